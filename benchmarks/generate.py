"""Speed of generation compared with transformers' `generate`, nanoGPT's and llama.cpp.

    python -m benchmarks.generate [--nanogpt PATH] [--rounds 5] [--preset config/gpt2_small.py]
        [--name NAME] [--key=value ...]
    python -m benchmarks.generate --base FOLDER [--gguf FILE] --name NAME
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.generate --name NAME

At a preset's shape with random weights, or with those of FOLDER, in Hugging Face's format; FILE is
what tools.export makes of it, for llama.cpp, as the tests install it.

transformers runs with its cache. Each round runs every contender once, in one process, greedily: on
one sequence from 16 tokens and at 400 tokens of context, and ours on eight sequences too. A speed
counts the tokens after the first; ratios are taken round by round, without the first, which warms
up. On a CPU transformers runs in float32 too; such variables as above emulate a CPU with fewer
instructions. Further arguments are settings: --dtype=float32 for ours.
"""

import importlib.util
import json
import subprocess
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import ROOT, argument_parser, compare, in_turn, nanogpt, report, run_main
from command_line import count, place
from formats import huggingface, pretrained
from generating.cpu_kernels import pack
from generating.decode import generate, make_decoder
from model import GPT, GPTConfig
from training.start import model_shape

VOCABULARY = 32000
LLAMA_CPP = ROOT / ".venv" / "llama_cpp" / "complete.mjs"  # as `make .venv/llama_cpp` installs it
PROMPTS = {"from 16 tokens": 16, "at 400": 400}


# -- contenders: (prompt, new tokens) -> tokens/s --------------------------------------------------


def speed(stamps: list[float], rows: int) -> float:
    """Tokens/s of `rows` sequences after the first token. stamps: the moment of each."""
    return rows * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def ours(model: GPT, prompt: list[int], new: int, rows: int = 1) -> float:
    decoder = make_decoder(model, rows)
    write = partial(generate, model, [prompt] * rows, decoder=decoder, temperature=0)
    for _ in write(2):
        pass  # on a GPU the second token records a graph, which the decoder keeps
    return speed([time.perf_counter() for _ in write(new)], rows)


def theirs(model, run: Callable, prompt: list[int], new: int) -> float:
    """The speed of another's model. run: (idx, new tokens) writes."""
    stamps = []
    hook = model.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
    with torch.inference_mode():
        run(torch.tensor([prompt], device=next(model.parameters()).device), new)
    hook.remove()
    return speed(stamps, 1)


def transformers(c: GPTConfig, base: str | None, device, dtype: torch.dtype) -> Callable:
    """The model of `transformers`: that of `base`, or one of the same shape."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if base:
        model = AutoModelForCausalLM.from_pretrained(base)
    else:
        values = huggingface.config_values(c, c.vocab_size, None)  # no end: it does not end early
        shape = AutoConfig.for_model(**values, pad_token_id=0)
        model = AutoModelForCausalLM.from_config(shape)
    model = model.eval().to(device, dtype)

    def run(idx, new):
        mask, whole = torch.ones_like(idx), {"min_new_tokens": new, "max_new_tokens": new}
        model.generate(idx, attention_mask=mask, do_sample=False, **whole)

    return partial(theirs, model, run)


def of_nanogpt(path: Path, c: GPTConfig, device: torch.device) -> Callable:
    """The model of a checkout of nanoGPT, run as its sample.py does; fewer tokens, it is slow."""
    module = nanogpt.model_module(path)
    shape = {field.name: getattr(c, field.name) for field in fields(module.GPTConfig)}
    model = module.GPT(module.GPTConfig(**shape)).eval().to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def run(idx, new):
        with hardware.autocast(device, dtype):
            model.generate(idx, max(4, new // 6), top_k=1)

    return partial(theirs, model, run)


def llama_cpp(path: str, prompt: list[int], new: int) -> float:
    """llama.cpp with a GGUF file, on as many threads as ours. Its prompt has as many words."""
    words = [path, " the" * len(prompt), new, torch.get_num_threads()]
    command = ["node", LLAMA_CPP, *map(str, words)]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", check=True)
    return speed(json.loads(result.stdout)["stamps"], 1)


def contenders_of(
    model: GPT, args: Namespace, device: torch.device, dtype: torch.dtype
) -> dict[str, Callable]:
    """Each contender by name: a function of a prompt and the number of new tokens."""
    c = model.config
    contenders = {"ours": partial(ours, model), "ours, eight": partial(ours, model, rows=8)}
    if importlib.util.find_spec("transformers"):
        dtypes = {dtype, torch.float32} if device.type == "cpu" else {dtype}
        for each in dtypes:
            name = f"transformers in {str(each).removeprefix('torch.')}"
            contenders[name] = transformers(c, args.base, device, each)
    if args.nanogpt:
        contenders["nanoGPT"] = of_nanogpt(args.nanogpt, c, device)
    if args.gguf:
        contenders["llama.cpp"] = partial(llama_cpp, args.gguf)
    return contenders


# -- the command -----------------------------------------------------------------------------------


def main(argv):
    parser = argument_parser("generate", __doc__)
    nanogpt.add_option(parser)
    parser.add_argument("--preset", default="config/gpt2_small.py", help="the model's shape")
    parser.add_argument("--base", type=place, help="a folder in Hugging Face's format instead")
    parser.add_argument("--gguf", type=place, help="the same weights, for llama.cpp")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--name", default="generate", help="of the result file")
    args, extra = parser.parse_known_args(argv)
    config = settings.load([args.preset, *extra])
    device = hardware.find_device(config.device)
    dtype = hardware.find_dtype(device, config.dtype)
    if args.base:
        model = pretrained.load(args.base).model().eval()
    else:
        model = GPT(model_shape(config, VOCABULARY)).eval()
    shape = model.config
    if device.type == "cpu":  # as generate.py has it
        print("weights of ours, for one row and several:", *pack(model, config.dtype))
    else:
        model.to(device, dtype)
    speeds = contenders_of(model, args, device, dtype)
    figures, all_rounds = {}, {}
    for where, length in PROMPTS.items():
        prompt = list(range(1, length + 1))
        contenders = {name: partial(speed_of, prompt, 60) for name, speed_of in speeds.items()}
        all_rounds[where] = in_turn(contenders, args.rounds + 1)[1:]
        for name, value in compare(all_rounds[where], "ours").items():
            figures[f"{where}: {name}"] = value
    report(args.name, figures, device, model=vars(shape), rounds=all_rounds)


if __name__ == "__main__":
    run_main("generate", main)
