"""What each part of the modern recipe is worth: each taken out of it, or put back as it was before.

    python -m benchmarks.ablation [--task shakespeare] [--seeds 3] [--jobs 1] [--beside PATH] ...

For each: the final validation loss after as many steps as the recipe, seconds a step against it,
and the loss after as many seconds (second runs with the steps that fit into them, where that
differs by more than 2%). Mean and spread over seeds. --jobs N has N runs at a time share the CPU's
threads; with a thread each, seconds are those of the processor, which other work does not disturb.
--precision compares how a GPU computes a step instead, at equal steps; --recipe GPT-2 takes that
recipe. --beside PATH adds the modern preset of another checkout, for comparing with an earlier
commit: `git clone . ../before && git -C ../before checkout 2a781db`, with `data` linked there.
Results go to results/ablation_NAME_cpu.json; NAME is the task unless --name gives one. Further
arguments are settings.

The variants are no settings of model.py: each is a few lines here that replace a part of it in a
process of its own.
"""

import argparse
import functools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import config as settings
import hardware
import model
import training.optimizer
from benchmarks import write
from benchmarks.time_to_loss import TASKS
from formats import run_log
from training import fp8
from training.dataset import DataError

ROOT = Path(__file__).parent.parent


class SquaredReLU(nn.Module):
    """The MLP before SwiGLU: the square of ReLU in 4 x the width (So et al., 2021, "Primer")."""

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
    """Another MLP in SwiGLU's place: its c_fc is one matrix, so Muon must take it as one."""
    before = training.optimizer.side_by_side

    def side_by_side(name, shape):
        return 1 if "c_fc" in name else before(name, shape)

    model.SwiGLU = kind
    training.optimizer.side_by_side = side_by_side


def use_squared_relu():
    """The MLP before SwiGLU."""
    use_mlp(SquaredReLU)


def use_gelu():
    """GPT-2's MLP."""
    use_mlp(GELU)


def use_norms_of_heads(make):
    """Other norms of queries and keys. make: called with the width of a head."""
    before = model.Attention.__init__

    def init(self, config, layer):
        before(self, config, layer)
        self.q_norm, self.k_norm = make(config.head_dim), make(config.head_dim)

    model.Attention.__init__ = init


def use_no_qk_norm():
    """Queries and keys as they are."""
    use_norms_of_heads(nn.Identity)


def use_qk_norm_without_weights():
    """Queries and keys normed, but not scaled."""
    use_norms_of_heads(functools.partial(nn.RMSNorm, eps=1e-6, elementwise_affine=False))


def use_layer_norm():
    """LayerNorm without biases in RMSNorm's place."""

    def make_norm(config):
        return nn.LayerNorm(config.n_embd, bias=False)

    model.make_norm = make_norm


def use_learned_positions():
    """An embedding of each position, as GPT-2 has it."""
    before = model.GPT.__init__

    def init(self, config, zero_init=False):
        before(self, config, zero_init)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)

    model.GPT.__init__ = init


def use_bfloat16_stream():
    """The values between the layers in bfloat16 on a CPU too, as on a GPU."""

    def stream_dtype(x):
        return torch.bfloat16

    model.stream_dtype = stream_dtype


def use_fp8_head():
    """The head's products in 8 bits: on a CPU by PyTorch's own, which round as a GPU's do."""
    before = model.GPT.__init__

    def init(self, config, zero_init=False):
        before(self, config, zero_init)
        self.lm_head = fp8.FP8Head(self.lm_head)

    model.GPT.__init__ = init


def use_both():
    """The fast preset's step on a GPU."""
    use_bfloat16_stream()
    use_fp8_head()


# For each variant the settings that it changes, and what it replaces.
VARIANTS = {
    "modern": ([], None),
    "LayerNorm instead of RMSNorm": ([], use_layer_norm),
    "no QK norm": ([], use_no_qk_norm),
    "QK norm without weights": ([], use_qk_norm_without_weights),
    "squared ReLU instead of SwiGLU": ([], use_squared_relu),
    "GELU instead of SwiGLU": ([], use_gelu),
    "learned positions instead of rotary": ([], use_learned_positions),
    "rope_theta = 1,000,000": (["--rope_theta=1000000"], None),
    "no zero init": (["--zero_init=False"], None),
    "AdamW instead of Muon": (["--optimizer=adamw"], None),
    "cosine and warm-up instead of wsd": (["--lr_schedule=cosine", "--warmup_steps=50"], None),
}
# How a step is computed on a GPU, which shall not change what is learned.
PRECISION = {
    "as on a CPU": ([], None),
    "bfloat16 between the layers": ([], use_bfloat16_stream),
    "bfloat16 between them, the head in 8 bits": ([], use_both),
}


@dataclass
class Outcome:
    """Final validation loss in nats a token, and seconds of the whole process."""

    loss: float
    seconds: float


