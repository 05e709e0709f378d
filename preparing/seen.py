"""Which documents came before, by 64-bit keys, in bounded memory and across restarts.

Knows keys and nothing of the documents.
"""

from pathlib import Path

import numpy as np

from formats.files import sync


class Seen:
    """The keys of all documents so far: the newest in a set, older ones in sorted files.

    The files are mapped into memory. A log keeps the keys in order, so that a resumed run knows
    what it knew. With a key each, about one in a billion documents is taken for a copy by mistake.
    """

    RUN = 1 << 19  # keys in the set; sorted files grow by merging to 16 times this

    def __init__(self, folder: Path, name: str, count: int):
        """Open the log `name` in `folder` with its first `count` keys; forget any further ones."""
        self.folder = folder
        self.name = name
        self.path = folder / f"{name}.bin"
        self.count = 0
        self.recent = set()
        self.runs = []
        self.log = open(self.path, "r+b" if count else "w+b")  # noqa: SIM115 - closed by Output
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
        sync(self.path)
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
        run.tofile(path)
        self.runs.append(np.memmap(path, np.uint64, "r"))
