"""Finished datasets: read back from the disk, summed up for the user, compressed and verified.

Knows meta.json through formats/data_folder.py, and of text only what tokens decode to.
"""

import functools
import gzip
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from formats.data_folder import (
    IN_REPLY,
    DataError,
    Mask,
    Meta,
    Split,
    dtype_for,
    read_meta,
    write_meta,
)
from formats.files import read_json, sha256, whole
from preparing import PrepareError
from preparing.chunks import CHUNK
from preparing.cleaning import CleaningReport
from preparing.encoder import token_lengths
from preparing.engines import Pool
from preparing.job import Plan, WorkFolder
from preparing.progress import Progress
from preparing.writer import SPLITS, Journal
from tokenizer_bpe import EOT, Tokenizer

FIRST_TOKENS = 1000  # of the text, in which its first line is looked for
SHOWN = 100  # characters of that line
EXAMPLE_SHOWN = 90  # characters of what was left out
BLOCK = 8 * CHUNK  # bytes that a worker compresses at a time
DAMAGED = (
    "{} is damaged: its sha256 is not the one in meta.json; copy it again, or prepare it again"
    " with --overwrite"
)


def describe(
    plan: Plan, work: WorkFolder, tokenizer: Tokenizer, journal: Journal
) -> tuple[Meta, float]:
    """The metadata of the files as read back from the disk, and which share of the ids occurs.

    Raises PrepareError where they differ from what was written.
    """
    dtype = dtype_for(tokenizer.vocab_size)
    splits = {}
    occur = np.zeros(tokenizer.vocab_size, bool)
    size = sum((work.path / f"{name}.bin").stat().st_size for name in SPLITS)
    with Progress(size, "checking") as bar:
        for name in SPLITS:
            splits[name], found = scan(work.path, f"{name}.bin", dtype, tokenizer, bar)
            splits[name].mask = scan_mask(work.path, splits[name], dtype, tokenizer)
            occur |= found
    tokens = {name: split.tokens for name, split in splits.items()}
    text_bytes = sum(split.text_bytes for split in splits.values())
    back = (tokens, text_bytes)
    written = (journal.tokens, journal.text_bytes)
    if back != written:
        raise PrepareError(
            f"{work.path} reads back as {back} tokens and bytes of text, not {written} as written:"
            " check the disk"
        )
    meta = Meta(
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer={
            "kind": tokenizer.kind,
            "file": "tokenizer.json",
            "sha256": sha256(work.tokenizer),
        },
        splits=splits,
        sources=plan.listed_sources(),
        settings=plan.settings,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    return meta, float(occur.mean())


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
    megabytes = journal.text_bytes / 1e6
    bytes_a_token = journal.text_bytes / tokens
    read = journal.read / 1e6
    speed = read / max(journal.seconds, 1e-9)
    lines = [
        f"{plan.out}: {tokens:,} tokens of {megabytes:,.1f} MB of text from {len(meta.sources):,}"
        f" files, {bytes_a_token:.2f} bytes a token, {meta.dtype}"
    ]
    for name, split in meta.splits.items():
        in_replies = f", {split.mask.tokens:,} tokens in replies" if split.mask else ""
        lines.append(
            f"  {name:10} {split.tokens:>14,} tokens, {split.documents:,} documents{in_replies}"
        )
    lines += [
        f"  validation {journal.split}",
        f"  tokenizer  {meta.tokenizer['kind']}, {meta.vocab_size:,} ids, {used:.1%} of them occur;"
        f" {origin}",
        f"  time       {seconds:,.1f} s; tokenising {read:,.1f} MB took {journal.seconds:,.1f} s,"
        f" {speed:,.1f} MB/s",
    ]
    ids = np.fromfile(plan.out / "train.bin", meta.dtype, FIRST_TOKENS)
    document = tokenizer.decode(ids).partition(EOT)[0]
    first = document.strip().partition("\n")[0]
    lines.append(f"  begins     {first[:SHOWN]!r}")
    return "\n".join(lines + report_lines(journal.report))


def report_lines(report: CleaningReport) -> list[str]:
    """What was left out by each rule, with examples; nothing where nothing was."""
    lines = []
    if report.rules:
        lines.append("left out or corrected:")
    for rule, (documents, size, examples) in sorted(report.rules.items()):
        lines.append(f"  {rule}: {documents:,} documents, {size:,} bytes")
        for example in examples:
            lines.append(f"    {example[:EXAMPLE_SHOWN]!r}")
    return lines


def scan(
    folder: Path, name: str, dtype: str, tokenizer: Tokenizer, bar: Progress
) -> tuple[Split, np.ndarray]:
    """Read a .bin through: what is in it, and which ids occur, bool [vocab_size].

    Raises DataError for an id beyond the vocabulary.
    """
    digest = hashlib.sha256()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    last = tokenizer.eot_id
    with open(folder / name, "rb") as file:
        while len(ids := np.fromfile(file, dtype, CHUNK)):
            if int(ids.max()) >= len(counts) or int(ids.min()) < 0:
                outside = ids[(ids < 0) | (ids >= len(counts))]
                raise DataError(
                    f"{folder / name} holds token id {outside[0]}, outside the vocabulary of"
                    f" {len(counts):,}"
                )
            digest.update(ids)
            counts += np.bincount(ids, minlength=len(counts))
            last = ids[-1]
            bar.update(ids.nbytes)
    documents = int(counts[tokenizer.eot_id])
    if last != tokenizer.eot_id:
        documents += 1
    split = Split(
        file=name,
        tokens=int(counts.sum()),
        documents=documents,
        text_bytes=int(counts @ token_lengths(tokenizer)),
        sha256=digest.hexdigest(),
    )
    return split, counts > 0


def scan_mask(folder: Path, split: Split, dtype: str, tokenizer: Tokenizer) -> Mask | None:
    """Read a .bin and its mask through: what is in replies. None where it has no mask."""
    path = folder / split.file.replace(".bin", ".mask.bin")
    if not path.exists():
        return None
    digest = hashlib.sha256()
    counts = np.zeros(tokenizer.vocab_size, np.int64)
    with open(folder / split.file, "rb") as tokens, open(path, "rb") as file:
        while len(ids := np.fromfile(tokens, dtype, CHUNK)):
            mask = np.fromfile(file, np.uint8, CHUNK)
            digest.update(mask)
            counts += np.bincount(ids[mask & IN_REPLY > 0], minlength=len(counts))
    return Mask(
        file=path.name,
        tokens=int(counts.sum()),
        text_bytes=int(counts @ token_lengths(tokenizer)),
        sha256=digest.hexdigest(),
    )


def _files(meta):
    """What meta.json knows of each .bin, masks included."""
    for split in meta.splits.values():
        yield split
        if split.mask:
            yield split.mask


# -- compress


def compress(folder: Path, workers: int) -> str:
    """Write a .gz next to each .bin of a finished folder, and its size and sha256 to meta.json.

    It is made of blocks, compressed in parallel, each a gzip member; any gunzip reads it. Returns
    what was done, in words.
    """
    meta = read_meta(folder)
    to_do = [file for file in _files(meta) if (folder / file.file).exists()]
    size = sum((folder / file.file).stat().st_size for file in to_do)
    compress_block = functools.partial(gzip.compress, compresslevel=6, mtime=0)
    with Pool(workers, compress_block) as pool, Progress(size, "compressing") as bar:
        for file in to_do:
            path = folder / f"{file.file}.gz"
            with whole(path) as partial, open(partial, "wb") as target:
                for data in pool.map(_blocks(folder / file.file)):
                    target.write(data)
                    bar.update(BLOCK)
            file.compressed = {
                "file": path.name,
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }
    write_meta(folder, meta)
    names = ", ".join(f"{file.file}.gz" for file in to_do)
    return f"{folder}: wrote {names or 'nothing'}"


def _blocks(path) -> Iterator[bytes]:
    """The content of a file, BLOCK bytes at a time."""
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield block


# -- verify


def verify(folder: Path) -> str:
    """Read a prepared folder and compare everything with meta.json.

    Returns what is good, in words. Raises DataError for what is not.
    """
    meta = read_meta(folder)
    tokenizer = Tokenizer.load(folder / meta.tokenizer["file"])
    _verify_file(folder, meta.tokenizer["file"], meta.tokenizer["sha256"])
    tokens = sum(split.tokens for split in meta.splits.values())
    good = []
    with Progress(tokens * np.dtype(meta.dtype).itemsize, "verifying") as bar:
        for file in _files(meta):
            if file.compressed and (folder / file.compressed["file"]).exists():
                _verify_file(folder, file.compressed["file"], file.compressed["sha256"])
                good.append(file.compressed["file"])
            if not (folder / file.file).exists():
                continue
            _verify_file(folder, file.file, file.sha256)
            good.append(file.file)
            if isinstance(file, Split):
                found, _ = scan(folder, file.file, meta.dtype, tokenizer, bar)
                if found.text_bytes != file.text_bytes:
                    raise DataError(DAMAGED.format(folder / file.file))
    report = read_json(folder / "cleaning.json") or {}
    return "\n".join(
        [
            f"{folder} is good: {', '.join(good)}; {tokens:,} tokens",
            *(f"  when it was made: {rule} (cleaning.json)" for rule in sorted(report)),
        ]
    )


def _verify_file(folder, name, expected):
    """Raises DataError when a file's sha256 is not the expected one."""
    if sha256(folder / name) != expected:
        raise DataError(DAMAGED.format(folder / name))
