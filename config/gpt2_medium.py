# GPT-2 Medium as published, 24 layers x 1024: 355 million parameters with GPT-2's vocabulary and
# context.
#   python prepare_data.py YOUR_TEXT --tokenizer gpt2 --out data/gpt2
#   python train.py config/gpt2_medium.py
data_dir = "data/gpt2"
n_layer = 24
n_head = 16
n_embd = 1024
block_size = 1024
batch_size = 64  # x 1024 = 65,536 tokens per step
micro_batch_size = 16
learning_rate = 3e-4
min_lr = 3e-5
warmup_steps = 2000
epochs = 1
eval_interval = 2000
save_interval = 2000
