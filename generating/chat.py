"""A session on a terminal, and conversations: the prompt of a model's next reply."""

import contextlib
import sys
from argparse import Namespace
from collections.abc import Callable

from formats.conversation import REPLY, format_chat
from generating.load import Checkpoint
from tokenizer_bpe import TokenizerError


class Conversation:
    """What was said to one model, and what it replied. system: a message before it, or None."""

    def __init__(self, checkpoint: Checkpoint, system: str | None = None):
        self.checkpoint = checkpoint
        self.messages = []  # as reply_prompt takes them
        if system:
            self.messages.append({"role": "system", "content": system})

    def prompt(self, line: str) -> str:
        """The prompt for the reply to a line."""
        said = {"role": "user", "content": line}
        return reply_prompt([*self.messages, said], self.checkpoint)

    def remember(self, line: str, reply: str) -> None:
        """Add a line and its reply."""
        self.messages.append({"role": "user", "content": line})
        self.messages.append({"role": "assistant", "content": reply})


def reply_prompt(messages: list[dict], checkpoint: Checkpoint) -> str:
    """The prompt for a model's next reply, as prepare_data.py writes conversations.

    messages: [{"role", "content"}]. Where they would leave less than half of the context for the
    reply, the oldest turns are left out, up to a later one of the user's; a system message at the
    beginning stays.
    """
    room = checkpoint.model.config.block_size // 2
    system = messages[:1] if messages[0]["role"] == "system" else []
    turns = messages[len(system) :]
    while True:
        prompt = format_chat([*system, *turns]) + REPLY
        later = [n for n, turn in enumerate(turns) if n and turn["role"] == "user"]
        if not later or len(checkpoint.tokenizer.encode(prompt)) <= room:
            return prompt
        turns = turns[later[0] :]


def saw_conversations(state: dict) -> bool:
    """Whether a run was trained on conversations. state: of a step folder."""
    return "masks" in state["data"]


def session(checkpoints: list[Checkpoint], args: Namespace, answer: Callable) -> None:
    """Ask for prompts until Ctrl-D; in a chat each model remembers its conversation.

    Ctrl-C ends a text, not the session. answer: generate.answer.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    print("a line is a prompt; Ctrl-C stops a text, Ctrl-D leaves", file=sys.stderr)
    if args.chat:
        print("/new starts a new conversation; Ctrl-C takes the line back", file=sys.stderr)
    conversations = [Conversation(c, args.system) for c in checkpoints]
    while True:
        try:
            line = input("> ")
            if line == "/new":
                conversations = [Conversation(c, args.system) for c in checkpoints]
            elif line.strip() and args.chat:
                prompts = [[conversation.prompt(line)] for conversation in conversations]
                answers = answer(checkpoints, prompts, args)
                for conversation, (reply, *_) in zip(conversations, answers, strict=True):
                    conversation.remember(line, reply.text)
            elif line.strip():
                answer(checkpoints, [[line]] * len(checkpoints), args)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
        except TokenizerError as error:
            print(error, file=sys.stderr)
