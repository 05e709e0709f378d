"""What may end a run before its last step, and how that is made harmless: signals, a second
trainer, memory that runs out.

Knows processes and folders; no model, no data.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

from training import ranks

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None


class RunError(RuntimeError):
    """A run that cannot go on, in a sentence for the user; the exit status is 1."""


class Stop(BaseException):
    """Raised by a signal wherever the program is, but for the moments under `with signals`. No
    `except Exception` swallows it.
    """

    def __init__(self, signum: int):
        self.signum = signum


class Signals:
    """SIGTERM, SIGHUP (but under nohup) and Ctrl-C end a run with a save; a second Ctrl-C ends it
    at once.

    `with signals:` holds them back for what must happen whole, such as a change of the weights with
    its counters.
    """

    def __init__(self):
        self.received, self.held, self.shared = None, False, False
        for name in ("SIGTERM", "SIGINT", "SIGHUP"):
            ignored = (
                name == "SIGHUP"
                and hasattr(signal, name)
                and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            )  # under nohup
            if hasattr(signal, name) and not ignored:
                signal.signal(getattr(signal, name), self._on_signal)

    def _on_signal(self, signum, frame):
        if self.received:
            if signum == signal.SIGINT:
                os.write(2, b"\nleft at once; the last checkpoint is whole\n")
                os._exit(130)
            return
        self.received = signum
        if not self.held and not self.shared:
            raise Stop(signum)

    def share(self) -> None:
        """Raises Stop where any process of the run has had a signal. From the first call on,
        several processes stop only here: all at the same step.
        """
        self.shared = not ranks.alone
        signum = int(max(ranks.gather(self.received or 0)))
        if signum:
            raise Stop(signum)

    def __enter__(self):
        self.held = True

    def __exit__(self, *error):
        self.held = False
        if self.received and not self.shared and not error[0]:
            raise Stop(self.received)


def leave(signum: int, message: str):
    """End the process with the status that a signal calls for: 130 after Ctrl-C, 143 after SIGTERM."""
    with contextlib.suppress(OSError):  # the terminal may be what has gone
        print(f"\n{signal.Signals(signum).name}: {message}", flush=True)
    with contextlib.suppress(ranks.Lost):
        ranks.gather(
            0
        )  # torchrun kills all soon after the first has ended: so none does before the one that saves
    sys.exit(128 + signum)


class Lock:
    """One trainer a run: a locked file that names its holder. The system unlocks it when the
    process dies, however it dies.

    Other machines on a shared folder do not see that lock; for them the file counts as held until
    it has not been refreshed for `stale_s` seconds. So it is where there is no flock (Windows).
    """

    stale_s = 180

    def __init__(self, folder: Path):
        """Take the lock. Raises RunError naming the trainer that holds it."""
        self.file = open(folder / ".lock", "a+")  # noqa: SIM115 - open as long as it is held
        locked, flock = True, fcntl is not None
        if flock:
            try:
                fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                locked = False
            except OSError:
                flock = False  # a mount without locks
        self.file.seek(0)
        held = self.file.read().split("\t")
        if len(held) == 3:
            pid, host, since = held
            elsewhere = host != socket.gethostname() or not flock
            fresh = time.time() - os.stat(self.file.name).st_mtime < self.stale_s
            if not locked or elsewhere and fresh:
                wait = (
                    ""
                    if not locked
                    else (
                        f" (if it is dead, wait {self.stale_s // 60} minutes or delete"
                        f" {self.file.name})"
                    )
                )
                self.file.close()
                raise RunError(
                    f"{folder} is being trained by process {pid} on {host} since {since}; stop that"
                    f" one first, or choose another checkpoint_dir{wait}"
                )
        elif not locked:
            raise RunError(
                f"{folder} is being trained by another process; stop that one first, or choose"
                " another checkpoint_dir"
            )
        self._write(f"{os.getpid()}\t{socket.gethostname()}\t{time.strftime('%Y-%m-%d %H:%M:%S')}")
        self.released = threading.Event()
        threading.Thread(target=self._refresh, daemon=True).start()

    def _write(self, text):
        self.file.seek(0)
        self.file.truncate()
        self.file.write(text)
        self.file.flush()

    def _refresh(self):
        """Show other machines that this trainer is alive, whatever it is busy with."""
        while not self.released.wait(self.stale_s / 6):
            with contextlib.suppress(OSError):
                os.utime(self.file.name)

    def release(self) -> None:
        """Give the lock back."""
        self.released.set()
        with contextlib.suppress(OSError):
            self._write("")
            self.file.close()
