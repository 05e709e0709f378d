"""The command line of prepare_data.py: what can be asked for, and what follows when it is not.

Touches no file, except to see which step of a run holds a tokenizer.
"""

import argparse
import glob
import math
import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable
from pathlib import Path

from preparing.catalog import table
from preparing.encodings import encoding
from preparing.options import Options
from preparing.pool import usable_cores

DEFAULT_OUT = "data/python_stdlib"
DEFAULT_VOCAB_SIZE = 32000


def parse_args(argv: list[str]) -> Namespace:
    """The command line, with defaults that depend on one another filled in.

    Ends the process with status 2 for what makes no sense. input: empty for the default text.
    """
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        usage=(
            "python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH]"
            " ... (--help lists all)"
        ),
        description=(
            "Text files -> data/NAME/, ready for train.py. Run again after an interruption, it"
            " goes on."
        ),
        epilog=table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_main_arguments(parser.add_argument)
    _add_tokenizer_arguments(parser.add_argument)
    _add_reading_arguments(parser.add_argument)
    _add_fetching_arguments(parser.add_argument)
    _add_cleaning_arguments(parser.add_argument)
    _add_output_arguments(parser.add_argument)
    args = parser.parse_args(argv)
    args.tokenizer = newest_tokenizer(args.tokenizer)
    _check_combinations(args, parser.error)
    args.vocab_size = args.vocab_size or DEFAULT_VOCAB_SIZE
    args.on_error = args.on_error or default_on_error(args)
    if args.clean and not args.dedupe:
        args.dedupe = "exact"
    args.out = args.out or default_out(args.input)
    if args.shard:
        args.out = "{}/shard-{}-of-{}".format(args.out, *args.shard)
    return args


def _add_main_arguments(add):
    """What to read, and where to write."""
    add(
        "input",
        nargs="*",
        metavar="INPUT",
        help=(
            "files, folders, globs, - for standard input, shakespeare, a name from the table below,"
            " or an address: hf://datasets/ORG/NAME/**.parquet, s3://, gs://, https://; .txt .jsonl"
            " .parquet, also .gz .zst; default: Python's standard library"
        ),
    )
    add(
        "--out", metavar="FOLDER", help="folder to write; default: data/ and the first input's name"
    )


def _add_tokenizer_arguments(add):
    """With which tokenizer."""
    add(
        "--tokenizer",
        default="bpe",
        metavar="T",
        help=(
            "bpe: train one on the input; char; gpt2; or a path: tokenizer.json, prepared folder,"
            " run, GPT-2 or Qwen3 folder of Hugging Face; default %(default)s"
        ),
    )
    add(
        "--vocab_size",
        type=number(int, 257),
        metavar="N",
        help=(
            "ids of the tokenizer to train, the 256 bytes and end-of-text among them; default"
            f" {DEFAULT_VOCAB_SIZE}"
        ),
    )
    add(
        "--sample_bytes",
        type=number(whole_number, 1),
        default="1e8",
        metavar="N",
        help="bytes of text, evenly spread, to train the tokenizer on; default %(default)s",
    )
    add(
        "--tokenizer_only",
        action="store_true",
        help="train the tokenizer, write FOLDER/tokenizer.json and stop",
    )


def _add_reading_arguments(add):
    """What is done with the text, and how records become texts."""
    add(
        "--val_fraction",
        type=number(float, 0, 0.999),
        metavar="F",
        help=(
            "share of the text held back for validation; default 0.1, of more than 200 MB less:"
            " about 20 MB"
        ),
    )
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
        help=(
            "tokenise on a Ray cluster: HOST:PORT of its head, or auto for this machine's (pip"
            " install ray)"
        ),
    )
    add(
        "--text_field",
        metavar="NAME",
        help=(
            "field of a JSON line, or column, with the text; default: text, else messages (a"
            " conversation of role and content)"
        ),
    )
    add(
        "--stdin_format",
        choices=["txt", "jsonl"],
        default="txt",
        help="what standard input holds; default %(default)s",
    )
    add(
        "--encoding",
        type=encoding,
        metavar="NAME",
        help="of all .txt and .jsonl files, as in latin-1 or utf-16; default: UTF-8",
    )
    add(
        "--on_error",
        choices=["stop", "skip", "replace"],
        help=(
            "broken UTF-8 or JSON: stop; skip the document (above 1 MB, the piece); replace bytes,"
            " skip JSON; default stop, with --clean replace, without INPUT skip"
        ),
    )


