"""Speed of generation beside transformers' `generate` with its cache and nanoGPT's, at the shape of
GPT-2 Small.

    python -m benchmarks.generate [--nanogpt PATH] [--checkpoint checkpoints/demo] [--rounds 5]

Each round runs every contender in turn, in one process, greedily, on one sequence from 16 tokens
and at 400 tokens of context, and ours on eight sequences; a speed counts the tokens after the
first. Ratios are taken round by round. The floor is the time to read the weights once (and at 400
tokens the cache) at the bandwidth that this machine shows in the same round. Beside that, the time
from the start of generate.py to the first text of a small checkpoint.
"""

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

import config
import hardware
from benchmarks import write
from generating import cpu_kernels, decode
from model import GPT, GPTConfig


def shape() -> GPTConfig:
    """GPT-2 Small as its preset has it: 134M."""
    c = config.load(["config/gpt2_small.py"])
    return GPTConfig(
        32000, c.block_size, c.n_layer, c.n_head, c.n_embd, c.bias, c.dropout, c.tie_weights
    )


def speed(stamps: list[float], rows: int) -> float:
    """Tokens/s of `rows` sequences after the first token, from the moments at which a token of each
    was there.
    """
    return rows * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def ours(model, prompt, new, rows=1):
    """Tokens/s of decode.generate."""
    return speed(
        [time.perf_counter() for _ in decode.generate(model, [prompt] * rows, new, temperature=0)],
        rows,
    )


def theirs(model, generate):
    """Tokens/s of another's model, one sequence; generate(idx, new) runs it."""

    def run(prompt, new):
        stamps = []
        hook = model.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
        with torch.inference_mode():
            generate(torch.tensor([prompt], device=next(model.parameters()).device), new)
        hook.remove()
        return speed(stamps, 1)

    return run


def transformers(c: GPTConfig, device, dtype):
    """GPT-2 of `transformers`, of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    same = {
        "vocab_size": c.vocab_size,
        "n_positions": c.block_size,
        "n_embd": c.n_embd,
        "n_layer": c.n_layer,
        "n_head": c.n_head,
        "tie_word_embeddings": c.tie_weights,
    }
    model = (
        GPT2LMHeadModel(GPT2Config(**same, eos_token_id=None, bos_token_id=None, pad_token_id=0))
        .eval()
        .to(device, dtype)
    )
    return theirs(
        model,
        lambda idx, new: model.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
        ),
    )


def nanogpt(path: str, c: GPTConfig, device):
    """The model of a checkout of nanoGPT, run as its sample.py does."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", Path(path) / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    values = module.GPTConfig(
        block_size=c.block_size,
        vocab_size=c.vocab_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        dropout=0.0,
        bias=c.bias,
    )
    model = module.GPT(values).eval().to(device)

    def generate(idx, new):
        with hardware.autocast(device, torch.bfloat16 if device.type == "cuda" else torch.float32):
            model.generate(idx, new, top_k=1)

    return theirs(model, generate)


def bandwidth(device) -> float:
    """Bytes/s that the memory gives at best: the fastest of a copy, a sum and a product over 256
    MB.
    """
    a = torch.ones(1 << 26, device=device)
    b = torch.ones_like(a)
    best = 0.0
    for work, size in (
        (lambda: b.copy_(a), 2 * a.nbytes),
        (lambda: a.sum(), a.nbytes),
        (lambda: torch.dot(a, b), 2 * a.nbytes),
    ):
        for _ in range(4):
            hardware.synchronize(device)
            start = time.perf_counter()
            work()
            hardware.synchronize(device)
            best = max(best, size / (time.perf_counter() - start))
    return best


def first_token(checkpoint: str) -> float:
    """Seconds from the start of generate.py to its first text."""
    start = time.perf_counter()
    command = [
        sys.executable,
        "generate.py",
        "--checkpoint",
        checkpoint,
        "--prompt",
        "def ",
        "--max_new_tokens",
        "20",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if not process.stdout.read(1):
            sys.exit(f"no text from {' '.join(command)}")
        return time.perf_counter() - start


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generate", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--nanogpt", metavar="PATH", help="checkout of nanoGPT to compare with")
    parser.add_argument(
        "--checkpoint",
        default="checkpoints/demo",
        help="a small run, for the time to the first token; default %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args(argv)
    device = hardware.find_device("auto")
    dtype = hardware.find_dtype(device, "auto")
    c = shape()
    model = GPT(c).eval()
    weights = sum(
        layer.weight.numel() for layer in model.modules() if isinstance(layer, torch.nn.Linear)
    )
    model.to(device, dtype)
    cpu_kernels.pack(model)
    others = {
        "transformers": transformers(c, device, dtype if device.type == "cuda" else torch.float32)
    }
    if device.type == "cpu":
        others["transformers in bfloat16"] = transformers(c, device, torch.bfloat16)
    if args.nanogpt:
        others["nanoGPT"] = nanogpt(args.nanogpt, c, device)
    short, long = list(range(1, 17)), list(range(1, 401))
    cache = (
        2
        * 4
        * c.n_layer
        * c.n_embd
        * len(long)
        * (1 if device.type == "cpu" else dtype.itemsize / 4)
    )
    rounds = []
    for n in range(args.rounds + 1):
        read = bandwidth(device)
        r = {
            "bandwidth_GB_per_s": read / 1e9,
            "floor": read / (weights * dtype.itemsize),
            "floor at 400": read / (weights * dtype.itemsize + cache),
            "ours": ours(model, short, 100),
            "ours at 400": ours(model, long, 50),
            "ours, eight": ours(model, short, 100, 8),
            "ours at 400, eight": ours(model, long, 25, 8),
        }
        for name, run in others.items():
            r |= {
                name: run(short, 12 if name == "nanoGPT" else 60),
                f"{name} at 400": run(long, 4 if name == "nanoGPT" else 30),
            }
        if Path(args.checkpoint).exists():
            r["first_token_s"] = first_token(args.checkpoint)
        if n:  # the first round warms up
            rounds.append({name: round(value, 3) for name, value in r.items()})
            print(
                f"round {n}: "
                + ", ".join(f"{name} {value:,.1f}" for name, value in rounds[-1].items()),
                flush=True,
            )
    ratios = {name: ("ours", name) for name in others} | {
        f"{name} at 400": ("ours at 400", f"{name} at 400") for name in others
    }
    ratios |= {"floor": ("ours", "floor"), "floor at 400": ("ours at 400", "floor at 400")}
    result = {
        "dtype": str(dtype),
        "model": vars(c),
        "rounds": rounds,
        "median": {
            name: round(statistics.median(r[name] for r in rounds), 2) for name in rounds[0]
        },
        "ours_over": {
            name: round(statistics.median(r[a] / r[b] for r in rounds), 3)
            for name, (a, b) in ratios.items()
        },
        "eight_over_one": round(statistics.median(r["ours, eight"] / r["ours"] for r in rounds), 2),
        "eight_over_one_at_400": round(
            statistics.median(r["ours at 400, eight"] / r["ours at 400"] for r in rounds), 2
        ),
    }
    print(
        json.dumps(
            {
                name: result[name]
                for name in ("median", "ours_over", "eight_over_one", "eight_over_one_at_400")
            },
            indent=1,
        )
    )
    write("generate", device, result)


if __name__ == "__main__":
    main(sys.argv[1:])
