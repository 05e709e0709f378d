"""Training speed of train.py beside nanoGPT's, whole scripts both, at the shape of a preset.

    python -m benchmarks.throughput [--preset config/gpt2_small.py] [--nanogpt PATH] [--rounds 3]
        [--steps 8] [--key=value ...]

Each round starts every contender once, in turn, on the same tokens; a contender's time a step is
the median of its steps in a round, the first few (compilation, warm-up) left out. Ratios are taken
round by round, so that a machine whose speed drifts still compares fairly. PATH is a checkout of
nanoGPT; it runs from a copy outside this repository, as it comes, and on a CPU also with the bf16
autocast that it lacks there. Ours runs once more with --profile for the share of a step outside
forward, backward and optimiser.
"""

import functools
import itertools
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import config as settings
import hardware
from benchmarks import (
    ROOT,
    argument_parser,
    done_without,
    in_turn,
    median_ratio,
    medians,
    nanogpt,
    print_table,
    train,
    write,
)
from config import Config
from formats import run_log
from formats.data_folder import read_meta
from model import GPT
from training.setup import model_shape

PLAIN_ON_A_CPU = "nullcontext() if device_type == 'cpu' else "  # in nanoGPT's train.py
# What hardware.py has set in this process, and nanoGPT does not set for itself.
OURS = {"THP_MEM_ALLOC_ENABLE": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}


class Speed(NamedTuple):
    """A contender in one round: seconds a step, and peak memory in bytes."""

    step_s: float
    peak_bytes: int


@dataclass
class Task:
    """What is trained, and how it is timed.

    every: steps to a measurement; skip: the first measurements, which do not count.
    """

    config: Config
    arguments: list[str]  # that config comes from
    steps: int
    every: int
    skip: int
    folder: Path  # for what the contenders write

    @property
    def tokens_a_step(self):
        """Tokens of an optimiser step."""
        return self.config.batch_size * self.config.block_size

    def our_settings(self):
        """The command line of train.py: the task without evaluations, saves and reports."""
        return [
            *self.arguments,
            f"--log_interval={self.every}",
            "--eval_interval=0",
            "--save_interval=0",
            "--eval_batches=1",
            f"--compile={True if self.config.compile is None else self.config.compile}",
        ]

    def speed(self, seconds, peak):
        """The speed that a run's measurements show."""
        return Speed(statistics.median(seconds[self.skip :]), peak)


class TimedRun(NamedTuple):
    """What a script printed: (moment in seconds, line), and its peak memory in bytes."""

    lines: list[tuple[float, str]]
    peak_bytes: int


def run_script(arguments, cwd):
    """Run a training script to its end."""
    environment = os.environ
    if cwd != ROOT:
        environment = {k: v for k, v in os.environ.items() if OURS.get(k) != v}
    process = subprocess.Popen(
        [sys.executable, "-u", ROOT / "benchmarks" / "with_peak.py", *arguments],
        cwd=cwd,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    lines = [(time.perf_counter(), line) for line in process.stdout]
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, arguments)
    return TimedRun(lines, peak_bytes=int(lines[-1][1].split()[-1]))


def our_speed(task):
    """The speed of train.py, from its log."""
    with tempfile.TemporaryDirectory(dir=task.folder) as folder:
        own = [f"--max_steps={task.steps}", f"--checkpoint_dir={folder}/run"]
        run = run_script(["train.py", *task.our_settings(), *own], ROOT)
        log = run_log.read(Path(folder) / "run")
    speeds = [record["tokens_per_second"] for record in log if "loss" in record]
    for line in done_without(line for _, line in run.lines):
        print(line, end="", flush=True)
    return task.speed([task.tokens_a_step / speed for speed in speeds], run.peak_bytes)


def our_profile(task):
    """Seconds a step of each part of it, as train.py --profile tells them."""
    log = train(*task.our_settings(), "--max_steps=10", "--profile=True")
    return next(r["seconds_a_step"] for r in log if r.get("event") == "profile")


def prepare_nanogpt(path, task, name):
    """A copy of the checkout, with the same tokens beside it; returns its folder."""
    c = task.config
    vocab_size = model_shape(c, read_meta(c.data_dir).vocab_size).vocab_size
    copy = task.folder / name
    nanogpt.copy_checkout(path, copy, "same", c.data_dir, vocab_size)
    return copy


