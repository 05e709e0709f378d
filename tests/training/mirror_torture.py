"""Kill a run while it uploads to its mirror, again and again: it must end as if left alone.

    python -m tests.training.mirror_torture --kills 30

Each kill is SIGKILL in the middle of an upload to an S3 server on loopback, and every second one
takes the machine's disk with it. After each, the newest step of the mirror must be whole.
"""

import argparse
import random
import shutil
import tempfile
import time
from pathlib import Path

from formats import mirror, run_folder
from tests.torture import check_same, prepare_this_file, run_once
from tests.training.store import Store
from tools.command import count

UPLOAD_S = 0.15  # that each file takes, so that there is time to be killed in


def look_at(there, folder):
    """Assert that the newest step of a mirror is whole; whether there is a half one too."""
    steps, whole = there.steps(), there.whole()
    if whole:
        run_folder.read_state(there.fetch(max(whole), folder))
        shutil.rmtree(folder)
    return len(steps) > len(whole)


def torture(data, folder, kills, steps, seed=0):
    """Train once undisturbed, then with kills in uploads, until `kills` have struck.

    Returns the numbers of runs that were compared, of kills that left half an upload, and of starts
    that lacked their disk.
    """
    assert run_once(data, folder / "whole", steps)
    dice = random.Random(seed)
    struck = halves = emptied = runs = 0

    def in_an_upload(process):
        for _ in range(dice.randrange(1, 12)):
            store.arrived.clear()
            while process.poll() is None and not store.arrived.wait(0.05):
                pass
        time.sleep(dice.uniform(0, 2 * UPLOAD_S))

    with Store() as store:
        store.slow_s = UPLOAD_S
        while struck < kills:
            run = folder / f"killed_{runs}"
            there = mirror.Mirror(f"s3://bucket/runs/{run.name}")
            until = min(kills, struck + 10)
            where = "--mirror=s3://bucket/runs"
            while not run_once(data, run, steps, in_an_upload if struck < until else None, where):
                struck += 1
                halves += look_at(there, folder / "look")
                if dice.random() < 0.5:
                    shutil.rmtree(run)
                    emptied += 1
                print(f"{struck} of {kills} kills, {runs} runs compared", end="\r", flush=True)
            check_same(folder / "whole", run)
            assert max(there.whole()) == steps
            runs += 1
    return runs, halves, emptied


def main():
    """The command line's work."""
    name, page = "python -m tests.training.mirror_torture", __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog=name, description=page)
    parser.add_argument("--kills", type=count, default=30)
    parser.add_argument("--steps", type=count, default=60, help="of a run; default %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = prepare_this_file(Path(temporary, "data"))
        runs, halves, emptied = torture(data, Path(temporary), args.kills, args.steps)
    print(
        f"{args.kills} kills over {runs} runs, {halves} of them with half an upload in the mirror,"
        f" {emptied} that took the disk too: every run ended in the log and the weights of an"
        " undisturbed one, bit for bit"
    )


if __name__ == "__main__":
    main()
