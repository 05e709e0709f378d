"""Text files -> data/<name>/: token ids in train.bin and val.bin, the tokenizer, and meta.json,
which is written last.

    python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH]

The command: which input, which tokenizer, is this work new or to be continued, what came of it. Of
preparing/, text_sources.py reads and cleans the text, token_writer.py encodes it, and folders.py
reads back what is finished. What is written depends on the input and the settings alone. Knows no
model.
"""

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
import urllib.request
from pathlib import Path

import numpy as np

from formats.data_folder import DataError, Meta, dtype_for, read_meta, write_meta
from formats.files import write_text
from preparing.folders import compress, first_document, publish, scan, sha256, verify
from preparing.text_sources import (
    InputError,
    Options,
    Piece,
    Position,
    Report,
    Source,
    find_sources,
    read_pieces,
    slices,
    texts_of,
)
from preparing.token_writer import (
    SPLITS,
    Journal,
    Pool,
    PrepareError,
    Progress,
    batches,
    encode_all,
    peak_memory,
    worker_count,
)
from tokenizer_bpe import Tokenizer, TokenizerError

SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NOT_IN_STDLIB = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "encodings",
    "pydoc_data",
    "site-packages",
    "dist-packages",
    "__pycache__",
}
VAL_BYTES = (
    20_000_000  # a tenth of the text is validation, but of large inputs no more than about so much
)
SLICE = 1 << 18  # bytes that a sample takes from one place


# -- the tokenizer --------------------------------------------------------------------------------


def make_tokenizer(args, sources: list[Source], options: Options, path: Path) -> str:
    """Save at `path` the tokenizer that --tokenizer asks for; says where it came from."""
    words = args.tokenizer
    if words == "bpe":
        train = functools.partial(
            train_tokenizer, sources, options, args.vocab_size, args.sample_bytes, args.workers
        )
        with Pool(1) as pool:  # a process of its own: its memory goes back, and Ctrl-C works
            (words,) = pool.map(train, [path])
    elif words == "char":
        found = set()
        with (
            Pool(worker_count(args.workers, sources)) as pool,
            Progress(sum(s.size for s in sources), "characters") as bar,
        ):
            for characters, after in pool.map(
                functools.partial(characters_of, options),
                batches(read_pieces(sources, Position(), options)),
            ):
                found |= characters
                bar.to(after.on_disk)
        write_text(path, Tokenizer.characters(found).to_json())
        words = f"{len(found)} different characters"
    else:
        write_text(path, (Tokenizer.gpt2() if words == "gpt2" else Tokenizer.load(words)).to_json())
    return words


def train_tokenizer(
    sources: list[Source],
    options: Options,
    vocab_size: int,
    sample_bytes: int,
    threads: int,
    path: Path,
) -> str:
    """Train byte-level BPE on an evenly spread sample and save it; says on how much."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    with Progress(sum(s.size for s in sources), "sampling") as bar:
        sample = spread_sample(
            read_pieces(sources, Position(), options),
            sample_bytes,
            lambda piece: bar.to(piece.after.on_disk),
        )
    size = f"{sum(part.size for part in sample) / 1e6:,.1f} MB"
    print(
        f"training the tokenizer, {vocab_size:,} tokens, on {size} ...", file=sys.stderr, flush=True
    )
    texts = (text for part in sample for text in texts_of(part, options)[0])
    write_text(
        path, Tokenizer.train(texts, vocab_size, show_progress=sys.stderr.isatty()).to_json()
    )
    return f"trained on {size} spread over the text"


def spread_sample(pieces, sample_bytes: int, each=lambda piece: None) -> list[Piece]:
    """Slices spread evenly over all pieces, together at most sample_bytes: every n-th, n doubling
    whenever there are too many. Calls `each` with the pieces it is through with.
    """
    kept, stride, seen, size = [], 1, 0, 0
    for piece in pieces:
        for part in slices(piece, SLICE):
            if seen % stride == 0:
                kept.append(part)
                size += part.size
            while size > sample_bytes and len(kept) > 1:
                kept, stride = kept[::2], stride * 2
                size = sum(p.size for p in kept)
            seen += 1
        each(piece)
    return kept


def characters_of(options: Options, pieces: list[Piece]) -> tuple[set[str], Position]:
    """The different characters of some pieces, and where the next one begins."""
    return (
        set().union(*(text for piece in pieces for text in texts_of(piece.loaded(), options)[0])),
        pieces[-1].after,
    )


# -- the input ------------------------------------------------------------------------------------


def standard_library() -> list[str]:
    """The sources of the Python that runs this, without its tests, its tables of character sets and
    its help pages.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        p.as_posix()
        for p in root.rglob("*.py")
        if p.stat().st_size and not NOT_IN_STDLIB & set(p.relative_to(root).parts)
    )


