"""One trainer per run: a locked file in the run's folder. Knows files and processes; no run."""

import contextlib
import os
import shutil
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from training import RunError


class Lock:
    """The lock of a run's folder. The system releases it when the process dies, however it dies."""

    def __init__(self, folder: Path):
        """Take the lock. Raises RunError naming the trainer that has it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.lock = folder, FileLock(folder / ".lock")
        holder = folder / ".trainer"
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            who = holder.read_text() if holder.exists() else "another process"
            raise RunError(
                f"{folder} is being trained by {who}; stop that one first, or choose another"
                " checkpoint_dir"
            ) from None
        except (NotImplementedError, OSError):
            pass  # this file system has no locks
        holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")

    def release(self) -> None:
        """Release the lock, and delete the folder if no run has started in it."""
        with contextlib.suppress(OSError):  # the folder may have become read-only
            (self.folder / ".trainer").unlink()
            if os.listdir(self.folder) == [".lock"]:
                shutil.rmtree(self.folder)
        self.lock.release()