def _add_fetching_arguments(add):
    """How much of it, and what is on the disk on its way."""
    add(
        "--gigabytes",
        type=number(float, 1e-6),
        metavar="N",
        help="stop after so many GB of text, at a document's end; default: all of it",
    )
    add(
        "--cache_gb",
        type=number(float, 1e-6),
        default=10,
        metavar="N",
        help="GB of remote files on the disk at a time; default %(default)s",
    )


def _add_cleaning_arguments(add):
    """What is left out."""
    add(
        "--clean",
        action="store_true",
        help=(
            "NFC, no control characters, no broken encodings, no exact duplicates, no noise; with a"
            " report"
        ),
    )
    add(
        "--dedupe",
        choices=["exact", "near"],
        help=(
            "drop copies: exact ones, as --clean does, or near ones too: documents that share three"
            " quarters of their runs of five words with an earlier one (pip install rensa)"
        ),
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
        type=number(float, 0, 1),
        default=Options.max_char_share,
        metavar="F",
        help=(
            "--clean drops documents of which a larger share is one character, white space not"
            " counted; default %(default)s"
        ),
    )
    add(
        "--min_letters",
        type=number(float, 0, 1),
        default=Options.min_letters,
        metavar="F",
        help=(
            "--clean drops documents with a smaller share of letters and digits, white space not"
            " counted; default %(default)s"
        ),
    )


def _add_output_arguments(add):
    """In which form to write, and what to do with a folder that is there."""
    add("--compress", action="store_true", help="also write train.bin.gz and val.bin.gz, to upload")
    add(
        "--shard",
        type=parse_shard,
        metavar="I/N",
        help="prepare only the I-th of N shares of the input, into FOLDER/shard-I-of-N",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace a finished dataset, or unfinished work on other input or settings",
    )
    add("--verify", metavar="FOLDER", help="check a prepared folder: sizes, checksums, ids, text")


def number(kind: Callable, low: float, high: float = math.inf) -> Callable:
    """A type for argparse: numbers of a kind from `low` to `high`."""

    def number(text):  # its name stands in argparse's errors
        value = kind(text)
        if low <= value <= high:
            return value
        if high < math.inf:
            raise ArgumentTypeError(f"{text}: it must be at least {low} and at most {high}")
        raise ArgumentTypeError(f"{text}: it must be at least {low}")

    return number


def whole_number(text: str) -> int:
    """An int, also written as 1e8. Raises ValueError."""
    value = float(text)
    if not value.is_integer():
        raise ValueError
    return int(value)


def parse_shard(text: str) -> tuple[int, int]:
    """A type for argparse: I/N."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise ArgumentTypeError(f"{text}: it must be I/N, as in 1/4, with I from 1 to N")
    return int(numbers[1]), int(numbers[2])


def newest_tokenizer(tokenizer: str) -> str:
    """Of a run, the tokenizer of its newest step; anything else as it is."""
    steps = sorted(Path(tokenizer).glob("step_*/tokenizer.json"))
    if steps:
        return str(steps[-1])
    return tokenizer


def _check_combinations(args, error):
    """Call `error` with a sentence for arguments that make no sense together."""
    if args.tokenizer != "bpe" and args.vocab_size:
        error(
            f"--vocab_size {args.vocab_size} has no meaning with --tokenizer {args.tokenizer}: it"
            " sets the size of a tokenizer trained here (bpe)"
        )
    if args.shard and (args.tokenizer in ("bpe", "char") or args.input == ["-"]):
        error(
            "--shard needs files and one tokenizer for all shards: train it first with"
            " --tokenizer_only, then give it with --tokenizer FOLDER/tokenizer.json"
        )
    if args.shard and args.gigabytes:
        error(
            "--gigabytes counts text from the beginning, and a shard does not know how much is in"
            " those before it; give the shards fewer files instead"
        )
    if "-" in args.input and len(args.input) > 1:
        error("- (standard input) cannot be mixed with files")


def default_on_error(args: Namespace) -> str:
    """What to do about broken text. Nobody is to correct Python's standard library."""
    if args.clean:
        return "replace"
    if not args.input:
        return "skip"
    return "stop"


def default_out(inputs: list[str]) -> str:
    """data/ and the name of the first input, or of the folder that it lies in.

    Of a glob, the part of a name before a * is one, as in texts*.txt, and other patterns are none.
    """
    if not inputs:
        return DEFAULT_OUT
    if inputs == ["-"]:
        return "data/stdin"
    first = Path(inputs[0]).resolve()
    names = [
        first.name.split(".")[0].strip("*"),
        *(folder.name.strip("*") for folder in first.parents),
    ]
    for name in names:
        if name and not glob.has_magic(name):
            return f"data/{name}"
    return "data/text"
