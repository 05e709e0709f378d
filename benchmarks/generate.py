"""Speed of generation beside transformers' `generate` and nanoGPT's, at the shape of GPT-2 Small.

    python -m benchmarks.generate [--nanogpt PATH] [--checkpoint checkpoints/demo] [--rounds 5]
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.generate --name avx2

transformers runs with its cache. Each round runs every contender in turn, in one process, greedily:
on one sequence from 16 tokens and at 400 tokens of context, and ours on eight sequences too. A
speed counts the tokens after the first. Ratios are taken round by round. The floor is the time to
read the weights once (and at 400 tokens the cache) at the bandwidth that this machine shows in the
same round. Beside that, the time from the start of generate.py to the first text of a small
checkpoint. On a CPU --dtype float32 is measured too; such variables as above emulate a CPU that has
fewer instructions.
"""

import copy
import functools
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import hardware
from benchmarks import (
    argument_parser,
    bandwidth,
    gpt2_small,
    median_ratio,
    medians,
    multiplies_bfloat16,
    write,
)
from benchmarks.nanogpt import model_module
from generating import decode
from generating.cpu_kernels import pack
from model import GPT, GPTConfig

SHORT = list(range(1, 17))  # the prompts: ids of 16 tokens
LONG = list(range(1, 401))  # and of 400


@dataclass
class Contender:
    """Another's model. run: prompt, new tokens -> tokens/s.

    new_short, new_long: how many tokens it writes after either prompt; slow ones write fewer.
    """

    run: Callable[[list[int], int], float]
    new_short: int = 60
    new_long: int = 30


def speed(stamps: list[float], rows: int) -> float:
    """Tokens/s of `rows` sequences after the first token.

    stamps: the moments, in seconds, at which a token of each was there.
    """
    return rows * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def ours(model, prompt: list[int], new: int, rows: int = 1) -> float:
    """Tokens/s of decode.generate."""
    written = decode.generate(model, [prompt] * rows, new, temperature=0)
    return speed([time.perf_counter() for _ in written], rows)


def theirs(model, generate, prompt: list[int], new: int) -> float:
    """Tokens/s of another's model, one sequence; generate(idx, new) runs it."""
    stamps = []
    hook = model.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
    with torch.inference_mode():
        generate(torch.tensor([prompt], device=next(model.parameters()).device), new)
    hook.remove()
    return speed(stamps, 1)


def transformers(c: GPTConfig, device: torch.device, dtype: torch.dtype) -> Contender:
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
        model.generate(
            idx,
            attention_mask=torch.ones_like(idx),
            max_new_tokens=new,
            do_sample=False,
            use_cache=True,
        )

    return Contender(functools.partial(theirs, model, generate))


def nanogpt(path: str, c: GPTConfig, device: torch.device) -> Contender:
    """The model of a checkout of nanoGPT, run as its sample.py does."""
    module = model_module(path)
    same = module.GPTConfig(
        block_size=c.block_size,
        vocab_size=c.vocab_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        dropout=0.0,
        bias=c.bias,
    )
    model = module.GPT(same).eval().to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def generate(idx, new):
        with hardware.autocast(device, dtype):
            model.generate(idx, new, top_k=1)

    return Contender(functools.partial(theirs, model, generate), new_short=12, new_long=4)


def contenders(
    c: GPTConfig, device: torch.device, dtype: torch.dtype, nanogpt_path: str | None
) -> dict[str, Contender]:
    """Whom ours is compared with, by name."""
    on_gpu = device.type == "cuda"
    others = {}
    if importlib.util.find_spec("transformers"):
        others["transformers"] = transformers(c, device, dtype if on_gpu else torch.float32)
    # Where a CPU does not multiply in bfloat16, prompts take transformers minutes.
    if others and not on_gpu and multiplies_bfloat16(device):
        others["transformers in bfloat16"] = transformers(c, device, torch.bfloat16)
    if nanogpt_path:
        others["nanoGPT"] = nanogpt(nanogpt_path, c, device)
    return others


