# Phase 1: characters of Shakespeare on a CPU, in about a minute.
#   python prepare_data.py shakespeare --tokenizer char --out data/shakespeare_char
#   python train.py config/shakespeare_char.py
data_dir = "data/shakespeare_char"
n_layer = 2
n_head = 4
n_embd = 128
block_size = 256
batch_size = 16
learning_rate = 3e-3
warmup_steps = 100
beta2 = 0.99
max_steps = 1500
eval_interval = 500
eval_batches = 0
