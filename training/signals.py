"""Signals end a run with a save: SIGTERM, SIGHUP (but under nohup) and Ctrl-C.

Knows processes; no run, no files.
"""

import contextlib
import os
import signal
import sys

from training import distributed


class Stop(BaseException):
    """Raised when a signal ends the run. No `except Exception` swallows it.

    message: what was saved then, in a sentence; None where nothing was to be saved.
    """

    def __init__(self, signum: int):
        self.signum, self.message = signum, None


class Signals:
    """Turns signals into Stop. A second Ctrl-C ends the process at once.

    A process alone raises Stop wherever it is, unless signals are held back. Several processes
    raise it together, in raise_if_any() and at a step: a signal only sets distributed.stop_flag.
    """

    def __init__(self):
        distributed.stop_flag = 0
        self.holding = False
        self.together = distributed.world_size > 1
        for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGBREAK"):
            signum = getattr(signal, name, None)  # Windows has the last for the one before
            if signum is None:
                continue
            under_nohup = name == "SIGHUP" and signal.getsignal(signum) == signal.SIG_IGN
            if not under_nohup:
                signal.signal(signum, self.on_signal)

    def on_signal(self, signum, frame):
        """What Python calls when a signal has come."""
        if distributed.stop_flag:
            if signum == signal.SIGINT:
                os.write(2, b"\nleft at once; the last checkpoint is whole\n")
                os._exit(130)
            return
        distributed.stop_flag = signum
        self.raise_if_alone()

    def raise_if_alone(self) -> None:
        """Raises Stop for a signal that has come, unless all processes are to stop together."""
        if distributed.stop_flag and not self.holding and not self.together:
            raise Stop(distributed.stop_flag)

    def raise_if_any(self) -> None:
        """Raises Stop in all processes where one of them has received a signal."""
        (stop,) = distributed.all_reduce_max(distributed.stop_flag)
        if stop:
            raise Stop(int(stop))

    @contextlib.contextmanager
    def held(self):
        """Hold signals back for what must happen whole, such as a step with its counters."""
        self.holding = True
        try:
            yield
        finally:
            self.holding = False
        self.raise_if_alone()

    def hold(self) -> None:
        """Hold signals back to the end: what follows is the save that they ask for."""
        self.holding = True


def leave(signum: int, message: str):
    """End the process as a signal calls for: with status 130 after Ctrl-C, 143 after SIGTERM."""
    print(f"\n{signal.Signals(signum).name}: {message}", flush=True)
    with contextlib.suppress(RuntimeError):  # another process has ended already
        # torchrun kills all soon after the first has ended: so none does before the one that saves
        distributed.gather(0)
    sys.exit(128 + signum)
