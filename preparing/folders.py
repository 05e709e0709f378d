"""Prepared folders: what is in their files, read back from the disk; compressing them, and putting
a finished one in its place.

Knows meta.json through formats/data_folder.py, and no text but what tokens decode to.
"""

import contextlib
import functools
import gzip
import hashlib
import os
import shutil
from pathlib import Path

import numpy as np

from formats.data_folder import DataError, Split, read_meta
from preparing.text_sources import PIECE
from preparing.token_writer import Pool, Progress
from tokenizer_bpe import Tokenizer

FILES = (
    "train.bin",
    "val.bin",
    "train.bin.gz",
    "val.bin.gz",
    "tokenizer.json",
    "cleaning.json",
    "meta.json",
)


def scan(
    folder: Path, name: str, dtype: str, tokenizer: Tokenizer, bar
) -> tuple[Split, np.ndarray]:
    """Read a .bin through: what is in it, and which ids occur, bool [vocab_size]. Raises DataError
    for an id beyond the vocabulary.
    """
    digest, counts, last = (
        hashlib.sha256(),
        np.zeros(tokenizer.vocab_size, np.int64),
        tokenizer.eot_id,
    )
    with open(folder / name, "rb") as file:
        while len(ids := np.fromfile(file, dtype, PIECE)):
            if int(ids.max()) >= len(counts) or int(ids.min()) < 0:
                raise DataError(
                    f"{folder / name} holds token id {ids.max()}, beyond the vocabulary of"
                    f" {len(counts):,}"
                )
            digest.update(ids)
            counts += np.bincount(ids, minlength=len(counts))
            last = ids[-1]
            bar.update(ids.nbytes)
    documents = int(counts[tokenizer.eot_id]) + int(last != tokenizer.eot_id)
    return (
        Split(
            name,
            int(counts.sum()),
            documents,
            int(counts @ token_lengths(tokenizer)),
            digest.hexdigest(),
        ),
        counts > 0,
    )


def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of each id's text, 0 for end-of-text and for ids that stand for nothing, int64
    [vocab_size].
    """
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for n in range(tokenizer.vocab_size):
        with contextlib.suppress(KeyError):
            lengths[n] = 0 if n == tokenizer.eot_id else len(tokenizer.decode_bytes([n]))
    return lengths


def first_document(path: Path, dtype: str, tokenizer: Tokenizer) -> str:
    """The first document of a .bin, or the first 4,000 tokens of it, decoded."""
    ids = np.fromfile(path, dtype, 4000)
    ends = np.flatnonzero(ids == tokenizer.eot_id)
    return tokenizer.decode(ids[: ends[0]] if len(ends) else ids)


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def compress(folder: Path, splits: dict[str, Split], workers: int) -> None:
    """Write a .gz beside each .bin, and its size and sha256 into the splits. It is made of blocks,
    each a gzip member, in parallel; any gunzip reads it.
    """
    block = functools.partial(gzip.compress, compresslevel=6, mtime=0)
    with (
        Pool(workers) as pool,
        Progress(
            sum((folder / s.file).stat().st_size for s in splits.values()), "compressing"
        ) as bar,
    ):
        for split in splits.values():
            path = folder / f"{split.file}.gz"
            with open(folder / split.file, "rb") as source, open(path, "wb") as target:
                for data in pool.map(block, iter(functools.partial(source.read, 8 * PIECE), b"")):
                    target.write(data)
                    bar.update(8 * PIECE)
                target.flush()
                os.fsync(target.fileno())
            split.compressed = {
                "file": path.name,
                "bytes": path.stat().st_size,
                "sha256": sha256(path),
            }


def verify(folder: Path) -> str:
    """Read a prepared folder, or a folder of shards, through and compare everything with meta.json;
    says what is good. Raises DataError for what is not.
    """
    meta = read_meta(folder)
    path, splits, words = (
        folder / meta.tokenizer["file"],
        [part for split in meta.splits.values() for part in split.files()],
        [],
    )
    tokenizer = Tokenizer.load(path)
    if sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(
            f"{path} is not the tokenizer that made this data: its sha256 is not the one in"
            f" meta.json, {meta.tokenizer['sha256']}"
        )
    with Progress(
        sum(s.tokens for s in splits) * np.dtype(meta.dtype).itemsize, "verifying"
    ) as bar:
        for split in splits:
            if split.compressed and (copy := folder / split.compressed["file"]).exists():
                if sha256(copy) != split.compressed["sha256"]:
                    raise DataError(
                        f"{copy} is damaged: its sha256 is not the one in meta.json; copy it again,"
                        " or make it again with --compress"
                    )
                words.append(copy.name)
            if (path := folder / split.file).exists():
                found, _ = scan(folder, split.file, meta.dtype, tokenizer, bar)
                if (found.sha256, found.text_bytes) != (split.sha256, split.text_bytes):
                    raise DataError(
                        f"{path} is damaged: its sha256 is not the one in meta.json; copy it again,"
                        " or prepare it again with --overwrite"
                    )
                if "\ufffd" in (text := first_document(path, meta.dtype, tokenizer)[:-4]):
                    words.append(f"{split.file} (its first document holds U+FFFD: {text[:40]!r})")
                words.append(split.file)
    return (
        f"{folder} is good: {', '.join(words)}; {sum(s.tokens for s in splits):,} tokens, sizes,"
        " checksums, id range and text"
    )


def publish(work: Path, out: Path) -> None:
    """Move a finished dataset from the working folder to its place, meta.json last; goes on where
    it was interrupted.
    """
    if (out / "meta.json").exists():  # what it replaces goes whole, meta.json first
        for name in reversed(FILES):
            (out / name).unlink(missing_ok=True)
    for name in FILES:
        if (work / name).exists():
            os.replace(work / name, out / name)
    shutil.rmtree(work)
