"""What the benchmarks share: contenders in turn, runs of train.py, the machine, JSON and tables.

`python -m benchmarks.NAME` measures one thing and writes it to results/ as JSON, with the machine
it ran on. docs/results.md has the commands and the numbers.
"""

import argparse
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import hardware
from config import ConfigError
from formats import files, run_log
from formats.data_folder import DataError
from hardware import DeviceError

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
# Of /proc/cpuinfo: what makes one kind of CPU multiply faster than another.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "i8mm", "sve")
# The lines in which train.py says that it does without something: the speed is of something else.
NOTICES = ("failed", "stay in 16 bits")


def argument_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of benchmarks/NAME.py; doc is its docstring.

    It takes options by their whole names alone: the beginning of one may be a setting of the run.
    """
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0], allow_abbrev=False
    )


def run_main(main: Callable) -> None:
    """Call main with the command line. A mistake in it ends in a sentence.

    A program that failed has said why.
    """
    try:
        main(sys.argv[1:])
    except (ConfigError, DataError, DeviceError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)


# -- measuring -------------------------------------------------------------------------------------


def in_turn(contenders: dict[str, Callable], rounds: int, show: Callable) -> list[dict]:
    """The result of every contender in each round, by name. show: a result as text.

    All run once in each round: a machine whose speed drifts still compares fairly within a round.
    """
    results = []
    for n in range(1, rounds + 1):
        results.append({})
        for name, run in contenders.items():
            results[-1][name] = run()
            print(f"round {n}, {name}: {show(results[-1][name])}", flush=True)
    return results


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of each value over the rounds."""
    return {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}


def median_ratio(rounds: list[dict[str, float]], name: str, other: str) -> float:
    """The median of one value over another, taken round by round."""
    return statistics.median(r[name] / r[other] for r in rounds)


def train(*arguments: str) -> list[dict]:
    """The log of one run of train.py, in a process of its own as a user's."""
    with tempfile.TemporaryDirectory() as folder:
        words = [sys.executable, "train.py", *arguments, f"--checkpoint_dir={folder}/run"]
        process = subprocess.run(words, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
        for line in notices(process.stdout.splitlines()):
            print(line, flush=True)
        return run_log.read(Path(folder) / "run")


def run_apart(function: Callable, *arguments):
    """What function(*arguments) returns, called in a process with its own memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def notices(lines: Iterable[str]) -> list[str]:
    """The lines with one of NOTICES."""
    return [line for line in lines if any(words in line for words in NOTICES)]


def bandwidth(device: torch.device) -> float:
    """Bytes/s of the memory at its best: a copy, a sum or a product of 256 MB, four times each."""
    a = torch.ones(1 << 26, device=device)
    b = torch.ones_like(a)
    works = (lambda: b.copy_(a), 2), (lambda: a.sum(), 1), (lambda: torch.dot(a, b), 2)
    best = 0.0
    for work, tensors in works * 4:
        hardware.synchronize(device)
        start = time.perf_counter()
        work()
        hardware.synchronize(device)
        best = max(best, tensors * a.nbytes / (time.perf_counter() - start))
    return best


# -- results ---------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict:
    """What numbers depend on: device, processor and PyTorch; of a GPU also CUDA and the driver."""
    values = {
        "device": hardware.describe(device),
        "processor": platform.processor() or platform.machine(),
        "torch": torch.__version__,
    }
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        flags = set(cpuinfo.read_text().split())
        values["instructions"] = [name for name in INSTRUCTIONS if name in flags]
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        values["cuda"] = torch.version.cuda
        values["driver"] = subprocess.run(query, capture_output=True, text=True).stdout.strip()
    return values


def write(name: str, result: dict, device: torch.device | None = None) -> Path:
    """Write a result to results/NAME.json, or NAME_DEVICE.json with its machine; returns where."""
    if device:
        name = f"{name}_{device.type}"
        result = machine(device) | result
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    files.write_json(path, result)
    print(f"written to {path}")
    return path
