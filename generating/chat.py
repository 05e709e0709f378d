"""The turns of a conversation -> the prompt of a model's next reply."""

from formats.conversation import REPLY, format_chat
from generating.load import Checkpoint


class Conversation:
    """What was said to one model, and what it replied."""

    def __init__(self, checkpoint: Checkpoint):
        self.checkpoint = checkpoint
        self.messages = []  # as reply_prompt takes them

    def prompt(self, line: str) -> str:
        """The prompt for the reply to a line."""
        said = {"role": "user", "content": line}
        return reply_prompt([*self.messages, said], self.checkpoint)

    def remember(self, line: str, reply: str) -> None:
        """A line was said, and replied to."""
        self.messages.append({"role": "user", "content": line})
        self.messages.append({"role": "assistant", "content": reply})


def first_prompts(lines: list[str], checkpoint: Checkpoint) -> list[str]:
    """The prompts of conversations that begin with these lines."""
    return [Conversation(checkpoint).prompt(line) for line in lines]


def reply_prompt(messages: list[dict], checkpoint: Checkpoint) -> str:
    """The prompt for a model's next reply, as prepare_data.py writes conversations.

    messages: [{"role", "content"}]. The oldest turns are left out where they would leave less than
    half of the context for the reply.
    """
    room = checkpoint.model.config.block_size // 2
    while True:
        prompt = format_chat(messages) + REPLY
        if len(messages) == 1 or len(checkpoint.tokenizer.encode(prompt)) <= room:
            return prompt
        messages = messages[2:]
