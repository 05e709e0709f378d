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
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import startup

ENVIRONMENT = dict(os.environ)  # nanoGPT runs in it
startup.tune_environment()  # as the scripts do, before PyTorch reads it

import torch

import hardware
from command_line import Parser, local_path
from formats import files, run_folder
from tools import command

ROOT = Path(__file__).parent.parent
RESULTS = Path(os.environ.get("BENCHMARK_RESULTS", Path(__file__).parent / "results"))
# Flags in /proc/cpuinfo that make one kind of CPU multiply faster than another.
INSTRUCTIONS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "i8mm", "sve")


def argument_parser(name: str, doc: str) -> Parser:
    """The parser of benchmarks/NAME.py; doc is its docstring."""
    return Parser(prog=f"python -m benchmarks.{name}", description=doc.splitlines()[0])


def checkout(name: str, script: str) -> Callable:
    """A type for argparse: a path to a checkout of a program that has the file `script`."""

    def checkout(text):
        path = local_path(text)
        if not (path / script).is_file():
            missing = f"{path} is not a checkout of {name}: it has no {script}"
            raise argparse.ArgumentTypeError(missing)
        return path

    return checkout


def run_main(name: str, main: Callable) -> None:
    """Run benchmarks/NAME.py; a mistake in its command line ends in a sentence."""
    command.run(f"benchmarks.{name}", main)


# -- measuring -------------------------------------------------------------------------------------


def in_turn(contenders: dict[str, Callable], rounds: int) -> list[dict[str, float]]:
    """The speed of every contender in each round, by name.

    All run once in each round: a machine whose speed drifts still compares fairly within a round.
    """
    results = []
    for n in range(1, rounds + 1):
        speeds = {}
        for name, run in contenders.items():
            speeds[name] = run()
            print(f"round {n}, {name}: {speeds[name]:,.4g}", flush=True)
        results.append(speeds)
    return results


def seconds(step: Callable, device: torch.device, times: int = 1) -> float:
    """Seconds of one call of `step`, of `times` without waiting between them."""
    hardware.synchronize(device)
    begun = time.perf_counter()
    for _ in range(times):
        step()
    hardware.synchronize(device)
    return (time.perf_counter() - begun) / times


def compare(rounds: list[dict[str, float]], ours: str) -> dict[str, float]:
    """The median speed of each contender, and that of ours over each other's, round by round."""
    figures = {name: statistics.median(r[name] for r in rounds) for name in rounds[0]}
    for name in rounds[0]:
        if name != ours:
            figures[f"{ours}, times {name}"] = statistics.median(r[ours] / r[name] for r in rounds)
    return figures


def run_script(*words: str) -> None:
    """Run a script of ours in a process of its own, as a user does."""
    if status := subprocess.run([sys.executable, *words], cwd=ROOT).returncode:
        sys.exit(status)  # it has said why


def train(*arguments: str) -> list[dict]:
    """The log of one run of train.py, whose checkpoints are not kept."""
    with tempfile.TemporaryDirectory() as folder:
        return train_in(Path(folder) / "run", *arguments)


def train_in(folder: Path, *arguments: str) -> list[dict]:
    """The log of one run of train.py; `folder` keeps its checkpoints."""
    run_script("train.py", *arguments, f"--checkpoint_dir={folder}")
    return run_folder.read_log(folder)


def edited_copy(path: Path, copy: Path, script: str, edits: dict[str, str]) -> Path:
    """Copy a checkout, which stays as it is; returns the copy.

    edits: passages of one of its scripts, and what replaces each.
    """
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns(".git"))
    text = (copy / script).read_text(encoding="utf-8")
    for old, new in edits.items():
        assert old in text, f"this checkout's {script} lacks: {old}"
        text = text.replace(old, new)
    (copy / script).write_text(text, encoding="utf-8")
    return copy


def run_apart(function: Callable, *arguments):
    """What function(*arguments) returns, called in a process with its own memory."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


# -- results ---------------------------------------------------------------------------------------


def machine(device: torch.device) -> dict:
    """What numbers depend on: device, processor, PyTorch, its CUDA and the driver."""
    flags = files.read_text(Path("/proc/cpuinfo")).split()
    values = {
        "device": hardware.describe(device),
        "processor": platform.machine(),
        "torch": torch.__version__,
        "instructions": [name for name in INSTRUCTIONS if name in flags],
    }
    if device.type == "cuda":
        driver = files.read_text(Path("/sys/module/nvidia/version")).strip()  # on Linux
        values |= {"cuda": torch.version.cuda, "driver": driver or "unknown"}
    return values


def result_path(name: str, device: torch.device) -> Path:
    """results/NAME_DEVICE.json."""
    return RESULTS / f"{name}_{device.type}.json"


def write(name: str, result: dict, device: torch.device) -> Path:
    """Write a result with its machine to result_path(); returns where."""
    RESULTS.mkdir(exist_ok=True)
    path = result_path(name, device)
    files.write_json(path, machine(device) | result)
    return path


def report(name: str, figures: dict[str, float], device: torch.device, **details) -> Path:
    """Print the figures as a table and write them with the details; returns where."""
    rows = [[figure, f"{value:,.4g}"] for figure, value in figures.items()]
    print(command.table(["", name], rows))
    path = write(name, {"figures": figures} | details, device)
    print(f"written to {path}")
    return path
