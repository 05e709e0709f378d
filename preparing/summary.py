"""Finished datasets: read back from the disk, summed up for the user, compressed and verified."""

import functools
import gzip
import hashlib
import time
import zlib
from pathlib import Path

import numpy as np

from formats.data_folder import (
    IN_REPLY,
    DataError,
    Meta,
    Split,
    blocks_sha256,
    dtype_for,
    gz_of,
    read_meta,
)
from formats.files import read_json, sha256, whole
from preparing import PrepareError, plural
from preparing.chunks import CHUNK
from preparing.encoder import token_lengths
from preparing.engines import Pool
from preparing.fast_bpe import encoder_name
from preparing.job import Plan, WorkFolder
from preparing.progress import Progress
from preparing.writer import SPLITS, Journal
from tokenizer_bpe import EOT, Tokenizer

FIRST_TOKENS = 1000  # of the text, in which its first line is looked for
SHOWN = 100  # characters of that line
BLOCK = 8 * CHUNK  # bytes that a worker compresses at a time


def describe(
    plan: Plan, work: WorkFolder, tokenizer: Tokenizer, journal: Journal
) -> tuple[Meta, float]:
    """The metadata of the files as read back from the disk, and which share of the ids occurs."""
    dtype = dtype_for(tokenizer.vocab_size)
    splits = {}
    occur = np.zeros(tokenizer.vocab_size, bool)
    size = sum((work.path / f"{name}.bin").stat().st_size for name in SPLITS)
    with Progress(size, "checking") as bar:
        for name in SPLITS:
            splits[name], found = scan(work.path, name, dtype, tokenizer, bar)
            occur |= found
    read = {name: split.tokens for name, split in splits.items()}
    text_bytes = sum(split.text_bytes for split in splits.values())
    if read != journal.tokens or text_bytes != journal.text_bytes:
        raise PrepareError(f"{work.path} reads back as other text than was written: check the disk")
    meta = Meta(
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer={
            "kind": tokenizer.kind,
            "file": work.tokenizer.name,
            "sha256": sha256(work.tokenizer),
        },
        splits=splits,
        sources=plan.listed_sources(),
        settings=plan.settings,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    return meta, float(occur.mean())


def scan(
    folder: Path, name: str, dtype: str, tokenizer: Tokenizer, bar: Progress
) -> tuple[Split, np.ndarray]:
    """Read a split and its mask through: what is in it, and which ids occur, bool [vocab_size]."""
    path = folder / f"{name}.bin"
    mask_path = folder / f"{name}.mask.bin"
    has_mask = mask_path.exists()
    digest = hashlib.sha256()
    mask_digest = hashlib.sha256()
    vocab_size = tokenizer.vocab_size
    counts = np.zeros(vocab_size, np.int64)
    in_replies = np.zeros(vocab_size, np.int64)
    width = np.dtype(dtype).itemsize
    ids = np.array([tokenizer.eot_id])
    for start in range(0, path.stat().st_size // width, CHUNK):
        ids = np.fromfile(path, dtype, CHUNK, offset=start * width)
        if ids.max() >= vocab_size or ids.min() < 0:
            raise DataError(f"{path} holds token ids outside the vocabulary of {vocab_size:,}")
        digest.update(ids)
        counts += np.bincount(ids, minlength=vocab_size)
        if has_mask:
            mask = np.fromfile(mask_path, np.uint8, CHUNK, offset=start)
            mask_digest.update(mask)
            in_replies += np.bincount(ids[mask & IN_REPLY > 0], minlength=vocab_size)
        bar.update(ids.nbytes)
    lengths = token_lengths(tokenizer)
    split = Split(
        file=path.name,
        tokens=int(counts.sum()),
        documents=int(counts[tokenizer.eot_id]) + int(ids[-1] != tokenizer.eot_id),
        text_bytes=int(counts @ lengths),
        sha256=digest.hexdigest(),
        blocks_sha256=blocks_sha256(path),
    )
    if has_mask:
        split.mask = Split(
            file=mask_path.name,
            tokens=int(in_replies.sum()),
            text_bytes=int(in_replies @ lengths),
            sha256=mask_digest.hexdigest(),
            blocks_sha256=blocks_sha256(mask_path),
        )
    return split, counts > 0


def summary(
    plan: Plan,
    meta: Meta,
    journal: Journal,
    tokenizer: Tokenizer,
    *,
    origin: str,
    used: float,
    seconds: float,
) -> str:
    """What to know of a finished dataset, in lines.

    origin: where the tokenizer came from, in words. used: share of its ids that occur. seconds:
    that the command took.
    """
    tokens = sum(journal.tokens.values())
    read = journal.read / 1e6
    lines = [
        f"{plan.out}: {tokens:,} tokens of {journal.text_bytes / 1e6:,.1f} MB of text from"
        f" {plural(len(meta.sources), 'file')}, {journal.text_bytes / tokens:.2f} bytes a token,"
        f" {meta.dtype}"
    ]
    for name, split in meta.splits.items():
        in_replies = f", {split.mask.tokens:,} tokens in replies" if split.mask else ""
        lines.append(
            f"  {name:10} {split.tokens:>14,} tokens, {plural(split.documents, 'document')}"
            f"{in_replies}"
        )
    ids = np.fromfile(plan.out / "train.bin", meta.dtype, FIRST_TOKENS)
    document = tokenizer.decode(ids).partition(EOT)[0]
    first_line = document.strip().partition("\n")[0]
    lines += [
        f"  validation {journal.split}",
        f"  tokenizer  {meta.tokenizer['kind']}, {meta.vocab_size:,} ids, {used:.1%} of them occur;"
        f" {origin}",
        f"  time       {seconds:,.1f} s; tokenising {read:,.1f} MB took {journal.seconds:,.1f} s,"
        f" {read / max(journal.seconds, 1e-9):,.1f} MB/s, with {encoder_name(tokenizer)}",
        f"  begins     {first_line[:SHOWN]!r}",
    ]
    if journal.report.rules:
        lines.append("left out or corrected:")
    for rule, counts in sorted(journal.report.rules.items()):
        documents = plural(counts["documents"], "document")
        lines.append(f"  {rule}: {documents}, {plural(counts['bytes'], 'byte')}")
        lines += [f"    {example!r}" for example in counts["examples"]]
    return "\n".join(lines)


def _files(meta):
    """What meta.json knows of each .bin, masks included."""
    return [file for split in meta.splits.values() for file in (split, split.mask) if file]


def compress(folder: Path, workers: int) -> str:
    """Write a .gz next to each .bin of a finished folder.

    It is made of blocks, compressed in parallel, each a gzip member; any gunzip reads it. Returns
    what was done, in words.
    """
    paths = [folder / file.file for file in _files(read_meta(folder))]
    paths = list(filter(Path.exists, paths))
    size = sum(path.stat().st_size for path in paths)
    compress_block = functools.partial(gzip.compress, compresslevel=6, mtime=0)
    with Pool(workers, compress_block) as run, Progress(size, "compressing") as bar:
        for path in paths:
            with (
                open(path, "rb") as source,
                whole(gz_of(path)) as partial,
                open(partial, "wb") as target,
            ):
                for data in run(iter(functools.partial(source.read, BLOCK), b"")):
                    target.write(data)
                    bar.update(BLOCK)
    names = ", ".join(gz_of(path).name for path in paths)
    return f"{folder}: wrote {names or 'nothing'}"


def verify(folder: Path) -> str:
    """Compare a folder with its meta.json. Returns what is good, in words; raises DataError."""
    meta = read_meta(folder)
    expected = {}
    for file in _files(meta):
        expected |= dict.fromkeys((f"{file.file}.gz", file.file), file.sha256)
    expected[meta.tokenizer["file"]] = meta.tokenizer["sha256"]
    found = [name for name in expected if (folder / name).exists()]
    damaged = [name for name in found if _content_sha256(folder / name) != expected[name]]
    if damaged:
        raise DataError(
            f"{folder}: {', '.join(damaged)} is damaged: not what meta.json describes; copy it"
            " again, or prepare it again with --overwrite"
        )
    tokenizer = Tokenizer.load(folder / meta.tokenizer["file"])
    described = (meta.tokenizer["kind"], meta.vocab_size, meta.eot_id)
    if described != (tokenizer.kind, tokenizer.vocab_size, tokenizer.eot_id):
        raise DataError(
            f"{folder}: meta.json describes another tokenizer than {meta.tokenizer['file']} in its"
            " kind, vocab_size or eot_id; copy both again, or prepare it again with --overwrite"
        )
    tokens = sum(split.tokens for split in meta.splits.values())
    report = read_json(folder / "cleaning.json") or {}
    return "\n".join(
        [
            f"{folder} is good: {', '.join(found)}; {tokens:,} tokens",
            *(f"  when it was made: {rule} (cleaning.json)" for rule in sorted(report)),
        ]
    )


def _content_sha256(path):
    """Checksum of a file, of a .gz unpacked; "" for one that is damaged."""
    if path.suffix != ".gz":
        return sha256(path)
    try:
        with gzip.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return ""
