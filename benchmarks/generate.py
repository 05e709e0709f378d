"""Speed of generation compared with transformers' `generate` and nanoGPT's, at GPT-2 Small's shape.

    python -m benchmarks.generate [--nanogpt PATH] [--checkpoint checkpoints/demo] [--rounds 5]
        [--preset config/gpt2_small.py]
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.generate --name avx2

transformers runs with its cache. Each round runs every contender once, in one process, greedily: on
one sequence from 16 tokens and at 400 tokens of context, and ours on eight sequences too. A speed
counts the tokens after the first; ratios are taken round by round. The floor is the time to read
the weights once (and at 400 tokens the cache) at the bandwidth that the machine shows in the same
round. A small checkpoint gives the time from the start of generate.py to its first text. On a CPU
--dtype float32 is measured too; such variables as above emulate a CPU with fewer instructions.
"""

import copy
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import ROOT, argument_parser, bandwidth, median_ratio, medians, run_main, write
from benchmarks.nanogpt import add_option, model_module
from generating import decode
from generating.cpu_kernels import pack
from model import GPT, GPTConfig
from tools.command import count
from training.setup import model_shape

SHORT = list(range(1, 17))  # the prompts: ids of 16 tokens
LONG = list(range(1, 401))  # and of 400


# -- contenders: (prompt, new tokens) -> tokens/s --------------------------------------------------


def speed(stamps: list[float], rows: int) -> float:
    """Tokens/s of `rows` sequences after the first token. stamps: the moment of each."""
    return rows * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def ours(model: GPT, prompt: list[int], new: int, rows: int = 1) -> float:
    for _ in decode.generate(model, [prompt] * rows, 2, temperature=0):
        pass  # on a GPU the second token records a graph, which is kept for as many rows
    written = decode.generate(model, [prompt] * rows, new, temperature=0)
    return speed([time.perf_counter() for _ in written], rows)


def theirs(model, generate: Callable, prompt: list[int], new: int) -> float:
    """The speed of another's model. generate: (idx, new tokens) runs it."""
    stamps = []
    hook = model.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
    with torch.inference_mode():
        generate(torch.tensor([prompt], device=next(model.parameters()).device), new)
    hook.remove()
    return speed(stamps, 1)


def transformers(c: GPTConfig, device: torch.device, dtype: torch.dtype) -> Callable:
    """GPT-2 of `transformers`, of the same shape."""
    from transformers import GPT2Config, GPT2LMHeadModel

    same = GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.block_size,
        n_embd=c.n_embd,
        n_layer=c.n_layer,
        n_head=c.n_head,
        tie_word_embeddings=c.tie_weights,
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(same).eval().to(device, dtype)

    def generate(idx, new):
        mask = torch.ones_like(idx)
        options = {"do_sample": False, "use_cache": True}
        model.generate(idx, attention_mask=mask, max_new_tokens=new, **options)

    return partial(theirs, model, generate)


