"""Speeds a GPU reaches at GPT-2 Small's shapes: products, a copy, attention, and 30 whole steps.

    python -m benchmarks.rates [--key=value ...]

Attention is timed on slices of one tensor, as the model has them, with PyTorch's choice of kernels
and on a GPU with each of two. Each figure is written when it is known; profiles of the steps, with
the names of the kernels, come last. Further arguments are settings.
"""

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile

import config as settings
import hardware
from benchmarks import argument_parser, run_apart, run_main, seconds, write
from config import Config
from hardware import Device
from ops import causal_attention
from training.setup import build
from training.trainer import Trainer

VOCABULARY = 32000
PRESETS = ("config/gpt2_small.py", "config/gpt2_small_modern.py")


def warm_seconds(work: Callable, device: Device) -> float:
    """Seconds of one call of `work`, after three that warm up."""
    seconds(work, device.torch, 3)
    return seconds(work, device.torch)


def products(c: Config, device: Device) -> Iterator[tuple[str, float]]:
    """TFLOP/s of the four matrices' products, and TB/s of a copy."""
    tokens, width = c.batch_size * c.block_size, c.n_embd
    random = partial(torch.randn, device=device.torch, dtype=device.dtype)
    matrices = {
        "c_attn": (width, 3 * width),
        "c_fc": (width, 4 * width),
        "c_proj": (4 * width, width),
        "head": (width, VOCABULARY),
    }
    for name, (columns, rows) in matrices.items():
        x, w, g = random(tokens, columns), random(rows, columns), random(tokens, rows)
        works = {
            "forward": lambda x=x, w=w: x @ w.t(),
            "weight gradient": lambda x=x, g=g: g.t() @ x,
            "data gradient": lambda g=g, w=w: g @ w,
        }
        for what, work in works.items():
            rate = 2e-12 * tokens * rows * columns / warm_seconds(work, device)
            yield f"{name}, {what}, TFLOP/s", rate
    yield "copy, TB/s", 2e-12 * g.nbytes / warm_seconds(g.clone, device)


def attention(c: Config, device: Device) -> Iterator[tuple[str, float]]:
    """TFLOP/s of attention forward and backward, by heads and by kernels."""
    kernels = {"PyTorch's choice": contextlib.nullcontext}
    if device.type == "cuda":
        kernels["flash"] = partial(sdpa_kernel, SDPBackend.FLASH_ATTENTION)
        kernels["cuDNN"] = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    random = partial(torch.randn, device=device.torch, dtype=device.dtype)
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
                yield f"{label}, TFLOP/s", 2 * flops / warm_seconds(forward, device)
                yield f"{label}, backward, TFLOP/s", 5 * flops / warm_seconds(backward, device)


@contextlib.contextmanager
def trainer(arguments: list[str]) -> Iterator[Trainer]:
    """The trainer of a run in a folder that goes afterwards, compiled unless settings forbid it."""
    with tempfile.TemporaryDirectory() as folder:
        c = settings.load([*arguments, f"--checkpoint_dir={folder}/run"])
        made = build(c).trainer
        problem = made.prepare(compiles=c.compile is not False)
        assert not problem, problem
        yield made


def step_ms(arguments: list[str]) -> float:
    """Milliseconds of a training step, the mean of 30."""
    with trainer(arguments) as made:
        seconds(made.step, made.device.torch, 3)
        return 1e3 * seconds(made.step, made.device.torch, 30)


def profile_by_kernel(arguments: list[str]) -> str:
    """A table of two training steps by kernel."""
    with trainer(arguments) as made:
        made.step()
        with profile() as of_steps:
            made.step()
            made.step()
            hardware.synchronize(made.device.torch)
        by = "self_cpu_time_total" if made.device.type == "cpu" else "self_device_time_total"
        return of_steps.key_averages().table(by, row_limit=30)


def main(argv):
    _, extra = argument_parser("rates", __doc__).parse_known_args(argv)
    c = settings.load([PRESETS[0], *extra])
    device = hardware.open_device(c.device, c.dtype)
    figures = {}

    def keep(name, value):
        figures[name] = value
        print(f"{name}: {value:.4g}", flush=True)
        write("rates", {"figures": figures}, device.torch)

    for name, value in itertools.chain(products(c, device), attention(c, device)):
        keep(name, value)
    for preset in PRESETS:
        keep(f"{preset}, ms a step", run_apart(step_ms, [preset, *extra]))
    for preset in PRESETS:
        print(run_apart(profile_by_kernel, [preset, *extra]))


if __name__ == "__main__":
    run_main("rates", main)
