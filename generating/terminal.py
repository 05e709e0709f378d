"""generate.py's terminal: options, prompts, and output as growing text, as JSON or as notes.

Loads no model and generates no token.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable

from command_line import Parser, number, place, plural, word
from formats.files import few
from generating.load import LoadedModel
from generating.text import Completion, Conversation, ids_of
from hardware import DTYPES
from tokenizer_bpe import TokenizerError

# Numeric options: default, smallest value, largest value, meaning.
NUMBERS = {
    "--num_samples": (1, 1, 10**6, "continuations of each prompt"),
    "--max_new_tokens": (200, 1, math.inf, "tokens to generate, at most; a text may end earlier"),
    "--temperature": (0.8, 0, math.inf, "randomness; 0 always takes the likeliest token"),
    "--top_k": (200, 0, math.inf, "choose among the N likeliest tokens; 0: among all"),
    "--top_p": (1.0, 0, 1, "choose among the likeliest tokens whose probabilities add up to N"),
    "--repetition_penalty": (1.0, 0.01, math.inf, "above 1, makes earlier tokens less likely"),
}
# {name of an option in nanoGPT's sample.py and other programs: ours}.
OTHERS = {"start": "prompt", "model": "checkpoint", "out_dir": "checkpoint"}
# Control characters could set a terminal's title or clipboard, so they are shown as symbols: ESC as
# \u241b. CR, which precedes line breaks in text from Windows, is left out.
CONTROLS = {n: chr(0x2400 + n) for n in range(32)} | dict.fromkeys(range(127, 160), "\ufffd")
CONTROLS |= {ord("\t"): "\t", ord("\n"): "\n", ord("\r"): ""}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse and check generate.py's arguments. A mistake prints a message; exit status 2."""
    parser = Parser(
        prog="generate.py",
        usage="python generate.py --prompt TEXT [--checkpoint RUN] ... (--help lists all)",
        description="Generate text with a trained model. Without a prompt it reads standard input,"
        " or asks for prompts on a terminal.",
        others=OTHERS,
        text="prompt",
    )
    add_options(parser)
    args = parser.parse_args(argv)
    if args.system and not args.chat:
        parser.error("--system is for conversations; add --chat")
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for checkpoints, prompts, sampling and output."""
    add = parser.add_argument
    text = (
        "a run (its best step by validation loss, else its newest), one step of it, a folder in"
        " Hugging Face's format, or the address of one; default: the newest run under checkpoints/"
    )
    add("--checkpoint", type=place, metavar="PATH", help=text)
    text = "the text to continue; give it several times to continue several texts at once"
    add("--prompt", action="append", dest="prompts", metavar="TEXT", help=text)
    text = "treat a prompt as a user's message and reply; for models trained on conversations"
    add("--chat", action="store_true", help=text)
    text = (
        "with --chat: a system message at the start of the conversation; default: that of the"
        " model's own chat template, if it has one"
    )
    add("--system", metavar="TEXT", help=text)
    for name, (default, low, high, meaning) in NUMBERS.items():
        text, kind = f"{meaning}; default %(default)s", number(type(default), low, high)
        add(name, type=kind, default=default, metavar="N", help=text)
    text = "same seed, same text; default: another text each time"
    add("--seed", type=number(int, 0, 2**63 - 1), metavar="N", help=text)
    text = r"stop before this text, where \n is a line break; may be given several times"
    add("--stop", type=stop_text, action="append", default=[], metavar="TEXT", help=text)
    text = (
        "precision of the weights; float32 is exact; auto: 16 bits if they are faster, which a"
        " CPU times first; default %(default)s"
    )
    add("--dtype", default="auto", choices=["auto", *DTYPES], help=text)
    text = "one line of JSON per continuation: text, token ids, tokens/s"
    add("--json", action="store_true", help=text)
    add_device(parser)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Add --device, for hardware.find_device; tools share it."""
    text = "auto, cuda, cuda:1, xpu, mps or cpu; default %(default)s"
    parser.add_argument("--device", type=word, default="auto", help=text)


def stop_text(text: str) -> str:
    r"""A type for argparse: a text that is not empty, where \n stands for a line break."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text would stop before the first token")
    return text.replace("\\n", "\n")


# -- input and output ------------------------------------------------------------------------------


def read_prompt() -> str:
    """The text of standard input, without the line break at its end. Raises TokenizerError."""
    try:
        return sys.stdin.buffer.read().decode("utf-8-sig").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise not_text(error) from None


def not_text(error: UnicodeDecodeError) -> TokenizerError:
    """The error for standard input that is not UTF-8."""
    return TokenizerError(f"standard input is not text in UTF-8: {error}")


def note(words: str) -> None:
    """Print a remark about a text, in brackets, to standard error."""
    print(f"[{words}]", file=sys.stderr)


def shown(completion: Completion, chat: bool) -> str:
    """The text to print: prompt and continuation, or in a chat the reply alone.

    Control characters are replaced if the output is a terminal.
    """
    text = completion.text.strip() if chat else completion.prompt + completion.text
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def stream(growing: Iterable[list[Completion]], chat: bool) -> list[Completion]:
    """Print continuations as they grow, one below the other; returns them when all are finished."""
    row = 0  # the one being printed
    printed = 0  # how many of its characters have been
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
    """Print a line of JSON per continuation of the checkpoint `name`.

    Non-ASCII characters are escaped unless the output is in UTF-8.
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


def note_prompts(loaded: LoadedModel, prompts: list[str | list[int]]) -> None:
    """Print a note on what the model sees in the prompts, where a user may not expect it."""
    tokenizer, context = loaded.tokenizer, loaded.model.config.block_size
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    special = tokenizer.specials.keys() - tokenizer.ordinary
    spelled = sorted(name for name in special if any(name in text for text in texts))
    if spelled:  # they stay text, as in the training text
        note(
            f"{few(spelled)} in a prompt is text; an empty prompt begins a document, and --chat"
            " writes the markers of a conversation"
        )
    if tokenizer.kind == "bpe" and any(re.search(r"\S \Z", text) for text in texts):
        note("a prompt ends in a blank; leave it out, as the token of the next word begins with it")
    for prompt in prompts:
        length = len(ids_of(tokenizer, prompt))
        if length > context:
            note(
                f"the prompt has {length:,} tokens; the model sees the last {context}, its context"
            )


def note_dropped(conversation: Conversation) -> None:
    """Print a note if the model no longer sees the beginning of a conversation."""
    if conversation.dropped:
        turns = plural(conversation.dropped, "old turn")
        note(f"{turns} left out: a chat fills at most half of the context")


def note_endings(completions: list[Completion], chat: bool) -> None:
    """Print a note if the model computed NaN, or if the reply in a chat is cut off."""
    endings = {completion.ended for completion in completions}
    if "NaN" in endings:
        note("the model computed NaN; try --dtype float32, or an earlier step of the run")
    if chat and "length" in endings:
        note("the reply is cut off at --max_new_tokens; give a larger number for more of it")


def note_speed(completions: list[Completion]) -> None:
    tokens = sum(len(completion.ids) for completion in completions)
    note(f"{plural(tokens, 'token')}, {tokens_per_second(completions):,.1f} tokens/s")


def tokens_per_second(completions: list[Completion]) -> float:
    """The total speed of continuations that were generated together."""
    tokens = sum(len(completion.ids) for completion in completions)
    return tokens / max(completion.seconds for completion in completions)
