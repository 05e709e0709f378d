# Fine-tune trained weights on your own text: a run of this repository, a folder in Hugging Face's
# format, or the address of either. Prepare the text with the weights' own tokenizer.
#   python prepare_data.py YOUR_TEXT --tokenizer checkpoints/gpt2_small_modern --out data/finetune
#   python train.py config/finetune.py
init_from = "checkpoints/gpt2_small_modern"  # it brings its architecture; block_size may be lower
data_dir = "data/finetune"
batch_size = 32
learning_rate = 3e-5  # a tenth of the rate in gpt2_small.py; a small model needs a higher one
min_lr = 0.0
warmup_steps = 20
epochs = 3
# The best step by validation loss is kept and used, so overfitting late in the run does no harm.
eval_interval = 100
save_interval = 0
