"""The story's ladder: what each change to a training loop gains, one change a rung.

    python -m benchmarks.ladder [--preset config/gpt2_small.py] [--rounds 2] [--steps 8]
        [--key=value ...]

The same model on the same data at every rung. Without --preset: GPT-2 Small on a GPU, 64 x 512 or
as many sequences as the first rung has memory for; on a CPU a model that climbs it in ten minutes.
Every rung runs in a process of its own, so that its peak memory is its own, and all of them once a
round. The plain loop lives here; the last rung is the step of train.py itself.
"""

import importlib.util
import math
import resource
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F

import config as settings
import hardware
import model
from benchmarks import (
    argument_parser,
    in_turn,
    median_ratio,
    medians,
    run_apart,
    run_main,
    write,
)
from config import Config
from formats.data_folder import read_meta
from tools.command import count, table
from training.optimizer import make_optimizer
from training.setup import build, model_shape

ON_A_CPU = """
    config/gpt2_small.py --data_dir=data/python_stdlib --n_layer=6 --n_head=6 --n_embd=384
    --block_size=256 --batch_size=8 --warmup_steps=2
"""
# Bytes of fp32 that the first rung takes of a GPU at GPT-2 Small's shape, estimated: a matrix of
# scores and 16 numbers of the width a token in each layer, and four times the logits.
AT_REST, PER_SEQUENCE = 3e9, 0.7e9
RUNGS = [
    "mapped file, a Python loop, fp32, eager, attention written out",
    "tokens in memory",
    "batches in one indexing",
    "torch.compile",
    "mixed precision",
    "scaled_dot_product_attention",
    "train.py: tokens on the device, fused AdamW, loss compiled, no waiting",
]
IN_MEMORY, ONE_INDEXING, COMPILED, MIXED_PRECISION, ONE_ATTENTION, TRAIN_PY = range(1, 7)


def written_out(q, k, v, dropout):
    """Attention as the papers write it, with the whole matrix of scores. q, k, v: [B, heads, T, d].

    Takes dropout as ops.causal_attention does, and uses none.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v


def one_attention(q, k, v, dropout):
    """Attention by PyTorch's one function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class PlainLoop:
    """A plain training loop with the changes up to a rung below the last."""

    def __init__(self, rung: int, c: Config):
        self.rung, self.c = rung, c
        self.device = hardware.find_device(c.device)
        meta = read_meta(c.data_dir)
        self.path, self.dtype = Path(c.data_dir) / meta.splits["train"].file, meta.dtype
        if rung >= IN_MEMORY:
            self.tokens = np.fromfile(self.path, self.dtype)
        # For the whole process, which measures nothing else.
        model.causal_attention = one_attention if rung >= ONE_ATTENTION else written_out
        torch.manual_seed(c.seed)
        self.model = model.GPT(model_shape(c, meta.vocab_size)).to(self.device)
        self.forward = self.model
        if rung >= COMPILED:
            self.forward = torch.compile(self.model, dynamic=False)
        self.precision = torch.float32
        if rung >= MIXED_PRECISION:
            self.precision = hardware.find_dtype(self.device, c.dtype)
        scales = self.precision == torch.float16
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scales)
        groups = []
        for group in make_optimizer(self.model, c, self.device).param_groups:
            groups.append({name: group[name] for name in ("params", "weight_decay")})
        betas = (c.beta1, c.beta2)
        self.optimizer = torch.optim.AdamW(groups, lr=c.learning_rate, betas=betas)

    def batch(self):
        """Inputs and targets, int64 [batch_size, block_size] each, on the device."""
        T = self.c.block_size
        if self.rung >= IN_MEMORY:
            tokens = self.tokens
        else:
            tokens = np.memmap(self.path, self.dtype, mode="r")
        starts = np.random.randint(len(tokens) - T, size=self.c.batch_size)
        if self.rung >= ONE_INDEXING:
            chunk = torch.from_numpy(tokens[starts[:, None] + np.arange(T + 1)].astype(np.int64))
            x, y = chunk[:, :-1], chunk[:, 1:]
        else:  # as nanoGPT has it
            windows = [tokens[i : i + T].astype(np.int64) for i in starts]
            targets = [tokens[i + 1 : i + 1 + T].astype(np.int64) for i in starts]
            x = torch.stack([torch.from_numpy(window) for window in windows])
            y = torch.stack([torch.from_numpy(target) for target in targets])
        return x.to(self.device), y.to(self.device)

    def step(self):
        """One optimiser step; its loss is looked at, and so waited for."""
        x, y = self.batch()
        with hardware.autocast(self.device, self.precision):
            logits = self.forward(x)
            loss = F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.c.grad_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.item()


class TrainPy:
    """The last rung: the step of train.py."""

    def __init__(self, c: Config):
        self.run = build(c)
        self.device, self.model = self.run.device.torch, self.run.state.model
        problem = self.run.trainer.compile()
        assert not problem, problem

    def batch(self):
        c = self.run.config
        first = self.run.state.progress.sequences
        return self.run.data.train.batch(first, c.batch_size, c.seed)

    def step(self):
        self.run.trainer.step()


