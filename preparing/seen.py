"""Which documents came before, by 64-bit hashes, in bounded memory and across restarts.

Knows hashes and nothing of the documents.
"""

from pathlib import Path

import numpy as np


class Seen:
    """The hashes of all documents so far: the newest in a set, older ones in sorted files.

    The files are mapped into memory. A log keeps the hashes in order, so that a resumed run knows
    what it knew. In a billion documents about one is taken for a copy by mistake.
    """

    RUN = 1 << 19  # hashes in the set; sorted files grow by merging to 16 times this

    def __init__(self, folder: Path, count: int):
        """Open the log in `folder` with the first `count` hashes, and forget any further ones."""
        self.folder = folder
        self.path = folder / "seen.bin"
        self.count = 0
        self.recent = set()
        self.runs = []
        self.log = open(self.path, "r+b" if count else "w+b")  # noqa: SIM115 - closed by Output
        self.log.truncate(8 * count)
        for start in range(0, count, self.RUN):
            self._add(np.fromfile(self.log, np.uint64, min(self.RUN, count - start)))

    def first(self, hashes: np.ndarray) -> np.ndarray:
        """For each hash, whether it is new; from now on it is not.

        hashes: uint64 [n]. Returns bool [n].
        """
        old = np.zeros(len(hashes), bool)
        for run in self.runs:
            nearest = np.searchsorted(run, hashes).clip(max=len(run) - 1)
            old |= run[nearest] == hashes
        new = np.zeros(len(hashes), bool)
        for n, value in enumerate(hashes.tolist()):
            new[n] = not old[n] and value not in self.recent
            self.recent.add(value)
        self.log.write(hashes[new].tobytes())
        self._add(hashes[new])
        return new

    def _add(self, hashes):
        """Count new hashes, and move the set to a file when it is full."""
        self.count += len(hashes)
        self.recent.update(hashes.tolist())
        if len(self.recent) >= self.RUN:
            self._spill(np.array(sorted(self.recent), np.uint64))
            self.recent = set()

    def _spill(self, run):
        """Write a sorted file, merged with those before it that are no longer than it is."""
        while self.runs and len(self.runs[-1]) <= len(run) < 8 * self.RUN:
            run = np.union1d(run, self.runs.pop())
        path = self.folder / f"seen-{len(self.runs)}-{len(run)}.run"
        run.tofile(path)
        self.runs.append(np.memmap(path, np.uint64, "r"))
