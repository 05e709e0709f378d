"""What backs every performance claim, run as `python -m benchmarks.NAME`.

Each benchmark writes its result to results/ as JSON, with the machine that it is of. What they have
in common stands here: contenders that take turns, ratios round by round, runs of train.py, tables.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

import config
import hardware
from formats import run_log
from model import GPTConfig
from tools import command

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
# What makes one kind of CPU differ from another, on x86 and on Arm.
INSTRUCTIONS = {
    *("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_bf16", "amx_int8", "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve"),
}
# Variables that keep libraries from instructions, to play another kind of CPU.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
# What train.py says where it does without something that was asked of it.
WITHOUT = ("so without it", "goes on without it", "stay in 16 bits", "out of memory with")


def argument_parser(name: str, doc: str, launcher: str = "python") -> argparse.ArgumentParser:
    """The parser of benchmarks/NAME.py; doc is its docstring.

    Only whole names of options are taken: what begins like one may be a setting of the run.
    """
    return argparse.ArgumentParser(
        prog=f"{launcher} -m benchmarks.{name}",
        description=doc.splitlines()[0],
        allow_abbrev=False,
    )


def in_turn(
    contenders: dict[str, Callable], rounds: int, show: Callable | None = str
) -> list[dict]:
    """The result of every contender in each round, by name.

    All of them run once in each round, one after the other: on a machine whose speed drifts, a
    round still compares fairly. show: a result as text, printed as soon as it is there; None
    prints nothing.
    """
    results = []
    for n in range(1, rounds + 1):
        results.append({})
        for name, run in contenders.items():
            result = run()
            results[-1][name] = result
            if show:
                print(f"round {n}, {name}: {show(result)}", flush=True)
    return results


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each value over the rounds."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def median_ratio(rounds: list[dict[str, float]], name: str, other: str) -> float:
    """The median of one value over another, taken round by round."""
    return statistics.median(r[name] / r[other] for r in rounds)


def train(*arguments: str) -> list[dict]:
    """The log of one run of train.py, in a process of its own as a user's."""
    with tempfile.TemporaryDirectory() as temporary:
        run = Path(temporary) / "run"
        command = [sys.executable, "train.py", *arguments, f"--checkpoint_dir={run}"]
        shown = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        for line in done_without(shown.stdout.splitlines()):
            print(line, flush=True)
        return run_log.read(run)


def done_without(lines: Iterable[str]) -> list[str]:
    """Those of train.py's lines that say what it did without: a speed may be of something else."""
    return [line for line in lines if any(words in line for words in WITHOUT)]


def measure_apart(name: str, *arguments: str) -> dict:
    """What benchmarks/NAME.py measures in a process of its own, so that the memory is its own.

    With these arguments it prints its result as one line of JSON.
    """
    command = [sys.executable, "-m", f"benchmarks.{name}", *arguments]
    shown = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    lines = shown.stdout.splitlines()
    for line in done_without(lines):
        print(line, flush=True)
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def gpt2_small(*arguments: str) -> GPTConfig:
    """The shape of GPT-2 Small as its preset has it, with a vocabulary of 32,000: 134M.

    arguments: settings that differ, as on a command line.
    """
    c = config.load(["config/gpt2_small.py", *arguments])
    return GPTConfig(
        vocab_size=32000,
        block_size=c.block_size,
        n_layer=c.n_layer,
        n_head=c.n_head,
        n_embd=c.n_embd,
        bias=c.bias,
        dropout=c.dropout,
        tie_weights=c.tie_weights,
    )


def print_table(head: list[str], rows: list[list[str]]) -> None:
    """Print a table in characters: the first column to the left, the others to the right."""
    print(command.table(head, rows))


def can_draw() -> bool:
    """Whether matplotlib is there; where it is not, a benchmark writes its numbers all the same."""
    return importlib.util.find_spec("matplotlib") is not None


def machine(device: torch.device) -> dict:
    """What numbers are of: device, processor and PyTorch; of a GPU also CUDA and the driver.

    Under "machine" what it can do: the kind of CPU, and the speeds that it shows at this moment.
    """
    values = {
        "device": hardware.describe(device),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    if device.type == "cuda":
        values["cuda"] = torch.version.cuda
        values["driver"] = driver_version()
    values["machine"] = {
        "instructions": instructions(),
        "limited_by": {name: os.environ[name] for name in LIMITS if name in os.environ},
        "products_GFLOP_per_s": {
            str(dtype): round(product_peak(device, dtype) / 1e9, 1)
            for dtype in (torch.float32, torch.bfloat16)
            if dtype == torch.float32 or multiplies_bfloat16(device)
        },
        "memory_GB_per_s": round(bandwidth(device) / 1e9, 1),
    }
    return values


def multiplies_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies matrices in bfloat16; PyTorch's emulation takes minutes."""
    return device.type != "cpu" or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def instructions() -> list[str]:
    """The processor's instructions that products are made of, as Linux names them."""
    with contextlib.suppress(OSError):
        return sorted(INSTRUCTIONS & set(Path("/proc/cpuinfo").read_text().split()))
    return []


def product_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of the best of four products of large square matrices.

    On a CPU of 1,024 rows, on a GPU of 8,192.
    """
    n = 1024 if device.type == "cpu" else 8192
    a = torch.randn(n, n, device=device).to(dtype)  # of equal numbers they were quicker on a GPU
    return 2 * n**3 / best_time(device, lambda: a @ a)


def bandwidth(device: torch.device) -> float:
    """Bytes/s that the memory gives at best: the fastest of a copy, a sum, a product of 256 MB."""
    a = torch.ones(1 << 26, device=device)
    b = torch.ones_like(a)
    return max(
        2 * a.nbytes / best_time(device, lambda: b.copy_(a)),
        a.nbytes / best_time(device, lambda: a.sum()),
        2 * a.nbytes / best_time(device, lambda: torch.dot(a, b)),
    )


def best_time(device: torch.device, work: Callable) -> float:
    """Seconds of the fastest of four times."""
    best = math.inf
    for _ in range(4):
        hardware.synchronize(device)
        start = time.perf_counter()
        work()
        hardware.synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best


def driver_version() -> str | None:
    """The version of NVIDIA's driver, None where nvidia-smi does not tell it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, IndexError):
        return subprocess.run(command, capture_output=True, text=True).stdout.split()[0]
    return None


def write(name: str, device: torch.device, result: dict) -> Path:
    """Write a result, with its machine, to results/NAME_DEVICE.json; returns where."""
    return write_json(f"{name}_{device.type}", machine(device) | result)


def write_json(name: str, result: dict) -> Path:
    """Write a result to results/NAME.json and say so; returns where."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"written to {path}")
    return path
