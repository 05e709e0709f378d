"""How long a report of a long log takes, and what drawing while training costs the training.

    python -m benchmarks.report [--lines 1000000] [--rounds 3] [--data data/NAME]

A log of so many lines in train.py's format is written and drawn. Then short runs on this machine
alternate: without drawing, and with a drawing at every evaluation, one about every five seconds,
which is a dozen times as often as report_minutes = 1 lets happen.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import RESULTS
from formats import run_folder

ROOT = Path(__file__).parent.parent
SETTINGS = [
    "--n_layer=4",
    "--n_head=4",
    "--n_embd=256",
    "--block_size=256",
    "--batch_size=4",
    "--compile=False",
    "--device=cpu",
    "--save_interval=0",
    "--eval_batches=2",
    "--log_interval=5",
    "--warmup_steps=10",
]


def write_log(folder, lines):
    """A log of a run of 10 x `lines` steps: of every hundred lines one evaluation with a sample and
    a save.
    """
    chance = random.Random(0)
    with open(folder / "log.jsonl", "w") as log:

        def record(**values):
            log.write(json.dumps(values) + "\n")

        record(step=0, event="start", device="made up", dtype="bfloat16", total_steps=10 * lines)
        for n in range(1, lines * 97 // 100 + 1):
            at = {"elapsed_s": round(3.3 * n, 3), "cost": round(n / 136, 4)}
            record(
                step=10 * n,
                tokens=327_680 * n,
                epoch=round(n / 8545, 6),
                loss=3 + 7 / n**0.3 + chance.gauss(0, 0.05),
                lr=3e-4,
                grad_norm=chance.gauss(1, 0.1),
                tokens_per_second=chance.gauss(1e5, 1e3),
                mfu=0.41,
                bad_steps=0,
                **at,
            )
            if n % 97 == 0:
                record(step=10 * n, event="save")
                record(
                    step=10 * n,
                    samples=[{"prompt": "Once upon", "text": " a time there was a king" * 5}],
                    **at,
                )
                record(step=10 * n, val_loss=3.1 + 7 / n**0.3, bits_per_byte=1.0, **at)


def draw(folder):
    """Seconds, bytes of the page and peak memory in bytes of a report."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "tools.report", folder],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    seconds = time.perf_counter() - start
    return {
        "seconds": round(seconds, 2),
        "page_bytes": (folder / "report.html").stat().st_size,
        "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def speed(data, folder, steps, minutes):
    """Median tokens/s of a run that draws every `minutes`, at evaluations."""
    length = [
        f"--max_steps={steps}",
        f"--eval_interval={max(1, steps // 4)}",
        f"--report_minutes={minutes}",
    ]
    subprocess.run(
        [
            sys.executable,
            "train.py",
            f"--data_dir={data}",
            f"--checkpoint_dir={folder}",
            *SETTINGS,
            *length,
        ],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = [r for r in run_folder.read_log(folder) if "loss" in r]
    return lines[-1]["tokens"] / lines[-1]["elapsed_s"]


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.report", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=120, help="of each short run; default %(default)s"
    )
    parser.add_argument("--data", default="data/python_stdlib")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "long"
        folder.mkdir()
        write_log(folder, args.lines)
        long = {
            "lines": args.lines,
            "log_bytes": (folder / "log.jsonl").stat().st_size,
            **draw(folder),
        }
        print(
            f"{args.lines:,} lines: {long['seconds']} s, a page of {long['page_bytes'] / 1e6:.2f}"
            f" MB, {long['peak_bytes'] / 1e6:,.0f} MB of memory",
            flush=True,
        )
        rounds = []
        for n in range(args.rounds):
            plain, drawing = (
                speed(
                    Path(args.data).absolute(),
                    Path(temporary) / f"{n}-{minutes}",
                    args.steps,
                    minutes,
                )
                for minutes in (0, 1e-6)
            )
            rounds.append(
                {"tokens_per_second": round(plain, 1), "while_drawing": round(drawing, 1)}
            )
            print(
                f"round {n + 1}: {plain:,.0f} tokens/s, {drawing:,.0f} with drawings:"
                f" {drawing / plain:.1%}",
                flush=True,
            )
    result = {"cores": os.cpu_count(), "long_log": long, "rounds": rounds}
    if rounds:
        result["speed_while_drawing_median"] = round(
            statistics.median(r["while_drawing"] / r["tokens_per_second"] for r in rounds), 4
        )
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "report.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"written to {RESULTS / 'report.json'}")


if __name__ == "__main__":
    main(sys.argv[1:])
