"""Text files -> data/<name>/: token ids in train.bin and val.bin, the tokenizer, and meta.json, which is written last.

    python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH]

The command: which input, which tokenizer, is this work new or to be continued, what came of it. text_sources.py reads and cleans the
text, token_writer.py encodes it. What is written depends on the input and the settings alone. Knows no model.
"""
import argparse
import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import sysconfig
import time
import urllib.request
from dataclasses import asdict
from pathlib import Path

import numpy as np

from metadata import DataError, Meta, Split, dtype_for, read_meta, write_meta
from text_sources import PIECE, InputError, Options, Piece, Position, Report, Source, find_sources, read_pieces, slices, texts_of
from token_writer import SPLITS, Journal, Pool, PrepareError, batches, encode_all, peak_memory, progress_bar, read_ids, token_lengths, worker_count, write_whole
from tokenizer_bpe import Tokenizer, TokenizerError

SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NOT_IN_STDLIB = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages", "__pycache__"}
VAL_BYTES = 20_000_000  # a tenth of the text is validation, but of large inputs no more than about so much
SLICE = 1 << 18  # bytes that a sample takes from one place


class Terminated(BaseException):
    """SIGTERM."""


# -- the tokenizer --------------------------------------------------------------------------------------------------------------


def spread_sample(pieces, sample_bytes: int) -> list[Piece]:
    """Slices spread evenly over all pieces, together at most sample_bytes: every n-th, n doubling whenever there are too many."""
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
    return kept


