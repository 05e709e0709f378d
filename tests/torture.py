"""Kill a real training run again and again: it must end as one that was left alone.

    python -m tests.torture --kills 100

With the same weights and the same log, that is. Each kill is SIGKILL at a random moment, so it
strikes imports, compilation, steps, evaluations and saves alike; saves come often.
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

import torch

from formats import run_folder, run_log
from tools.command import count

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
    "--block_size=32",
    "--batch_size=8",
    "--micro_batch_size=4",
    "--dropout=0.1",
    "--compile=False",
    "--device=cpu",
    "--learning_rate=3e-3",
    "--warmup_steps=5",
    "--log_interval=3",
    "--eval_interval=25",
    "--eval_batches=2",
    "--save_interval=4",
    "--save_minutes=0.005",
    "--keep_last=2",
    "--sample_prompts=The ",
]
CLOCKS = ("elapsed_s", "tokens_per_second", "cost")  # what differs between runs in a log


class Outcome(NamedTuple):
    """Runs that were killed, and how many kills struck while a save was being written."""

    runs: int
    in_save: int


def run_once(data, folder, steps, kill_after=None):
    """Start train.py; SIGKILL after `kill_after` seconds, if any. Whether it ended by itself."""
    command = [
        sys.executable,
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        f"--max_steps={steps}",
        *SETTINGS,
    ]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        process.wait(kill_after)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return False
    assert process.returncode == 0, process.stderr.read()
    return True


def log_without_clocks(folder):
    """The records of a run's log that must not depend on kills."""
    records = [record for record in run_log.read(folder) if "event" not in record]
    return [{k: v for k, v in record.items() if k not in CLOCKS} for record in records]


def final_weights(folder):
    """The tensors of a run's last checkpoint."""
    return run_folder.load_tensors(run_folder.steps(folder)[-1] / "model.pt")


def check_same(whole, killed):
    """Assert that two runs ended in the same log and the same weights, bit for bit."""
    expected, found = log_without_clocks(whole), log_without_clocks(killed)
    lacking = [record for record in expected if record not in found]
    more = [record for record in found if record not in expected]
    assert expected == found, f"the logs differ: {lacking} missing, {more} more, of {len(found)}"
    expected, found = final_weights(whole), final_weights(killed)
    same = all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    assert same, "the weights differ"


def torture(data, folder, kills, steps, seed=0):
    """Train once undisturbed, then again and again with kills at random moments.

    Until `kills` have struck; each run goes on to its end, and is compared there.
    """
    start = time.monotonic()
    assert run_once(data, folder / "whole", steps)
    usual = time.monotonic() - start
    chance = random.Random(seed)
    struck = in_save = runs = 0
    while struck < kills:
        killed = folder / f"killed_{runs}"
        ended = False
        while not ended:
            kill_after = chance.uniform(0, 0.9 * usual) if struck < kills else None
            ended = run_once(data, killed, steps, kill_after)
            if not ended:
                struck += 1
                in_save += any(killed.glob(".step_*.partial"))
                print(f"{struck} of {kills} kills, {runs} runs compared", end="\r", flush=True)
        check_same(folder / "whole", killed)
        shutil.rmtree(killed)
        runs += 1
    return Outcome(runs, in_save)


def prepare_this_file(out):
    """A prepared folder made of this file."""
    command = [sys.executable, "prepare_data.py", "tests/torture.py"]
    command += ["--tokenizer", "char", "--out", out]
    quiet = subprocess.DEVNULL
    subprocess.run(command, cwd=ROOT, check=True, stdout=quiet, stderr=quiet)
    return out


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kills", type=count, default=100)
    parser.add_argument(
        "--steps", type=count, default=200, help="length of a run; default %(default)s"
    )
    parser.add_argument("--data", help="prepared folder; default: one made of this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        data = args.data or prepare_this_file(folder / "data")
        outcome = torture(data, folder, args.kills, args.steps)
    print(
        f"{args.kills} kills over {outcome.runs} runs, {outcome.in_save} of them while a save was"
        " being written: every run ended in the log and the weights of an undisturbed one, bit for"
        " bit"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
