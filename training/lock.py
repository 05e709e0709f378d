"""One trainer a run: a locked file in its folder, and a file that names its holder.

Knows files and processes; no run.
"""

import contextlib
import os
import shutil
import socket
import time
from pathlib import Path

from filelock import FileLock, Timeout

from formats import files, run_log
from training import RunError

FRESH_S = 180  # after which a trainer of another machine that wrote nothing counts as dead


class Lock:
    """The lock of a run's folder. The system unlocks it when the process dies, however it dies.

    On some mounts, such as Google Drive, other machines do not see that lock. So a trainer of
    another machine that did not release it counts as alive while the run's log is fresh.
    """

    def __init__(self, folder: Path):
        """Take the lock. Raises RunError naming the trainer that holds it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.holder = folder / ".trainer.json"
        self.lock = FileLock(folder / ".lock")
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise RunError(self._held()) from None
        except (NotImplementedError, OSError):
            pass  # the mount has no locks
        holder = self._read_holder()
        if holder and holder["host"] != socket.gethostname() and self._is_fresh():
            self.lock.release()
            wait = f"if it is dead, wait {FRESH_S // 60} minutes or delete {self.holder}"
            raise RunError(f"{self._held()} ({wait})")
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
        files.write_json(self.holder, me)

    def _read_holder(self):
        return files.read_json(self.holder, pid=int, host=str, since=str)

    def _is_fresh(self):
        """Whether its holder has written the log, or taken the lock, a short while ago."""
        written = [path for path in (self.folder / run_log.NAME, self.holder) if path.exists()]
        return any(time.time() - path.stat().st_mtime < FRESH_S for path in written)

    def _held(self):
        who = "another process"
        if holder := self._read_holder():
            who = f"process {holder['pid']} on {holder['host']} since {holder['since']}"
        return (
            f"{self.folder} is being trained by {who}; stop that one first, or choose another"
            " checkpoint_dir"
        )

    def release(self) -> None:
        """Give the lock back. A folder in which no run has begun goes too."""
        with contextlib.suppress(OSError):  # the folder may have become read-only
            self.holder.unlink()
            if os.listdir(self.folder) == [".lock"]:
                shutil.rmtree(self.folder)
        self.lock.release()
