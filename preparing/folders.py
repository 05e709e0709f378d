"""Finished folders: read back from the disk, verified, and compressed.

Knows meta.json through formats/data_folder.py, and of text only what tokens decode to.
"""

import contextlib
import functools
import gzip
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from formats.data_folder import IN_REPLY, DataError, Mask, Split, read_meta, write_meta
from formats.files import read_json, sha256, whole
from preparing.chunks import CHUNK
from preparing.engines import Pool
from preparing.progress import Progress
from tokenizer_bpe import Tokenizer

BLOCK = 8 * CHUNK  # bytes that a worker compresses at a time
DAMAGED = (
    "{} is damaged: its sha256 is not the one in meta.json; copy it again, or prepare it again"
    " with --overwrite"
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
    path = folder / meta.tokenizer["file"]
    tokenizer = Tokenizer.load(path)
    if sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(DAMAGED.format(path))
    tokens = sum(split.tokens for split in meta.splits.values())
    good = []
    with Progress(tokens * np.dtype(meta.dtype).itemsize, "verifying") as bar:
        for file in _files(meta):
            if file.compressed and (folder / file.compressed["file"]).exists():
                good.append(
                    _verify_file(folder, file.compressed["file"], file.compressed["sha256"])
                )
            if not (folder / file.file).exists():
                continue
            good.append(_verify_file(folder, file.file, file.sha256))
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
    """The name of a file. Raises DataError when its sha256 is not the expected one."""
    if sha256(folder / name) != expected:
        raise DataError(DAMAGED.format(folder / name))
    return name
