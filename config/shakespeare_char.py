# Shakespeare as characters, on a CPU, in one to three minutes.
#   python prepare_data.py shakespeare --tokenizer char --out data/shakespeare_char
#   python train.py config/shakespeare_char.py
data_dir = "data/shakespeare_char"
n_layer = 2
n_head = 4
n_embd = 128
block_size = 256
batch_size = 8
learning_rate = 6e-3
embedding_lr = 0.02  # for the positions only, as the embedding is tied
warmup_steps = 50
beta2 = 0.5 ** (batch_size * block_size / 280_000)  # half-life of AdamW's average: 280k tokens
max_steps = 1200
eval_interval = 100
eval_batches = 0  # the whole validation split
