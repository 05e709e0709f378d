"""What generate.py reads and prints: prompts, texts as they grow or as JSON, notes on stderr."""

import json
import sys
from collections.abc import Iterable

from generating.load import LoadedModel
from generating.text import Completion
from tokenizer_bpe import TokenizerError

# Control characters, with which a text could set a terminal's title or clipboard, as pictures: ESC
# is shown as \u241b. CR, which comes before a line break in text of Windows, is left out.
CONTROLS = {n: chr(0x2400 + n) for n in range(32)} | dict.fromkeys(range(127, 160), "\ufffd")
CONTROLS |= {ord("\t"): "\t", ord("\n"): "\n", ord("\r"): ""}


def read_prompt() -> str:
    """The text of standard input, without the line break at its end. Raises TokenizerError."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise not_text(error) from None


def not_text(error: UnicodeDecodeError) -> TokenizerError:
    """The error for standard input that is not UTF-8."""
    return TokenizerError(f"standard input is no text in UTF-8: {error}")


def note(words: str) -> None:
    """Print a remark about a text, in brackets, to standard error."""
    print(f"[{words}]", file=sys.stderr)


def shown(completion: Completion, chat: bool) -> str:
    """A continuation with its prompt; in a chat, without. Exact, but for a terminal."""
    text = completion.text.strip() if chat else completion.prompt + completion.text
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def stream(growing: Iterable[list[Completion]], chat: bool) -> list[Completion]:
    """Print continuations as they grow, one below the other; returns them once they are whole."""
    row = 0  # the one that is being printed
    printed = 0  # how many of its characters are
    for completions in growing:
        while row < len(completions):
            text = shown(completions[row], chat)
            print(text[printed:], end="", flush=True)
            printed = len(text)
            if not completions[row].ended:
                break
            row += 1
            printed = 0
            if row < len(completions):
                print("\n---")
    print(flush=True)  # before the notes
    return completions


def show_json(name: str, completions: list[Completion]) -> None:
    """Print a line of JSON for each continuation of the checkpoint `name`.

    It is whole on every terminal: only one for UTF-8 shows all characters as they are.
    """
    for completion in completions:
        values = {
            "checkpoint": name,
            "prompt": completion.prompt,
            "text": completion.text,
            "ended": completion.ended,
            "tokens": len(completion.ids),
            "ids": completion.ids,
            "tokens_per_second": round(tokens_per_second(completions), 1),
        }
        print(json.dumps(values, ensure_ascii=sys.stdout.encoding.lower() != "utf-8"), flush=True)


def note_speed(completions: list[Completion]) -> None:
    tokens = sum(len(completion.ids) for completion in completions)
    note(f"{tokens:,} tokens, {tokens_per_second(completions):,.1f} tokens/s")


def tokens_per_second(completions: list[Completion]) -> float:
    """The speed of continuations that were written together."""
    tokens = sum(len(completion.ids) for completion in completions)
    return tokens / max(completion.seconds for completion in completions)


def note_long_prompts(loaded: LoadedModel, prompts: list[str]) -> None:
    """Note the prompts whose beginning the model does not see."""
    context = loaded.model.config.block_size
    for prompt in prompts:
        length = len(loaded.tokenizer.encode(prompt))
        if length > context:
            note(
                f"the prompt has {length:,} tokens; the model sees the last {context}, its context"
            )
