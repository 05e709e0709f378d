# make demo: a small model on the standard library's sources, on a CPU, in about two minutes.
data_dir = "data/python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
tie_weights = True
batch_size = 8
learning_rate = 2e-3
warmup_steps = 50
max_steps = 800
eval_interval = 200
sample_prompts = ["def "]
