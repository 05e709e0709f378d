"""The story's ladder: what each change to a training loop gains, one change a rung, same model,
same data, one run.

    python -m benchmarks.ladder [--preset config/gpt2_small.py] [--rounds 2] [--steps 8] [--key=value ...]

Without --preset: GPT-2 Small at 64 x 512 on a GPU; on a CPU a model that climbs it within ten
minutes. Every rung runs in a process of its own, so that its peak memory is its own, and all of
them in turn for each round, so that a machine whose speed drifts compares fairly. The rungs' code
lives here; only the last rung is the step of train.py itself.
"""

import argparse
import contextlib
import json
import math
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import config as settings
import hardware
import model
from benchmarks import write
from formats.data_folder import read_meta
from training.run import Run
from training.setup import model_config
from training.step import make_optimizer

ON_A_CPU = [
    "config/gpt2_small.py",
    "--data_dir=data/python_stdlib",
    "--n_layer=6",
    "--n_head=6",
    "--n_embd=384",
    "--block_size=256",
    "--batch_size=8",
    "--warmup_steps=2",
]
RUNGS = [
    "mapped file, a Python loop, fp32, eager, attention written out",
    "tokens in memory",
    "batches in one indexing",
    "torch.compile",
    "mixed precision",
    "scaled_dot_product_attention",
    "train.py: tokens on the device, fused AdamW, loss compiled, no waiting",
]


