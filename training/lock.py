"""One trainer per run: a locked file in the run's folder. Knows files and processes; no run."""

import contextlib
import os
import shutil
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from training import RunError


@contextlib.contextmanager
def locked(folder: Path):
    """Hold the lock of a run's folder, which is made, and deleted if no run has started in it.

    The system releases the lock when the process dies, however it dies. Raises RunError naming the
    trainer that has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock, holder = FileLock(folder / ".lock"), folder / ".trainer"
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = holder.read_text() if holder.exists() else "another process"
        raise RunError(
            f"{folder} is being trained by {who}; stop that one first, or choose another"
            " checkpoint_dir"
        ) from None
    except (NotImplementedError, OSError):
        pass  # this file system has no locks
    holder.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have become read-only
            holder.unlink()
            if os.listdir(folder) == [".lock"]:
                shutil.rmtree(folder)
        lock.release()
