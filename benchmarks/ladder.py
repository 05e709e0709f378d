"""The story's ladder: what each change to a training loop gains, one change a rung.

    python -m benchmarks.ladder [--preset config/gpt2_small.py] [--rounds 2] [--steps 8]
        [--key=value ...]

The same model on the same data at every rung; without --preset a model that climbs it on a CPU in
ten minutes. Every rung runs in a process of its own, so that its peak memory is its own, and all of
them once a round. The plain loop is in this file; the last rung is the step of train.py itself. On
a GPU of less than 80 GB the first rung needs a --batch_size below 64.
"""

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
from training.setup import build
from training.start import model_shape

ON_A_CPU = """
    config/gpt2_small.py --data_dir=data/python_stdlib --n_layer=6 --n_head=6 --n_embd=384
    --block_size=256 --batch_size=8 --warmup_steps=2
"""
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

    dropout is 0 here.
    """
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, -torch.inf).softmax(dim=-1) @ v


def one_attention(q, k, v, dropout):
    """Attention by PyTorch's one function."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def plain_loop(rung: int, c: Config) -> tuple[Callable, Callable]:
    """The batch and the step of a plain training loop, with the changes up to a rung."""
    device, meta, T = hardware.find_device(c.device), read_meta(c.data_dir), c.block_size
    path = Path(c.data_dir) / meta.splits["train"].file
    in_memory = np.fromfile(path, meta.dtype) if rung >= IN_MEMORY else None
    # For the whole process, which measures nothing else.
    model.causal_attention = one_attention if rung >= ONE_ATTENTION else written_out
    torch.manual_seed(c.seed)
    gpt = model.GPT(model_shape(c, meta.vocab_size)).to(device)
    forward = torch.compile(gpt, dynamic=False) if rung >= COMPILED else gpt
    dtype = hardware.find_dtype(device, c.dtype) if rung >= MIXED_PRECISION else torch.float32
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    betas = (c.beta1, c.beta2)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=c.learning_rate, betas=betas)

    def batch():
        """Inputs and targets, int64 [batch_size, block_size] each, on the device."""
        tokens = np.memmap(path, meta.dtype, mode="r") if in_memory is None else in_memory
        starts = np.random.randint(len(tokens) - T, size=c.batch_size)
        if rung >= ONE_INDEXING:
            chunk = torch.from_numpy(tokens[starts[:, None] + np.arange(T + 1)].astype(np.int64))
        else:  # as nanoGPT has it
            windows = [tokens[i : i + T + 1].astype(np.int64) for i in starts]
            chunk = torch.stack([torch.from_numpy(window) for window in windows])
        return chunk[:, :-1].to(device), chunk[:, 1:].to(device)

    def step():
        x, y = batch()
        with hardware.autocast(device, dtype):
            loss = F.cross_entropy(forward(x).float().flatten(0, 1), y.flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), c.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        loss.item()  # as a loop that prints it: it waits for the device

    return batch, step


def train_py(c: Config) -> tuple[Callable, Callable]:
    """The batch and the step of train.py."""
    run = build(c)
    problem = run.trainer.prepare(compiles=True)
    assert not problem, problem
    batch = partial(run.data.train.batch, 0, c.batch_size, c.seed)
    return batch, run.trainer.step


def measure(rung: int, words: list[str], steps: int) -> dict:
    """One rung in this process: seconds per step and per batch, and peak bytes."""
    c = settings.load(words)
    device = hardware.find_device(c.device)
    batch, step = train_py(c) if rung == TRAIN_PY else plain_loop(rung, c)
    for _ in range(3):  # compilation, first allocations
        step()
    # On a GPU a step that does not wait is over before its work is: time several as one.
    at_once = 1 if device.type == "cpu" else 10
    step_s = median(seconds(device, step, at_once) for _ in range(steps))
    batch_s = median(seconds(device, batch, at_once) for _ in range(30))
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"step_s": step_s, "batch_s": batch_s, "peak_bytes": peak}


def seconds(device: torch.device, work: Callable, times: int) -> float:
    """Seconds of one call of `work`, of `times` without waiting between them."""
    hardware.synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        work()
    hardware.synchronize(device)
    return (time.perf_counter() - start) / times


# -- the command -----------------------------------------------------------------------------------


def draw(rows: list[dict], path: Path, device: str) -> None:
    """The rungs as bars: milliseconds per step. Does nothing where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return
    figure = Figure((10, 3.6), layout="constrained")
    axes = figure.subplots()
    milliseconds = [1e3 * row["step_s"] for row in rows]
    bars = axes.barh([row["rung"] for row in rows], milliseconds, color="#56B4E9")
    axes.bar_label(bars, [f" {1e3 * r['step_s']:,.0f} ms, {r['cumulative']:.1f}x" for r in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"milliseconds per step, {device}")
    axes.set_xlim(0, 1.3 * max(milliseconds))
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def main(argv):
    parser = argument_parser("ladder", __doc__)
    parser.add_argument("--preset")
    parser.add_argument("--rounds", type=count, default=2)
    text = "steps timed for each rung in a round"
    parser.add_argument("--steps", type=count, default=8, help=text)
    args, extra = parser.parse_known_args(argv)
    words = [*([args.preset] if args.preset else ON_A_CPU.split()), *extra]
    c = settings.load(words)
    device = hardware.find_device(c.device)
    with tempfile.TemporaryDirectory() as folder:
        in_folder = [*words, f"--checkpoint_dir={folder}/run"]
        rungs = {
            name: partial(run_apart, measure, rung, in_folder, args.steps)
            for rung, name in enumerate(RUNGS)
        }
        rounds = in_turn(rungs, args.rounds, lambda r: f"{1e3 * r['step_s']:,.1f} ms")

    tokens, rows, lines = c.batch_size * c.block_size, [], []
    times = [{name: r[name]["step_s"] for name in RUNGS} for r in rounds]
    for name, step_s in medians(times).items():
        batch_s = median(r[name]["batch_s"] for r in rounds)
        peak = max(r[name]["peak_bytes"] for r in rounds)
        gain = median_ratio(times, RUNGS[0], name)
        row = {"rung": name, "step_s": step_s, "batch_s": batch_s, "peak_bytes": peak}
        rows.append(row | {"tokens_per_second": tokens / step_s, "cumulative": gain})
        cells = [f"{1e3 * step_s:,.1f}", f"{tokens / step_s:,.0f}", f"{1e3 * batch_s:.3f}"]
        lines.append([name, *cells, f"{peak / 1e9:.2f}", f"{gain:.2f}x"])
    print(table(["rung", "ms per step", "tokens/s", "batch ms", "peak GB", "in all"], lines))
    figures = {"times the first rung": rows[-1]["cumulative"]}
    result = {"figures": figures, "command": " ".join(words), "rungs": rows}
    path = write("ladder", result, device)
    draw(rows, path.with_suffix(".png"), hardware.describe(device))


if __name__ == "__main__":
    run_main("ladder", main)
