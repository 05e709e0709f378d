# Go on from trained weights with one's own text: a run of this repository, a folder in Hugging
# Face's format, or the address of either. The text is prepared with the weights' own tokenizer.
#   python prepare_data.py YOUR_TEXT --tokenizer checkpoints/gpt2_small --out data/finetune
#   python train.py config/finetune.py
init_from = "checkpoints/gpt2_small"  # its shape is taken over; block_size may be set lower
data_dir = "data/finetune"
dropout = 0.1  # little text is seen several times
batch_size = 32
learning_rate = 3e-5  # a tenth of what the weights were trained with
min_lr = 0.0
warmup_steps = 20
epochs = 3
# The best step by validation loss is kept and used, so more epochs than the text bears do no harm.
eval_interval = 100
save_interval = 0
