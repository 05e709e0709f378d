"""Copies of documents: keys that tell them, and which keys came before.

A key is the hash of a text or, for near-copies, of a part of its MinHash (Broder, 1997): over runs
of five words, 112 minima in 14 bands of 8, as FineWeb has it (Penedo et al., 2024, "The FineWeb
Datasets"). Of two documents that share three quarters of such runs, 77 in 100 share a band, of
those that share half of them, 5. Needs the package rensa. Keys of all documents are kept in
bounded memory and across restarts.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

RUN = 5  # words
BANDS, ROWS = 14, 8
SEED = 42
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, made odd: spreads the bits
LONGEST_WORD = 40  # characters on average: a text of longer ones has no spaces between its words


def hash64(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def band_keys(texts: list[str]) -> np.ndarray:
    """The keys of each text's bands, uint64 [texts, BANDS]."""
    from rensa import RMinHash

    if not texts:
        return np.zeros((0, BANDS), np.uint64)
    hashes = RMinHash.hash_token_sets([words_of(text) for text in texts])
    runs = [hashes_of_runs(np.array(words, np.uint64)) for words in hashes]
    ends = np.cumsum([0, *map(len, runs)]).tolist()
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(runs), ends, BANDS * ROWS, SEED
    )
    minima = np.array(matrix.to_rows(), np.uint64).reshape(len(texts), BANDS, ROWS)
    keys = np.broadcast_to(np.arange(1, BANDS + 1, dtype=np.uint64), minima.shape[:2])
    for row in range(ROWS):
        keys = keys * MIX + minima[:, :, row]
    return keys


def words_of(text: str) -> list[str]:
    """The words of a text in small letters; its characters, where it has no spaces."""
    words = text.lower().split()
    if len(text) > LONGEST_WORD * len(words):
        return list(text.lower())
    return words


def hashes_of_runs(words: np.ndarray) -> np.ndarray:
    """Hashes of words, uint64 [n] -> of each run of RUN of them, [n - RUN + 1]; of fewer, [1]."""
    length = min(RUN, len(words))
    count = len(words) - length + 1
    runs = np.zeros(count, np.uint64)
    for n in range(length):
        runs = runs * MIX + words[n : n + count]
    return runs


class Seen:
    """The keys of all documents so far: the newest in a set, older ones in sorted files.

    The files are mapped into memory. A log keeps the keys in order, so that a resumed run knows
    what it knew. With a key each, about one in a billion documents is taken for a copy by mistake.
    """

    RUN = 1 << 19  # keys in the set; sorted files grow by merging to 16 times this

    def __init__(self, folder: Path, name: str, count: int):
        """Open the log `name` in `folder` with its first `count` keys; later ones are forgotten."""
        self.folder = folder
        self.name = name
        self.count = 0
        self.recent = set()
        self.runs = []
        path = folder / f"{name}.bin"
        self.log = open(path, "r+b" if count else "w+b")  # noqa: SIM115 - used until the end
        self.log.truncate(8 * count)
        for start in range(0, count, self.RUN):
            self._add(np.fromfile(self.log, np.uint64, min(self.RUN, count - start)))

    def first(self, keys: np.ndarray) -> np.ndarray:
        """For each document, whether it is new: whether none of its keys came before.

        The keys of a new one count as seen from now on. keys: uint64 [documents, keys of each].
        Returns bool [documents].
        """
        old = np.zeros(len(keys), bool)
        for run in self.runs:
            nearest = np.searchsorted(run, keys).clip(max=len(run) - 1)
            old |= (run[nearest] == keys).any(1)
        new = np.zeros(len(keys), bool)
        for n, values in enumerate(keys.tolist()):
            if not old[n] and self.recent.isdisjoint(values):
                new[n] = True
                self.recent.update(values)
        self.log.write(keys[new].tobytes())
        self._add(keys[new].ravel())
        return new

    def save(self) -> int:
        """Have the log on the disk; returns how many keys it holds."""
        self.log.flush()
        os.fsync(self.log.fileno())
        return self.count

    def _add(self, keys):
        """Count new keys, and move the set to a file when it is full."""
        self.count += len(keys)
        self.recent.update(keys.tolist())
        if len(self.recent) >= self.RUN:
            self._spill(np.array(sorted(self.recent), np.uint64))
            self.recent = set()

    def _spill(self, run):
        """Write a sorted file, merged with those before it that are no longer than it is."""
        while self.runs and len(self.runs[-1]) <= len(run) < 8 * self.RUN:
            run = np.union1d(run, self.runs.pop())
        path = self.folder / f"{self.name}-{len(self.runs)}-{len(run)}.run"
        path.write_bytes(run)
        self.runs.append(np.memmap(path, np.uint64, "r"))
