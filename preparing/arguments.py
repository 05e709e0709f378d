"""The command line of prepare_data.py: its options, and the defaults that depend on one another.

Touches no file, except to see which step of a run holds a tokenizer.
"""

import argparse
import codecs
import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from preparing.catalog import table
from preparing.engines import usable_cores

DEFAULT_OUT = "data/python_stdlib"
DEFAULT_VOCAB_SIZE = 32000
USAGE = (
    "python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH] ..."
    " (--help lists all)"
)
DESCRIPTION = "Text files -> data/NAME/, ready for train.py. Run it again to continue after a stop."


@dataclass
class Options:
    """How records become texts, as the command line chose.

    The three rules at the end drop documents; they are applied after the characters are cleaned.
    Shares are of the characters that are not white space.
    """

    text_field: str | None = None  # None: "text", else "messages"
    on_error: str = "stop"  # stop, skip the document, or replace broken bytes by U+FFFD
    encoding: str | None = None  # of .txt and .jsonl; None: UTF-8
    clean: bool = False
    dedupe: str | None = None  # copies are dropped: exact ones, or near ones too
    min_chars: int = 20  # shorter documents are dropped
    max_char_share: float = 0.5  # dropped when a single character makes up more
    min_letters: float = 0.4  # dropped when letters and digits make up less

    def text_column(self, names: Iterable[str]) -> str:
        """The field or column with the text: the one asked for, else text, else messages."""
        if self.text_field:
            return self.text_field
        if "messages" in names and "text" not in names:
            return "messages"
        return "text"


def parse_args(argv: list[str]) -> Namespace:
    """The command line, with defaults that depend on one another filled in.

    Ends the process with status 2 for contradictions. input: empty for the default text.
    """
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        usage=USAGE,
        description=DESCRIPTION,
        epilog=table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_arguments(parser.add_argument)
    args = parser.parse_args(argv)
    if args.tokenizer != "bpe" and args.vocab_size:
        parser.error(
            f"--vocab_size has no meaning with --tokenizer {args.tokenizer}, only with bpe, which"
            " is trained here"
        )
    if "-" in args.input and len(args.input) > 1:
        parser.error("- (standard input) cannot be mixed with files")
    args.tokenizer = newest_tokenizer(args.tokenizer)
    args.sample_bytes = int(args.sample_bytes)
    args.vocab_size = args.vocab_size or DEFAULT_VOCAB_SIZE
    args.on_error = args.on_error or default_on_error(args)
    if args.clean and not args.dedupe:
        args.dedupe = "exact"
    args.out = args.out or default_out(args.input)
    return args


