"""A progress bar for long steps."""

import sys
import threading

from tqdm import tqdm


class Progress(tqdm):
    """A bar with MB/s and time left; a line every half minute where the output is no terminal."""

    def __init__(self, total: float, what: str, start: int = 0):
        """total, start: bytes, in all and at the beginning. what: the name of the step."""
        is_terminal = sys.stderr.isatty()
        super().__init__(
            desc=what,
            total=total,
            initial=start,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            mininterval=0.2 if is_terminal else 30,
            delay=0 if is_terminal else 10,
        )

    def to(self, done: int) -> None:
        self.update(done - self.n)


Progress.set_lock(threading.RLock())  # tqdm's own is one between processes, which a kill leaks
