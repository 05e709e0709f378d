# Fine-tune a trained model on conversations (`messages`), so that it replies. Prepare them with the
# model's own tokenizer. Only the assistant's tokens count in the loss.
#   python prepare_data.py CONVERSATIONS.jsonl --tokenizer checkpoints/gpt2_small_modern \
#       --out data/chat
#   python train.py config/chat.py
#   python generate.py --checkpoint checkpoints/chat --chat
init_from = "checkpoints/gpt2_small_modern"  # the architecture comes with it
data_dir = "data/chat"
loss_on = "assistant"
block_size = 512  # or that of the weights, if it is shorter
batch_size = 4  # x 512 = 2,048 tokens per step: many steps from few conversations
learning_rate = 3e-4  # as in finetune.py: docs/results.md
min_lr = 0.0
warmup_steps = 20
epochs = 2
# The run keeps the step with the lowest validation loss of those evaluated: overfitting after it
# does no harm.
eval_interval = 100
save_interval = 0
