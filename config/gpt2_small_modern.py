# A model of GPT-2 Small's size for several GB of text and an A100 or better: Qwen3's architecture,
# Muon, and a linear decay. With a vocabulary of 32,000 tokens it has 134,107,392 parameters.
#   python prepare_data.py YOUR_TEXT --vocab_size 32000 --out data/main
#   python train.py config/gpt2_small_modern.py
data_dir = "data/main"
arch = "qwen3"
n_layer = 12
n_head = 12
n_embd = 768
block_size = 512
tie_weights = False
zero_init = True
induction_init = True
optimizer = "muon"
batch_size = 64  # x 512 = 32,768 tokens per step
learning_rate = 3e-3
embedding_lr = 0.2
muon_lr = 0.02
beta2 = 0.5 ** (batch_size * block_size / 7_000_000)  # half-life of AdamW's average: 7M tokens
weight_decay = 0.0
warmup_steps = 100
lr_schedule = "wsd"
epochs = 3
eval_interval = 2000
save_interval = 2000
sample_prompts = ["Once upon a time", "The meaning of life is", "Hello! How are you?"]
