"""Kill a real training run again and again: it must end as one that was left alone.

    python -m tests.torture --kills 100

With the same weights and the same log, that is. Each kill is SIGKILL at a random moment, so it
strikes imports, compilation, steps, evaluations and saves alike; saves come often.
"""

import argparse
import contextlib
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from time import monotonic

import torch

from formats import run_folder, run_log
from tools.command import count

ROOT = Path(__file__).parent.parent
SETTINGS = shlex.split(
    "--n_layer=2 --n_head=2 --n_embd=64 --block_size=32 --batch_size=8 --micro_batch_size=4"
    " --dropout=0.1 --compile=False --device=cpu --learning_rate=3e-3 --warmup_steps=5"
    " --log_interval=3 --eval_interval=25 --eval_batches=2 --save_interval=4 --save_minutes=0.005"
    " --keep_last=2 '--sample_prompts=The '"
)
CLOCKS = ("elapsed_s", "tokens_per_second", "cost")  # what differs between runs in a log


def run_once(data, folder, steps, kill_when=None, *more):
    """Run train.py; SIGKILL once `kill_when(process)` returns. Whether it ended by itself."""
    where = [f"--data_dir={data}", f"--checkpoint_dir={folder}", f"--max_steps={steps}"]
    command = [sys.executable, "train.py", *where, *SETTINGS, *more]
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, stdout=quiet, stderr=subprocess.PIPE, text=True)
    if kill_when:
        kill_when(process)
        process.kill()
    _, errors = process.communicate()
    assert process.returncode in (0, -9), errors
    return process.returncode == 0


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


def torture(data, folder, kills, steps):
    """Train once undisturbed, then again and again with kills at random moments.

    Until `kills` have struck; each run goes on to its end, and is compared there. Returns the
    number of these runs, and of kills that struck while a save was being written.
    """
    begun = monotonic()
    assert run_once(data, folder / "whole", steps)
    usual = monotonic() - begun
    dice = random.Random(0)
    struck = in_save = runs = 0

    def at_random(process):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(dice.uniform(0, 0.9 * usual))

    while struck < kills:
        killed = folder / f"killed_{runs}"
        while not run_once(data, killed, steps, at_random if struck < kills else None):
            struck += 1
            in_save += any(killed.glob(".step_*.partial"))
            print(f"{struck} of {kills} kills, {runs} runs compared", end="\r", flush=True)
        check_same(folder / "whole", killed)
        shutil.rmtree(killed)
        runs += 1
    return runs, in_save


def prepare_this_file(out):
    """A prepared folder made of this file."""
    command = [sys.executable, "prepare_data.py", "tests/torture.py", "--tokenizer", "char"]
    subprocess.run([*command, "--out", out], cwd=ROOT, check=True, capture_output=True)
    return out


def main():
    """The command line's work."""
    page = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.torture", description=page)
    parser.add_argument("--kills", type=count, default=100)
    parser.add_argument("--steps", type=count, default=200, help="of a run; default %(default)s")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        data = prepare_this_file(Path(temporary, "data"))
        runs, in_save = torture(data, Path(temporary), args.kills, args.steps)
    print(
        f"{args.kills} kills over {runs} runs, {in_save} of them while a save was being written:"
        " every run ended in the log and the weights of an undisturbed one, bit for bit"
    )


if __name__ == "__main__":
    main()
