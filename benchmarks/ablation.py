"""What each part of the modern recipe is worth: each taken out of the full recipe, and each added to the plain one.

    python -m benchmarks.ablation [--task shakespeare] [--seeds 3] [--jobs 1] [--name NAME] [--key=value ...]

For each: the final validation loss after as many steps as the full (or plain) recipe, seconds a step against it, and the loss after as many seconds
(a second run with the steps that fit into them, where that differs by more than 2%). Mean and spread over seeds. With --jobs N the CPU's threads are
shared by N runs at a time. The result is called after NAME, by default the task.
"""
import argparse
import contextlib
import io
import multiprocessing
import statistics
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import checkpoint
import config as settings
import hardware
from benchmarks import write
from benchmarks.time_to_loss import TASKS
from dataset import DataError
from train import train

# The settings of each part in the plain recipe, and in the full one.
PARTS = {
    "Muon": ({"optimizer": "adamw"}, {"optimizer": "muon"}),
    "rotary positions": ({"position": "learned"}, {"position": "rotary"}),
    "QK norm": ({"qk_norm": False}, {"qk_norm": True}),
    "squared ReLU": ({"activation": "gelu"}, {"activation": "relu2"}),
    "zero init": ({"zero_init": False}, {"zero_init": True}),
    "embedding shortcut": ({"shortcut": False}, {"shortcut": True}),
    "value residual": ({"value_residual": False}, {"value_residual": True}),
    "wsd schedule, no warm-up": ({"lr_schedule": "cosine", "warmup_steps": 50}, {"lr_schedule": "wsd", "warmup_steps": 0}),
}


def run(config, changes, seed, steps):
    """Final validation loss and seconds a step."""
    with tempfile.TemporaryDirectory() as folder:
        changed = [f"--{k}={v}" for k, v in changes.items()]
        arguments = [*config, *changed, f"--seed={seed}", f"--max_steps={steps}", "--eval_interval=0", "--report_minutes=0", f"--checkpoint_dir={folder}/run"]
        with contextlib.redirect_stdout(io.StringIO()):
            train(settings.load(arguments))
        last = next(r for r in reversed(checkpoint.read_log(Path(folder) / "run")) if "val_loss" in r)
    return last["val_loss"], last["elapsed_s"] / steps


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="shakespeare")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--name")
    args, extra = parser.parse_known_args(argv)
    shared, contenders = TASKS[args.task]
    table, threads = {}, max(1, torch.get_num_threads() // args.jobs)
    with ProcessPoolExecutor(args.jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (threads,)) as pool:
        for base, side in (("modern", 0), ("GPT-2", 1)):
            config = [*contenders[base], *shared, *extra]
            now = vars(settings.load(config))
            changes = {base: {}} | {("without " if side == 0 else "with ") + part: values[side] for part, values in PARTS.items()}
            changes = {k: v for k, v in changes.items() if k == base or any(now[name] != value for name, value in v.items())}
            table[base] = {name: [] for name in changes}
            for job in [pool.submit(run, config, {}, 0, 2) for _ in range(args.jobs)]:
                job.result()  # a process is slower at first
            for seed in range(1, args.seeds + 1):
                first = [pool.submit(run, config, change, seed, now["max_steps"]) for change in changes.values()]
                first = [job.result() for job in first]
                speeds = [first[0][1] / seconds for _, seconds in first]
                timed = [pool.submit(run, config, change, seed, round(now["max_steps"] * speed)) if abs(speed - 1) > 0.02 else None
                         for change, speed in zip(changes.values(), speeds, strict=True)]  # fmt: skip
                for name, (loss, seconds), again in zip(changes, first, timed, strict=True):
                    in_time = again.result()[0] if again else loss
                    table[base][name].append({"loss": loss, "seconds_a_step": seconds, "loss_at_equal_seconds": in_time})
                    print(f"seed {seed}, {name}: {loss:.4f}, {seconds * 1e3:.0f} ms a step, {in_time:.4f} in equal time", flush=True)
    result = {"task": args.task, "jobs": args.jobs, "settings": shared + extra, "runs": table}
    write(f"ablation_{args.name or args.task}", hardware.find_device("auto"), result)
    print(f"\n| {args.name or args.task} | loss at equal steps | time a step | loss at equal seconds |\n|---|---|---|---|")
    for base, runs in table.items():
        for name, found in runs.items():
            columns = {key: [r[key] for r in found] for key in ("loss", "loss_at_equal_seconds")}
            speed = statistics.median(r["seconds_a_step"] / b["seconds_a_step"] for r, b in zip(found, runs[base], strict=True))
            a, b = (f"{statistics.mean(v):.4f} ± {statistics.stdev(v) if len(v) > 1 else 0:.4f}" for v in columns.values())
            print(f"| {name} | {a} | {speed:.2f}x | {b} |")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DataError as error:
        sys.exit(f"{error}")
