"""What the tests of training share: a trainer in a process of its own."""

import subprocess
import sys
import time

from tests.conftest import ROOT, SMALL


def start(data, folder, *more, before=(), **options):
    """Begin training a small model; returns the process."""
    command = [
        *before,
        sys.executable,
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        *SMALL,
        *more,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_until(process, condition):
    """Wait until something holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)
