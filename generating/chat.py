"""Conversations: the prompt of a model's next reply."""

from formats.conversation import REPLY, format_chat
from generating.load import LoadedModel


class Conversation:
    """The messages to one model and its replies. system: a message before them, or None."""

    def __init__(self, loaded: LoadedModel, system: str | None = None):
        self.loaded = loaded
        self.system = [{"role": "system", "content": system}] if system else []
        self.messages = []  # one of the user's, one of the assistant's, and so on

    def prompt(self, line: str) -> str:
        """The prompt for the reply to a line of the user's, as conversations are prepared.

        Where it would leave less than half of the context for the reply, the oldest turns are left
        out; the system message stays.
        """
        messages = [*self.messages, {"role": "user", "content": line}]
        room = self.loaded.model.config.block_size // 2
        for start in range(0, len(messages), 2):
            prompt = format_chat([*self.system, *messages[start:]]) + REPLY
            if len(self.loaded.tokenizer.encode(prompt)) <= room:
                break
        return prompt

    def remember(self, line: str, reply: str) -> None:
        self.messages.append({"role": "user", "content": line})
        self.messages.append({"role": "assistant", "content": reply})
