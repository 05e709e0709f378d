"""The command line of generate.py, and what the tools that generate share with it."""

import argparse
import re
import sys
from pathlib import Path

from formats.conversation import STOP
from hardware import DTYPES


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The arguments of generate.py, checked. A mistake is a sentence, and the exit status is 2."""
    parser = argparse.ArgumentParser(
        prog="generate.py",
        usage="python generate.py --prompt TEXT [--checkpoint RUN] ... (--help lists all)",
        description="Text from trained models. Without a prompt on a terminal it asks for prompts;"
        " else it reads standard input.",
    )
    add_prompts(parser)
    add_sampling(parser)
    add_output(parser)
    add_device(parser)
    parser.add_argument(
        "--dtype",
        default="auto",
        choices=["auto", *DTYPES, "int8"],
        help="of the weights; float32 is exact; int8, on a CPU, is the fastest and the least exact;"
        " auto: 16 bits where they are faster, which a CPU tries out; default %(default)s",
    )
    args = parser.parse_args(argv)
    check(parser, args)
    if args.system and not args.chat:
        parser.error("--system is for conversations; add --chat")
    if args.chat:
        args.stop.append(STOP)
    return args


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Which checkpoints, and what they are asked."""
    parser.add_argument(
        "--checkpoint",
        action="append",
        metavar="PATH",
        help="a run (its best step by validation loss, else its newest), one step of it, or the"
        " address of either; default: the newest run under checkpoints/. Several answer side by"
        " side",
    )
    parser.add_argument(
        "--prompt",
        action="append",
        dest="prompts",
        metavar="TEXT",
        help="the text to continue; several are one batch",
    )
    parser.add_argument(
        "--prompt_file",
        action="append",
        dest="prompts",
        type=read_prompt,
        metavar="PATH",
        help="the text to continue, from a file; - is standard input",
    )
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a prompt is what a user says in a conversation, and the model replies; for models"
        " trained on `messages`",
    )
    parser.add_argument(
        "--system",
        metavar="TEXT",
        help="with --chat, a system message before the conversation",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How long the texts become, and how their tokens are drawn."""
    parser.add_argument(
        "--max_new_tokens",
        type=int,
        default=200,
        metavar="N",
        help="default %(default)s; end-of-text stops earlier",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="stop before this text; may be given several times",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.8,
        metavar="T",
        help="0 takes the likeliest token each time; default %(default)s",
    )
    parser.add_argument(
        "--top_k",
        type=int,
        default=200,
        metavar="K",
        help="draw among the K likeliest tokens, 0 for all; default %(default)s",
    )
    parser.add_argument(
        "--top_p",
        type=float,
        default=1.0,
        metavar="P",
        help="draw among the likeliest tokens that together reach probability P; default"
        " %(default)s",
    )
    parser.add_argument(
        "--repetition_penalty",
        type=float,
        default=1.0,
        metavar="R",
        help="above 1, tokens that were there before become less likely; default %(default)s",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """How many texts, which of the possible ones, and in which form."""
    parser.add_argument(
        "--num_samples",
        type=int,
        default=1,
        metavar="N",
        help="continuations of each prompt; default %(default)s",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="S",
        help="same seed, same text; default: another text each time",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="a line of JSON for each continuation: text, token ids, tokens/s",
    )


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where the model runs, as hardware.find_device takes it."""
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, mps or cpu; default %(default)s"
    )


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a sentence for a value that makes no sense."""

    def must(name, value, holds, allowed):
        if not holds:
            parser.error(f"--{name} {value}: it must be {allowed}")

    penalty = args.repetition_penalty
    seed_fits = args.seed is None or 0 <= args.seed < 2**63
    must("max_new_tokens", args.max_new_tokens, args.max_new_tokens >= 1, "at least 1")
    must("temperature", args.temperature, 0 <= args.temperature < float("inf"), "0 or more")
    must("top_k", args.top_k, args.top_k >= 0, "0 or more")
    must("top_p", args.top_p, 0 < args.top_p <= 1, "above 0 and at most 1")
    must("repetition_penalty", penalty, 0 < penalty < float("inf"), "above 0")
    must("num_samples", args.num_samples, args.num_samples >= 1, "at least 1")
    must("seed", args.seed, seed_fits, "0 or more, and below 2**63")
    must("stop", args.stop, all(args.stop), "a text, not empty")


def read_prompt(path: str) -> str:
    """The text of a file, or of standard input for -, without the line break at its end.

    Raises argparse.ArgumentTypeError for what cannot be read or is no text.
    """
    try:
        data = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise argparse.ArgumentTypeError(
            f"{path} is not text in UTF-8: byte {error.start} is {wrong:#04x}"
        ) from None
    return re.sub(r"\r?\n\Z", "", text)
