# From a trained model to one that answers: conversations (`messages`), prepared with the model's
# own tokenizer, and the loss on the assistant's tokens alone.
#   python prepare_data.py CONVERSATIONS.jsonl --tokenizer checkpoints/gpt2_small_modern \
#       --out data/chat
#   python train.py config/chat.py
#   python generate.py --checkpoint checkpoints/chat --chat
init_from = "checkpoints/gpt2_small_modern"  # it brings its architecture
data_dir = "data/chat"
loss_on = "assistant"
block_size = 512  # or that of the weights, if it is shorter
batch_size = 4  # x 512 = 2,048 tokens per step: many steps from few conversations
learning_rate = 1e-4
min_lr = 0.0
warmup_steps = 20
epochs = 2
# The best step by validation loss is kept and used, so overfitting late in the run does no harm.
eval_interval = 100
save_interval = 0
