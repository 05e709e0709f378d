"""What each part of the modern recipe is worth: each taken out of the full recipe, and each added to the plain one.

    python -m benchmarks.ablation [--task shakespeare] [--seeds 3] [--key=value ...]

For each: the final validation loss after as many steps as the full (or plain) recipe, seconds a step against it, and the loss after as many seconds
(a second run with the steps that fit into them). Mean and spread over seeds. Variants alternate within a seed. Writes benchmarks/results/ablation_TASK.json.
"""
import argparse
import contextlib
import io
import json
import statistics
import sys
import tempfile
from pathlib import Path

import torch

import checkpoint
import config as settings
import hardware
from benchmarks.time_to_loss import RESULTS, TASKS
from train import train

# The settings of each part in the plain recipe, and in the full one.
PARTS = {
    "Muon": ({"optimizer": "adamw"}, {"optimizer": "muon"}),
    "rotary positions": ({"position": "learned"}, {"position": "rotary"}),
    "RMSNorm": ({"norm": "layernorm"}, {"norm": "rmsnorm"}),
    "QK norm": ({"qk_norm": False}, {"qk_norm": True}),
    "squared ReLU": ({"activation": "gelu"}, {"activation": "relu2"}),
    "zero init": ({"zero_init": False}, {"zero_init": True}),
    "soft cap": ({"logit_softcap": 0.0}, {"logit_softcap": 15.0}),
    "embedding shortcut": ({"shortcut": False}, {"shortcut": True}),
    "value residual": ({"value_residual": False}, {"value_residual": True}),
    "wsd schedule": ({"lr_schedule": "cosine", "warmup_steps": 50}, {"lr_schedule": "wsd", "warmup_steps": 0}),
}


def run(config, changes, seed, steps, folder):
    """Final validation loss and seconds a step."""
    arguments = [*config, *(f"--{k}={v}" for k, v in changes.items()), f"--seed={seed}", f"--max_steps={steps}", "--eval_interval=0", f"--checkpoint_dir={folder}"]
    with contextlib.redirect_stdout(io.StringIO()):
        train(settings.load(arguments))
    last = next(r for r in reversed(checkpoint.read_log(folder)) if "val_loss" in r)
    return last["val_loss"], last["elapsed_s"] / steps


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ablation", description=__doc__.splitlines()[0])
    parser.add_argument("--task", choices=TASKS, default="shakespeare")
    parser.add_argument("--seeds", type=int, default=3)
    args, extra = parser.parse_known_args(argv)
    shared, contenders = TASKS[args.task]
    table = {}
    with tempfile.TemporaryDirectory() as temporary:
        for base, side in (("modern", 0), ("GPT-2", 1)):
            config = [*contenders[base], *shared, *extra]
            now = vars(settings.load(config))
            changes = {base: {}} | {("without " if side == 0 else "with ") + part: values[side] for part, values in PARTS.items()}
            changes = {k: v for k, v in changes.items() if k == base or any(now[name] != value for name, value in v.items())}
            runs = {name: [] for name in changes}
            for seed in range(1, args.seeds + 1):
                for name, change in changes.items():
                    at = Path(temporary) / f"{base}{seed}{name}"
                    loss, seconds = run(config, change, seed, now["max_steps"], at)
                    budget = runs[base][-1]["seconds_a_step"] * now["max_steps"] if name != base else None
                    timed = run(config, change, seed, max(1, round(budget / seconds)), at.with_suffix(".timed"))[0] if budget else loss
                    runs[name].append({"loss": loss, "seconds_a_step": seconds, "loss_at_equal_seconds": timed})
                    print(f"seed {seed}, {name}: {loss:.4f}, {seconds * 1e3:.0f} ms a step, {timed:.4f} in equal time", flush=True)
            table[base] = runs
    result = {"task": args.task, "device": hardware.describe(hardware.find_device("auto")), "torch": torch.__version__, "runs": table}
    path = RESULTS / f"ablation_{args.task}.json"
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n| {args.task} | loss at equal steps | time a step | loss at equal seconds |\n|---|---|---|---|")
    for base, runs in table.items():
        for name, found in runs.items():
            columns = {key: [r[key] for r in found] for key in ("loss", "loss_at_equal_seconds")}
            speed = statistics.median(r["seconds_a_step"] / b["seconds_a_step"] for r, b in zip(found, runs[base], strict=True))
            a, b = (f"{statistics.mean(v):.4f} ± {statistics.stdev(v) if len(v) > 1 else 0:.4f}" for v in columns.values())
            print(f"| {name} | {a} | {speed:.2f}x | {b} |")
    print(f"written to {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