def written_out(q, k, v, dropout):
    """Attention as the papers write it, the whole matrix of scores in memory. q, k, v: [B, heads,
    T, d].
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    scores = scores.masked_fill(
        torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -torch.inf
    )
    return scores.softmax(dim=-1) @ v


def flash(q, k, v, dropout):
    """Attention by PyTorch's one function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Story:
    """The loop of rung `rung`, from 0: a plain one, with the changes up to that rung."""

    def __init__(self, rung, c):
        self.rung, self.c, self.device = rung, c, hardware.find_device(c.device)
        meta = read_meta(c.data_dir)
        self.path, self.dtype = Path(c.data_dir) / meta.splits["train"].file, meta.dtype
        if rung >= 1:
            self.tokens = np.fromfile(self.path, self.dtype)
        torch.manual_seed(c.seed)
        self.model = model.GPT(model_config(c, meta)).to(self.device)
        model.causal_attention = (
            written_out if rung < 5 else flash
        )  # this process measures nothing else
        self.forward = torch.compile(self.model, dynamic=False) if rung >= 3 else self.model
        self.dtype_of_products = (
            hardware.find_dtype(self.device, c.dtype) if rung >= 4 else torch.float32
        )
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.dtype_of_products == torch.float16
        )
        groups = make_optimizer(self.model, c, self.device).param_groups
        self.optimizer = torch.optim.AdamW(
            [{"params": g["params"], "weight_decay": g["weight_decay"]} for g in groups],
            lr=c.learning_rate,
            betas=(c.beta1, c.beta2),
        )

    def batch(self):
        """Inputs and targets, int64 [batch_size, block_size] each, on the device."""
        T, B = self.c.block_size, self.c.batch_size
        tokens = self.tokens if self.rung >= 1 else np.memmap(self.path, self.dtype, mode="r")
        starts = np.random.randint(len(tokens) - T, size=B)
        if self.rung >= 2:
            chunk = torch.from_numpy(tokens[starts[:, None] + np.arange(T + 1)].astype(np.int64))
            x, y = chunk[:, :-1], chunk[:, 1:]
        else:
            x = torch.stack([torch.from_numpy(tokens[i : i + T].astype(np.int64)) for i in starts])
            y = torch.stack(
                [torch.from_numpy(tokens[i + 1 : i + 1 + T].astype(np.int64)) for i in starts]
            )
        return x.to(self.device), y.to(self.device)

    def step(self):
        """One optimiser step, its loss printed, so waited for."""
        x, y = self.batch()
        with hardware.autocast(self.device, self.dtype_of_products):
            logits = self.forward(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.c.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()


class Ours:
    """The last rung: the step of train.py."""

    def __init__(self, c):
        self.run = Run(c)
        self.device, self.model = self.run.device, self.run.model
        problem = self.run.compile()
        assert not problem, problem

    def batch(self):
        """The next batch."""
        return self.run.train_data.batch(
            self.run.progress.sequences, self.run.config.batch_size, self.run.config.seed
        )

    def step(self):
        """One optimiser step."""
        self.run.train_step(contextlib.nullcontext())


def measure(rung, extra, steps):
    """One rung in this process: seconds a step and a batch, peak bytes, operations a token; printed
    as JSON.
    """
    with tempfile.TemporaryDirectory() as folder:
        c = settings.load([*extra, f"--checkpoint_dir={folder}/run"])
        it = Story(rung, c) if rung < len(RUNGS) - 1 else Ours(c)
        for _ in range(3):  # compilation, first allocations
            it.step()
        # On a GPU a step that does not wait is over before its work is: time several as one.
        at_once, times = (1 if it.device.type == "cpu" else 10), []
        for _ in range(steps):
            hardware.synchronize(it.device)
            start = time.perf_counter()
            for _ in range(at_once):
                it.step()
            hardware.synchronize(it.device)
            times.append((time.perf_counter() - start) / at_once)
        batches = []
        for _ in range(30):
            start = time.perf_counter()
            it.batch()
            hardware.synchronize(it.device)
            batches.append(time.perf_counter() - start)
        peak = (
            torch.cuda.max_memory_allocated(it.device)
            if it.device.type == "cuda"
            else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        )
        print(
            json.dumps(
                {
                    "step_s": statistics.median(times),
                    "batch_s": statistics.median(batches),
                    "peak_bytes": peak,
                    "flops_per_token": it.model.flops_per_token(),
                }
            )
        )


def picture(rows, path, device):
    """The rungs as bars: seconds a step."""
    from matplotlib.figure import Figure

    figure = Figure((10, 3.6), layout="constrained")
    axes = figure.subplots()
    bars = axes.barh(
        [r["rung"] for r in rows],
        [1e3 * r["step_s"] for r in rows],
        color=["#56B4E9"] * (len(rows) - 1) + ["#009E73"],
    )
    axes.bar_label(bars, [f" {1e3 * r['step_s']:,.0f} ms, {r['cumulative']:.1f}x" for r in rows])
    axes.invert_yaxis()
    axes.set(
        xlabel=f"milliseconds a step, {device}", xlim=(0, 1.3e3 * max(r["step_s"] for r in rows))
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ladder", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--preset")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8, help="steps timed for each rung in a round")
    parser.add_argument("--rung", type=int, help=argparse.SUPPRESS)
    args, extra = parser.parse_known_args(argv)
    on_gpu = hardware.find_device("auto").type == "cuda"
    shape = [args.preset] if args.preset else ["config/gpt2_small.py"] if on_gpu else ON_A_CPU
    extra = [*shape, *extra]
    if args.rung is not None:
        return measure(args.rung, extra, args.steps)
    c = settings.load(extra)
    device = hardware.find_device(c.device)
    results = [[] for _ in RUNGS]
    for n in range(args.rounds):
        for rung, name in enumerate(RUNGS):
            command = [
                sys.executable,
                "-m",
                "benchmarks.ladder",
                *extra[1:],
                "--preset",
                extra[0],
                "--rung",
                str(rung),
                "--steps",
                str(args.steps),
            ]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            results[rung].append(json.loads(re.findall(r"^\{.*\}$", out, re.MULTILINE)[-1]))
            print(
                f"round {n + 1}: {1e3 * results[rung][-1]['step_s']:9,.1f} ms  {name}", flush=True
            )
    tokens, peak = c.batch_size * c.block_size, hardware.peak_flops(device)
    rows = []
    for name, of in zip(RUNGS, results, strict=True):
        step = statistics.median(r["step_s"] for r in of)
        rows.append(
            {
                "rung": name,
                "step_s": step,
                "tokens_per_second": tokens / step,
                "batch_s": statistics.median(r["batch_s"] for r in of),
                "mfu": tokens / step * of[0]["flops_per_token"] / peak if peak else None,
                "tflops": tokens / step * of[0]["flops_per_token"] / 1e12,
                "peak_bytes": max(r["peak_bytes"] for r in of),
                "rounds": [r["step_s"] for r in of],
                "gain": statistics.median(
                    a["step_s"] / b["step_s"]
                    for a, b in zip(results[max(0, len(rows) - 1)], of, strict=True)
                ),
                "cumulative": statistics.median(
                    a["step_s"] / b["step_s"] for a, b in zip(results[0], of, strict=True)
                ),
            }
        )
    print(
        f"\n{'rung':76}{'ms a step':>10}{'tokens/s':>11}{'TFLOP/s':>9}{'MFU':>7}{'batch ms':>10}{'peak GB':>9}{'gain':>7}{'in all':>8}"
    )
    for r in rows:
        mfu = f"{r['mfu']:.1%}" if r["mfu"] else "n/a"
        print(
            f"{r['rung']:76}{1e3 * r['step_s']:10,.1f}{r['tokens_per_second']:11,.0f}{r['tflops']:9.3f}{mfu:>7}"
            f"{1e3 * r['batch_s']:10.3f}{r['peak_bytes'] / 1e9:9.2f}{r['gain']:6.2f}x{r['cumulative']:7.2f}x"
        )
    path = write(
        "ladder", device, {"command": " ".join(extra), "tokens_a_step": tokens, "rungs": rows}
    )
    picture(rows, path.with_suffix(".png"), hardware.describe(device))


if __name__ == "__main__":
    main(sys.argv[1:])
