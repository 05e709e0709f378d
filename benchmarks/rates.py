"""Speeds a GPU reaches at GPT-2 Small's shapes: matrix products, a copy and attention.

    python -m benchmarks.rates [--key=value ...]

Attention is timed on slices of one tensor, as the model has them, with PyTorch's choice of kernels
and on a GPU with each of two. Each figure is written when it is known; the profiles of two steps,
with the names of the kernels, come last. Further arguments are settings.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

import config as settings
import hardware
from benchmarks import argument_parser, open_trainer, run_apart, run_main, seconds, write
from config import Config
from model import causal_attention

VOCABULARY = 32000
PRESETS = ("config/gpt2_small.py", "config/gpt2_small_modern.py")


def products(c: Config, random: Callable, device: torch.device) -> Iterator[tuple[str, float]]:
    """TFLOP/s of the four matrices' products, and TB/s of a copy."""
    tokens, width = c.batch_size * c.block_size, c.n_embd
    matrices = {
        "c_attn": (width, 3 * width),
        "c_fc": (width, 4 * width),
        "c_proj": (4 * width, width),
        "head": (width, VOCABULARY),
    }
    for name, (columns, rows) in matrices.items():
        x, w, g = random(tokens, columns), random(rows, columns), random(tokens, rows)
        works = {
            "forward": partial(torch.mm, x, w.t()),
            "weight gradient": partial(torch.mm, g.t(), x),
            "data gradient": partial(torch.mm, g, w),
        }
        for what, work in works.items():
            rate = 2e-12 * tokens * rows * columns / seconds(work, device)
            yield f"{name}, {what}, TFLOP/s", rate
    yield "copy, TB/s", 2e-12 * g.nbytes / seconds(g.clone, device)


def attention(c: Config, random: Callable, device: torch.device) -> Iterator[tuple[str, float]]:
    """TFLOP/s of attention forward and backward, by heads and by kernels."""
    kernels = {"PyTorch's choice": contextlib.nullcontext}
    if device.type == "cuda":
        kernels["flash"] = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        kernels["cuDNN"] = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    for heads in (c.n_head, c.n_head // 2):
        size = c.n_embd // heads
        qkv = random(c.batch_size, c.block_size, 3, heads, size, requires_grad=True)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        flops = 1e-12 * q.numel() * c.block_size  # of a product, where half of the pairs count
        forward = partial(causal_attention, q, k, v, 0.0)
        for name, only in kernels.items():
            with contextlib.suppress(RuntimeError), only():  # a GPU without this kernel
                y = forward()
                backward = partial(torch.autograd.grad, y, qkv, torch.ones_like(y), True)
                label = f"attention by {name}, heads of {size}"
                yield f"{label}, TFLOP/s", 2 * flops / seconds(forward, device)
                yield f"{label}, backward, TFLOP/s", 5 * flops / seconds(backward, device)


def profile_by_kernel(arguments: list[str]) -> str:
    """The micro-batch of a run, and a table of two training steps by kernel."""
    trainer = open_trainer(arguments)
    device = trainer.device.torch
    trainer.step()
    with profile() as of_steps:
        trainer.step()
        trainer.step()
        hardware.synchronize(device)
    by = "self_cpu_time_total" if device.type == "cpu" else "self_device_time_total"
    table = of_steps.key_averages().table(by, row_limit=30)
    return f"{arguments[0]}, micro-batches of {trainer.micro_batch}\n{table}"


def main(argv):
    _, extra = argument_parser("rates", __doc__).parse_known_args(argv)
    c, figures = settings.load([PRESETS[0], *extra]), {}
    device = hardware.find_device(c.device)
    random = partial(torch.randn, device=device, dtype=hardware.find_dtype(device, c.dtype))
    for name, value in itertools.chain(products(c, random, device), attention(c, random, device)):
        figures[name] = value
        print(f"{name}: {value:.4g}", flush=True)
        write("rates", {"figures": figures}, device)
    hardware.release_memory(device)  # another process profiles
    for preset in PRESETS:
        print(run_apart(profile_by_kernel, [preset, *extra]), flush=True)


if __name__ == "__main__":
    run_main("rates", main)
