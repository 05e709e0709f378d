# Fine-tune trained weights on your own text: a run of this repository, a folder in Hugging Face's
# format, or the address of either. Prepare the text with the weights' own tokenizer.
#   python prepare_data.py YOUR_TEXT --tokenizer checkpoints/gpt2_small_modern --out data/finetune
#   python train.py config/finetune.py
init_from = "checkpoints/gpt2_small_modern"  # the architecture comes with it
data_dir = "data/finetune"
block_size = 512  # or that of the weights, if it is shorter
batch_size = 4  # x 512 = 2,048 tokens per step: many steps from little text
learning_rate = 3e-4  # 1e-4 forgets less; 1e-3 can be too high: docs/fine-tuning.md
min_lr = 0.0
warmup_steps = 20
epochs = 3
# The run keeps the step with the lowest validation loss of those evaluated: overfitting after it
# does no harm.
eval_interval = 100
save_interval = 0
