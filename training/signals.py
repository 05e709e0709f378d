"""Signals end a run with a save: SIGTERM, SIGHUP (but under nohup) and Ctrl-C.

Knows processes; no run, no files.
"""

import contextlib
import os
import signal
import sys

from training import distributed


class Stop(BaseException):
    """Raised by a signal wherever the program is, but for moments in which signals are held back.

    No `except Exception` swallows it.
    """

    def __init__(self, signum: int):
        self.signum = signum


class Signals:
    """Turns signals into Stop. A second Ctrl-C ends the process at once."""

    def __init__(self):
        self.received = None
        distributed.told["signal"] = 0
        self.holding = False
        self.agreed = False  # whether processes stop together, at raise_if_received
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            signum = getattr(signal, name, None)  # Windows has no SIGHUP
            if signum is None:
                continue
            under_nohup = name == "SIGHUP" and signal.getsignal(signum) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(signum, self.on_signal)

    def on_signal(self, signum, frame):
        """What Python calls when a signal has come."""
        if self.received:
            if signum == signal.SIGINT:
                os.write(2, b"\nleft at once; the last checkpoint is whole\n")
                os._exit(130)
            return
        self.received = distributed.told["signal"] = signum
        if not self.holding and not self.agreed:
            raise Stop(signum)

    @contextlib.contextmanager
    def held(self):
        """Hold signals back for what must happen whole, such as a step with its counters."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        if self.received and not self.agreed:
            raise Stop(self.received)

    def hold(self) -> None:
        """Hold signals back from here to the end: what follows is the save that they ask for."""
        self.holding = True

    def raise_if_received(self) -> None:
        """Raises Stop where any process of the run has told the others of a signal.

        From the first call on, several processes stop only here: all at the same step.
        """
        if not self.agreed:
            self.agreed = distributed.world_size > 1
            distributed.gather(0)
        if distributed.heard["signal"]:
            raise Stop(int(distributed.heard["signal"]))


def leave(signum: int, message: str):
    """End the process as a signal calls for: with status 130 after Ctrl-C, 143 after SIGTERM."""
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        print(f"\n{signal.Signals(signum).name}: {message}", flush=True)
    with contextlib.suppress(distributed.Lost):
        # torchrun kills all soon after the first has ended: so none does before the one that saves
        distributed.gather(0)
    sys.exit(128 + signum)
