"""Seconds from `python train.py` to its banner, and to the end of its first step: with an empty
compile cache, with a full one, uncompiled.

python -m benchmarks.startup [--preset config/demo.py] [--rounds 3] [--key=value ...]
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import config as settings
import hardware
from benchmarks import write


def start(arguments, folder):
    """Seconds to the banner and to the first step's line in the log."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    quiet = [
        "--log_interval=1",
        "--eval_interval=0",
        "--eval_batches=1",
        "--report_minutes=0",
        "--max_steps=2",
        f"--checkpoint_dir={run}",
    ]
    begun, log = time.perf_counter(), run / "log.jsonl"
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments, *quiet],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
    )
    process.stdout.readline()
    banner = time.perf_counter() - begun
    while not (log.exists() and '"loss"' in log.read_text()):
        assert process.poll() is None, "train.py ended before its first step"
        time.sleep(0.01)
    first = time.perf_counter() - begun
    process.communicate()
    return {"banner_s": round(banner, 2), "first_step_s": round(first, 2)}


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--preset", default="config/demo.py")
    parser.add_argument("--rounds", type=int, default=3)
    args, extra = parser.parse_known_args(argv)
    extra = [args.preset, *extra]
    device, rounds = hardware.find_device(settings.load(extra).device), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for n in range(args.rounds):
            shutil.rmtree(folder / "cache", ignore_errors=True)
            rounds.append(
                {
                    "empty cache": start([*extra, "--compile=True"], folder),
                    "full cache": start([*extra, "--compile=True"], folder),
                    "uncompiled": start([*extra, "--compile=False"], folder),
                }
            )
            print(f"round {n + 1}: {rounds[-1]}", flush=True)
    medians = {
        kind: {key: statistics.median(r[kind][key] for r in rounds) for key in rounds[0][kind]}
        for kind in rounds[0]
    }
    for kind, seconds in medians.items():
        print(
            f"{kind:14} banner {seconds['banner_s']:6.2f} s, first step"
            f" {seconds['first_step_s']:6.2f} s"
        )
    write(
        f"startup_{Path(args.preset).stem}",
        device,
        {"command": " ".join(extra), "median": medians, "rounds": rounds},
    )


if __name__ == "__main__":
    main(sys.argv[1:])
