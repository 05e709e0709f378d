"""Seconds of training until a recipe has the loss that another one ends with.

    python -m benchmarks.time_to_loss [--task shakespeare|sources|gpt2_small] [--nanogpt PATH] [--seeds 3]

On one device, the same data and the same evaluation windows. `shakespeare` compares with nanoGPT's
own recipe for a CPU (4 layers, 128 dim, context 64, 2,000 iterations of 12 sequences), trained by
nanoGPT's train.py from a copy of the checkout at PATH. `sources` and `gpt2_small` compare our GPT-2
preset with the modern one at one size; the data of `sources`, 240 MB of Python, as `make .venv/dev`
installs it:

    python prepare_data.py '.venv/lib/python3*/site-packages/**/*.py' --clean --vocab_size 8192 --out data/site_packages

Training, compilation included, is counted; evaluation and saving are not. Seeds alternate, so that
a machine whose speed drifts compares fairly. Writes the curves as PNG and the numbers as JSON to
benchmarks/results/.
"""

import argparse
import importlib.util
import math
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import write
from formats import run_folder
from model import IGNORE
from training.dataset import DataError, Dataset, read_meta

ROOT = Path(__file__).parent.parent

# For each task what all of ours share, and each contender's own: a preset and what is set besides.
# The first one's final loss is the aim.
TASKS = {
    "shakespeare": (
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
                "--max_steps=190",
                "--eval_interval=10",
            ],
        },
    ),
    "sources": (
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
    "gpt2_small": (
        ["--data_dir=data/main", "--eval_batches=10", "--save_interval=0", "--save_minutes=0"],
        {
            "GPT-2": [
                "config/gpt2_small.py",
                "--max_steps=4000",
                "--warmup_steps=200",
                "--learning_rate=1e-3",
                "--eval_interval=200",
            ],
            "modern": ["config/gpt2_small_modern.py", "--max_steps=1500", "--eval_interval=75"],
        },
    ),
}
# data/shakespeare_char's recipe in nanoGPT's README, "I only have a macbook": its settings word for
# word.
NANOGPT = [
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
]