def nanogpt(path: Path, c: GPTConfig, device: torch.device) -> Callable:
    """The model of a checkout of nanoGPT, run as its sample.py does; fewer tokens, it is slow."""
    module = model_module(path)
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias")
    same = module.GPTConfig(**{name: getattr(c, name) for name in names})
    model = module.GPT(same).eval().to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def generate(idx, new):
        with hardware.autocast(device, dtype):
            model.generate(idx, max(4, new // 6), top_k=1)

    return partial(theirs, model, generate)


def others(
    c: GPTConfig, device: torch.device, dtype: torch.dtype, path: str | None
) -> dict[str, Callable]:
    """Whom ours is compared with, by name. dtype: ours. path: of a checkout of nanoGPT."""
    found = {}
    if c.arch == "gpt2" and importlib.util.find_spec("transformers"):
        on_cpu = device.type == "cpu"
        found["transformers"] = transformers(c, device, torch.float32 if on_cpu else dtype)
        # Where a CPU emulates bfloat16, a prompt takes transformers minutes.
        if on_cpu and hardware.find_dtype(device, "auto") == torch.bfloat16:
            found["transformers in bfloat16"] = transformers(c, device, torch.bfloat16)
    if path:
        found["nanoGPT"] = nanogpt(path, c, device)
    return found


def first_token(checkpoint: str) -> float:
    """Seconds from the start of generate.py to its first text."""
    words = [sys.executable, "generate.py", "--checkpoint", checkpoint]
    words += ["--prompt", "def ", "--max_new_tokens", "20"]
    start = time.perf_counter()
    with subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        if not process.stdout.read(1):
            sys.exit(f"no text from {' '.join(words)}")
        return time.perf_counter() - start


# -- the command -----------------------------------------------------------------------------------


def our_models(c: GPTConfig, device: torch.device) -> tuple[dict, dict, torch.dtype]:
    """Our model by name, what its weights are kept in on a CPU, and the dtype for one sequence."""
    model = GPT(c).eval()
    if device.type != "cpu":
        dtype = hardware.find_dtype(device, "auto")
        return {"ours": model.to(device, dtype)}, {}, dtype
    exact = copy.deepcopy(model)
    pack(exact, "float32")
    formats = dict(zip(("one_row", "several"), pack(model), strict=True))
    models = {"ours": model, "ours in float32": exact}
    return models, formats, hardware.DTYPES[formats["one_row"]]


def floor_bytes(c: GPTConfig, dtype: torch.dtype, device: torch.device) -> dict[str, int]:
    """Bytes that a token cannot do without reading: the weights, and at 400 tokens the cache."""
    with torch.device("meta"):
        layers = [m for m in GPT(c).modules() if isinstance(m, torch.nn.Linear)]
    weights = dtype.itemsize * sum(layer.weight.numel() for layer in layers)
    cached = 4 if device.type == "cpu" else dtype.itemsize  # bytes of a number in the cache
    cache = 2 * c.n_layer * c.n_embd * len(LONG) * cached
    return {"floor": weights, "floor at 400": weights + cache}


def measure(models: dict, compared: dict, floors: dict, device: torch.device) -> dict[str, float]:
    """One round: tokens/s by name, and the memory's bandwidth."""
    read = bandwidth(device)
    model = models["ours"]
    speeds = {
        "bandwidth_GB_per_s": read / 1e9,
        **{name: read / size for name, size in floors.items()},
        "ours": ours(model, SHORT, 100),
        "ours at 400": ours(model, LONG, 50),
        "ours, eight": ours(model, SHORT, 100, rows=8),
        "ours at 400, eight": ours(model, LONG, 25, rows=8),
    }
    if "ours in float32" in models:
        speeds["ours in float32"] = ours(models["ours in float32"], SHORT, 60)
    for name, other in compared.items():
        speeds[name] = other(SHORT, 60)
        speeds[f"{name} at 400"] = other(LONG, 30)
    return speeds


def main(argv):
    parser = argument_parser("generate", __doc__)
    add_option(parser)
    parser.add_argument(
        "--checkpoint",
        default="checkpoints/demo",
        help="a small run, for the time to the first text; default %(default)s",
    )
    parser.add_argument("--preset", default="config/gpt2_small.py", help="the model's shape")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--name", help="of the kind of CPU: written to generate_NAME_cpu.json")
    args = parser.parse_args(argv)
    device = hardware.find_device("auto")
    c = model_shape(settings.load([args.preset]), 32000)  # 134M
    models, formats, dtype = our_models(c, device)
    compared = others(c, device, dtype, args.nanogpt)
    floors = floor_bytes(c, dtype, device)

    rounds = []
    for n in range(args.rounds + 1):
        speeds = measure(models, compared, floors, device)
        if Path(args.checkpoint).exists():
            speeds["first_token_s"] = first_token(args.checkpoint)
        if n == 0:
            continue  # it warms up
        rounds.append({name: round(value, 3) for name, value in speeds.items()})
        print(f"round {n}: {rounds[-1]}", flush=True)

    over = {}
    for name in [*compared, "floor"]:
        over[name] = round(median_ratio(rounds, "ours", name), 3)
        over[f"{name} at 400"] = round(median_ratio(rounds, "ours at 400", f"{name} at 400"), 3)
    eight_at_400 = median_ratio(rounds, "ours at 400, eight", "ours at 400")
    figures = {"tokens/s, one sequence": medians(rounds)["ours"]}
    for other, label in (("nanoGPT", "nanoGPT's"), ("transformers", "transformers'")):
        least = [ratio for name, ratio in over.items() if name.startswith(other)]
        if least:
            figures[f"times {label} tokens/s"] = min(least)
    found = {
        "figures": figures,
        "median": medians(rounds),
        "ours_over": over,
        "eight_over_one": round(median_ratio(rounds, "ours, eight", "ours"), 2),
        "eight_over_one_at_400": round(eight_at_400, 2),
    }
    print(json.dumps(found, indent=1))
    name = f"generate_{args.name}" if args.name else "generate"
    write(name, formats | {"model": vars(c), "rounds": rounds} | found, device)


if __name__ == "__main__":
    run_main(main)