def shakespeare() -> str:
    """The path of the tiny Shakespeare file, downloaded if need be. Raises InputError when it
    cannot be had.
    """
    path = Path("data/shakespeare.txt")
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as reply:
                write_text(path, reply.read().decode())
        except OSError as error:
            problem = (
                f"tiny Shakespeare could not be downloaded ({getattr(error, 'reason', error)})"
            )
            raise InputError(
                f"{problem}. Where there is a network, fetch\n  {SHAKESPEARE_URL}\nand put it at"
                f" {path.absolute()}, or give the file as INPUT"
            ) from None
    if sha256(path) != SHAKESPEARE_SHA256:
        raise InputError(
            f"{path} is not the file it should be, its sha256 is not {SHAKESPEARE_SHA256}; delete"
            f" it and fetch {SHAKESPEARE_URL} again"
        )
    return path.as_posix()


def keep_stdin(work: Path, kind: str) -> Source:
    """Standard input as a file in the working folder: the text is read twice, and perhaps again
    after a kill.
    """
    path = work / f"stdin.{kind}"
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    if not path.stat().st_size:
        raise InputError("standard input is empty")
    return Source(path.as_posix(), kind, "", path.stat().st_size, int(sha256(path)[:12], 16))


def share_of(sources: list[Source], shard: tuple[int, int]) -> list[Source]:
    """The sources of shard I of N: a run of whole files, about equal in bytes; the shards in order
    are the whole input in order.
    """
    index, count = shard
    if len(sources) < count:
        raise InputError(
            f"--shard {index}/{count}: the input has only {len(sources)} files, and a file is not"
            " divided; cut large ones first, as with split --line-bytes=1G, or use fewer shards"
        )
    total, before, at, mine = sum(s.size for s in sources), 0, 0, []
    for n, source in enumerate(sources):
        target = int((before + source.size / 2) * count / total)
        at = max(at, min(target, at + (n > 0)), count - (len(sources) - n))  # no shard stays empty
        mine += [source] if at == index - 1 else []
        before += source.size
    return mine


# -- the command ----------------------------------------------------------------------------------


def prepare(args) -> None:
    """The command's work: from the input to a finished folder, or on from where it stopped."""
    started, out = time.monotonic(), Path(args.out)
    work = out / ".partial"
    options = Options(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Options)})
    settings = settings_of(args, options)
    everything = [] if args.input == ["-"] else find_sources(args.input)
    sources = share_of(everything, args.shard) if args.shard else everything
    with locked(work):
        if (work / "meta.json").exists():
            publish(work, out)
            return prepare(args)
        if args.input == ["-"]:
            sources = everything = [keep_stdin(work, args.stdin_format)]
        if args.val_fraction is None:
            args.val_fraction = settings["val_fraction"] = min(
                0.1, VAL_BYTES / sum(s.size for s in everything)
            )
        if finished(out, settings, sources, args):
            return None if (work / "plan.json").exists() else shutil.rmtree(work)
        begin(work, settings, sources, args.overwrite)
        check_room(out, work, sources, args)
        path, words = work / "tokenizer.json", "as the run before made it"
        if not path.exists():
            words = make_tokenizer(args, sources, options, path)
        tokenizer = Tokenizer.load(path)
        if args.tokenizer_only:
            os.replace(path, out / "tokenizer.json")
            shutil.rmtree(work)
            return print(f"{out / 'tokenizer.json'}: {tokenizer.vocab_size:,} tokens, {words}")
        journal = encode_all(
            sources, options, args, work, dtype_for(tokenizer.vocab_size), tokenizer
        )
        meta, used = describe(work, journal, tokenizer, settings, sources)
        if args.compress:
            compress(work, meta.splits, args.workers)
        if journal.report.rules:
            write_text(
                work / "cleaning.json",
                json.dumps(journal.report.rules, indent=1, ensure_ascii=False) + "\n",
            )
        write_meta(work, meta)
        publish(work, out)
    print(
        "\n".join(
            [
                *summary(out, meta, journal, tokenizer, words, used, time.monotonic() - started),
                *report_lines(journal.report),
            ]
        )
    )


