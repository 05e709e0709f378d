"""What each part of the modern recipe is worth: each taken out of it, or put back as it was before.

    python -m benchmarks.ablation [--task shakespeare] [--seeds 3] [--jobs 1] [--beside PATH] [--key=value ...]

For each: the final validation loss after as many steps as the recipe, seconds a step against it,
and the loss after as many seconds (second runs with the steps that fit into them, where that
differs by more than 2%). Mean and spread over seeds. With --jobs N the CPU's threads are shared by
N runs at a time. --beside PATH adds the modern preset of another checkout, for comparing with an
earlier commit: `git clone . ../before && git -C ../before checkout 2a781db`, with `data` linked
there. Results go to results/ablation_NAME_cpu.json; NAME is the task unless --name gives one.

The variants are no settings of model.py: each is a few lines here that replace a part of it in a
process of its own.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import config as settings
import hardware
import model
import training.step
from benchmarks import write
from benchmarks.time_to_loss import TASKS
from formats import run_folder
from training.dataset import DataError

ROOT = Path(__file__).parent.parent


class SquaredReLU(nn.Module):
    """The MLP before SwiGLU: 4 x as wide, the square of ReLU between (So et al., 2021, "Primer")."""

    activation = staticmethod(lambda x: F.relu(x).square())

    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=False)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=False)

    def forward(self, x):
        return self.c_proj(self.activation(self.c_fc(x)))


class GELU(SquaredReLU):
    """GPT-2's MLP without biases."""

    activation = staticmethod(model.gelu)


def use_mlp(kind):
    """One matrix in c_fc, so Muon takes it as one."""
    model.SwiGLU = kind
    split = training.step.side_by_side
    training.step.side_by_side = lambda name, c: 1 if "c_fc" in name else split(name, c)


def use_norms_of_heads(make):
    """Other norms of queries and keys."""
    before = model.Attention.__init__

    def init(self, config, layer):
        before(self, config, layer)
        self.q_norm, self.k_norm = make(config), make(config)

    model.Attention.__init__ = init


def use_layer_norm():
    """LayerNorm without biases in RMSNorm's place."""
    model.make_norm = lambda config: nn.LayerNorm(config.n_embd, bias=False)


def use_learned_positions():
    """An embedding of each position, as GPT-2 has it."""
    before = model.GPT.__init__

    def init(self, config, zero_init=False):
        before(self, config, zero_init)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)

    model.GPT.__init__ = init


# For each variant the settings that it changes, and what it replaces.
VARIANTS = {
    "modern": ([], None),
    "LayerNorm instead of RMSNorm": ([], use_layer_norm),
    "no QK norm": ([], lambda: use_norms_of_heads(lambda c: nn.Identity())),
    "QK norm without weights": (
        [],
        lambda: use_norms_of_heads(
            lambda c: nn.RMSNorm(c.head_dim, 1e-6, elementwise_affine=False)
        ),
    ),
    "squared ReLU instead of SwiGLU": ([], lambda: use_mlp(SquaredReLU)),
    "GELU instead of SwiGLU": ([], lambda: use_mlp(GELU)),
    "learned positions instead of rotary": ([], use_learned_positions),
    "rope_theta = 1,000,000": (["--rope_theta=1000000"], None),
    "no zero init": (["--zero_init=False"], None),
    "AdamW instead of Muon": (["--optimizer=adamw"], None),
    "cosine and warm-up instead of wsd": (["--lr_schedule=cosine", "--warmup_steps=50"], None),
}


def one_run(name, beside, threads, arguments, seed, steps):
    """(final validation loss, tokens/s in the middle of the run) of one run of train.py, a process
    of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = [f"--seed={seed}", f"--max_steps={steps}", "--eval_interval=0", "--report_minutes=0"]
        command = [sys.executable, "train.py", *arguments, *run, f"--checkpoint_dir={folder}/run"]
        if name in VARIANTS:
            command[1:2] = ["-m", "benchmarks.ablation", "--variant", name]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        done = subprocess.run(command, cwd=beside or ROOT, env=env, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name}: {done.stderr}")
        log = run_folder.read_log(Path(folder) / "run")
    loss = next(r["val_loss"] for r in reversed(log) if "val_loss" in r)
    return loss, statistics.median(r["tokens_per_second"] for r in log if "tokens_per_second" in r)


def train_variant(name, arguments):
    """One run with a part of model.py replaced, in this process."""
    from train import train

    changes, replace = VARIANTS[name]
    if replace:
        replace()
    train(settings.load([*arguments, *changes]))


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation",
        description=__doc__.splitlines()[0],
        allow_abbrev=False,  # --seed is a setting of the run, --seeds is not
    )
    parser.add_argument("--task", choices=TASKS, default="shakespeare")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--beside", metavar="PATH", help="another checkout")
    parser.add_argument("--name")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # one run, for one_run
    args, extra = parser.parse_known_args(argv)
    if args.variant:
        return train_variant(args.variant, extra)
    shared, contenders = TASKS[args.task]
    arguments = [*contenders["modern"], *shared, *extra]
    steps = settings.load(arguments).max_steps
    threads = max(1, torch.get_num_threads() // args.jobs)
    names = [*VARIANTS, *(["before"] if args.beside else [])]
    with ThreadPoolExecutor(args.jobs) as pool:

        def submit(name, seed, steps):
            where = args.beside if name == "before" else None
            return pool.submit(one_run, name, where, threads, arguments, seed, steps)

        def all_runs(steps_of):
            jobs = {
                (name, seed): submit(name, seed, steps_of[name])
                for seed in range(1, args.seeds + 1)
                for name in steps_of
            }
            for (name, seed), job in jobs.items():
                loss, speed = job.result()
                print(
                    f"seed {seed}, {name}, {steps_of[name]} steps: {loss:.4f}, {speed:,.0f}"
                    " tokens/s",
                    flush=True,
                )
            return {
                name: [jobs[name, s].result() for s in range(1, args.seeds + 1)]
                for name in steps_of
            }

        equal_steps = all_runs(dict.fromkeys(names, steps))
        speed = {name: statistics.median(s for _, s in runs) for name, runs in equal_steps.items()}
        ratio = {name: speed["modern"] / speed[name] for name in names}  # seconds a step
        timed = {name: round(steps / ratio[name]) for name in names if abs(ratio[name] - 1) > 0.02}
        equal_seconds = equal_steps | all_runs(timed)
    result = {"task": args.task, "jobs": args.jobs, "settings": arguments, "rows": {}}
    print(
        f"\n| {args.name or args.task} | loss at equal steps | time a step | loss at equal"
        " seconds |"
    )
    print("|---|---|---|---|")
    for name in names:
        losses = [[loss for loss, _ in runs[name]] for runs in (equal_steps, equal_seconds)]
        result["rows"][name] = {
            "loss": losses[0],
            "time_a_step": ratio[name],
            "loss_at_equal_seconds": losses[1],
        }
        a, b = (
            f"{statistics.mean(v):.4f} ± {statistics.stdev(v) if len(v) > 1 else 0:.4f}"
            for v in losses
        )
        print(f"| {name} | {a} | {ratio[name]:.2f}x | {b} |")
    write(f"ablation_{args.name or args.task}", hardware.find_device("auto"), result)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (DataError, RuntimeError) as error:
        sys.exit(f"{error}")
