"""One trainer a run: a locked file in its folder that names its holder.

Knows files and processes; no run.
"""

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from formats.files import try_lock
from training.errors import RunError


class Lock:
    """The lock of a run's folder. The system unlocks it when the process dies, however it dies.

    Other machines on a shared folder do not see that lock; for them the file counts as held until
    it has not been refreshed for `stale_s` seconds. So it is where there is no flock (Windows).
    """

    stale_s = 180

    def __init__(self, folder: Path):
        """Take the lock. Raises RunError naming the trainer that holds it."""
        self.file = open(folder / ".lock", "a+")  # noqa: SIM115 - open as long as it is held
        got_it = try_lock(self.file)
        locked, flock = got_it is not False, got_it is not None
        self.file.seek(0)
        held = self.file.read().split("\t")
        if len(held) == 3:
            self._check_holder(folder, held, locked, flock)
        elif not locked:
            raise RunError(
                f"{folder} is being trained by another process; stop that one first, or choose "
                "another checkpoint_dir"
            )
        self._write(f"{os.getpid()}\t{socket.gethostname()}\t{time.strftime('%Y-%m-%d %H:%M:%S')}")
        self.released = threading.Event()
        threading.Thread(target=self._refresh, daemon=True).start()

    def _check_holder(self, folder: Path, held: list[str], locked: bool, flock: bool) -> None:
        """Raises RunError unless the trainer that the file names is gone."""
        pid, host, since = held
        elsewhere = host != socket.gethostname() or not flock
        fresh = time.time() - os.stat(self.file.name).st_mtime < self.stale_s
        if locked and not (elsewhere and fresh):
            return
        wait = ""
        if locked:
            minutes = self.stale_s // 60
            wait = f" (if it is dead, wait {minutes} minutes or delete {self.file.name})"
        self.file.close()
        raise RunError(
            f"{folder} is being trained by process {pid} on {host} since {since}; stop that one "
            f"first, or choose another checkpoint_dir{wait}"
        )

    def _write(self, text: str) -> None:
        self.file.seek(0)
        self.file.truncate()
        self.file.write(text)
        self.file.flush()

    def _refresh(self) -> None:
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