def train_tokenizer(sources: list[Source], options: Options, vocab_size: int, sample_bytes: int, threads: int, path: Path) -> str:
    """Train byte-level BPE on an evenly spread sample and save it; says on how much. For a process of its own: its memory goes back, and Ctrl-C works."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(threads))
    with progress_bar(sum(s.size for s in sources), 0, "sampling") as bar:
        sample = spread_sample(follow(read_pieces(sources, Position(), options), bar), sample_bytes)
    size = sum(part.size for part in sample)
    print(f"training the tokenizer, {vocab_size:,} tokens, on {size / 1e6:,.1f} MB ...", file=sys.stderr, flush=True)
    texts = (text for part in sample for text in texts_of(part, options)[0])
    save_tokenizer(Tokenizer.train(texts, vocab_size, show_progress=sys.stderr.isatty()), path)
    return f"trained on {size / 1e6:,.1f} MB spread over the text"


def train_here(arguments):
    """train_tokenizer, as a worker process is given it: one argument."""
    return train_tokenizer(*arguments)


def follow(pieces, bar):
    """The pieces, the bar going with them."""
    for piece in pieces:
        yield piece
        bar.update(piece.after.on_disk - bar.n)


def characters_of(options: Options, pieces: list[Piece]) -> tuple[str, Position]:
    """The different characters of some pieces, and where the next one begins."""
    return "".join(set().union(*(text for piece in pieces for text in texts_of(piece.loaded(), options)[0]))), pieces[-1].after


def make_tokenizer(spec: str, sources: list[Source], options: Options, args, path: Path) -> tuple[str, int]:
    """The tokenizer that `spec` (bpe, char, gpt2 or a path) asks for, saved at `path`. Returns where it came from, in words, and peak memory in bytes."""
    if spec == "bpe":
        with Pool(1) as pool:
            (words,) = pool.map(train_here, [(sources, options, args.vocab_size, args.sample_bytes, args.workers, path)])
            return words, pool.close()
    if spec == "char":
        found = set()
        with Pool(worker_count(args.workers, sources)) as pool, progress_bar(sum(s.size for s in sources), 0, "characters") as bar:
            for chars, after in pool.map(functools.partial(characters_of, options), batches(read_pieces(sources, Position(), options))):
                found.update(chars)
                bar.update(after.on_disk - bar.n)
            save_tokenizer(Tokenizer.characters(found), path)
            return f"{len(found)} different characters", pool.close()
    save_tokenizer(Tokenizer.gpt2() if spec == "gpt2" else Tokenizer.load(spec), path)
    return spec, 0


def save_tokenizer(tokenizer, path):
    """Whole or not at all."""
    tokenizer.save(path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)


# -- files and what is in them --------------------------------------------------------------------------------------------------


def scan(path: Path, dtype: str, tokenizer: Tokenizer, bar) -> tuple[str, int, int, np.ndarray]:
    """Read a .bin through: its sha256, tokens, bytes of the text they stand for, and which ids occur. Raises DataError for an id beyond the vocabulary."""
    digest, tokens, text_bytes = hashlib.sha256(), 0, 0
    lengths, used = token_lengths(tokenizer), np.zeros(tokenizer.vocab_size, bool)
    for ids in read_ids(path, dtype):
        if int(ids.max()) >= len(used) or int(ids.min()) < 0:
            raise DataError(f"{path} holds token id {ids.max()}, beyond the vocabulary of {len(used):,}")
        digest.update(ids)
        used[ids] = True
        tokens, text_bytes = tokens + len(ids), text_bytes + int(lengths[ids].sum(dtype=np.int64))
        bar.update(ids.nbytes)
    return digest.hexdigest(), tokens, text_bytes, used


def compress(folder: Path, splits: dict[str, Split], workers: int) -> None:
    """Write a .gz beside each .bin, and its size and sha256 into the splits. It is made in blocks, in parallel; any gunzip reads it."""
    with Pool(workers) as pool, progress_bar(sum((folder / s.file).stat().st_size for s in splits.values()), 0, "compressing") as bar:
        for split in splits.values():
            path, digest = folder / f"{split.file}.gz", hashlib.sha256()
            with open(folder / split.file, "rb") as source, open(path, "wb") as target:
                blocks = iter(functools.partial(source.read, 8 * PIECE), b"")
                for block in pool.map(gzip_block, blocks):
                    digest.update(block)
                    target.write(block)
                    bar.update(source.tell() - bar.n if source.tell() > bar.n else 0)
                target.flush()
                os.fsync(target.fileno())
            split.compressed = {"file": path.name, "bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def gzip_block(block: bytes) -> bytes:
    """One gzip member of its own; members one after the other are a gzip file."""
    return gzip.compress(block, 6, mtime=0)


def publish(work: Path, out: Path) -> None:
    """Move a finished dataset from the working folder to its place, meta.json last; goes on where it was interrupted."""
    (out / "meta.json").unlink(missing_ok=True)
    for path in [*work.glob("*.bin*"), work / "tokenizer.json", work / "cleaning.json"]:
        if path.exists() and not path.name.startswith("seen"):
            os.replace(path, out / path.name)
    os.replace(work / "meta.json", out / "meta.json")
    shutil.rmtree(work)


def verify(folder: Path) -> str:
    """Read a prepared folder, or a folder of shards, through and compare everything with meta.json; says what is good. Raises DataError for what is not."""
    meta = read_meta(folder)
    tokenizer = Tokenizer.load(folder / meta.tokenizer["file"])
    found = hashlib.sha256((folder / meta.tokenizer["file"]).read_bytes()).hexdigest()
    if found != meta.tokenizer["sha256"]:
        raise DataError(f"{folder / meta.tokenizer['file']} is not the tokenizer that made this data: sha256 {found}, meta.json says {meta.tokenizer['sha256']}")
    splits = [part for split in meta.splits.values() for part in split.files()]
    words = []
    with progress_bar(sum(s.tokens for s in splits) * np.dtype(meta.dtype).itemsize, 0, "verifying") as bar:
        for split in splits:
            if split.compressed and (copy := folder / split.compressed["file"]).exists():
                with open(copy, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != split.compressed["sha256"]:
                        raise DataError(f"{copy} is damaged: its sha256 is not the one in meta.json; copy it again, or make it again with --compress")
                words.append(copy.name)
            if not (folder / split.file).exists():
                continue
            sha256, tokens, text_bytes, _ = scan(folder / split.file, meta.dtype, tokenizer, bar)
            if sha256 != split.sha256 or text_bytes != split.text_bytes:
                raise DataError(f"{folder / split.file} is damaged: its sha256 is not the one in meta.json; copy it again, or prepare it again with --overwrite")
            if tokens and "\ufffd" in (text := first_document(folder / split.file, meta.dtype, tokenizer)[:-4]):
                words.append(f"{split.file} (its first document holds U+FFFD: {text[:40]!r})")
            words.append(split.file)
    return f"{folder} is good: {', '.join(words)}; {sum(s.tokens for s in splits):,} tokens, sizes, checksums, id range and text"


def first_document(path: Path, dtype: str, tokenizer: Tokenizer) -> str:
    """The first document of a .bin, or the first 4,000 tokens of it, decoded."""
    ids = np.fromfile(path, dtype, 4000)
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    return tokenizer.decode(ids[: ends[0]] if len(ends) else ids)


# -- the input ------------------------------------------------------------------------------------------------------------------


def standard_library() -> list[str]:
    """The sources of the Python that runs this, without its tests, its tables of character sets and its help pages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p.as_posix() for p in root.rglob("*.py") if p.stat().st_size and not NOT_IN_STDLIB & set(p.relative_to(root).parts))


