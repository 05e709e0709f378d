"""What `prepare_data.py --ray` gives and costs on this machine, beside the pool of processes.

    python -m benchmarks.prepare_ray [--megabytes 600] [--rounds 3]

A cluster of one node, with as many cores as the pool has workers, prepares the same text as the
pool, in turn. Both are compared in what they write, in the speed of tokenising, which leaves the
start out, and in the time of the whole command. Writes benchmarks/results/prepare_ray_cpu.json.
"""

import argparse
import contextlib
import importlib.util
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from benchmarks import argument_parser, write
from benchmarks.prepare import MemoryWatch, make_text, prepare
from formats.files import sha256
from preparing.pool import usable_cores


def main(argv: list[str]) -> None:
    """The command line's work."""
    args = parse_args(argv)
    cores = usable_cores()
    result = {"megabytes": args.megabytes, "cores": cores, "package_mb": package_size() // 10**6}
    with tempfile.TemporaryDirectory(prefix="ray") as temporary:
        work = Path(temporary)
        make_text(work / "small.txt", 40_000_000)
        make_text(work / "text.txt", args.megabytes * 10**6)
        prepare(work / "small.txt", "--out", work / "tokenizer")
        with cluster(work / "cluster", cores, result) as (address, watch):
            rounds = {"pool": [], "ray": []}
            for _ in range(args.rounds):
                for name, more in (("pool", ["--workers", cores]), ("ray", ["--ray", address])):
                    flags = ["--tokenizer", work / "tokenizer", "--out", work / name, "--overwrite"]
                    rounds[name].append(prepare(work / "text.txt", *flags, *more))
            result["cluster_mb"] = watch.peak_pss // 10**6
        for name in ("train.bin", "val.bin"):
            assert sha256(work / "pool" / name) == sha256(work / "ray" / name)
    for name, measured in rounds.items():
        for what in ("tokenising_mb_s", "seconds", "peak_pss_mb"):
            result[f"{name}_{what}"] = [run[what] for run in measured]
    result["of_pool_tokenising"] = ratio(rounds, "tokenising_s")
    result["of_pool_whole"] = ratio(rounds, "seconds")
    for name, value in result.items():
        print(f"{name:24}{value}")
    write("prepare_ray", torch.device("cpu"), result)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argument_parser("prepare_ray", __doc__)
    parser.add_argument("--megabytes", type=int, default=600, help="of text")
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn")
    return parser.parse_args(argv)


def ratio(rounds: dict[str, list[dict]], what: str) -> float:
    """The pool's median time over Ray's: Ray's speed in parts of the pool's."""
    pool, ray = (statistics.median(run[what] for run in rounds[name]) for name in ("pool", "ray"))
    return round(pool / ray, 3)


def package_size() -> int:
    """Bytes that the package ray takes on the disk."""
    folder = Path(importlib.util.find_spec("ray").origin).parent
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def cluster(folder: Path, cores: int, result: dict) -> Iterator[tuple[str, MemoryWatch]]:
    """A cluster of one node: its address, and what watches its memory.

    Notes in `result` how long its start takes and how much memory it has before any work.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [Path(sys.executable).with_name("ray"), "start", "--head", "--block", "--port", port]
    words += ["--num-cpus", cores, "--temp-dir", folder, "--include-dashboard=false"]
    environment = os.environ | {"RAY_USAGE_STATS_ENABLED": "0"}
    started = time.perf_counter()
    process = subprocess.Popen(
        [str(word) for word in words], env=environment, stdout=subprocess.PIPE, text=True
    )
    watch = MemoryWatch(process.pid)
    try:
        for line in process.stdout:
            if "runtime started" in line:
                break
        result["cluster_start_s"] = round(time.perf_counter() - started, 1)
        watch.start()
        time.sleep(3)
        result["idle_cluster_mb"] = watch.peak_pss // 10**6
        yield f"127.0.0.1:{port}", watch
    finally:
        watch.done.set()
        members = psutil.Process(process.pid).children(recursive=True)
        for member in (process, *members):
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])
