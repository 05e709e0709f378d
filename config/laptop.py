# For 1 to 100 MB of your own text, on a laptop: a model of 5.3 million parameters, or 6.9 million
# above 10 MB, with the larger vocabulary. All 6,000 steps take an estimated hour on one server core
# with AMX; most laptops need longer. Text below 10 MB ends sooner, after eight epochs.
#   python prepare_data.py YOUR_TEXT --out data/mine
#   python train.py config/laptop.py
data_dir = "data/mine"
arch = "qwen3"
n_layer = 6
n_head = 4
n_embd = 256
block_size = 512
tie_weights = False
zero_init = True
induction_init = True
optimizer = "muon"
batch_size = 8  # x 512 = 4,096 tokens per step; 4 is better for a few minutes without bfloat16
learning_rate = 4e-3
embedding_lr = 0.2
muon_lr = 0.03
muon_momentum = 0.9
beta2 = 0.5 ** (batch_size * block_size / 1_000_000)  # half-life of AdamW's average: 1M tokens
weight_decay = None  # chosen by the number of epochs
warmup_steps = 20
lr_schedule = "wsd"
epochs = 8
max_steps = 6000  # 24.6 million tokens
eval_interval = 250
sample_prompts = None  # three words of the validation text
