# For 250 MB of text as characters, on a T4 or V100: about 11 million parameters. These GPUs have no
# bfloat16, so dtype = "auto" uses float16 with a GradScaler.
#   python prepare_data.py YOUR_TEXT --tokenizer char --out data/medium_char
#   python train.py config/medium_char.py
data_dir = "data/medium_char"
n_layer = 6
n_head = 6
n_embd = 384
block_size = 512
batch_size = 64  # x 512 = 32,768 tokens per step
learning_rate = 1e-3
embedding_lr = 0.02  # for the positions only, as the embedding is tied
warmup_steps = 500
epochs = 1
eval_interval = 500
save_interval = 1000
