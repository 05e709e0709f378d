"""Finished folders: read back from the disk and verified, compressed, put in their place.

Knows meta.json through formats/data_folder.py, and of text only what tokens decode to.
"""

import contextlib
import functools
import gzip
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from formats.data_folder import IN_REPLY, DataError, Mask, Meta, Split, read_meta
from formats.files import read_json, sha256, sync
from preparing.pieces import PIECE
from preparing.pool import Pool
from preparing.progress import Progress
from tokenizer_bpe import Tokenizer

FILES = (
    "train.bin",
    "val.bin",
    "train.mask.bin",
    "val.mask.bin",
    "train.bin.gz",
    "val.bin.gz",
    "train.mask.bin.gz",
    "val.mask.bin.gz",
    "tokenizer.json",
    "cleaning.json",
    "meta.json",
)
BLOCK = 8 * PIECE  # bytes that a worker compresses at a time
FIRST_TOKENS = 4000  # of a file, in which its first document is looked for
OTHER_SHA256 = (
    "its sha256 is not the one in meta.json; copy it again, or prepare it again with --overwrite"
)


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
        while len(ids := np.fromfile(file, dtype, PIECE)):
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
        while len(ids := np.fromfile(tokens, dtype, PIECE)):
            mask = np.fromfile(file, np.uint8, PIECE)
            digest.update(mask)
            counts += np.bincount(ids[mask & IN_REPLY > 0], minlength=len(counts))
    return Mask(
        file=path.name,
        tokens=int(counts.sum()),
        text_bytes=int(counts @ token_lengths(tokenizer)),
        sha256=digest.hexdigest(),
    )


@functools.cache
def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of each id's text, int64 [vocab_size].

    0 for end-of-text and for ids that stand for nothing.
    """
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for n in range(tokenizer.vocab_size):
        if n != tokenizer.eot_id:
            with contextlib.suppress(KeyError):
                lengths[n] = len(tokenizer.decode_bytes([n]))
    return lengths


def first_document(path: Path, dtype: str, tokenizer: Tokenizer) -> str:
    """The first document of a .bin, or what its first tokens decode to."""
    ids = np.fromfile(path, dtype, FIRST_TOKENS)
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    if len(ends):
        ids = ids[: ends[0]]
    return tokenizer.decode(ids)


def compress(folder: Path, splits: dict[str, Split], workers: int) -> None:
    """Write a .gz beside each .bin, masks included, and its size and sha256 into the splits.

    It is made of blocks, compressed in parallel, each a gzip member; any gunzip reads it.
    """
    compress_block = functools.partial(gzip.compress, compresslevel=6, mtime=0)
    kept = [file for split in splits.values() for file in with_mask(split)]
    size = sum((folder / file.file).stat().st_size for file in kept)
    with Pool(workers, compress_block) as pool, Progress(size, "compressing") as bar:
        for file in kept:
            path = folder / f"{file.file}.gz"
            with open(path, "wb") as target:
                for data in pool.map(_blocks(folder / file.file)):
                    target.write(data)
                    bar.update(BLOCK)
            sync(path)
            file.compressed = {
                "file": path.name,
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }


def with_mask(split: Split) -> list[Split | Mask]:
    """What is known of a split's files: of its .bin, and of the mask beside it where it has one."""
    return [split, split.mask] if split.mask else [split]


def _blocks(path) -> Iterator[bytes]:
    """The content of a file, BLOCK bytes at a time."""
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            yield block


def verify(folder: Path) -> str:
    """Read a prepared folder, or a folder of shards, and compare everything with meta.json.

    Says what is good. Raises DataError for what is not.
    """
    meta = read_meta(folder)
    tokenizer = _verified_tokenizer(folder, meta)
    splits = [part for split in meta.splits.values() for part in split.files()]
    tokens = sum(split.tokens for split in splits)
    good = []
    with Progress(tokens * np.dtype(meta.dtype).itemsize, "verifying") as bar:
        for split in splits:
            for file in with_mask(split):
                if file.compressed and (folder / file.compressed["file"]).exists():
                    good.append(_verify_compressed(folder, file))
            if (folder / split.file).exists():
                good += _verify_split(folder, split, meta.dtype, tokenizer, bar)
            if split.mask and (folder / split.mask.file).exists():
                good.append(_verify_mask(folder, split.mask))
    checked = "sizes, checksums, id range and text"
    if not any((folder / split.file).exists() for split in splits):
        checked = "checksums of the compressed copies"
    lines = [f"{folder} is good: {', '.join(good)}; {tokens:,} tokens, {checked}"]
    report = read_json(folder / "cleaning.json") or {}
    if report:
        lines.append("left out or corrected when it was made (cleaning.json):")
        lines += [f"  {rule}" for rule in sorted(report)]
    return "\n".join(lines)


def _verified_tokenizer(folder, meta: Meta):
    """The tokenizer of a folder. Raises DataError when it is another than made the data."""
    path = folder / meta.tokenizer["file"]
    tokenizer = Tokenizer.load(path)
    if sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(
            f"{path} is not the tokenizer that made this data: its sha256 is not the one in"
            f" meta.json, {meta.tokenizer['sha256']}"
        )
    return tokenizer


def _verify_compressed(folder, split):
    """The name of a split's compressed copy. Raises DataError when it is damaged."""
    path = folder / split.compressed["file"]
    if sha256(path) != split.compressed["sha256"]:
        raise DataError(
            f"{path} is damaged: its sha256 is not the one in meta.json; copy it again, or make it"
            " again with --compress"
        )
    return path.name


def _verify_split(folder, split, dtype, tokenizer, bar):
    """What is good of a split's .bin, in words. Raises DataError when it is damaged."""
    path = folder / split.file
    found, _ = scan(folder, split.file, dtype, tokenizer, bar)
    if (found.sha256, found.text_bytes) != (split.sha256, split.text_bytes):
        raise DataError(f"{path} is damaged: {OTHER_SHA256}")
    good = [split.file]
    text = first_document(path, dtype, tokenizer)[:-4]  # its end may be half a character
    if "\ufffd" in text:
        good.insert(0, f"{split.file} (its first document holds U+FFFD: {text[:40]!r})")
    return good


def _verify_mask(folder, mask):
    """The name of a split's mask. Raises DataError when it is damaged."""
    path = folder / mask.file
    if sha256(path) != mask.sha256:
        raise DataError(f"{path} is damaged: {OTHER_SHA256}")
    return mask.file


def publish(work: Path, out: Path) -> None:
    """Move a finished dataset from the working folder to its place, meta.json last.

    Goes on where it was interrupted.
    """
    if (out / "meta.json").exists():  # what it replaces goes whole, meta.json first
        for name in reversed(FILES):
            (out / name).unlink(missing_ok=True)
    for name in FILES:
        if (work / name).exists():
            os.replace(work / name, out / name)
