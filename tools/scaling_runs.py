"""The small runs of a family: train.py in one process after another, each kept in its folder.

A run that is finished is read from its log, one that was cut off goes on. Knows settings and logs,
not what follows from them.
"""

import math
import signal
import subprocess
import sys
from pathlib import Path

from formats import run_log

TRAIN = Path(__file__).parent.parent / "train.py"


class RunFailed(RuntimeError):
    """A small run that did not end well, in a sentence for the user."""


def final_loss(folder: Path) -> float | None:
    """The validation loss at a run's last step, in nats a token; None of one that is not done.

    Infinite of a run that diverged: that loss is NaN, or train.py gave up before.
    """
    total, loss = None, None
    for record in run_log.iterate(folder):
        total = record.get("total_steps", total)
        if "val_loss" in record and record["step"] == total:
            loss = math.inf if record["val_loss"] is None else record["val_loss"]
        elif record.get("event") == "diverged":
            loss = math.inf
    return loss


def evaluations(folder: Path) -> list[tuple[int, float]]:
    """The validation losses of a run, (step, nats a token), those that are NaN left out."""
    known = [r for r in run_log.iterate(folder) if r.get("val_loss") is not None]
    return [(r["step"], r["val_loss"]) for r in known]


def seconds_of(folder: Path) -> float:
    """Seconds of training that a run took."""
    return max((record.get("elapsed_s", 0.0) for record in run_log.iterate(folder)), default=0.0)


def train(folder: Path, arguments: list[str], settings: dict) -> float:
    """The final loss of the run in `folder`, trained to its end where it is not there yet.

    arguments: a preset and settings as on the command line of train.py; settings: more, by name.
    What the run prints goes to output.txt there. Infinite where it diverges; raises RunFailed with
    its last words where it ends for another reason.
    """
    loss = final_loss(folder)
    if loss is not None:
        return loss
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, str(TRAIN), *arguments, f"--checkpoint_dir={folder}"]
    command += [f"--{name}={value}" for name, value in settings.items()]
    output = folder / "output.txt"
    with open(output, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        status = wait(process)
    loss = final_loss(folder)
    if loss is None or (status and math.isfinite(loss)):
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        raise RunFailed(f"{folder} ended with status {status}: {lines[-1]}; all of it: {output}")
    return loss


def wait(process: subprocess.Popen) -> int:
    """The exit status of a process, which is ended with this one, and may save before."""

    def leave(signum, frame):
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        return process.wait()
    finally:
        signal.signal(signal.SIGTERM, before)
        if process.poll() is None:
            process.terminate()
            process.wait()
