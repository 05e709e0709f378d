"""Speed of generation compared with transformers' `generate` and nanoGPT's, at GPT-2 Small's shape.

    python -m benchmarks.generate [--nanogpt PATH] [--checkpoint checkpoints/demo] [--rounds 5]
        [--preset config/gpt2_small.py] [--key=value ...]
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 python -m benchmarks.generate --name avx2

transformers runs with its cache. Each round runs every contender once, in one process, greedily: on
one sequence from 16 tokens and at 400 tokens of context, and ours on eight sequences too. A speed
counts the tokens after the first; ratios are taken round by round. A small checkpoint gives the
time from the start of generate.py to its first text. On a CPU --dtype float32 is measured too; such
variables as above emulate a CPU with fewer instructions.
"""

import copy
import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import (
    ROOT,
    argument_parser,
    in_turn,
    median_ratio,
    medians,
    nanogpt,
    run_main,
    write,
)
from generating.cpu_kernels import pack
from generating.decode import generate
from generating.decoder import make_decoder
from model import GPT, GPTConfig
from tools.command import count, table
from training.start import model_shape

VOCABULARY = 32000
SHORT, LONG = range(1, 17), range(1, 401)  # the ids of two prompts
FIRST_TEXT = "seconds to the first text"


# -- contenders: (prompt, new tokens) -> tokens/s --------------------------------------------------


def speed(stamps: list[float], rows: int) -> float:
    """Tokens/s of `rows` sequences after the first token. stamps: the moment of each."""
    return rows * (len(stamps) - 1) / (stamps[-1] - stamps[0])


def ours(model: GPT, prompt: range, new: int, rows: int = 1) -> float:
    decoder = make_decoder(model, rows)
    write = partial(generate, model, [list(prompt)] * rows, decoder=decoder, temperature=0)
    for _ in write(2):
        pass  # on a GPU the second token records a graph, which the decoder keeps
    return speed([time.perf_counter() for _ in write(new)], rows)


def theirs(model, run: Callable, prompt: range, new: int) -> float:
    """The speed of another's model. run: (idx, new tokens) writes."""
    stamps = []
    hook = model.register_forward_hook(lambda *_: stamps.append(time.perf_counter()))
    with torch.inference_mode():
        run(torch.tensor([list(prompt)], device=next(model.parameters()).device), new)
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

    def run(idx, new):
        mask = torch.ones_like(idx)
        options = {"do_sample": False, "use_cache": True}
        model.generate(idx, attention_mask=mask, max_new_tokens=new, **options)

    return partial(theirs, model, run)


def of_nanogpt(path: Path, c: GPTConfig, device: torch.device) -> Callable:
    """The model of a checkout of nanoGPT, run as its sample.py does; fewer tokens, it is slow."""
    module = nanogpt.model_module(path)
    names = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "bias")
    same = module.GPTConfig(**{name: getattr(c, name) for name in names})
    model = module.GPT(same).eval().to(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def run(idx, new):
        with hardware.autocast(device, dtype):
            model.generate(idx, max(4, new // 6), top_k=1)

    return partial(theirs, model, run)


def others(c: GPTConfig, device: torch.device, dtype: torch.dtype, path: Path | None) -> dict:
    """The contenders of ours, by name. dtype: ours. path: of a checkout of nanoGPT."""
    found = {}
    if c.arch == "gpt2" and importlib.util.find_spec("transformers"):
        on_cpu = device.type == "cpu"
        found["transformers"] = transformers(c, device, torch.float32 if on_cpu else dtype)
        # Where a CPU emulates bfloat16, a prompt takes transformers minutes.
        if on_cpu and dtype == torch.bfloat16:
            found["transformers in bfloat16"] = transformers(c, device, dtype)
    if path:
        found["nanoGPT"] = of_nanogpt(path, c, device)
    return found


def contenders_of(
    c: GPTConfig, device: torch.device, checkpoint: Path, path: Path | None
) -> tuple[dict[str, Callable], dict[str, str]]:
    """What each round measures, by name, and on a CPU what our weights are kept in."""
    dtype = hardware.find_dtype(device, "auto")
    model = GPT(c).eval()
    contenders, formats = {}, {}
    if device.type == "cpu":
        exact = copy.deepcopy(model)
        pack(exact, "float32")
        contenders["ours in float32"] = partial(ours, exact, SHORT, 60)
        formats = dict(zip(("one_row", "several"), pack(model), strict=True))
    else:
        model = model.to(device, dtype)
    contenders["ours"] = partial(ours, model, SHORT, 100)
    contenders["ours at 400"] = partial(ours, model, LONG, 50)
    contenders["ours, eight"] = partial(ours, model, SHORT, 100, rows=8)
    contenders["ours at 400, eight"] = partial(ours, model, LONG, 25, rows=8)
    for name, other in others(c, device, dtype, path).items():
        contenders[name] = partial(other, SHORT, 60)
        contenders[f"{name} at 400"] = partial(other, LONG, 30)
    if checkpoint.exists():
        contenders[FIRST_TEXT] = partial(first_text_s, checkpoint)
    return contenders, formats


def first_text_s(checkpoint: Path) -> float:
    """Seconds from the start of generate.py to its first text."""
    words = [sys.executable, "generate.py", "--checkpoint", str(checkpoint)]
    words += ["--prompt", "def ", "--max_new_tokens", "20"]
    pipe = subprocess.PIPE
    start = time.perf_counter()
    with subprocess.Popen(words, cwd=ROOT, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        if not process.stdout.read(1):
            sys.exit(f"no text from {' '.join(words)}")
        return time.perf_counter() - start


# -- the command -----------------------------------------------------------------------------------


def main(argv):
    parser = argument_parser("generate", __doc__)
    nanogpt.add_option(parser)
    parser.add_argument(
        "--checkpoint",
        type=Path,
        default="checkpoints/demo",
        help="a small run, for the time to the first text; default %(default)s",
    )
    parser.add_argument("--preset", default="config/gpt2_small.py", help="the model's shape")
    parser.add_argument("--rounds", type=count, default=5)
    parser.add_argument("--name", help="of the kind of CPU: written to generate_NAME_cpu.json")
    args, extra = parser.parse_known_args(argv)
    config = settings.load([args.preset, *extra])
    device = hardware.find_device(config.device)
    shape = model_shape(config, VOCABULARY)
    contenders, formats = contenders_of(shape, device, args.checkpoint, args.nanogpt)
    rounds = in_turn(contenders, args.rounds + 1, lambda value: f"{value:.1f}")[1:]

    figures = medians(rounds)
    for name in rounds[0]:
        one = "ours at 400" if "at 400" in name else "ours"
        if "eight" in name:
            figures[f"{name}: times one sequence"] = median_ratio(rounds, name, one)
        elif not name.startswith(("ours", FIRST_TEXT)):
            figures[f"times {name}"] = median_ratio(rounds, one, name)
    print("\nmedians without the first round, which warms up")
    rows = [[name, f"{value:.2f}"] for name, value in figures.items()]
    print(table(["tokens/s, and ratios", ""], rows))
    name = f"generate_{args.name}" if args.name else "generate"
    write(name, formats | {"figures": figures, "model": vars(shape), "rounds": rounds}, device)


if __name__ == "__main__":
    run_main("generate", main)
