"""The command line of prepare_data.py -> a plan of plain values.

Looks at no input: it reads no file and opens no connection.
"""

import codecs
import os
import re
from argparse import ArgumentTypeError, Namespace
from dataclasses import fields
from pathlib import Path

import processors
from command_line import Parser, local_path, number, place, positive, word
from preparing.chunks import Options
from preparing.sources import CATALOG, KINDS

USAGE = "python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH] ..."
DESCRIPTION = (
    "Turn text files into tokens for train.py, in data/NAME/. After an interruption, run the same"
    " command again."
)
LARGEST_VOCAB = 1 << 19  # ids; a larger value is taken for a typo, as with model sizes


def parse(argv: list[str]) -> Namespace:
    """The plan of a command line: its options by name, checked, with defaults filled in.

    inputs: as given; empty for the default text, ["-"] for standard input. options: how records
    become texts. vocab_size, val_fraction: None to choose by the size of the input. gigabytes: None
    for all. Exits with status 2 if the options contradict each other.
    """
    names = f"texts by name, from the Hugging Face Hub: {', '.join(CATALOG)}"
    parser = Parser("prepare_data.py", USAGE, DESCRIPTION, names)
    _add_arguments(parser)
    plan = parser.parse_args(argv)
    if "-" in plan.inputs and len(plan.inputs) > 1:
        parser.error("- (standard input) cannot be mixed with files")
    if plan.vocab_size and plan.tokenizer != "bpe":
        parser.error("--vocab_size works only with --tokenizer bpe; others have a fixed size")
    if steps := sorted(Path(plan.tokenizer).glob("step_*/tokenizer.json")):  # of a run
        plan.tokenizer = str(steps[-1])
    if not plan.on_error:
        plan.on_error = "stop" if plan.inputs else "skip"
        if plan.clean:
            plan.on_error = "replace"
    plan.dedupe |= plan.clean
    plan.out = Path(plan.out or default_out(plan.inputs))
    plan.sample_bytes = int(plan.sample_bytes)
    values = vars(plan)
    plan.options = Options(**{field.name: values.pop(field.name) for field in fields(Options)})
    return plan


def _add_arguments(parser):
    add = parser.add_argument
    add(
        "inputs",
        nargs="*",
        type=place,
        metavar="INPUT",
        help="files, folders, patterns in quotes, addresses (hf://datasets/ORG/NAME/**.parquet,"
        " s3://, gs://, https://), a name from the list below, shakespeare, or - for standard"
        " input. From a folder it reads .txt, .jsonl and .parquet, other types by name or pattern;"
        " all but .parquet may end in .gz or .zst. Default: the sources of Python's standard"
        " library",
    )
    add("--out", type=local_path, help="folder to write; default: data/ and the input's name")
    text = "share of the bytes held back for validation; default 0.1, but at most about 20 MB"
    add("--val_fraction", type=number(float, 0, 0.999), help=text)
    text = "stop after N GB of text, at the end of a document"
    add("--gigabytes", type=positive, help=text)
    add("--overwrite", action="store_true", help="replace the content of --out")
    text = "check a prepared folder: sizes, checksums, tokenizer"
    add("--verify", type=local_path, metavar="FOLDER", help=text)
    add = parser.add_argument_group("tokenizer").add_argument
    add(
        "--tokenizer",
        default="bpe",
        type=place,
        help="bpe: train one on the input; char; gpt2; or a path: tokenizer.json, prepared folder,"
        " run, Hugging Face folder; or an address: hf://ORG/NAME; default %(default)s",
    )
    text = "number of tokens of the bpe; default: 1,024 to 32,000, by size and letters of the text"
    add("--vocab_size", type=number(int, 257, LARGEST_VOCAB), help=text)
    text = (
        "largest number of bytes to train the tokenizer on, from all parts of the text; default"
        " %(default)s"
    )
    add("--sample_bytes", type=number(float, 1), default="1e8", help=text)
    add = parser.add_argument_group("reading").add_argument
    add(
        "--text_field",
        type=word,
        help="field of a JSON line, or column, with the text; default: text, else a conversation"
        " (messages, conversations, or instruction and output)",
    )
    add(
        "--stdin_format",
        choices=["txt", *dict.fromkeys(KINDS.values())],
        default="txt",
        help="what standard input holds; default %(default)s",
    )
    add("--encoding", type=encoding, help="encoding of the text files that are not UTF-8")
    add(
        "--on_error",
        choices=["stop", "skip", "replace"],
        help="what to do with a document that cannot be used, such as text that is not valid UTF-8"
        " or JSON, or has characters that the tokenizer lacks. stop: end with an error; skip: leave"
        " the document out (above 1 MB, the part); replace: put U+FFFD for wrong bytes, remove such"
        " characters, and leave out what is not valid JSON. Default: stop; with --clean replace;"
        " without INPUT skip",
    )
    add = parser.add_argument_group("cleaning").add_argument
    text = (
        "repair wrong characters, drop duplicates and documents without real text; cleaning.json"
        " lists them"
    )
    add("--clean", action="store_true", help=text)
    text = "drop exact duplicates of up to 1 MB (--clean does this too)"
    add("--dedupe", action="store_true", help=text)
    add = parser.add_argument_group("machine").add_argument
    text = "threads that tokenize; default: as many as processors, here %(default)s"
    add("--workers", type=number(int, 1), default=processors.usable(), help=text)
    text = "tokenize on a Ray cluster: HOST:PORT of its head node, or auto (pip install ray)"
    add("--ray", type=word, metavar="ADDRESS", help=text)
    text = "how many GB of downloaded files may be on the disk at a time; default %(default)s"
    add("--cache_gb", type=positive, default=10, help=text)


def encoding(name: str) -> str | None:
    """A type for argparse: Python's name of an encoding; None for UTF-8."""
    try:
        "".encode(name)  # rejects rot13 and the like, which are not text encodings
        codecs.getincrementaldecoder(name)("replace").decode(b"\xff")  # rejects idna
        found = codecs.lookup(name).name
    except (LookupError, UnicodeError):
        raise ArgumentTypeError(
            f"Python knows no encoding {name} for text files; examples: latin-1, cp1252, utf-16"
        ) from None
    return None if found == "utf-8" else found


def default_out(inputs: list[str]) -> str:
    """data/ plus the name of the first input; for a glob, of the part before its first wildcard."""
    if not inputs:
        return "data/python_stdlib"
    if inputs == ["-"]:
        return "data/stdin"
    fixed = re.split(r"[*?[]", inputs[0])[0]
    name = Path(os.path.realpath(fixed)).name.split(".")[0].strip("-_")
    return f"data/{name or 'text'}"
