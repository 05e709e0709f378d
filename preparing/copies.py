"""Find documents that came before, by hashes of their texts: little memory, and across restarts.

Knows exact copies only. With 64 bits, about one in a billion documents is taken for a copy by
mistake.
"""

import hashlib
import os
from pathlib import Path

import numpy as np

RECENT_HASHES = 1 << 19  # hashes in the set, before they are sorted into the others


def hash64(text: bytes) -> int:
    """A hash of a text, without the white space at its end."""
    return int.from_bytes(hashlib.blake2b(text.rstrip(), digest_size=8).digest(), "little")


class Seen:
    """The hashes of all documents so far: the newest in a set, older ones sorted, 8 bytes each.

    A log keeps them in order, so that a resumed run knows what it knew.
    """

    def __init__(self, path: Path, count: int):
        """Open the log with its first `count` hashes; later ones are forgotten."""
        self.log = open(path, "r+b" if count else "w+b")  # noqa: SIM115 - used until the end
        self.log.truncate(8 * count)
        self.sorted = np.sort(np.fromfile(self.log, np.uint64))
        self.recent = set()

    def first(self, hashes: np.ndarray) -> np.ndarray:
        """Mark the documents that are new, bool [documents]; all count as seen from now on.

        hashes: uint64 [documents].
        """
        left, right = (np.searchsorted(self.sorted, hashes, side) for side in ("left", "right"))
        new = left == right
        for n in np.flatnonzero(new):
            value = int(hashes[n])
            new[n] = value not in self.recent
            self.recent.add(value)
        self.log.write(hashes[new].tobytes())
        if len(self.recent) >= RECENT_HASHES:
            recent = np.fromiter(self.recent, np.uint64)
            self.sorted = np.sort(np.concatenate([self.sorted, recent]))
            self.recent = set()
        return new

    def save(self) -> int:
        """Wait until the disk has the log; returns how many hashes it holds."""
        self.log.flush()
        os.fsync(self.log.fileno())
        return len(self.sorted) + len(self.recent)
