# GPT-2 Small with a vocabulary of 32,000 tokens and 134,601,216 parameters, for an A100 or better.
# For your own text, gpt2_small_modern.py learns faster.
#   python prepare_data.py YOUR_TEXT --vocab_size 32000 --out data/main
#   python train.py config/gpt2_small.py
data_dir = "data/main"
n_layer = 12
n_head = 12
n_embd = 768
block_size = 512
bias = True
tie_weights = False
batch_size = 64  # x 512 = 32,768 tokens per step
learning_rate = 3e-4
embedding_lr = 0.06
min_lr = 3e-5
warmup_steps = 2000
epochs = 10
eval_interval = 2000
save_interval = 2000
sample_prompts = ["Once upon a time", "The meaning of life is", "Hello! How are you?"]
