# GPT-2 XL's shape, 48 layers x 1600: 1.56 billion parameters with GPT-2's vocabulary and context,
# as published. Weights, gradients and optimiser take 25 GB and are sharded over the GPUs;
# --dry_run says what that leaves on each.
#   python prepare_data.py YOUR_TEXT --tokenizer gpt2 --out data/gpt2
#   torchrun --standalone --nproc_per_node=8 train.py config/gpt2_xl.py
data_dir = "data/gpt2"
n_layer = 48
n_head = 25
n_embd = 1600
block_size = 1024
shard = True
batch_size = 128  # x 1024 = 131,072 tokens a step
micro_batch_size = 8  # in 26 GB on each of 8 GPUs, in 50 GB on one
learning_rate = 2e-4
min_lr = 2e-5
warmup_steps = 2000
epochs = 1
eval_interval = 2000
save_interval = 2000
