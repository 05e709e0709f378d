"""What a GPU does at our shapes, in some 90 seconds and one process.

    python -m benchmarks.rates [--device cuda] [--key=value ...]

Rates of matrix products, of a copy and of attention at GPT-2 Small's shapes, then 30 compiled steps
of gpt2_small and gpt2_small_fast on random tokens, with the 40 kernels that take the longest.
Results are written after each measurement. Further arguments are settings.
"""

import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.profiler import ProfilerActivity, profile

import config as settings
import hardware
from benchmarks import RESULTS, argument_parser, machine, run_main
from config import Config
from formats.files import write_json
from hardware import Device
from model import GPT
from ops import causal_attention
from training import fp8
from training.adapt import adapt
from training.optimizer import make_optimizer, optimizer_step
from training.setup import model_shape
from training.step import compile_whole, forward_backward

PRESETS = ["config/gpt2_small.py", "config/gpt2_small_fast.py"]
VOCABULARY = 32000
STEPS, PROFILED, KERNELS = 30, 3, 40


def seconds(work: Callable, device: Device, times: int = 20) -> float:
    """Seconds of one call of `work`, which is warmed up before."""
    for n in range(3 + times):
        if n == 3:
            hardware.synchronize(device.torch)
            begun = time.perf_counter()
        work()
    hardware.synchronize(device.torch)
    return (time.perf_counter() - begun) / times


def rates(c: Config, device: Device) -> Iterator[tuple[str, float]]:
    """Names and values of what is measured without a model."""
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
        yield f"{name}'s gradient, TFLOP/s", flops / seconds(lambda x=x, g=g: g.t() @ x, device)
    if device.type == "cuda" and not fp8.trial(device.torch):
        x8, w8 = (fp8.to_float8(t, fp8.E4M3) for t in (x, w))
        yield (
            "head in 8 bits, TFLOP/s",
            flops / seconds(lambda: fp8.scaled_product(*x8, *w8), device),
        )
    yield "copy, TB/s", 2e-12 * g.nbytes / seconds(g.clone, device)
    for heads in (c.n_head, c.n_head // 2):
        size = width // heads
        shape = (c.batch_size, heads, c.block_size, size)
        q, k, v = (random(shape, requires_grad=True) for _ in range(3))
        forward = partial(causal_attention, q, k, v, 0.0)
        y, g = forward(), random(shape)
        backward = partial(torch.autograd.grad, y, (q, k, v), g, retain_graph=True)
        flops = 1e-12 * q.numel() * c.block_size  # of a product, where half of the pairs count
        yield f"attention, heads of {size}, TFLOP/s", 2 * flops / seconds(forward, device)
        yield f"its backward, heads of {size}, TFLOP/s", 5 * flops / seconds(backward, device)


def steps(c: Config, device: Device) -> tuple[dict[str, float], Callable]:
    """Figures of a preset's compiled steps, and a step."""
    torch.manual_seed(0)
    model = GPT(model_shape(c, VOCABULARY), c.zero_init)
    adapt(model, c, device)
    model = model.to(device.torch)
    optimizer = make_optimizer(model, c, device.torch)
    scaler = torch.amp.GradScaler(device.type, enabled=device.dtype == torch.float16)
    chunk = torch.randint(VOCABULARY, (c.batch_size, c.block_size + 1), device=device.torch)
    forward = model if c.compile is False else compile_whole(model)  # "max" takes minutes

    def step():
        cast = partial(hardware.autocast, device.torch, device.dtype)
        size = c.micro_batch_size or c.batch_size
        forward_backward(forward, chunk[:, :-1], chunk[:, 1:], size, cast, scaler)
        optimizer_step(model, optimizer, scaler, 1e-4, c.grad_clip)

    begun = time.perf_counter()
    step()
    hardware.synchronize(device.torch)
    figures = {"s to the first step": time.perf_counter() - begun}
    step_s = seconds(step, device, STEPS)
    figures["ms a step"] = 1e3 * step_s
    if device.peak_flops:
        flops = model.flops_per_token() * c.batch_size * c.block_size
        figures["MFU"] = flops / step_s / device.peak_flops
    return figures, step


def longest_kernels(step: Callable, device: Device) -> list[tuple[str, float, float]]:
    """The kernels that take the longest: name, launches a step, ms a step."""
    on_gpu = device.type == "cuda"
    activity = ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU
    with profile(activities=[activity]) as profiled:
        for _ in range(PROFILED):
            step()
        hardware.synchronize(device.torch)
    took = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    found = sorted(profiled.key_averages(), key=lambda kernel: -getattr(kernel, took))
    return [
        (kernel.key[:120], kernel.count / PROFILED, getattr(kernel, took) / 1e3 / PROFILED)
        for kernel in found[:KERNELS]
    ]


def main(argv):
    parser = argument_parser("rates", __doc__)
    parser.add_argument("--device", default="auto")
    args, extra = parser.parse_known_args(argv)
    torch.set_float32_matmul_precision("high")
    device = hardware.open_device(args.device, "auto", 0)
    RESULTS.mkdir(exist_ok=True)
    result = machine(device.torch) | {"figures": {}, "kernels": {}}

    def keep(name: str, value: float) -> None:
        result["figures"][name] = value
        write_json(RESULTS / f"rates_{device.type}.json", result)
        print(f"{name}: {value:.4g}", flush=True)

    for name, value in rates(settings.load([PRESETS[0], *extra]), device):
        keep(name, value)
    for preset in PRESETS:
        name = preset.removeprefix("config/").removesuffix(".py")
        figures, step = steps(settings.load([preset, *extra]), device)
        for what, value in figures.items():
            keep(f"{name}: {what}", value)
        result["kernels"][name] = longest_kernels(step, device)
        kernels = result["kernels"][name]
        keep(f"{name}: ms of its {KERNELS} longest kernels", sum(ms for _, _, ms in kernels))
        del step  # its model makes room for the next


if __name__ == "__main__":
    run_main(main)
