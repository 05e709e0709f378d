"""The command line of generate.py."""

import argparse
import math

from command_line import Parser, number, place, word
from formats.conversation import STOP
from hardware import DTYPES

# Options that are numbers: default, smallest value, largest value, meaning.
NUMBERS = {
    "--num_samples": (1, 1, math.inf, "continuations of each prompt"),
    "--max_new_tokens": (200, 1, math.inf, "most tokens to generate; end-of-text stops earlier"),
    "--temperature": (0.8, 0, math.inf, "0 always takes the likeliest token"),
    "--top_k": (200, 0, math.inf, "sample from the N likeliest tokens; 0: from all"),
    "--top_p": (1.0, 0, 1, "sample from the likeliest that together have this probability"),
    "--repetition_penalty": (1.0, 0.01, math.inf, "above 1, makes earlier tokens less likely"),
}
# Names that sample.py of nanoGPT and other programs have for these options.
OTHERS = {"start": "prompt", "model": "checkpoint", "out_dir": "checkpoint"}


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The arguments of generate.py, checked. A mistake is a sentence, and the exit status is 2."""
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
    if args.chat:
        args.stop.append(STOP)
    return args


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options: checkpoints and prompts, the texts and how tokens are drawn, output."""
    add = parser.add_argument
    text = (
        "a run (its best step by validation loss, else its newest), one step of it, or the address"
        " of a run; default: the newest run under checkpoints/"
    )
    add("--checkpoint", type=place, metavar="PATH", help=text)
    text = "the text to continue; several are one batch"
    add("--prompt", action="append", dest="prompts", metavar="TEXT", help=text)
    text = "treat a prompt as a user's message and reply; for models trained on conversations"
    add("--chat", action="store_true", help=text)
    add("--system", metavar="TEXT", help="with --chat, a system message before it")
    for name, (default, low, high, meaning) in NUMBERS.items():
        text, kind = f"{meaning}; default %(default)s", number(type(default), low, high)
        add(name, type=kind, default=default, metavar="N", help=text)
    text = "same seed, same text; default: another text each time"
    add("--seed", type=number(int, 0, 2**63 - 1), metavar="N", help=text)
    text = "stop before this text; may be given several times"
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
    """Add --device, which hardware.find_device reads; tools share it."""
    text = "auto, cuda, cuda:1, xpu, mps or cpu; default %(default)s"
    parser.add_argument("--device", type=word, default="auto", help=text)


def stop_text(text: str) -> str:
    """A type for argparse: a text that is not empty. Blanks and line breaks may be all of it."""
    if not text:
        raise argparse.ArgumentTypeError("an empty text would stop before the first token")
    return text
