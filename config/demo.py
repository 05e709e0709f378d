# make demo: a small model on the standard library's sources, on a CPU, in one to three minutes.
# The modern recipe, as in gpt2_small_modern.py. Such a short run needs such a small vocabulary.
#   python prepare_data.py --vocab_size 512 --out data/python_stdlib
#   python train.py config/demo.py
data_dir = "data/python_stdlib"
arch = "qwen3"
n_layer = 4
n_head = 2
n_embd = 128
block_size = 256
tie_weights = False
zero_init = True
induction_init = True
optimizer = "muon"
batch_size = 16
learning_rate = 5e-3
embedding_lr = 0.2
muon_lr = 0.04
muon_momentum = 0.9
beta2 = 0.5 ** (batch_size * block_size / 280_000)  # half-life of AdamW's average: 280k tokens
weight_decay = 0.0
warmup_steps = 0
lr_schedule = "wsd"
max_steps = 320
eval_interval = 80
sample_prompts = ["def read("]
