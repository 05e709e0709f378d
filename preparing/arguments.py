"""The command line of prepare_data.py: its options, and the defaults that depend on one another."""

import codecs
import math
import os
import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from preparing.catalog import table
from preparing.engines import usable_cores
from tokenizer_bpe import LARGEST

DEFAULT_VOCAB_SIZE = 32000
USAGE = "python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH] ..."
DESCRIPTION = "Text files -> data/NAME/, ready for train.py. Run it again to continue after a stop."


@dataclass
class Options:
    """How records become texts, as the command line chose; --help says what each option does."""

    text_field: str | None = None  # None: "text", else "messages"
    on_error: str = "stop"
    encoding: str | None = None  # None: UTF-8
    clean: bool = False
    dedupe: str | None = None
    min_chars: int = 20
    max_char_share: float = 0.5
    min_letters: float = 0.4

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
    parser = ArgumentParser(
        prog="prepare_data.py", usage=USAGE, description=DESCRIPTION, epilog=table()
    )
    parser.formatter_class = RawDescriptionHelpFormatter  # leaves the lines of the table alone
    _add_arguments(parser)
    args = parser.parse_args(argv)
    if "-" in args.input and len(args.input) > 1:
        parser.error("- (standard input) cannot be mixed with files")
    if args.tokenizer == "bpe":
        args.vocab_size = args.vocab_size or DEFAULT_VOCAB_SIZE
    elif args.vocab_size:
        parser.error("--vocab_size is for --tokenizer bpe, which is trained here")
    steps = sorted(Path(args.tokenizer).glob("step_*/tokenizer.json"))  # of a run
    if steps:
        args.tokenizer = str(steps[-1])
    args.sample_bytes = int(args.sample_bytes)
    if not args.on_error:
        args.on_error = "stop" if args.input else "skip"
        if args.clean:
            args.on_error = "replace"
    if args.clean and not args.dedupe:
        args.dedupe = "exact"
    args.out = args.out or default_out(args.input)
    return args


def _add_arguments(parser):
    positive = number(float, 1e-6)
    share = number(float, 0, 1)
    add = parser.add_argument
    add(
        "input",
        nargs="*",
        metavar="INPUT",
        help="files, folders, globs, - for standard input, shakespeare, a name from the table"
        " below, or an address: hf://datasets/ORG/NAME/**.parquet, s3://, gs://, https://; .txt"
        " .jsonl .parquet, also .gz .zst; default: Python's standard library",
    )
    add("--out", help="folder to write; default: data/ and the input's name")
    text = "share of the text for validation; default 0.1, but at most about 20 MB"
    add("--val_fraction", type=number(float, 0, 0.999), help=text)
    add("--gigabytes", type=positive, help="stop after N GB of text, at a document's end")
    add("--overwrite", action="store_true", help="replace the content of --out")
    add("--verify", metavar="FOLDER", help="check a prepared folder: sizes, checksums, tokenizer")
    add("--compress", metavar="FOLDER", help="add train.bin.gz and val.bin.gz to a prepared folder")
    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer",
        default="bpe",
        help="bpe: train one on the input; char; gpt2; or a path: tokenizer.json, prepared folder,"
        " run, Hugging Face folder of GPT-2 or Qwen3; default %(default)s",
    )
    text = f"size of a bpe, 256 bytes and end-of-text included; default {DEFAULT_VOCAB_SIZE}"
    add("--vocab_size", type=number(int, 257, LARGEST), help=text)
    text = "bytes of text, evenly spread, to train the tokenizer on; default %(default)s"
    add("--sample_bytes", type=number(float, 1), default="1e8", help=text)
    add = parser.add_argument_group("reading").add_argument
    add(
        "--text_field",
        help="field of a JSON line, or column, with the text; default: text, else messages (a"
        " conversation of role and content)",
    )
    add("--stdin_format", choices=["txt", "jsonl"], default="txt", help="default txt")
    add("--encoding", type=encoding, help="encoding of .txt and .jsonl; default: UTF-8")
    add(
        "--on_error",
        choices=["stop", "skip", "replace"],
        help="for broken UTF-8 or JSON; skip: the document (above 1 MB, the part); replace: bytes,"
        " but skip JSON; default stop, with --clean replace, without INPUT skip",
    )
    add = parser.add_argument_group("cleaning").add_argument
    add("--clean", action="store_true", help="repair characters, drop copies and noise, and report")
    add(
        "--dedupe",
        choices=["exact", "near"],
        help="drop copies: exact ones, as --clean does, or near ones too: documents that share"
        " three quarters of their runs of five words with an earlier one (pip install rensa)",
    )
    text = "--clean drops shorter documents; default %(default)s"
    add("--min_chars", type=int, default=Options.min_chars, help=text)
    text = "--clean drops documents with more of one character; default %(default)s"
    add("--max_char_share", type=share, default=Options.max_char_share, help=text)
    text = "--clean drops documents with fewer letters and digits; default %(default)s"
    add("--min_letters", type=share, default=Options.min_letters, help=text)
    add = parser.add_argument_group("machine").add_argument
    text = "worker processes; default: one per core, here %(default)s"
    add("--workers", type=number(int, 1), default=usable_cores(), help=text)
    text = "tokenise on a Ray cluster: HOST:PORT of its head, or auto (pip install ray)"
    add("--ray", metavar="ADDRESS", help=text)
    text = "GB of remote files on the disk at a time; default %(default)s"
    add("--cache_gb", type=positive, default=10, help=text)


def number(kind: Callable, low: float, high: float = math.inf) -> Callable:
    """A type for argparse: numbers of a kind from `low` to `high`."""

    def number(text):  # argparse's errors show its name
        value = kind(text)
        if not low <= value <= high or value == math.inf:
            limit = f" and at most {high}" if high < math.inf else ""
            raise ArgumentTypeError(f"{text}: it must be a number of at least {low}{limit}")
        return value

    return number


def encoding(name: str) -> str | None:
    """A type for argparse: an encoding by the name that Python gives it; None for UTF-8."""
    try:
        found = codecs.lookup(name).name
        "".encode(name)  # refuses codecs of bytes, such as base64
    except (LookupError, ValueError):
        raise ArgumentTypeError(
            f"{name} is no encoding that Python knows, as latin-1, cp1252 or utf-16 are"
        ) from None
    return None if found == "utf-8" else found


def default_out(inputs: list[str]) -> str:
    """data/ and the name of the first input; of a glob, of its part before the first wildcard."""
    if not inputs:
        return "data/python_stdlib"
    if inputs == ["-"]:
        return "data/stdin"
    fixed = re.split(r"[*?[]", inputs[0])[0]
    name = Path(os.path.realpath(fixed)).name.split(".")[0].strip("-_")
    return f"data/{name or 'text'}"
