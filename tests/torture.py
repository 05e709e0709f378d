"""Kill a real training run again and again, and see that it ends in the same weights and the same
log as one left alone.

    python -m tests.torture --kills 100

Each kill is SIGKILL at a random moment, so it strikes imports, compilation, steps, evaluations and
saves alike; saves come often.
"""

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from formats import run_folder

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


def run_once(data, folder, steps, kill_after=None):
    """Start train.py; SIGKILL after `kill_after` seconds unless it ended before. Returns whether it
    ended by itself.
    """
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


def essence(folder):
    """What must not depend on kills: the log without its clocks, and the final weights."""
    clocks = ("elapsed_s", "tokens_per_second", "cost")
    log = [
        {k: v for k, v in r.items() if k not in clocks}
        for r in run_folder.read_log(folder)
        if "event" not in r
    ]
    return log, run_folder.load_tensors(run_folder.steps(folder)[-1] / "model.pt")


def torture(data, folder, kills, steps, seed=0):
    """Train once undisturbed, then again with kills at random moments until `kills` have struck,
    each run compared at its end.

    Returns the runs that it took, and how many kills struck while a save was being written.
    """
    start = time.monotonic()
    assert run_once(data, folder / "whole", steps)
    usual = time.monotonic() - start
    log, weights = essence(folder / "whole")
    chance, struck, in_save, runs = random.Random(seed), 0, 0, 0
    while struck < kills:
        killed = folder / f"killed_{runs}"
        while not run_once(
            data, killed, steps, chance.uniform(0, 0.9 * usual) if struck < kills else None
        ):
            struck += 1
            in_save += bool(list(killed.glob(".step_*.partial")))
            print(f"{struck} of {kills} kills, {runs} runs compared", end="\r", flush=True)
        log_killed, weights_killed = essence(killed)
        assert log == log_killed, "the logs differ"
        assert all(torch.equal(v, weights_killed[k]) for k, v in weights.items()), (
            "the weights differ"
        )
        shutil.rmtree(killed)
        runs += 1
    return runs, in_save


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.torture", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--steps", type=int, default=200, help="length of a run; default %(default)s"
    )
    parser.add_argument(
        "--data", default=None, help="prepared folder; default: one made of this file"
    )
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder, data = Path(temporary), args.data
        if not data:
            data = folder / "data"
            subprocess.run(
                [
                    sys.executable,
                    "prepare_data.py",
                    "tests/torture.py",
                    "--tokenizer",
                    "char",
                    "--out",
                    data,
                ],
                cwd=ROOT,
                check=True,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        runs, in_save = torture(data, folder, args.kills, args.steps)
    print(
        f"{args.kills} kills over {runs} runs, {in_save} of them while a save was being written:"
        " every run ended in the log and the weights of an undisturbed one, bit for bit"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
