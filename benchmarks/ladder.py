"""What each change to a plain training loop gains: a ladder with one change a rung.

    python -m benchmarks.ladder [--preset config/gpt2_small.py] [--rounds 2] [--steps 8]
        [--key=value ...]

The same model on the same data at every rung; without --preset a model that climbs it on a CPU in
ten minutes. Every rung runs in a process of its own, and all of them once a round. The plain loop
is in this file; the last rung is train.py, by its own log. Only speed counts: gradients in float16
are not scaled. On a GPU of less than 60 GB the first rung needs a --batch_size below 64.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import config as settings
import hardware
import model
from benchmarks import argument_parser, compare, in_turn, report, run_apart, run_main, seconds
from benchmarks.throughput import TIMED, our_speed
from command_line import count
from config import Config
from formats.data_folder import read_meta
from training.start import model_shape

ON_A_CPU = """
    config/gpt2_small.py --data_dir=data/python_stdlib --n_layer=6 --n_head=6 --n_embd=384
    --block_size=256 --batch_size=8 --warmup_steps=2
"""
RUNGS = [
    "mapped file, a Python loop, fp32, eager, attention written out",
    "torch.compile",
    "mixed precision",
    "scaled_dot_product_attention",
    "train.py: tokens on the device, fused AdamW, loss compiled, no waiting",
]
COMPILED, MIXED_PRECISION, ONE_ATTENTION = range(1, 4)


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


def plain_loop(rung: int, c: Config) -> Callable:
    """The step of a plain training loop, with the changes up to a rung."""
    device, meta, T = hardware.find_device(c.device), read_meta(c.data_dir), c.block_size
    # For the whole process, which measures nothing else.
    model.causal_attention = one_attention if rung >= ONE_ATTENTION else written_out
    torch.manual_seed(c.seed)
    gpt = model.GPT(model_shape(c, meta.vocab_size)).to(device)
    forward = torch.compile(gpt, dynamic=False) if rung >= COMPILED else gpt
    dtype = hardware.find_dtype(device, c.dtype) if rung >= MIXED_PRECISION else torch.float32
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=c.learning_rate)

    def step():
        # As nanoGPT has it: a new map each time, and one window after the other.
        tokens = np.memmap(Path(c.data_dir) / meta.splits["train"].file, meta.dtype, mode="r")
        starts = np.random.randint(len(tokens) - T, size=c.batch_size)
        windows = [torch.from_numpy(tokens[i : i + T + 1].astype(np.int64)) for i in starts]
        chunk = torch.stack(windows).to(device)
        x, y = chunk[:, :-1], chunk[:, 1:]
        with hardware.autocast(device, dtype):
            loss = F.cross_entropy(forward(x).float().flatten(0, 1), y.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(gpt.parameters(), c.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # as a loop that prints it: it waits for the device

    return step


def speed(rung: int, words: list[str], steps: int) -> float:
    """Tokens/s of one rung of the plain loop in this process, after three steps to warm up."""
    c = settings.load(words)
    device, step = hardware.find_device(c.device), plain_loop(rung, c)
    seconds(step, device, 3)
    return c.tokens_per_step / seconds(step, device, steps)


def main(argv):
    parser = argument_parser("ladder", __doc__)
    parser.add_argument("--preset", default=ON_A_CPU)
    parser.add_argument("--rounds", type=count, default=2)
    parser.add_argument("--steps", type=count, default=8, help="in a round; default %(default)s")
    args, extra = parser.parse_known_args(argv)
    words = [*args.preset.split(), *extra]
    device = hardware.find_device(settings.load(words).device)
    rungs = {
        name: partial(run_apart, speed, rung, words, args.steps)
        for rung, name in enumerate(RUNGS[:-1])
    }
    rungs[RUNGS[-1]] = partial(our_speed, [*args.preset.split(), *TIMED, *extra], args.steps)
    rounds = in_turn(rungs, args.rounds)
    report("ladder", compare(rounds, RUNGS[-1]), device, command=" ".join(words), rounds=rounds)


if __name__ == "__main__":
    run_main("ladder", main)