def first_token(checkpoint: str) -> float:
    """Seconds from the start of generate.py to its first text."""
    command = [sys.executable, "generate.py", "--checkpoint", checkpoint]
    command += ["--prompt", "def ", "--max_new_tokens", "20"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        if not process.stdout.read(1):
            sys.exit(f"no text from {' '.join(command)}")
        return time.perf_counter() - start


def number_of_weights(model) -> int:
    """How many are read for a token: those of all Linear layers."""
    linear = [layer for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    return sum(layer.weight.numel() for layer in linear)


def our_models(
    model: GPT, device: torch.device, dtype: torch.dtype
) -> tuple[dict[str, GPT], tuple[str, str]]:
    """Ours as generate.py runs it, by name, on a CPU also in float32; its choice of formats.

    The formats are those of one row and of several, by the names of cpu_kernels.
    """
    if device.type != "cpu":
        return {"ours": model.to(device, dtype)}, (str(dtype), str(dtype))
    exact = copy.deepcopy(model)
    pack(exact, "float32")
    formats = pack(model)
    return {"ours": model, "ours in float32": exact}, formats


def bytes_of_cache(c: GPTConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """What is read besides: keys and values of so many tokens, in float32 on a CPU."""
    itemsize = 4 if device.type == "cpu" else dtype.itemsize
    return 2 * c.n_layer * c.n_embd * tokens * itemsize


def one_round(
    models: dict[str, GPT], others: dict[str, Contender], device, weights, cache
) -> dict[str, float]:
    """Every speed once, in tokens/s. weights, cache: bytes read for a token."""
    model = models["ours"]
    read = bandwidth(device)
    speeds = {
        "bandwidth_GB_per_s": read / 1e9,
        "floor": read / weights,
        "floor at 400": read / (weights + cache),
        "ours": ours(model, SHORT, 100),
        "ours at 400": ours(model, LONG, 50),
        "ours, eight": ours(model, SHORT, 100, rows=8),
        "ours at 400, eight": ours(model, LONG, 25, rows=8),
    }
    for name in list(models)[1:]:
        speeds[name] = ours(models[name], SHORT, 60)
    for name, other in others.items():
        speeds[name] = other.run(SHORT, other.new_short)
        speeds[f"{name} at 400"] = other.run(LONG, other.new_long)
    return speeds


def summary(rounds: list[dict[str, float]], names: list[str]) -> dict:
    """Medians of the speeds, and of their ratios within a round. names: of the others."""
    over = {}
    for name in [*names, "floor"]:
        over[name] = round(median_ratio(rounds, "ours", name), 3)
        over[f"{name} at 400"] = round(median_ratio(rounds, "ours at 400", f"{name} at 400"), 3)
    eight, eight_at_400 = "ours, eight", "ours at 400, eight"
    return {
        "median": {name: round(speed, 2) for name, speed in medians(rounds).items()},
        "ours_over": over,
        "eight_over_one": round(median_ratio(rounds, eight, "ours"), 2),
        "eight_over_one_at_400": round(median_ratio(rounds, eight_at_400, "ours at 400"), 2),
    }


def main(argv):
    """The command line's work."""
    parser = argument_parser("generate", __doc__)
    parser.add_argument("--nanogpt", metavar="PATH", help="checkout of nanoGPT to compare with")
    parser.add_argument(
        "--checkpoint",
        default="checkpoints/demo",
        help="a small run, for the time to the first token; default %(default)s",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", help="of the kind of CPU: written to generate_NAME_cpu.json")
    args = parser.parse_args(argv)
    device = hardware.find_device("auto")
    dtype = hardware.find_dtype(device, "auto")

    c = gpt2_small()
    model = GPT(c).eval()
    weights = number_of_weights(model)
    models, (one_row, several) = our_models(model, device, dtype)
    record = {"one_row": one_row, "several": several}
    if device.type == "cpu":
        dtype = hardware.DTYPES[one_row]
    weights *= dtype.itemsize  # in bytes from here on
    cache = bytes_of_cache(c, len(LONG), device, dtype)
    others = contenders(c, device, dtype, args.nanogpt)

    rounds = []
    for n in range(args.rounds + 1):
        speeds = one_round(models, others, device, weights, cache)
        if Path(args.checkpoint).exists():
            speeds["first_token_s"] = first_token(args.checkpoint)
        if n == 0:
            continue  # it warms up
        rounds.append({name: round(value, 3) for name, value in speeds.items()})
        shown = ", ".join(f"{name} {value:,.1f}" for name, value in rounds[-1].items())
        print(f"round {n}: {shown}", flush=True)

    found = summary(rounds, list(others))
    print(json.dumps(found, indent=1))
    name = f"generate_{args.name}" if args.name else "generate"
    write(name, device, record | {"model": vars(c), "rounds": rounds} | found)


if __name__ == "__main__":
    main(sys.argv[1:])
