# make demo: a small model on the standard library's sources, on a CPU, in two to four minutes.
data_dir = "data/python_stdlib"
n_layer = 4
n_head = 4
n_embd = 256
block_size = 256
tie_weights = True
batch_size = 4
learning_rate = 1.5e-3
warmup_steps = 50
beta2 = 0.995  # small batches: average the second moment over as many tokens as larger ones do
max_steps = 1400
eval_interval = 350
sample_prompts = ["def read("]
