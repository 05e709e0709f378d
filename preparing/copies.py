"""Find documents that came before, by hashes of their texts: across restarts too.

Knows exact copies only. With 64 bits, about one in a billion documents is taken for a copy by
mistake.
"""

import hashlib
import os
from pathlib import Path

import numpy as np


def hash64(text: bytes) -> int:
    """A hash of a text, without the white space at its end."""
    return int.from_bytes(hashlib.blake2b(text.rstrip(), digest_size=8).digest(), "little")


class Seen:
    """The hashes of all documents so far, about 70 bytes of memory each.

    A log keeps them in order, so that a resumed run knows what it knew.
    """

    def __init__(self, path: Path, count: int):
        """Open the log with its first `count` hashes; later ones are forgotten."""
        self.log = open(path, "r+b" if count else "w+b")  # noqa: SIM115 - used until the end
        self.log.truncate(8 * count)
        self.hashes = set(np.fromfile(self.log, np.uint64).tolist())

    def first(self, hashes: np.ndarray) -> np.ndarray:
        """Mark the documents that are new, bool [documents]; all count as seen from now on.

        hashes: uint64 [documents].
        """
        new = np.zeros(len(hashes), bool)
        for n, value in enumerate(hashes.tolist()):
            new[n] = value not in self.hashes
            self.hashes.add(value)
        self.log.write(hashes[new].tobytes())
        return new

    def save(self) -> int:
        """Wait until the disk has the log; returns how many hashes it holds."""
        self.log.flush()
        os.fsync(self.log.fileno())
        return len(self.hashes)
