"""Seconds of training until a recipe has the loss that another one ends with.

    python -m benchmarks.time_to_loss [--task shakespeare|sources|gpt2_small] [--nanogpt PATH]
        [--seeds 3] [--leave_out NAME] [--key=value ...]

On one device, the same data and the same evaluation windows. `shakespeare` compares with nanoGPT's
own recipe for a CPU (4 layers, 128 dim, context 64, 2,000 iterations of 12 sequences), trained by
nanoGPT's train.py from a copy of the checkout at PATH; `gpt2_small` with nanoGPT at that size, for
3,000 steps, or where no PATH is given with our GPT-2 preset. `sources` compares our GPT-2 preset
with the modern one; its data, 220 MB of Python, as `make .venv/dev` installs it:

    python prepare_data.py '.venv/lib/python3*/site-packages/**/*.py' --clean --vocab_size 8192 \\
        --out data/site_packages

Training, compilation included, is counted; evaluation and saving are not. Seeds alternate, so that
a machine whose speed drifts compares fairly. Writes the curves as PNG and the numbers as JSON to
benchmarks/results/.
"""

import functools
import itertools
import math
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch

import config as settings
import hardware
from benchmarks import argument_parser, can_draw, nanogpt, print_table, train, write
from benchmarks.throughput import run_script
from formats.data_folder import DataError, read_meta
from model import IGNORE
from training.dataset import Dataset


class Task(NamedTuple):
    """What all contenders of ours share, and each one's own: a preset and what is set besides."""

    shared: list[str]
    contenders: dict[str, list[str]]


# The first contender's final loss is the aim.
TASKS = {
    "shakespeare": Task(
        [
            "--data_dir=data/shakespeare_char",
            "--n_layer=4",
            "--n_head=4",
            "--n_embd=128",
            "--block_size=64",
            "--eval_batches=0",
        ],
        {
            "GPT-2": [
                "config/shakespeare_char.py",
                "--batch_size=16",
                "--max_steps=1200",
                "--eval_interval=60",
            ],
            "modern": [
                "config/shakespeare_char_modern.py",
                "--batch_size=16",
                "--max_steps=150",
                "--eval_interval=10",
            ],
        },
    ),
    "sources": Task(
        [
            "--data_dir=data/site_packages",
            "--n_layer=4",
            "--n_head=4",
            "--n_embd=256",
            "--block_size=256",
            "--batch_size=16",
            "--eval_batches=5",
            "--save_interval=0",
            "--sample_prompts=[]",
            "--compile=True",
        ],
        {
            "GPT-2": [
                "config/gpt2_small.py",
                "--learning_rate=1e-3",
                "--min_lr=None",
                "--warmup_steps=60",
                "--max_steps=480",
                "--eval_interval=60",
            ],
            "modern": [
                "config/gpt2_small_modern.py",
                "--learning_rate=5e-3",
                "--muon_lr=0.04",
                "--muon_momentum=0.9",
                "--beta2_tokens=280_000",
                "--warmup_steps=0",
                "--max_steps=115",
                "--eval_interval=5",
            ],
        },
    ),
    "gpt2_small": Task(
        [
            "--data_dir=data/main",
            "--eval_batches=10",
            "--save_interval=0",
            "--save_minutes=0",
            "--sample_prompts=[]",
        ],
        {
            "GPT-2": [
                "config/gpt2_small.py",
                "--max_steps=3000",
                "--warmup_steps=200",
                "--learning_rate=1e-3",
                "--min_lr=1e-4",
                "--eval_interval=200",
            ],
            "modern": ["config/gpt2_small_modern.py", "--max_steps=1100", "--eval_interval=50"],
        },
    ),
}
# nanoGPT's train.py: of Shakespeare the recipe in its README, "I only have a macbook", word for
# word; at GPT-2 Small's size what our preset sets, with biases, for as many steps.
NANOGPT = {
    "shakespeare": [
        "config/train_shakespeare_char.py",
        "--compile=False",
        "--eval_iters=20",
        "--log_interval=1",
        "--block_size=64",
        "--batch_size=12",
        "--n_layer=4",
        "--n_head=4",
        "--n_embd=128",
        "--max_iters=2000",
        "--lr_decay_iters=2000",
        "--dropout=0.0",
        "--eval_interval=2000",
        "--always_save_checkpoint=True",
    ],
    "gpt2_small": [
        "--compile={compile}",
        "--eval_iters=1",
        "--log_interval={log_interval}",
        "--block_size={block_size}",
        "--gradient_accumulation_steps=1",
        "--batch_size={batch_size}",
        "--n_layer={n_layer}",
        "--n_head={n_head}",
        "--n_embd={n_embd}",
        "--bias={bias}",
        "--learning_rate={learning_rate}",
        "--min_lr={min_lr}",
        "--warmup_iters={warmup_steps}",
        "--max_iters={max_steps}",
        "--lr_decay_iters={max_steps}",
        "--eval_interval={max_steps}",
        "--always_save_checkpoint=True",
    ],
}


