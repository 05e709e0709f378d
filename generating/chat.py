"""Prompts one after the other from a terminal, and conversations that a model remembers."""

import contextlib
import sys
from argparse import Namespace

from formats.conversation import REPLY, format_chat
from generating.answers import answer
from generating.load import Checkpoint
from model import GPT
from tokenizer_bpe import Tokenizer, TokenizerError


def session(checkpoints: list[Checkpoint], args: Namespace) -> None:
    """Ask for prompts until Ctrl-D; in a chat each model remembers the conversation.

    Ctrl-C ends a text, not the session. args: as generating.arguments.parse_args returns them.
    """
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  the arrow keys bring back earlier lines
    forget = "; /new forgets the conversation" if args.chat else ""
    print(f"a line is a prompt{forget}; Ctrl-C stops a text, Ctrl-D leaves", file=sys.stderr)
    histories = [[] for _ in checkpoints]
    while True:
        try:
            line = input("> ")
            if line == "/new":
                histories = [[] for _ in checkpoints]
            elif line.strip() and args.chat:
                histories = converse(checkpoints, histories, line, args)
            elif line.strip():
                answer(checkpoints, [[line]] * len(checkpoints), args)
        except EOFError:
            print()
            return
        except TokenizerError as error:
            print(error, file=sys.stderr)
        except KeyboardInterrupt:
            print()


def converse(
    checkpoints: list[Checkpoint], histories: list[list[dict]], line: str, args: Namespace
) -> list[list[dict]]:
    """Say a line to each model and print what it replies; returns the histories with both.

    histories: the messages so far, a list for each checkpoint, as `conversation` takes them.
    """
    said = {"role": "user", "content": line}
    histories = [[*messages, said] for messages in histories]
    prompts = []
    for checkpoint, messages in zip(checkpoints, histories, strict=True):
        prompts.append([conversation(messages, checkpoint.model, checkpoint.tokenizer)])
    answers = answer(checkpoints, prompts, args)
    for messages, completions in zip(histories, answers, strict=True):
        messages.append({"role": "assistant", "content": completions[0].text})
    return histories


def first_turns(checkpoints: list[Checkpoint], lines: list[str]) -> list[list[str]]:
    """The prompts for conversations that begin with these lines: a list for each checkpoint."""
    conversations = [[{"role": "user", "content": line}] for line in lines]
    return [
        [
            conversation(messages, checkpoint.model, checkpoint.tokenizer)
            for messages in conversations
        ]
        for checkpoint in checkpoints
    ]


def conversation(messages: list[dict], model: GPT, tokenizer: Tokenizer) -> str:
    """The prompt for a model's next reply, as prepare_data.py writes conversations.

    messages: [{"role", "content"}]. The oldest turns are left out where they would leave less than
    half of the context for the reply.
    """
    while True:
        prompt = format_chat(messages) + REPLY
        if len(messages) == 1 or len(tokenizer.encode(prompt)) <= model.config.block_size // 2:
            return prompt
        messages = messages[2:]