def shakespeare() -> str:
    """The path of the tiny Shakespeare file, downloaded if need be. Raises InputError when it cannot be had."""
    path = Path("data/shakespeare.txt")
    if not path.exists():
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as reply:
                data = reply.read()
        except OSError as error:
            problem = f"tiny Shakespeare could not be downloaded ({getattr(error, 'reason', error)})"
            raise InputError(f"{problem}. Where there is a network, fetch\n  {SHAKESPEARE_URL}\nand put it at {path.absolute()}, or give the file as INPUT") from None
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".partial").write_bytes(data)
        os.replace(path.with_suffix(".partial"), path)
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != SHAKESPEARE_SHA256:
        raise InputError(f"{path} is not the file it should be: sha256 {found}, expected {SHAKESPEARE_SHA256}; delete it and fetch {SHAKESPEARE_URL} again")
    return path.as_posix()


def keep_stdin(work: Path, kind: str) -> Source:
    """Standard input as a file in the working folder: the text is read twice, and perhaps again after a kill."""
    path, digest = work / f"stdin.{kind}", hashlib.sha256()
    with open(path, "wb") as file:
        while block := sys.stdin.buffer.read(PIECE):
            digest.update(block)
            file.write(block)
    if not path.stat().st_size:
        raise InputError("standard input is empty")
    return Source(path.as_posix(), kind, "", path.stat().st_size, int(digest.hexdigest()[:12], 16))


def share_of(sources: list[Source], shard: tuple[int, int]) -> list[Source]:
    """The sources of shard I of N: a run of whole files, about equal in bytes; the shards in order are the whole input in order."""
    index, count = shard
    if len(sources) < count:
        raise InputError(f"--shard {index}/{count}: the input has only {len(sources)} files, and a file is not divided; cut large ones first, as with split --line-bytes=1G, or use fewer shards")
    total, before, at, mine = sum(s.size for s in sources), 0, 0, []
    for n, source in enumerate(sources):
        target = int((before + source.size / 2) * count / total)
        at = max(at, min(target, at + (n > 0)), count - (len(sources) - n))  # no shard stays empty
        mine += [source] if at == index - 1 else []
        before += source.size
    return mine


# -- the command ----------------------------------------------------------------------------------------------------------------