def nanogpt_speed(task, copy):
    """The speed of nanoGPT's train.py, from when its lines came."""
    c = task.config
    micro = c.micro_batch_size or c.batch_size
    device = hardware.find_device(c.device)
    # What nanoGPT itself chooses; its float16 would scale gradients on a CPU too.
    dtype = "bfloat16" if device.type == "cpu" else str(hardware.find_dtype(device, c.dtype))
    command = [
        "train.py",
        "--dataset=same",
        f"--device={device.type}",
        f"--n_layer={c.n_layer}",
        f"--n_head={c.n_head}",
        f"--n_embd={c.n_embd}",
        f"--block_size={c.block_size}",
        f"--batch_size={micro}",
        f"--gradient_accumulation_steps={c.batch_size // micro}",
        f"--bias={c.bias}",
        f"--dropout={c.dropout}",
        f"--compile={c.compile is not False}",
        f"--dtype={dtype.removeprefix('torch.')}",
        "--eval_iters=1",
        "--eval_interval=1000000",
        f"--log_interval={task.every}",
        "--always_save_checkpoint=False",
        f"--max_iters={task.steps}",
    ]
    run = run_script(command, copy)
    stamps = []  # (step, when)
    for at, line in run.lines:
        if found := re.match(r"iter (\d+): loss", line):
            stamps.append((int(found[1]), at))
    seconds = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(stamps)]
    return task.speed(seconds, run.peak_bytes)


def parse_args(argv):
    """The command line: our own options, and the settings of the run."""
    parser = argument_parser("throughput", __doc__)
    parser.add_argument("--preset", default="config/gpt2_small.py")
    parser.add_argument("--nanogpt", metavar="PATH", help="checkout of nanoGPT to compare with")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, help="steps in a round; default: 8, on a GPU 100")
    parser.add_argument(
        "--skip",
        type=int,
        default=3,
        help=(
            "first measurements of a round that do not count: of a step each, on a GPU of ten,"
            " since to look at each would make it wait"
        ),
    )
    parser.add_argument(
        "--name", help="name of the result file; default: throughput_ and the preset's"
    )
    return parser.parse_known_args(argv)


def model_flops(task):
    """Floating-point operations a token, as the model counts them itself."""
    with torch.device("meta"):
        return GPT(
            model_shape(task.config, read_meta(task.config.data_dir).vocab_size)
        ).flops_per_token()


def contenders_of(task, nanogpt_path, device):
    """Ours, and nanoGPT where there is a checkout, by name."""
    contenders = {"ours": functools.partial(our_speed, task)}
    if nanogpt_path:
        copy = prepare_nanogpt(nanogpt_path, task, "nanogpt")
        contenders["nanoGPT"] = functools.partial(nanogpt_speed, task, copy)
    if nanogpt_path and device.type == "cpu":
        copy = prepare_nanogpt(nanogpt_path, task, "nanogpt_autocast")
        nanogpt.replace_in_script(copy, PLAIN_ON_A_CPU, "")
        contenders["nanoGPT with bf16 autocast"] = functools.partial(nanogpt_speed, task, copy)
    return contenders


def main(argv):
    """The command line's work."""
    args, extra = parse_args(argv)
    arguments = [args.preset, *extra]
    c = settings.load(arguments)
    device = hardware.find_device(c.device)
    every, steps = (10, args.steps or 100) if device.type == "cuda" else (1, args.steps or 8)
    with tempfile.TemporaryDirectory() as folder:
        task = Task(c, arguments, steps, every, args.skip, Path(folder))
        contenders = contenders_of(task, args.nanogpt, device)
        speeds = in_turn(
            contenders,
            args.rounds,
            show=lambda speed: f"{task.tokens_a_step / speed.step_s:,.0f} tokens/s",
        )
        parts = our_profile(task)
    rounds = [{name: speed.step_s for name, speed in r.items()} for r in speeds]
    tokens_per_second = {
        name: round(task.tokens_a_step / seconds, 1) for name, seconds in medians(rounds).items()
    }
    peaks = {name: max(r[name].peak_bytes for r in speeds) for name in contenders}
    ours_over = {
        name: round(median_ratio(rounds, name, "ours"), 3) for name in contenders if name != "ours"
    }
    peak_flops = hardware.peak_flops(device)
    mfu = None
    if peak_flops:
        mfu = round(tokens_per_second["ours"] * model_flops(task) / peak_flops, 4)
    outside = round((parts["data"] + parts["other"]) / sum(parts.values()), 5)
    result = {
        "dtype": str(hardware.find_dtype(device, c.dtype)),
        "model": vars(model_shape(c, read_meta(c.data_dir).vocab_size)),
        "tokens_a_step": task.tokens_a_step,
        "seconds_a_step_by_round": rounds,
        "tokens_per_second_median": tokens_per_second,
        "ours_mfu": mfu,
        "peak_bytes": peaks,
        "ours_profile_seconds_a_step": parts,
        "ours_share_outside_forward_backward_optimizer": outside,
        "ours_over": ours_over,
    }
    rows = []
    for name, speed in tokens_per_second.items():
        ratio = f"{ours_over[name]:.2f}x" if name in ours_over else ""
        rows.append([name, f"{speed:,.0f}", f"{peaks[name] / 1e9:.2f}", ratio])
    print_table(["", "tokens/s", "peak GB", "ours is"], rows)
    print(f"outside forward, backward and optimiser: {outside:.2%} of a step of ours")
    write(args.name or f"throughput_{Path(args.preset).stem}", device, result)


if __name__ == "__main__":
    main(sys.argv[1:])