def _add_arguments(add):
    share = number(float, 0, 1)
    add(
        "input",
        nargs="*",
        metavar="INPUT",
        help="files, folders, globs, - for standard input, shakespeare, a name from the table"
        " below, or an address: hf://datasets/ORG/NAME/**.parquet, s3://, gs://, https://; .txt"
        " .jsonl .parquet, also .gz .zst; default: Python's standard library",
    )
    add("--out", metavar="FOLDER", help="folder to write; default: data/ and the input's name")
    add(
        "--val_fraction",
        type=number(float, 0, 0.999),
        metavar="F",
        help="share of the text for validation; default 0.1, above 200 MB less: about 20 MB",
    )
    add(
        "--gigabytes",
        type=number(float, 1e-6),
        metavar="N",
        help="stop after N GB of text, at a document's end; default: all of it",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace a finished dataset, or unfinished work on other input or settings",
    )
    add("--verify", metavar="FOLDER", help="check a prepared folder: sizes, checksums, ids, text")
    add("--compress", metavar="FOLDER", help="add train.bin.gz and val.bin.gz to a prepared folder")
    # the tokenizer
    add(
        "--tokenizer",
        default="bpe",
        metavar="T",
        help="bpe: train one on the input; char; gpt2; or a path: tokenizer.json, prepared folder,"
        " run, GPT-2 or Qwen3 folder of Hugging Face; default %(default)s",
    )
    add(
        "--vocab_size",
        type=number(int, 257),
        metavar="N",
        help=f"ids of a bpe, with the 256 bytes and end-of-text; default {DEFAULT_VOCAB_SIZE}",
    )
    add(
        "--sample_bytes",
        type=number(float, 1),
        default="1e8",
        metavar="N",
        help="bytes of text, evenly spread, to train the tokenizer on; default %(default)s",
    )
    # reading
    add(
        "--text_field",
        metavar="NAME",
        help="field of a JSON line, or column, with the text; default: text, else messages (a"
        " conversation of role and content)",
    )
    add("--stdin_format", choices=["txt", "jsonl"], default="txt", help="of standard input")
    add(
        "--encoding",
        type=encoding,
        metavar="NAME",
        help="of all .txt and .jsonl files, as in latin-1 or utf-16; default: UTF-8",
    )
    add(
        "--on_error",
        choices=["stop", "skip", "replace"],
        help="broken UTF-8 or JSON: stop; skip the document (above 1 MB, the part); replace bytes,"
        " skip JSON; default stop, with --clean replace, without INPUT skip",
    )
    # cleaning
    add(
        "--clean",
        action="store_true",
        help="NFC, no control characters or broken encodings, no copies, no noise; with a report",
    )
    add(
        "--dedupe",
        choices=["exact", "near"],
        help="drop copies: exact ones, as --clean does, or near ones too: documents that share"
        " three quarters of their runs of five words with an earlier one (pip install rensa)",
    )
    add(
        "--min_chars",
        type=int,
        default=Options.min_chars,
        metavar="N",
        help="--clean drops shorter documents; default %(default)s",
    )
    add(
        "--max_char_share",
        type=share,
        default=Options.max_char_share,
        metavar="F",
        help="--clean drops documents with more of one character; default %(default)s",
    )
    add(
        "--min_letters",
        type=share,
        default=Options.min_letters,
        metavar="F",
        help="--clean drops documents with fewer letters and digits; default %(default)s",
    )
    # machines
    add(
        "--workers",
        type=number(int, 1),
        default=usable_cores(),
        metavar="N",
        help="worker processes; default: one a core, here %(default)s",
    )
    add(
        "--ray",
        metavar="ADDRESS",
        help="tokenise on a Ray cluster: HOST:PORT of its head, or auto (pip install ray)",
    )
    add(
        "--cache_gb",
        type=number(float, 1e-6),
        default=10,
        metavar="N",
        help="GB of remote files on the disk at a time; default %(default)s",
    )


def number(kind: Callable, low: float, high: float = math.inf) -> Callable:
    """A type for argparse: numbers of a kind from `low` to `high`."""

    def number(text):  # argparse's errors show its name
        value = kind(text)
        if not low <= value <= high:
            limit = f" and at most {high}" if high < math.inf else ""
            raise ArgumentTypeError(f"{text}: it must be at least {low}{limit}")
        return value

    return number


def encoding(name: str) -> str | None:
    """A type for argparse: an encoding by the name that Python gives it; None for UTF-8."""
    try:
        found = codecs.lookup(name)
        "".encode(name)  # refuses codecs of bytes, such as base64
    except (LookupError, ValueError):
        raise ArgumentTypeError(
            f"{name} is no encoding that Python knows; some are latin-1, cp1252, utf-16, gb18030,"
            " shift_jis, koi8-r"
        ) from None
    return None if found.name == "utf-8" else found.name


def newest_tokenizer(tokenizer: str) -> str:
    """The tokenizer of the newest step, for a run; anything else as it is."""
    steps = sorted(Path(tokenizer).glob("step_*/tokenizer.json"))
    if steps:
        return str(steps[-1])
    return tokenizer


def default_on_error(args: Namespace) -> str:
    """What to do about broken text. Nobody is to correct Python's standard library."""
    if args.clean:
        return "replace"
    if not args.input:
        return "skip"
    return "stop"


def default_out(inputs: list[str]) -> str:
    """data/ and the name of the first input; of a glob, of its part before the first wildcard."""
    if not inputs:
        return DEFAULT_OUT
    if inputs == ["-"]:
        return "data/stdin"
    fixed = re.split(r"[*?[]", inputs[0])[0]
    name = Path(fixed).resolve().name.split(".")[0].strip("-_")
    return f"data/{name or 'text'}"
