"""What the benchmarks share: contenders in turn, runs of train.py, the machine, and JSON.

`python -m benchmarks.NAME` measures one thing and writes it to results/ as JSON, with the machine
it ran on. docs/results.md has the commands and the numbers.
"""

import argparse
import multiprocessing
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

import hardware
import startup
from config import ConfigError
from formats import files, run_log
from formats.data_folder import DataError
from hardware import DeviceError

startup.tune_environment()  # as the scripts do
ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
# Flags in /proc/cpuinfo that make one kind of CPU multiply faster than another.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "i8mm", "sve")


def argument_parser(name: str, doc: str) -> argparse.ArgumentParser:
    """The parser of benchmarks/NAME.py; doc is its docstring.

    It takes options by their whole names alone: the beginning of one may be a setting of the run.
    """
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0], allow_abbrev=False
    )


def run_main(name: str, main: Callable) -> None:
    """Run benchmarks/NAME.py; a mistake in its command line ends in a sentence."""
    sys.exit(startup.run(f"benchmarks.{name}", main, (ConfigError, DataError, DeviceError)))


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
        process = subprocess.run(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        if process.returncode:
            sys.exit(process.returncode)  # it has said why
        for line in process.stdout.splitlines():
            if "failed" in line:  # as compiling may: then the speed is that of something else
                print(line, flush=True)
        return run_log.read(Path(folder) / "run")


def run_apart(function: Callable, *arguments):
    """What function(*arguments) returns, called in a process with its own memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


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
        values["cuda"] = torch.version.cuda
    if device.type == "cuda" and shutil.which("nvidia-smi"):  # AMD's and small containers lack it
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
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