@contextlib.contextmanager
def locked(work: Path):
    """Hold the working folder; raises PrepareError when another run does. The lock goes with the
    process, however it ends.
    """
    work.mkdir(parents=True, exist_ok=True)
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with open(work / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise PrepareError(
                f"another run is preparing {work.parent} just now; wait for it, or stop it"
            ) from None
        yield


def settings_of(args, options: Options) -> dict:
    """What the bytes written depend on besides the input."""
    settings = {
        "tokenizer": args.tokenizer,
        "val_fraction": args.val_fraction,
        "text_field": options.text_field,
        "on_error": options.on_error,
        "clean": options.clean,
    }
    if args.tokenizer == "bpe":
        settings |= {"vocab_size": args.vocab_size, "sample_bytes": args.sample_bytes}
    elif args.tokenizer not in ("char", "gpt2"):
        settings["tokenizer"] = (
            "sha256"
            f" {hashlib.sha256(Tokenizer.load(args.tokenizer).to_json().encode()).hexdigest()}"
        )
    if options.clean:
        settings |= {
            "min_chars": options.min_chars,
            "max_char_share": options.max_char_share,
            "min_letters": options.min_letters,
        }
    return settings | ({"shard": "{}/{}".format(*args.shard)} if args.shard else {})


def differences(old: dict, new: dict) -> str:
    """What differs between former work and this, {"settings": {name: value}, "sources": [{"path",
    ...}]}, in words.
    """
    before, now = ({s["path"]: s for s in plan["sources"]} for plan in (old, new))
    old, new = old["settings"], new["settings"]
    words = [
        f"{name} was {old.get(name)}, is now {new.get(name)}"
        for name in sorted(old | new)
        if old.get(name) != new.get(name)
    ]
    words += [f"{path} is new" for path in now if path not in before] + [
        f"{path} is gone" for path in before if path not in now
    ]
    words += [f"{path} changed" for path in now if path in before and now[path] != before[path]]
    if not words and list(before) != list(now):
        words = ["the order of the inputs changed"]
    return "; ".join(words[:3] + ([f"and {len(words) - 3:,} more"] if words[3:] else []))


def finished(out: Path, settings: dict, sources: list[Source], args) -> bool:
    """Whether the folder holds this very dataset already. Raises InputError when it holds another
    one.
    """
    if not (out / "meta.json").exists() or args.overwrite or args.tokenizer_only:
        return False
    meta = read_meta(out)
    changed = differences(
        {"settings": meta.settings, "sources": meta.sources},
        {"settings": settings, "sources": listed(sources)},
    )
    if changed:
        raise InputError(
            f"{out} holds a finished dataset of other input or settings: {changed}.\nGive another"
            " --out, or make this one anew with --overwrite"
        )
    if args.compress and not all(split.compressed for split in meta.splits.values()):
        compress(out, meta.splits, args.workers)
        write_meta(out, meta)
    print(
        f"{out} is finished already: "
        + ", ".join(f"{name} {split.tokens:,} tokens" for name, split in meta.splits.items())
        + " (--overwrite makes it anew)"
    )
    return True


def listed(sources: list[Source]) -> list[dict]:
    """The sources as meta.json lists them."""
    return [{"path": s.path, "bytes": s.size} for s in sources]


def begin(work: Path, settings: dict, sources: list[Source], overwrite: bool) -> None:
    """Note what this work is; what was finished of it stays. Raises InputError when the folder
    holds finished parts of other work.
    """
    plan, path = (
        {"settings": settings, "sources": [dataclasses.asdict(s) for s in sources]},
        work / "plan.json",
    )
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else plan
    if (
        old["settings"]["on_error"] == "stop"
    ):  # nothing broken came up to where it stopped, so the bytes are the same
        old["settings"]["on_error"] = settings["on_error"]
    changed = differences(old, plan)
    if changed and not overwrite and any(path.stat().st_size for path in work.glob("*.bin")):
        problem = f"{work.parent} holds unfinished work on other input or settings: {changed}"
        raise InputError(
            f"{problem}.\nRepeat the former command to finish it, give another --out, or start anew"
            " with --overwrite"
        )
    if changed:
        for file in work.iterdir():
            if file.name != "lock" and not file.name.startswith("stdin"):
                file.unlink()
    write_text(path, json.dumps(plan, ensure_ascii=False))


def check_room(out: Path, work: Path, sources: list[Source], args) -> None:
    """Raises InputError when the disk cannot hold what is to be written."""
    text = sum(s.size * (4 if s.compression or s.kind == "parquet" else 1) for s in sources)
    tokens = text if args.tokenizer == "char" else 0.35 * text
    width = 4 if args.tokenizer == "bpe" and args.vocab_size > 65536 else 2
    there = sum(path.stat().st_size for path in work.glob("*.bin"))
    need, free = tokens * width * (1.9 if args.compress else 1) - there, shutil.disk_usage(out).free
    if need > free:
        raise InputError(
            f"{out} needs about {need / 1e9:,.1f} GB more on disk, and {free / 1e9:,.1f} GB are"
            " free: make room, or give an --out on another disk"
        )


def describe(
    work: Path, journal: Journal, tokenizer: Tokenizer, settings: dict, sources: list[Source]
) -> tuple[Meta, float]:
    """The metadata of the finished files, as read back from the disk, and which share of the
    vocabulary occurs. Raises PrepareError where they differ from what was written.
    """
    dtype, splits, used = dtype_for(tokenizer.vocab_size), {}, np.zeros(tokenizer.vocab_size, bool)
    with Progress(sum((work / f"{name}.bin").stat().st_size for name in SPLITS), "checking") as bar:
        for name in SPLITS:
            splits[name], occur = scan(work, f"{name}.bin", dtype, tokenizer, bar)
            used |= occur
    back = (
        {name: split.tokens for name, split in splits.items()},
        sum(split.text_bytes for split in splits.values()),
    )
    if back != (journal.tokens, journal.text_bytes):
        raise PrepareError(
            f"{work} reads back as {back} tokens and bytes of text, written were"
            f" {journal.tokens, journal.text_bytes}: the disk is not sound, or this is a bug"
        )
    identity = {
        "kind": tokenizer.kind,
        "file": "tokenizer.json",
        "sha256": sha256(work / "tokenizer.json"),
    }
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Meta(
        dtype,
        tokenizer.vocab_size,
        tokenizer.eot_id,
        identity,
        splits,
        listed(sources),
        settings,
        created,
    ), float(used.mean())


def summary(
    out: Path,
    meta: Meta,
    journal: Journal,
    tokenizer: Tokenizer,
    words: str,
    used: float,
    seconds: float,
) -> list[str]:
    """What to know of a finished dataset, in lines."""
    tokens, text, peak = sum(journal.tokens.values()), journal.text_bytes, peak_memory()
    lines = [
        f"{out}: {tokens:,} tokens of {text / 1e6:,.1f} MB of text from {len(meta.sources):,}"
        f" files, {text / tokens:.2f} bytes a token, {meta.dtype}"
    ]
    lines += [
        f"  {name:10} {s.tokens:>14,} tokens, {s.documents:,} documents"
        for name, s in meta.splits.items()
    ]
    lines += [
        f"  validation {journal.split}",
        (
            f"  tokenizer  {meta.tokenizer['kind']}, {meta.vocab_size:,} ids, {used:.1%} of them"
            f" occur; {words}"
        ),
    ]
    lines += [
        f"  time       {seconds:,.1f} s; tokenising {journal.read / 1e6:,.1f} MB took"
        f" {journal.seconds:,.1f} s, {journal.read / 1e6 / max(journal.seconds, 1e-9):,.1f} MB/s"
    ]
    lines += (
        [f"  memory     {(Pool.peak + peak) / 1e6:,.0f} MB at most, all processes together"]
        if peak
        else []
    )
    first = next(
        (
            line
            for line in first_document(out / "train.bin", meta.dtype, tokenizer).splitlines()
            if line.strip()
        ),
        "",
    )
    return [*lines, f"  begins     {first[:100]!r}"]


def report_lines(report: Report) -> list[str]:
    """What was left out by each rule, with examples."""
    lines = ["left out or corrected:"] if report.rules else []
    for rule, (documents, size, examples) in sorted(report.rules.items()):
        lines += [
            f"  {rule}: {documents:,} documents, {size:,} bytes",
            *(f"    {example[:90]!r}" for example in examples),
        ]
    return lines


def number(kind, low, high=math.inf):
    """A type for argparse: numbers of a kind from `low` to `high`."""

    def number(text):
        if not low <= kind(text) <= high:
            raise argparse.ArgumentTypeError(
                f"{text}: it must be at least {low}"
                + (f" and at most {high}" if high < math.inf else "")
            )
        return kind(text)

    return number


def share(text: str) -> tuple[int, int]:
    """A type for argparse: I/N."""
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise argparse.ArgumentTypeError(f"{text}: it must be I/N, as in 1/4, with I from 1 to N")
    return int(numbers[1]), int(numbers[2])


def parse_args(argv):
    """The command line, with defaults that depend on one another filled in."""
    parser = argparse.ArgumentParser(
        prog="prepare_data.py",
        description=(
            "Text files -> data/NAME/, ready for train.py. Run again after an interruption, it"
            " goes on."
        ),
    )
    add = parser.add_argument
    add(
        "input",
        nargs="*",
        metavar="INPUT",
        help=(
            "files, folders, globs, - for standard input, or shakespeare; .txt .jsonl .parquet,"
            " also .gz .zst; default: Python's standard library"
        ),
    )
    add(
        "--out", metavar="FOLDER", help="folder to write; default: data/ and the first input's name"
    )
    add(
        "--tokenizer",
        default="bpe",
        metavar="T",
        help=(
            "bpe: train one on the input; char; gpt2; or a path: tokenizer.json, prepared folder,"
            " run, GPT-2 of Hugging Face; default %(default)s"
        ),
    )
    add(
        "--vocab_size",
        type=number(int, 257),
        metavar="N",
        help=(
            "ids of the tokenizer to train, the 256 bytes and end-of-text among them; default 32000"
        ),
    )
    add(
        "--sample_bytes",
        type=number(lambda text: int(float(text)), 1),
        default="1e8",
        metavar="N",
        help="bytes of text, evenly spread, to train the tokenizer on; default %(default)s",
    )
    add(
        "--tokenizer_only",
        action="store_true",
        help="train the tokenizer, write FOLDER/tokenizer.json and stop",
    )
    add(
        "--val_fraction",
        type=number(float, 0, 0.999),
        metavar="F",
        help=(
            "share of the text held back for validation; default 0.1, of more than 200 MB less:"
            " about 20 MB"
        ),
    )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add(
        "--workers",
        type=number(int, 1),
        default=cores,
        metavar="N",
        help="worker processes; default: one a core, here %(default)s",
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
        "--on_error",
        choices=["stop", "skip", "replace"],
        help=(
            "broken UTF-8 or JSON: stop; skip the document (above 1 MB, the piece); replace bytes,"
            " skip JSON; default stop, with --clean replace"
        ),
    )
    add(
        "--clean",
        action="store_true",
        help=(
            "NFC, no control characters, no broken encodings, no exact duplicates, no noise; with a"
            " report"
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
            "--clean drops documents of which more is one character, space aside; default"
            " %(default)s"
        ),
    )
    add(
        "--min_letters",
        type=number(float, 0, 1),
        default=Options.min_letters,
        metavar="F",
        help=(
            "--clean drops documents of which less is letters and digits, space aside; default"
            " %(default)s"
        ),
    )
    add("--compress", action="store_true", help="also write train.bin.gz and val.bin.gz, to upload")
    add(
        "--shard",
        type=share,
        metavar="I/N",
        help="prepare only the I-th of N shares of the input, into FOLDER/shard-I-of-N",
    )
    add(
        "--overwrite",
        action="store_true",
        help="replace a finished dataset, or unfinished work on other input or settings",
    )
    add("--verify", metavar="FOLDER", help="check a prepared folder: sizes, checksums, ids, text")
    parser.usage = (
        "python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH] ..."
        " (--help lists all)"
    )
    args = parser.parse_args(argv)
    default_input = not args.input
    if of_a_run := sorted(Path(args.tokenizer).glob("step_*/tokenizer.json")):
        args.tokenizer = str(of_a_run[-1])
    if args.tokenizer != "bpe" and args.vocab_size:
        parser.error(
            f"--vocab_size {args.vocab_size} has no meaning with --tokenizer {args.tokenizer}: it"
            " sets the size of a tokenizer trained here (bpe)"
        )
    args.vocab_size = args.vocab_size or 32000
    if args.shard and (args.tokenizer in ("bpe", "char") or args.input == ["-"]):
        parser.error(
            "--shard needs files and one tokenizer for all shards: train it first with"
            " --tokenizer_only, then give it with --tokenizer FOLDER/tokenizer.json"
        )
    if "-" in args.input and len(args.input) > 1:
        parser.error("- (standard input) cannot be mixed with files")
    args.on_error = args.on_error or (
        "replace" if args.clean else "skip" if default_input else "stop"
    )
    if default_input and not args.verify:
        args.input, args.out = standard_library(), args.out or "data/python_stdlib"
    if args.input == ["shakespeare"] and not Path("shakespeare").exists():
        args.input = [shakespeare()]
    if not args.out and not args.verify:
        first = Path(args.input[0])
        args.out = f"data/{'stdin' if args.input == ['-'] else first.resolve().name.split('.')[0].strip('*') or first.resolve().parent.name}"
    if args.shard:
        args.out = f"{args.out}/shard-{args.shard[0]}-of-{args.shard[1]}"
    return args


def main(argv) -> int:
    """The exit status: 0, 1 for a failure while running, 2 for bad usage or input, 130 after
    Ctrl-C, 143 after SIGTERM.
    """

    def terminate(*_):
        raise KeyboardInterrupt(143)

    signal.signal(signal.SIGTERM, terminate)
    try:
        args = parse_args(argv)
        if args.verify:
            print(verify(Path(args.verify)))
        else:
            prepare(args)
        return 0
    except (InputError, TokenizerError, DataError) as error:
        message, status = error, 1 if isinstance(error, DataError) and args.verify else 2
    except PrepareError as error:
        message, status = error, 1
    except OSError as error:
        message, status = (
            (
                f"{error.filename or args.out}: {error.strerror or error}; what is finished is"
                " kept, and the same command continues once there is room or permission"
            ),
            1,
        )
    except KeyboardInterrupt as stop:
        message, status = (
            "stopped; what is finished is kept, and the same command continues",
            (*stop.args, 130)[0],
        )
    print(f"prepare_data.py: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