def prepare(args) -> None:
    """The command's work: from the input to a finished folder, or on from where it stopped."""
    started, out = time.monotonic(), Path(args.out)
    work = out / ".partial"
    options = Options(**{f.name: getattr(args, f.name) for f in dataclasses.fields(Options)})
    given = Tokenizer.load(args.tokenizer) if args.tokenizer not in ("bpe", "char", "gpt2") else None
    sources = find_sources([p for p in args.input if p != "-"]) if args.input != ["-"] else []
    if args.val_fraction is None and sources:
        args.val_fraction = min(0.1, VAL_BYTES / sum(s.size for s in sources))
    if args.shard:
        sources = share_of(sources, args.shard)
    with locked(work):
        if (work / "meta.json").exists():
            publish(work, out)
            return prepare(args)
        if args.input == ["-"]:
            sources = [keep_stdin(work, args.stdin_format)]
            args.val_fraction = min(0.1, VAL_BYTES / sources[0].size) if args.val_fraction is None else args.val_fraction
        settings = settings_of(args, options, given)
        if finished(out, settings, sources, args):
            return None if (work / "plan.json").exists() else shutil.rmtree(work)
        begin(work, settings, sources, args)
        check_room(out, work, sources, args)
        path, peak, words = work / "tokenizer.json", 0, "as the run before made it"
        if not path.exists():
            words, peak = make_tokenizer(args.tokenizer, sources, options, args, path)
            peak += peak_memory()
        tokenizer = Tokenizer.load(path)
        if args.tokenizer_only:
            os.replace(path, out / "tokenizer.json")
            shutil.rmtree(work)
            return print(f"{out / 'tokenizer.json'}: {tokenizer.vocab_size:,} tokens, {words}")
        dtype = dtype_for(tokenizer.vocab_size)
        journal, peak_encoding = encode_all(sources, options, args, work, dtype, tokenizer)
        meta, used = describe(work, journal, tokenizer, dtype, settings, sources, args)
        report = report_lines(journal.report)
        if report:
            (work / "cleaning.json").write_text(json.dumps(journal.report.rules, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        write_meta(work, meta)
        publish(work, out)
    print("\n".join([*summary(out, meta, journal, tokenizer, words, used, time.monotonic() - started, max(peak, peak_encoding)), *report]))


@contextlib.contextmanager
def locked(work: Path):
    """Hold the working folder; raises PrepareError when another run does. The lock goes with the process, however it ends."""
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
            raise PrepareError(f"another run is preparing {work.parent} just now; wait for it, or stop it") from None
        yield


def settings_of(args, options: Options, given: Tokenizer | None) -> dict:
    """What the bytes written depend on besides the input."""
    settings = {"tokenizer": f"sha256 {hashlib.sha256(given.to_json().encode()).hexdigest()}" if given else args.tokenizer, "val_fraction": args.val_fraction}
    if args.tokenizer == "bpe":
        settings |= {"vocab_size": args.vocab_size, "sample_bytes": args.sample_bytes}
    settings |= {"text_field": options.text_field, "on_error": options.on_error, "clean": options.clean}
    if options.clean:
        settings |= {"min_chars": options.min_chars, "max_char_share": options.max_char_share, "min_letters": options.min_letters}
    return settings | ({"shard": "{}/{}".format(*args.shard)} if args.shard else {})


def differences(old: dict, new: dict, old_sources: list[dict], new_sources: list[dict]) -> list[str]:
    """What differs between the settings and sources of former work and of this, in words."""
    words = [f"{name} was {old.get(name)}, is now {new.get(name)}" for name in sorted(old | new) if old.get(name) != new.get(name)]
    before, now = {s["path"]: s for s in old_sources}, {s["path"]: s for s in new_sources}
    words += [f"{path} is new" for path in now if path not in before] + [f"{path} is gone" for path in before if path not in now]
    words += [f"{path} changed" for path in now if path in before and now[path] != before[path]]
    if not words and list(before) != list(now):
        words = ["the order of the inputs changed"]
    return words[:3] + ([f"and {len(words) - 3:,} more"] if words[3:] else [])


def finished(out: Path, settings: dict, sources: list[Source], args) -> bool:
    """Whether the folder holds this very dataset already. Raises InputError when it holds another one."""
    if not (out / "meta.json").exists() or args.overwrite or args.tokenizer_only:
        return False
    meta = read_meta(out)
    changed = differences(meta.settings, settings, meta.sources, [{"path": s.path, "bytes": s.size} for s in sources])
    if changed:
        raise InputError(f"{out} holds a finished dataset of other input or settings: {'; '.join(changed)}.\nGive another --out, or make this one anew with --overwrite")
    if args.compress and not all(split.compressed for split in meta.splits.values()):
        compress(out, meta.splits, args.workers)
        write_meta(out, meta)
    print(f"{out} is finished already: " + ", ".join(f"{name} {split.tokens:,} tokens" for name, split in meta.splits.items()) + " (--overwrite makes it anew)")
    return True


def begin(work: Path, settings: dict, sources: list[Source], args) -> None:
    """Note what this work is; what was finished of it stays. Raises InputError when the folder holds finished parts of other work."""
    plan, path = {"settings": settings, "sources": [asdict(s) for s in sources]}, work / "plan.json"
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else plan
    if old["settings"]["on_error"] == "stop":  # nothing broken came up to where it stopped, so the bytes are the same
        old["settings"]["on_error"] = settings["on_error"]
    changed = differences(old["settings"], settings, old["sources"], plan["sources"])
    if changed and not args.overwrite and any(path.stat().st_size for path in work.glob("*.bin")):
        problem = f"{work.parent} holds unfinished work on other input or settings: {'; '.join(changed)}"
        raise InputError(f"{problem}.\nRepeat the former command to finish it, give another --out, or start anew with --overwrite")
    if changed:
        for file in work.iterdir():
            if file.name != "lock" and not file.name.startswith("stdin"):
                file.unlink()
    write_whole(path, json.dumps(plan, ensure_ascii=False))


def check_room(out: Path, work: Path, sources: list[Source], args) -> None:
    """Raises InputError when the disk cannot hold what is to be written."""
    text = sum(s.size * (4 if s.compression or s.kind == "parquet" else 1) for s in sources)
    tokens = text if args.tokenizer == "char" else 0.35 * text
    width = 4 if args.tokenizer == "bpe" and args.vocab_size > 65536 else 2
    there = sum(path.stat().st_size for path in work.glob("*.bin"))
    need, free = tokens * width * (1.9 if args.compress else 1) - there, shutil.disk_usage(out).free
    if need > free:
        raise InputError(f"{out} needs about {need / 1e9:,.1f} GB more on disk, and {free / 1e9:,.1f} GB are free: make room, or give an --out on another disk")


def describe(work: Path, journal: Journal, tokenizer: Tokenizer, dtype: str, settings: dict, sources: list[Source], args) -> tuple[Meta, int]:
    """The metadata of the finished files, as read back from the disk, and how many ids of the vocabulary occur. Raises PrepareError where they differ from what was written."""
    splits, used = {}, np.zeros(tokenizer.vocab_size, bool)
    with progress_bar(sum((work / f"{name}.bin").stat().st_size for name in SPLITS), 0, "checking") as bar:
        for name in SPLITS:
            counts = getattr(journal, name)
            sha256, tokens, text_bytes, occur = scan(work / f"{name}.bin", dtype, tokenizer, bar)
            if (tokens, text_bytes) != (counts.tokens, counts.text_bytes):
                back = f"{work / name}.bin reads back as {tokens:,} tokens for {text_bytes:,} bytes of text"
                raise PrepareError(f"{back}, written were {counts.tokens:,} for {counts.text_bytes:,}: the disk is not sound, or this is a bug")
            splits[name] = Split(f"{name}.bin", tokens, counts.documents, text_bytes, sha256)
            used |= occur
    if args.compress:
        compress(work, splits, args.workers)
    identity = {"kind": tokenizer.kind, "file": "tokenizer.json", "sha256": hashlib.sha256((work / "tokenizer.json").read_bytes()).hexdigest()}
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return Meta(dtype, tokenizer.vocab_size, tokenizer.eot_id, identity, splits, [{"path": s.path, "bytes": s.size} for s in sources], settings, created), int(used.sum())


def summary(out: Path, meta: Meta, journal: Journal, tokenizer: Tokenizer, words: str, used: int, seconds: float, peak: int) -> list[str]:
    """What to know of a finished dataset, in lines."""
    tokens, text = (sum(getattr(s, name) for s in meta.splits.values()) for name in ("tokens", "text_bytes"))
    lines = [f"{out}: {tokens:,} tokens of {text / 1e6:,.1f} MB of text from {len(meta.sources):,} files, {text / tokens:.2f} bytes a token, {meta.dtype}"]
    lines += [f"  {name:10} {s.tokens:>14,} tokens, {s.documents:,} documents" for name, s in meta.splits.items()]
    lines += [f"  validation {journal.split}", f"  tokenizer  {meta.tokenizer['kind']}, {meta.vocab_size:,} ids, {used / meta.vocab_size:.1%} of them occur; {words}"]
    lines += [f"  time       {seconds:,.1f} s; tokenising {journal.input_bytes / 1e6:,.1f} MB took {journal.seconds:,.1f} s, {journal.input_bytes / 1e6 / max(journal.seconds, 1e-9):,.1f} MB/s"]
    lines += [f"  memory     {peak / 1e6:,.0f} MB at most, all processes together"] if peak else []
    first = next((line for line in first_document(out / "train.bin", meta.dtype, tokenizer).splitlines() if line.strip()), "")
    return [*lines, f"  begins     {first[:100]!r}"]


def report_lines(report: Report) -> list[str]:
    """What was left out by each rule, with examples."""
    lines = ["left out or corrected:"] if report.rules else []
    for rule, (documents, size, examples) in sorted(report.rules.items()):
        lines += [f"  {rule}: {documents:,} documents, {size:,} bytes", *(f"    {example[:90]!r}" for example in examples)]
    return lines


def parse_args(argv):
    """The command line, with defaults that depend on one another filled in."""
    parser = argparse.ArgumentParser(prog="prepare_data.py", description="Text files -> data/NAME/, ready for train.py. Run again after an interruption, it goes on.")
    add = parser.add_argument
    add("input", nargs="*", metavar="INPUT", help="files, folders, globs, - for standard input, or shakespeare; .txt .jsonl .parquet, also .gz .zst; default: Python's standard library")
    add("--out", metavar="FOLDER", help="folder to write; default: data/ and the first input's name")
    add("--tokenizer", default="bpe", metavar="T", help="bpe: train one on the input; char; gpt2; or a path: tokenizer.json, prepared folder, run, GPT-2 of Hugging Face; default %(default)s")
    add("--vocab_size", type=int, metavar="N", help="ids of the tokenizer to train; default 32000")
    add("--sample_bytes", type=float, default=1e8, metavar="N", help="bytes of text, evenly spread, to train the tokenizer on; default %(default)g")
    add("--tokenizer_only", action="store_true", help="train the tokenizer, write FOLDER/tokenizer.json and stop")
    add("--val_fraction", type=float, metavar="F", help="share of the text held back for validation; default 0.1, of more than 200 MB less: about 20 MB")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    add("--workers", type=int, default=cores, metavar="N", help="worker processes; default: one a core, here %(default)s")
    add("--text_field", metavar="NAME", help="field of a JSON line, or column, with the text; default: text, else messages (a conversation of role and content)")
    add("--stdin_format", choices=["txt", "jsonl"], default="txt", help="what standard input holds; default %(default)s")
    add("--on_error", choices=["stop", "skip", "replace"], help="broken UTF-8 or JSON: stop; skip the document (above 1 MB, the piece); replace bytes, skip JSON; default stop, with --clean replace")
    add("--clean", action="store_true", help="NFC, no control characters, no broken encodings, no exact duplicates, no noise; with a report")
    add("--min_chars", type=int, default=Options.min_chars, metavar="N", help="--clean drops shorter documents; default %(default)s")
    add("--max_char_share", type=float, default=Options.max_char_share, metavar="F", help="--clean drops documents of which one character makes up more, white space aside; default %(default)s")
    add("--min_letters", type=float, default=Options.min_letters, metavar="F", help="--clean drops documents of which letters and digits make up less, white space aside; default %(default)s")
    add("--compress", action="store_true", help="also write train.bin.gz and val.bin.gz, to upload")
    add("--shard", metavar="I/N", help="prepare only the I-th of N shares of the input, into FOLDER/shard-I-of-N")
    add("--overwrite", action="store_true", help="replace a finished dataset, or unfinished work on other input or settings")
    add("--verify", metavar="FOLDER", help="check a prepared folder: sizes, checksums, ids, text")
    parser.usage = "python prepare_data.py [INPUT ...] [--out data/NAME] [--tokenizer bpe|char|gpt2|PATH] ... (--help lists all)"
    args = parser.parse_args(argv)
    default_input = not args.input
    if of_a_run := sorted(Path(args.tokenizer).glob("step_*/tokenizer.json")):
        args.tokenizer = str(of_a_run[-1])
    if args.tokenizer != "bpe" and args.vocab_size:
        parser.error(f"--vocab_size {args.vocab_size} has no meaning with --tokenizer {args.tokenizer}: it sets the size of a tokenizer trained here (bpe)")
    args.vocab_size = 32000 if args.vocab_size is None else args.vocab_size
    for name, value, ok, allowed in (
        ("vocab_size", args.vocab_size, args.vocab_size >= 257, "at least 257, the 256 bytes and end-of-text"),
        ("val_fraction", args.val_fraction, args.val_fraction is None or 0 <= args.val_fraction < 1, "from 0 to below 1"),
        ("workers", args.workers, args.workers >= 1, "at least 1"),
        ("sample_bytes", args.sample_bytes, args.sample_bytes >= 1, "at least 1"),
        ("max_char_share", args.max_char_share, 0 < args.max_char_share <= 1, "above 0 and at most 1"),
        ("min_letters", args.min_letters, 0 <= args.min_letters <= 1, "from 0 to 1"),
    ):
        if not ok:
            parser.error(f"--{name} {value}: it must be {allowed}")
    args.sample_bytes = int(args.sample_bytes)
    if args.shard:
        numbers = re.fullmatch(r"(\d+)/(\d+)", args.shard)
        if not numbers or not 1 <= int(numbers[1]) <= int(numbers[2]):
            parser.error(f"--shard {args.shard}: it must be I/N, as in 1/4, with I from 1 to N")
        args.shard = int(numbers[1]), int(numbers[2])
        if args.tokenizer in ("bpe", "char") or args.input == ["-"]:
            parser.error("--shard needs files and one tokenizer for all shards: train it first with --tokenizer_only, then give it with --tokenizer FOLDER/tokenizer.json")
    if "-" in args.input and len(args.input) > 1:
        parser.error("- (standard input) cannot be mixed with files")
    args.on_error = args.on_error or ("replace" if args.clean else "skip" if default_input else "stop")
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
    """The exit status: 0, 1 for a failure while running, 2 for bad usage or input, 130 after Ctrl-C, 143 after SIGTERM."""

    def terminate(*_):
        raise Terminated

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
        message, status = f"{error.filename or args.out}: {error.strerror or error}; what is finished is kept, and the same command continues once there is room or permission", 1
    except (KeyboardInterrupt, Terminated) as stop:
        message, status = "stopped; what is finished is kept, and the same command continues", 130 if isinstance(stop, KeyboardInterrupt) else 143
    print(f"prepare_data.py: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
