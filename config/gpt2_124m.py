# GPT-2 as published, with 124 million parameters, on the ten billion tokens of FineWeb-Edu: a run
# to compare with other people's. Batch, peak learning rate and warm-up are those of llm.c.
#   python prepare_data.py fineweb-edu --tokenizer gpt2 --out data/fineweb_edu_gpt2
#   python train.py config/gpt2_124m.py
data_dir = "data/fineweb_edu_gpt2"
n_layer = 12
n_head = 12
n_embd = 768
block_size = 1024
batch_size = 512  # x 1024 = 524,288 tokens per step
micro_batch_size = 32  # takes 15.7 GB, estimated
learning_rate = 6e-4
min_lr = 0.0
warmup_steps = 700
epochs = 1
eval_interval = 250
save_interval = 1000
sample_prompts = ["Once upon a time", "The meaning of life is", "Hello! How are you?"]
