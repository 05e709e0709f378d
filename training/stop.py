"""Signals that end a run: Ctrl-C, SIGTERM, and SIGHUP but under nohup.

The handler only sets a flag, which the loop reads once per step. Knows no run and no files.
"""

import os
import signal

from training import distributed


class StopFlag:
    """The signal that this process has received, from its construction on.

    signum: its number; 0: none. A second Ctrl-C ends the process at once.
    """

    def __init__(self):
        self.signum = 0
        signal.signal(signal.SIGTERM, self.set)
        signal.signal(signal.SIGINT, self.set)
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self.set)  # Windows has none

    def set(self, signum, frame):
        if self.signum and signum == signal.SIGINT:
            os.write(2, b"\nexited immediately; the last checkpoint is intact\n")
            os._exit(130)
        self.signum = signum

    def set_anywhere(self) -> bool:
        """True if any process of the run has received a signal. All processes must call it."""
        (signum,) = distributed.all_reduce_max(self.signum)
        return signum > 0
