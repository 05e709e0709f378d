"""The command line of generate.py."""

import argparse
import difflib
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
        description="Generate text with trained models. Without a prompt it reads standard input,"
        " or asks for prompts on a terminal.",
    )
    add_options(parser.add_argument)
    add_device(parser)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        names = re.findall(r"--\w+", parser.format_help())
        near = difflib.get_close_matches(unknown[0].partition("=")[0], names, 1)
        hint = f"did you mean {near[0]}?" if near else "text to continue goes after --prompt"
        parser.error(f"{unknown[0]} is not an option; {hint}")
    check(parser, args)
    if args.chat:
        args.stop.append(STOP)
    return args


def add_options(add) -> None:
    """Checkpoints and prompts; how many texts, how long, and how their tokens are drawn; output."""
    text = (
        "a run (its best step by validation loss, else its newest), one step of it, or the address"
        " of either; several are compared in columns; default: the newest run under checkpoints/"
    )
    add("--checkpoint", action="append", metavar="PATH", help=text)
    text = "the text to continue; several are one batch"
    add("--prompt", action="append", dest="prompts", metavar="TEXT", help=text)
    text = "the text to continue, from a file without its last line break; - is standard input"
    path = {"type": read_prompt, "metavar": "PATH"}
    add("--prompt_file", action="append", dest="prompts", **path, help=text)
    text = "treat a prompt as a user's message and reply; for models trained on `messages`"
    add("--chat", action="store_true", help=text)
    add("--system", metavar="TEXT", help="with --chat, a system message before it")

    def add_number(name, default, meaning):
        text = f"{meaning}; default %(default)s"
        add(name, type=type(default), default=default, metavar="N", help=text)

    add_number("--num_samples", 1, "continuations of each prompt")
    add_number("--max_new_tokens", 200, "most tokens to generate; end-of-text stops earlier")
    add_number("--temperature", 0.8, "0 always takes the likeliest token")
    add_number("--top_k", 200, "sample from the N likeliest tokens; 0: from all")
    add_number("--top_p", 1.0, "sample from the likeliest that together have this probability")
    add_number("--repetition_penalty", 1.0, "above 1, makes tokens that came before less likely")
    text = "same seed, same text; default: another text each time"
    add("--seed", type=int, metavar="N", help=text)
    text = "stop before this text; may be given several times"
    add("--stop", action="append", default=[], metavar="TEXT", help=text)
    text = (
        "precision of the weights; float32 is exact; auto: 16 bits if they are faster, which a"
        " CPU times first; default %(default)s"
    )
    add("--dtype", default="auto", choices=["auto", *DTYPES], help=text)
    text = "one line of JSON per continuation: text, token ids, tokens/s"
    add("--json", action="store_true", help=text)


def add_device(parser: argparse.ArgumentParser) -> None:
    """Where the model runs, as hardware.find_device takes it; tools share it."""
    text = "auto, cuda, cuda:1, xpu, mps or cpu; default %(default)s"
    parser.add_argument("--device", default="auto", help=text)


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """End with a sentence for a value that makes no sense."""
    rules = {
        "max_new_tokens": (args.max_new_tokens >= 1, "at least 1"),
        "temperature": (0 <= args.temperature < float("inf"), "0 or more"),
        "top_k": (args.top_k >= 0, "0 or more"),
        "top_p": (0 < args.top_p <= 1, "above 0 and at most 1"),
        "repetition_penalty": (0 < args.repetition_penalty < float("inf"), "above 0"),
        "num_samples": (args.num_samples >= 1, "at least 1"),
        "seed": (args.seed is None or 0 <= args.seed < 2**63, "0 or more, and below 2**63"),
        "stop": (all(args.stop), "a text, not empty"),
    }
    for name, (holds, allowed) in rules.items():
        if not holds:
            parser.error(f"--{name} {getattr(args, name)}: it must be {allowed}")
    if args.system and not args.chat:
        parser.error("--system is for conversations; add --chat")


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
        raise argparse.ArgumentTypeError(f"{path} is not text in UTF-8: {error}") from None
    return re.sub(r"\r?\n\Z", "", text)
