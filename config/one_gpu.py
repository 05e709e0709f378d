# For 100 MB to 2 GB of your own text, on one GPU at home: a model of 55 million parameters, in
# about three hours on an RTX 3090 (estimated). Shorter text ends sooner, after four epochs.
#   python prepare_data.py YOUR_TEXT --out data/mine
#   python train.py config/one_gpu.py
data_dir = "data/mine"
arch = "qwen3"
n_layer = 12
n_head = 8
n_embd = 512
block_size = 512
tie_weights = False
zero_init = True
induction_init = True
optimizer = "muon"
batch_size = 64  # x 512 = 32,768 tokens per step
learning_rate = 3e-3
embedding_lr = 0.2
muon_lr = 0.02
beta2 = 0.5 ** (batch_size * block_size / 3_000_000)  # half-life of AdamW's average: 3M tokens
weight_decay = None  # chosen by the number of epochs
warmup_steps = 50
lr_schedule = "wsd"
epochs = 4
max_steps = 30_000  # a billion tokens
eval_interval = 500
sample_prompts = None  # three words of the validation text