class Point(NamedTuple):
    """Seconds of training, and the validation loss then, in nats a token."""

    seconds: float
    loss: float


def our_curve(arguments, seed):
    """The validation loss over a run of train.py."""
    log = train(*arguments, f"--seed={seed}")
    return [Point(r["elapsed_s"], r["val_loss"]) for r in log if "val_loss" in r]


def nanogpt_settings(task, c):
    """The command line of nanoGPT's train.py for a task, c being our GPT-2's settings in it."""
    ours = vars(c) | {"compile": c.compile is not False}
    ours["log_interval"] = max(1, min(c.log_interval, c.max_steps // 4))  # its speed is in its log
    return [argument.format(**ours) for argument in NANOGPT[task]]


def nanogpt_curve(path, arguments, seed, device, c):
    """The same of nanoGPT's own train.py: one point, as only its final weights are evaluated."""
    meta = read_meta(c.data_dir)
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "nanogpt"
        nanogpt.copy_checkout(path, copy, "same", c.data_dir, meta.vocab_size)
        seeding = "torch.manual_seed({})"
        before = seeding.format("1337 + seed_offset")
        nanogpt.replace_in_script(copy, before, seeding.format(seed))
        own = ["--dataset=same", f"--device={device.type}", "--out_dir=out"]
        seconds = seconds_of_training(run_script(["train.py", *arguments, *own], copy).lines)
        model = load_nanogpt(copy, device)
    data = Dataset(c.data_dir, meta, "val", c.block_size, device, "ram")
    # In the precision that nanoGPT trains in: on a CPU that of its weights.
    dtype = torch.float32 if device.type == "cpu" else hardware.find_dtype(device, c.dtype)
    cast = hardware.autocast(device, dtype)
    windows = c.eval_batches * c.batch_size
    return [Point(seconds, validation_loss(model, data, windows, cast))]


def seconds_of_training(lines):
    """Seconds of all steps of nanoGPT's train.py, the first one's compilation included.

    lines: (moment, line) of what it printed. Its evaluations, before the first and before the last
    step, are left out.
    """
    begun = next(at for at, line in lines if line.startswith("step 0:"))
    ends = [at for at, line in lines if re.match(r"iter \d+: loss", line)]
    seconds = [b - a for a, b in itertools.pairwise([begun, *ends])]
    seconds[-1] = statistics.median(seconds[1:-1])  # this one holds an evaluation
    return sum(seconds)


def load_nanogpt(copy, device):
    """The model that nanoGPT has trained in a copy of its checkout."""
    module = nanogpt.model_module(copy)
    saved = torch.load(copy / "out" / "ckpt.pt", map_location=device, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).to(device).eval()
    weights = {name.removeprefix("_orig_mod."): w for name, w in saved["model"].items()}
    model.load_state_dict(weights)
    return model


def validation_loss(model, data, windows, cast):
    """Mean loss of nanoGPT's model over so many validation windows, 0: all, in nats a token."""
    total = count = 0
    with torch.no_grad(), cast:
        for x, y in data.evaluation(windows, 64):
            predictions = int((y != IGNORE).sum())
            loss = model(x, y.contiguous())[1].item()
            total += loss * predictions
            count += predictions
    return total / count


def seconds_to(curve, aim):
    """When a curve first reaches the aim, between its points by a straight line; None if never."""
    before = None
    for point in curve:
        if point.loss <= aim and before is None:
            return point.seconds
        if point.loss <= aim:
            share = (before.loss - aim) / (before.loss - point.loss)
            return before.seconds + (point.seconds - before.seconds) * share
        before = point
    return None


def draw(runs, aim, path, task):
    """The curves of every seed, and the aim."""
    from matplotlib.figure import Figure

    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    colors = ("#0072B2", "#D55E00", "#009E73")
    for color, (name, curves) in zip(colors, runs.items(), strict=False):
        for n, curve in enumerate(curves):
            axes.plot(
                [point.seconds for point in curve],
                [point.loss for point in curve],
                color=color,
                marker="o",
                markersize=3,
                linewidth=1.2,
                label=None if n else name,
            )
    first = next(iter(runs))
    axes.axhline(aim, color="grey", linestyle=":", label=f"{first}'s final loss, {aim:.3f}")
    beginnings = [curve[0].loss for curves in runs.values() for curve in curves]
    axes.set_ylim(None, min(max(beginnings), aim + 1.2))
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("validation loss, nats a token")
    axes.set_title(f"Time to loss: {task}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def all_curves(contenders, seeds):
    """The curve of every seed, by contender. Seeds alternate. contenders: {name: seed -> curve}."""
    runs = {name: [] for name in contenders}
    for seed in range(1, seeds + 1):
        for name, curves in runs.items():
            curve = contenders[name](seed)
            end = curve[-1]
            print(f"seed {seed}, {name}: {end.loss:.4f} after {end.seconds:.1f} s", flush=True)
            curves.append(curve)
    return runs


def main(argv):
    """The command line's work."""
    parser = argument_parser("time_to_loss", __doc__)
    parser.add_argument("--task", choices=TASKS, default="shakespeare")
    parser.add_argument(
        "--nanogpt",
        metavar="PATH",
        help=f"checkout of nanoGPT, for the tasks {' and '.join(NANOGPT)}",
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--leave_out", metavar="NAME", help="one of the contenders, as GPT-2")
    parser.add_argument("--name", help="of the result files; default: time_to_loss_ and the task's")
    args, extra = parser.parse_known_args(argv)
    task = TASKS[args.task]
    commands = {name: [*own, *task.shared, *extra] for name, own in task.contenders.items()}
    c = settings.load(commands["GPT-2"])
    device = hardware.find_device(c.device)
    if args.leave_out:
        del commands[args.leave_out]
    contenders = {name: functools.partial(our_curve, command) for name, command in commands.items()}
    if args.nanogpt:
        commands["nanoGPT"] = nanogpt_settings(args.task, c)
        theirs = functools.partial(nanogpt_curve, args.nanogpt, commands["nanoGPT"])
        contenders = {"nanoGPT": functools.partial(theirs, device=device, c=c)} | contenders
    runs = all_curves(contenders, args.seeds)
    first = next(iter(runs))
    aims = [curve[-1].loss for curve in runs[first]]
    reached = {
        name: [seconds_to(curve, aim) for curve, aim in zip(curves, aims, strict=True)]
        for name, curves in runs.items()
    }
    shares = {name: share_of_time(times, reached[first]) for name, times in reached.items()}
    result = {
        "task": args.task,
        "settings": commands,
        "aim": aims,
        "seconds_to_aim": reached,
        "share_of_time_median": {k: v if math.isfinite(v) else None for k, v in shares.items()},
        "curves": runs,
    }
    path = write(args.name or f"time_to_loss_{args.task}", device, result)
    if can_draw():
        draw(runs, statistics.median(aims), path.with_suffix(".png"), args.task)
    rows = [
        [name, *("never" if t is None else f"{t:.1f} s" for t in times), f"{shares[name]:.2f}"]
        for name, times in reached.items()
    ]
    seeds = [f"seed {n}" for n in range(1, args.seeds + 1)]
    print_table(["to the aim", *seeds, "median share"], rows)


def share_of_time(times, of_first):
    """The median share of the first contender's time; never counts as infinity."""
    pairs = zip(times, of_first, strict=True)
    return statistics.median((time or math.inf) / first for time, first in pairs)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (DataError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}")
