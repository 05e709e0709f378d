"""Kill a run while it uploads to its mirror, again and again: it must end as if left alone.

    python -m tests.training.mirror_torture --kills 30

Each kill is SIGKILL in the middle of an upload to an S3 server on loopback, and every second one
takes the machine's disk with it. After each, the newest step of the mirror must be whole.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from formats import mirror, run_folder
from tests.conftest import ROOT
from tests.torture import SETTINGS, check_same, prepare_this_file, run_once
from tests.training.store import Store
from tools.command import count

UPLOAD_S = 0.15  # that each file takes, so that there is time to be killed in


class Outcome(NamedTuple):
    """Runs that were compared, kills that left half an upload, starts that lacked their disk."""

    runs: int
    halves: int
    emptied: int


def run_until_killed(store, data, folder, steps, dice):
    """Start train.py; SIGKILL in an upload, if there are dice to choose it. Whether it ended."""
    command = [
        sys.executable,
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        f"--max_steps={steps}",
        "--mirror=s3://bucket/runs",
        *SETTINGS,
    ]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=subprocess.PIPE, text=True)
    for _ in range(dice.randrange(1, 12) if dice else 0):
        store.arrived.clear()
        while process.poll() is None and not store.arrived.wait(0.05):
            pass
    if dice:
        time.sleep(dice.uniform(0, 2 * UPLOAD_S))
        process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -9), errors
    return process.returncode == 0


def look_at(there, folder):
    """Assert that the newest step of a mirror is whole; whether there is a half one too."""
    steps, whole = there.steps(), there.whole()
    if whole:
        run_folder.read_state(there.fetch(max(whole), folder))
        shutil.rmtree(folder)
    return len(steps) > len(whole)


def torture(data, folder, kills, steps, seed=0):
    """Train once undisturbed, then with kills in uploads, until `kills` have struck."""
    assert run_once(data, folder / "whole", steps)
    dice = random.Random(seed)
    struck = halves = emptied = runs = 0
    with Store() as store:
        store.slow_s = UPLOAD_S
        while struck < kills:
            run = folder / f"killed_{runs}"
            there = mirror.Mirror(f"s3://bucket/runs/{run.name}")
            until = min(kills, struck + 10)
            while not run_until_killed(store, data, run, steps, dice if struck < until else None):
                struck += 1
                halves += look_at(there, folder / "look")
                if dice.random() < 0.5:
                    shutil.rmtree(run)
                    emptied += 1
                print(f"{struck} of {kills} kills, {runs} runs compared", end="\r", flush=True)
            check_same(folder / "whole", run)
            assert max(there.whole()) == steps
            runs += 1
    return Outcome(runs, halves, emptied)


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.training.mirror_torture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kills", type=count, default=30)
    parser.add_argument("--steps", type=count, default=60, help="of a run; default %(default)s")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        outcome = torture(prepare_this_file(folder / "data"), folder, args.kills, args.steps)
    print(
        f"{args.kills} kills over {outcome.runs} runs, {outcome.halves} of them with half an upload"
        f" in the mirror, {outcome.emptied} that took the disk too: every run ended in the log and"
        " the weights of an undisturbed one, bit for bit"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
