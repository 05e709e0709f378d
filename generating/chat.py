"""Conversations: the prompt of a model's next reply."""

from formats.conversation import REPLY, format_chat
from generating.load import LoadedModel


class Conversation:
    """The messages to one model and its replies. system: a message before them, or None."""

    def __init__(self, loaded: LoadedModel, system: str | None = None):
        self.loaded = loaded
        self.messages = [{"role": "system", "content": system}] if system else []

    def prompt(self, line: str) -> str:
        """The prompt for the reply to a line of the user's."""
        return reply_prompt([*self.messages, {"role": "user", "content": line}], self.loaded)

    def remember(self, line: str, reply: str) -> None:
        self.messages.append({"role": "user", "content": line})
        self.messages.append({"role": "assistant", "content": reply})


def reply_prompt(messages: list[dict], loaded: LoadedModel) -> str:
    """The prompt for a model's next reply, as prepare_data.py writes conversations.

    messages: [{"role", "content"}]. Where they would leave less than half of the context for the
    reply, the oldest turns are left out, up to a later one of the user's; a system message at the
    beginning stays.
    """
    room = loaded.model.config.block_size // 2
    system = messages[:1] if messages[0]["role"] == "system" else []
    for start, message in enumerate(messages):
        if message["role"] == "user":
            prompt = format_chat([*system, *messages[start:]]) + REPLY
            if len(loaded.tokenizer.encode(prompt)) <= room:
                break
    return prompt
