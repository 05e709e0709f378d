"""What it costs and brings how threads wait for each other, on a quiet CPU and beside others.

    python -m benchmarks.shared_cpu [--task train|generate] [--rounds 2] [--busy 0 1 2]

Milliseconds a step of config/demo.py, or a token of a model of GPT-2 Small's shape, on
data/python_stdlib, in turn. busy: programs beside it, each of which takes a core if it can.
"""

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import hardware
from benchmarks import ROOT, argument_parser, in_turn, medians, print_table, train, write

WAITING = {
    "as startup.py has it": {},
    "libgomp's default": {"GOMP_SPINCOUNT": "300000"},
    "asleep": {"OMP_WAIT_POLICY": "passive"},
}
QUIET = ["--eval_interval=0", "--eval_batches=1", "--report_minutes=0"]


@contextlib.contextmanager
def busy_programs(count):
    """So many processes that never wait."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@contextlib.contextmanager
def environment(variables):
    """Variables for the processes that are started under it, and no other of their kind."""
    before = os.environ.copy()
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"):
        os.environ.pop(name, None)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def ms_a_step(steps):
    """Of training, the first step left out."""
    log = train("config/demo.py", *QUIET, "--log_interval=1", f"--max_steps={steps}")
    first, *_, last = [record for record in log if "loss" in record]
    return 1000 * (last["elapsed_s"] - first["elapsed_s"]) / (steps - 1)


def small_model(folder):
    """A run of GPT-2 Small's shape; returns its folder."""
    command = ["config/gpt2_small.py", "--data_dir=data/python_stdlib", *QUIET, "--batch_size=1"]
    command += ["--max_steps=1", f"--checkpoint_dir={folder}"]
    subprocess.run(
        [sys.executable, "train.py", *command], cwd=ROOT, check=True, stdout=subprocess.DEVNULL
    )
    return folder


def ms_a_token(run):
    """Of generating with the model of a run, one sequence."""
    options = ["--max_new_tokens", "48", "--temperature", "0", "--dtype", "float32", "--json"]
    command = [sys.executable, "generate.py", "--checkpoint", run, "--prompt", "def ", *options]
    out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return 1000 / json.loads(out)["tokens_per_second"]


def measure(work, busy, variables):
    """What work() measures beside so many busy programs, with these variables."""
    with environment(variables), busy_programs(busy):
        return round(work(), 1)


def main(argv):
    """The command line's work."""
    parser = argument_parser("shared_cpu", __doc__)
    parser.add_argument("--task", choices=["train", "generate"], default="train")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--busy", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args(argv)

    with tempfile.TemporaryDirectory() as temporary:
        work = functools.partial(ms_a_step, args.steps)
        if args.task == "generate":
            work = functools.partial(ms_a_token, small_model(Path(temporary)))
        contenders = {
            f"{name}, {busy} busy": functools.partial(measure, work, busy, variables)
            for busy in args.busy
            for name, variables in WAITING.items()
        }
        rounds = in_turn(contenders, args.rounds, "{} ms".format)

    of_contenders = medians(rounds)
    rows = [
        [name, *(f"{of_contenders[f'{name}, {busy} busy']:,.0f}" for busy in args.busy)]
        for name in WAITING
    ]
    unit = "a step" if args.task == "train" else "a token"
    print_table([f"ms {unit}", *(f"{busy} busy" for busy in args.busy)], rows)
    result = {"command": " ".join(argv), "median_ms": of_contenders, "rounds": rounds}
    write(f"shared_{args.task}", hardware.find_device("cpu"), result)


if __name__ == "__main__":
    main(sys.argv[1:])
