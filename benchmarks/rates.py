"""What a device reaches at GPT-2 Small's shapes: matrix products, a copy, attention.

    python -m benchmarks.rates [--key=value ...]

Knows no data and trains nothing: the speed of whole steps is what throughput measures. Further
arguments are settings, of which batch, width, heads, device and dtype count.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

import config as settings
import hardware
from benchmarks import argument_parser, run_main, write
from config import Config
from hardware import Device
from ops import causal_attention

VOCABULARY = 32000


def seconds(work: Callable, device: Device, times: int = 20) -> float:
    """Seconds of one call of `work`, after three that warm up."""
    for n in range(3 + times):
        if n == 3:
            hardware.synchronize(device.torch)
            begun = time.perf_counter()
        work()
    hardware.synchronize(device.torch)
    return (time.perf_counter() - begun) / times


def rates(c: Config, device: Device) -> Iterator[tuple[str, float]]:
    """Names and values: TFLOP/s, and TB/s of the copy."""
    tokens, width = c.batch_size * c.block_size, c.n_embd
    random = partial(torch.randn, device=device.torch, dtype=device.dtype)
    products = {
        "c_attn": (width, 3 * width),
        "c_fc": (width, 4 * width),
        "c_proj": (4 * width, width),
        "head": (width, VOCABULARY),
    }
    for name, (columns, rows) in products.items():
        x, w, g = random(tokens, columns), random(rows, columns), random(tokens, rows)
        flops = 2e-12 * tokens * rows * columns
        yield f"{name}, TFLOP/s", flops / seconds(lambda x=x, w=w: x @ w.t(), device)
        yield f"{name}, weight gradient", flops / seconds(lambda x=x, g=g: g.t() @ x, device)
        yield f"{name}, data gradient", flops / seconds(lambda g=g, w=w: g @ w, device)
    yield "copy, TB/s", 2e-12 * g.nbytes / seconds(g.clone, device)
    for heads in (c.n_head, c.n_head // 2):
        size = width // heads
        shape = (c.batch_size, heads, c.block_size, size)
        q, k, v = (random(shape, requires_grad=True) for _ in range(3))
        forward = partial(causal_attention, q, k, v, 0.0)
        y, g = forward(), random(shape)
        backward = partial(torch.autograd.grad, y, (q, k, v), g, retain_graph=True)
        flops = 1e-12 * q.numel() * c.block_size  # of a product, where half of the pairs count
        yield f"attention, heads of {size}", 2 * flops / seconds(forward, device)
        yield f"its backward, heads of {size}", 5 * flops / seconds(backward, device)


def main(argv):
    _, extra = argument_parser("rates", __doc__).parse_known_args(argv)
    c = settings.load(["config/gpt2_small.py", *extra])
    device = hardware.open_device(c.device, c.dtype)
    figures = {}
    for name, value in rates(c, device):
        figures[name] = value
        print(f"{name}: {value:.4g}", flush=True)
    write("rates", {"figures": figures}, device.torch)


if __name__ == "__main__":
    run_main("rates", main)
