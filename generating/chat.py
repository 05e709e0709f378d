"""The prompt for a model's next reply in a conversation."""

from formats.conversation import REPLY, format_chat
from model import GPT
from tokenizer_bpe import Tokenizer


def conversation(messages: list[dict], model: GPT, tokenizer: Tokenizer) -> str:
    """The prompt for a model's next reply, as prepare_data.py writes conversations. The oldest
    turns go where they would leave less than half of the context for the reply.
    """
    while True:
        prompt = format_chat(messages) + REPLY
        if len(messages) == 1 or len(tokenizer.encode(prompt)) <= model.config.block_size // 2:
            return prompt
        messages = messages[2:]