def one_run(name, beside, threads, arguments, seed, steps) -> Outcome:
    """One run of train.py in a process of its own. beside: another checkout to run it in."""
    with tempfile.TemporaryDirectory() as folder:
        run = [f"--seed={seed}", f"--max_steps={steps}", "--eval_interval=0", "--report_minutes=0"]
        command = [sys.executable, "train.py", *arguments, *run, f"--checkpoint_dir={folder}/run"]
        if name in VARIANTS | PRECISION:
            command[1:2] = ["-m", "benchmarks.ablation", "--variant", name]
        env = os.environ | {"OMP_NUM_THREADS": str(threads)}
        began = time.perf_counter()
        with open(f"{folder}/errors", "w+") as errors:
            process = subprocess.Popen(
                command, cwd=beside or ROOT, env=env, stdout=subprocess.DEVNULL, stderr=errors
            )
            _, status, usage = os.wait4(process.pid, 0)
            errors.seek(0)
            if status:
                raise RuntimeError(f"{name}: {errors.read()}")
        seconds = time.perf_counter() - began
        if threads == 1 and hardware.find_device("auto").type == "cpu":
            seconds = usage.ru_utime + usage.ru_stime
        log = run_log.read(Path(folder) / "run")
    return Outcome(next(r["val_loss"] for r in reversed(log) if "val_loss" in r), seconds)


def train_variant(name, arguments):
    """One run with a part of model.py replaced, in this process."""
    from train import train

    changes, replace = (VARIANTS | PRECISION)[name]
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
    parser.add_argument("--precision", action="store_true", help="the variants of PRECISION only")
    parser.add_argument("--recipe", choices=("modern", "GPT-2"), default="modern")
    parser.add_argument("--name")
    parser.add_argument("--variant", help=argparse.SUPPRESS)  # one run, for one_run
    args, extra = parser.parse_known_args(argv)
    if args.variant:
        return train_variant(args.variant, extra)
    shared, contenders = TASKS[args.task]
    arguments = [*contenders[args.recipe], *shared, *extra]
    steps = settings.load(arguments).max_steps
    threads = max(1, torch.get_num_threads() // args.jobs)
    names = [*(PRECISION if args.precision else VARIANTS), *(["before"] if args.beside else [])]
    few = steps // 10  # what a start takes is in both, and not in their difference
    with ThreadPoolExecutor(args.jobs) as pool:

        def all_runs(steps_of):
            jobs = {}
            for seed in range(1, args.seeds + 1):
                for name, count in steps_of.items():
                    where = args.beside if name == "before" else None
                    job = pool.submit(one_run, name, where, threads, arguments, seed, count)
                    jobs.setdefault(name, []).append(job)
            outcomes = {name: [job.result() for job in of] for name, of in jobs.items()}
            for name, of in outcomes.items():
                losses = ", ".join(f"{outcome.loss:.4f}" for outcome in of)
                print(f"{name}, {steps_of[name]} steps: {losses}", flush=True)
            return outcomes

        equal_steps = all_runs(dict.fromkeys(names, steps))
        if args.precision:  # seconds on this device say nothing of those on a GPU
            return compare_precision(args.name or args.task, arguments, equal_steps)
        starts = all_runs(dict.fromkeys(names, few))
        ratio = {name: seconds_a_step(name, equal_steps, starts) for name in names}
        ratio = {name: seconds / ratio[names[0]] for name, seconds in ratio.items()}
        timed = {name: round(steps / ratio[name]) for name in names if abs(ratio[name] - 1) > 0.02}
        equal_seconds = equal_steps | all_runs(timed)
    result = {"task": args.task, "jobs": args.jobs, "settings": arguments, "rows": {}}
    print(f"\n| {args.name or args.task} | equal steps | time a step | equal seconds |")
    print("|---|---|---|---|")
    for name in names:
        first = [outcome.loss for outcome in equal_steps[name]]
        second = [outcome.loss for outcome in equal_seconds[name]]
        result["rows"][name] = {
            "loss": first,
            "time_a_step": ratio[name],
            "loss_at_equal_seconds": second,
        }
        print(f"| {name} | {spread(first)} | {ratio[name]:.2f}x | {spread(second)} |")
    write(f"ablation_{args.name or args.task}", hardware.find_device("auto"), result)


def compare_precision(name, arguments, outcomes) -> None:
    """Write and print the losses of PRECISION's variants, by seed."""
    losses = {variant: [outcome.loss for outcome in of] for variant, of in outcomes.items()}
    for variant, of in losses.items():
        print(f"| {variant} | {spread(of)} |")
    result = {"settings": arguments, "loss": losses}
    write(f"ablation_{name}", hardware.find_device("auto"), result)


def seconds_a_step(name, long, short) -> float:
    """Seconds of the steps that long runs have beyond short ones: the median over seeds."""
    pairs = zip(long[name], short[name], strict=True)
    return statistics.median(whole.seconds - start.seconds for whole, start in pairs)


def spread(losses: list[float]) -> str:
    """Mean and standard deviation."""
    deviation = statistics.stdev(losses) if len(losses) > 1 else 0
    return f"{statistics.mean(losses):.4f} \u00b1 {deviation:.4f}"


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (DataError, RuntimeError) as error:
        sys.exit(f"{error}")
