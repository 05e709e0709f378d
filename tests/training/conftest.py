"""What the tests of training share: a trainer in a process of its own."""

import subprocess
import sys
import time

import config
from tests.conftest import ROOT, SMALL
from training.setup import build


def small_run(data, folder, *more):
    """A Run of the small settings in this process, its folder made."""
    run = build(config.load([f"--data_dir={data}", f"--checkpoint_dir={folder}", *SMALL, *more]))
    run.folder.mkdir(parents=True, exist_ok=True)
    return run


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