def measure(rung: int, words: list[str], steps: int) -> dict:
    """One rung in this process: seconds a step and a batch, peak bytes, operations a token."""
    c = settings.load(words)
    loop = TrainPy(c) if rung == TRAIN_PY else PlainLoop(rung, c)
    for _ in range(3):  # compilation, first allocations
        loop.step()
    # On a GPU a step that does not wait is over before its work is: time several as one.
    at_once = 1 if loop.device.type == "cpu" else 10
    step_s = median(seconds(loop.device, loop.step, at_once) for _ in range(steps))
    batch_s = median(seconds(loop.device, loop.batch, at_once) for _ in range(30))
    if loop.device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(loop.device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "step_s": step_s,
        "batch_s": batch_s,
        "peak_bytes": peak,
        "flops_per_token": loop.model.flops_per_token(),
    }


def seconds(device: torch.device, work: Callable, at_once: int) -> float:
    """Seconds of a piece of work, of `at_once` that run without waiting between them."""
    hardware.synchronize(device)
    start = time.perf_counter()
    for _ in range(at_once):
        work()
    hardware.synchronize(device)
    return (time.perf_counter() - start) / at_once


def rows_of(rounds: list[dict], tokens: int, peak_flops: float | None) -> list[dict]:
    """What the rungs come to: a row each, with its gain over the rung before and over the first.

    rounds: {rung: what measure returns}, of each round. tokens: a step.
    """
    times = [{name: r[name]["step_s"] for name in RUNGS} for r in rounds]
    rows = []
    for name, step_s in medians(times).items():
        of_rung = [r[name] for r in rounds]
        flops = tokens / step_s * of_rung[0]["flops_per_token"]
        rows.append(
            {
                "rung": name,
                "step_s": step_s,
                "tokens_per_second": tokens / step_s,
                "batch_s": median(r["batch_s"] for r in of_rung),
                "mfu": flops / peak_flops if peak_flops else None,
                "peak_bytes": max(r["peak_bytes"] for r in of_rung),
                "cumulative": median_ratio(times, RUNGS[0], name),
            }
        )
    return rows


def show(rows: list[dict]) -> None:
    lines = []
    for row in rows:
        lines.append(
            [
                row["rung"],
                f"{1e3 * row['step_s']:,.1f}",
                f"{row['tokens_per_second']:,.0f}",
                f"{row['mfu']:.1%}" if row["mfu"] else "n/a",
                f"{1e3 * row['batch_s']:.3f}",
                f"{row['peak_bytes'] / 1e9:.2f}",
                f"{row['cumulative']:.2f}x",
            ]
        )
    print(table(["rung", "ms a step", "tokens/s", "MFU", "batch ms", "peak GB", "in all"], lines))


def draw(rows: list[dict], path: Path, device: str) -> None:
    """The rungs as bars: milliseconds a step."""
    from matplotlib.figure import Figure

    figure = Figure((10, 3.6), layout="constrained")
    axes = figure.subplots()
    milliseconds = [1e3 * row["step_s"] for row in rows]
    bars = axes.barh([row["rung"] for row in rows], milliseconds, color="#56B4E9")
    axes.bar_label(bars, [f" {1e3 * r['step_s']:,.0f} ms, {r['cumulative']:.1f}x" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds a step, {device}")
    axes.set_xlim(0, 1.3 * max(milliseconds))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def default_settings() -> list[str]:
    """GPT-2 Small on a GPU, on a CPU a model that climbs the ladder within ten minutes."""
    device = hardware.find_device("auto")
    if device.type != "cuda":
        return ON_A_CPU.split()
    return ["config/gpt2_small.py", f"--batch_size={sequences(hardware.gpu_memory(device))}"]


def sequences(memory: float) -> int:
    """Sequences of a batch for which the first rung finds room in a GPU of `memory` bytes."""
    room = (0.85 * memory - AT_REST) / PER_SEQUENCE
    return 2 ** min(6, int(math.log2(max(1, room))))


def main(argv):
    parser = argument_parser("ladder", __doc__)
    parser.add_argument("--preset")
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument(
        "--steps", type=count, default=8, help="steps timed for each rung in a round"
    )
    args, extra = parser.parse_known_args(argv)
    words = [*([args.preset] if args.preset else default_settings()), *extra]
    c = settings.load(words)
    device = hardware.find_device(c.device)
    with tempfile.TemporaryDirectory() as folder:
        in_folder = [*words, f"--checkpoint_dir={folder}/run"]
        rungs = {
            name: partial(run_apart, measure, rung, in_folder, args.steps)
            for rung, name in enumerate(RUNGS)
        }
        rounds = in_turn(rungs, args.rounds, lambda r: f"{1e3 * r['step_s']:,.1f} ms")
    tokens = c.batch_size * c.block_size
    peak = hardware.peak_flops(device, hardware.find_dtype(device, c.dtype))
    rows = rows_of(rounds, tokens, peak)
    show(rows)
    figures = {
        "tokens a step": tokens,
        "times the first rung": rows[-1]["cumulative"],
        "a batch, times the first rung": rows[0]["batch_s"] / rows[-1]["batch_s"],
    }
    result = {"figures": figures, "command": " ".join(words), "tokens_a_step": tokens}
    path = write("ladder", result | {"rungs": rows}, device)
    if importlib.util.find_spec("matplotlib"):
        draw(rows, path.with_suffix(".png"), hardware.describe(device))


if __name__ == "__main__":
    run_main(main)
