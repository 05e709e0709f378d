# The data and size of shakespeare_char.py with the modern recipe, in half a minute on a CPU.
#   python prepare_data.py shakespeare --tokenizer char --out data/shakespeare_char
#   python train.py config/shakespeare_char_modern.py
data_dir = "data/shakespeare_char"
arch = "qwen3"
n_layer = 2
n_head = 4
n_embd = 128
block_size = 256
tie_weights = False
zero_init = True
induction_init = True
optimizer = "muon"
batch_size = 8
learning_rate = 1e-2
embedding_lr = 0.1
muon_lr = 0.04
muon_momentum = 0.9
weight_decay = 0.0
warmup_steps = 0
lr_schedule = "wsd"
max_steps = 400
eval_interval = 100
eval_batches = 0  # the whole validation split
