# GPT-2 Small as a GPU likes it best: without biases, which move a seventh of the bytes and are a
# third of the kernels, with 6 heads of 128 instead of 12 of 64, tuned, and with the head in 8 bits
# where the GPU has them; 134,499,072 parameters.
#   python prepare_data.py YOUR_TEXT --out data/main
#   python train.py config/gpt2_small_fast.py
data_dir = "data/main"
n_layer = 12
n_head = 6
n_embd = 768
block_size = 512
bias = False
tie_weights = False
fp8_head = True
compile = "max"  # takes minutes, once
batch_size = 64  # x 512 = 32,768 tokens a step
learning_rate = 3e-4
embedding_lr = 0.06
min_lr = 3e-5
warmup_steps = 2000
epochs = 10
eval_interval = 2000
save_interval = 2000
sample_prompts = ["Once upon a time", "The meaning of life is", "Hello! How are you?"]