def ours(arguments, seed, folder):
    """[(seconds, validation loss), ...] of a run of train.py with these arguments, a process of its
    own as a user's.
    """
    shutil.rmtree(folder, ignore_errors=True)
    more = [f"--seed={seed}", "--report_minutes=0", f"--checkpoint_dir={folder}"]
    subprocess.run(
        [sys.executable, "train.py", *arguments, *more],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return [(r["elapsed_s"], r["val_loss"]) for r in run_folder.read_log(folder) if "val_loss" in r]


def nanogpt(path, seed, folder, device, data_dir, block_size):
    """The same of nanoGPT's own train.py, whose only evaluation here is that of its final weights."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path, folder, ignore=shutil.ignore_patterns(".git"))
    data, meta = folder / "data" / "shakespeare_char", read_meta(data_dir)
    for name in ("train.bin", "val.bin"):
        (data / name).unlink(missing_ok=True)
        (data / name).symlink_to((Path(data_dir) / name).absolute())
    with open(data / "meta.pkl", "wb") as f:
        pickle.dump({"vocab_size": meta.vocab_size}, f)
    script = folder / "train.py"
    script.write_text(
        script.read_text().replace(
            "torch.manual_seed(1337 + seed_offset)", f"torch.manual_seed({seed})"
        )
    )
    out = subprocess.run(
        [sys.executable, "train.py", *NANOGPT, f"--device={device.type}", "--out_dir=out"],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    steps = [float(ms) / 1e3 for ms in re.findall(r"iter \d+: loss [\d.]+, time ([\d.]+)ms", out)]
    steps[0] = steps[-1] = statistics.median(steps)  # these two hold an evaluation each
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    saved = torch.load(folder / "out" / "ckpt.pt", map_location=device, weights_only=True)
    model = module.GPT(module.GPTConfig(**saved["model_args"])).to(device).eval()
    model.load_state_dict({k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()})
    total = count = 0
    with torch.no_grad():
        for x, y, predictions in Dataset(
            data_dir, meta, "val", block_size, device, "ram"
        ).evaluation(0, 64):
            assert (y != IGNORE).sum() == predictions
            total, count = (
                total + model(x, y.contiguous())[1].item() * predictions,
                count + predictions,
            )
    return [(sum(steps), total / count)]


def seconds_to(curve, aim):
    """When a curve first reaches the aim, between its points by a straight line; None if it never
    does.
    """
    before = None
    for seconds, loss in curve:
        if loss <= aim:
            return (
                seconds
                if before is None
                else before[0] + (seconds - before[0]) * (before[1] - aim) / (before[1] - loss)
            )
        before = seconds, loss
    return None


def draw(runs, aim, path, task):
    """The curves of every seed, and the aim."""
    from matplotlib.figure import Figure

    figure = Figure((8, 4.5), layout="constrained")
    axes = figure.subplots()
    for color, (name, curves) in zip(("#0072B2", "#D55E00", "#009E73"), runs.items(), strict=False):
        for n, curve in enumerate(curves):
            axes.plot(
                *zip(*curve, strict=True),
                color=color,
                marker="o",
                markersize=3,
                linewidth=1.2,
                label=None if n else name,
            )
    axes.axhline(
        aim, color="grey", linestyle=":", label=f"{next(iter(runs))}'s final loss, {aim:.3f}"
    )
    axes.set(
        xlabel="seconds of training",
        ylabel="validation loss, nats a token",
        title=f"Time to loss: {task}",
        ylim=(None, min(max(c[0][1] for r in runs.values() for c in r), aim + 1.2)),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.time_to_loss", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--task", choices=TASKS, default="shakespeare")
    parser.add_argument(
        "--nanogpt", metavar="PATH", help="checkout of nanoGPT, for the task shakespeare"
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--name", help="of the result files; default: time_to_loss_ and the task's")
    args, extra = parser.parse_known_args(argv)
    shared, contenders = TASKS[args.task]
    contenders = {name: [*own, *shared, *extra] for name, own in contenders.items()}
    c = settings.load(contenders["GPT-2"])
    device = hardware.find_device(c.device)
    runs = {name: [] for name in (["nanoGPT"] if args.nanogpt else []) + list(contenders)}
    with tempfile.TemporaryDirectory() as temporary:
        for seed in range(1, args.seeds + 1):
            for name, curves in runs.items():
                folder = Path(temporary) / name
                curves.append(
                    nanogpt(args.nanogpt, seed, folder, device, c.data_dir, c.block_size)
                    if name == "nanoGPT"
                    else ours(contenders[name], seed, folder)
                )
                print(
                    f"seed {seed}, {name}: {curves[-1][-1][1]:.4f} after {curves[-1][-1][0]:.1f} s",
                    flush=True,
                )
    first = next(iter(runs))
    aims = [curve[-1][1] for curve in runs[first]]
    reached = {
        name: [seconds_to(curve, aim) for curve, aim in zip(curves, aims, strict=True)]
        for name, curves in runs.items()
    }
    shares = {
        name: statistics.median(
            (s or math.inf) / base for s, base in zip(times, reached[first], strict=True)
        )
        for name, times in reached.items()
    }
    result = {
        "task": args.task,
        "settings": contenders | ({"nanoGPT": NANOGPT} if args.nanogpt else {}),
        "aim": aims,
        "seconds_to_aim": reached,
        "share_of_time_median": {k: v if math.isfinite(v) else None for k, v in shares.items()},
        "curves": runs,
    }
    path = write(args.name or f"time_to_loss_{args.task}", device, result)
    draw(runs, statistics.median(aims), path.with_suffix(".png"), args.task)
    for name, times in reached.items():
        print(
            f"{name:12}"
            + ", ".join("never" if t is None else f"{t:.1f} s" for t in times)
            + f"   median share {shares[name]:.2f}"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (DataError, subprocess.CalledProcessError) as error:
        sys.exit(f"{error}")
