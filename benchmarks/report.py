"""How long a report of a long log takes, and what drawing while training costs the training.

    python -m benchmarks.report [--lines 1000000] [--rounds 3] [--data data/NAME]

A log of so many lines in train.py's format is written and drawn. Then short runs on this machine
alternate: without drawing, and with a drawing at every evaluation, one about every five seconds,
which is a dozen times as often as report_minutes = 1 lets happen.
"""

import functools
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import ROOT, argument_parser, in_turn, median_ratio, train, write_json

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


def records(lines):
    """The records of a run of 10 x `lines` steps, as train.py logs them.

    Of every hundred, one is a save, one a sample and one an evaluation.
    """
    chance = random.Random(0)
    yield {
        "step": 0,
        "event": "start",
        "device": "made up",
        "dtype": "bfloat16",
        "total_steps": 10 * lines,
    }
    for n in range(1, lines * 97 // 100 + 1):
        step = 10 * n
        spent = {"elapsed_s": round(3.3 * n, 3), "cost": round(n / 136, 4)}
        yield {
            "step": step,
            "tokens": 327_680 * n,
            "epoch": round(n / 8545, 6),
            "loss": 3 + 7 / n**0.3 + chance.gauss(0, 0.05),
            "lr": 3e-4,
            "grad_norm": chance.gauss(1, 0.1),
            "tokens_per_second": chance.gauss(1e5, 1e3),
            "mfu": 0.41,
            "bad_steps": 0,
            **spent,
        }
        if n % 97 == 0:
            sample = {"prompt": "Once upon", "text": " a time there was a king" * 5}
            yield {"step": step, "event": "save"}
            yield {"step": step, "samples": [sample], **spent}
            yield {"step": step, "val_loss": 3.1 + 7 / n**0.3, "bits_per_byte": 1.0, **spent}


def long_log(folder, lines):
    """What a report of so many lines takes: seconds, bytes of the page, peak bytes of memory."""
    log = folder / "log.jsonl"
    with open(log, "w") as file:
        for record in records(lines):
            file.write(json.dumps(record) + "\n")
    start = time.perf_counter()
    command = [sys.executable, "-m", "tools.report", folder]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    return {
        "lines": lines,
        "log_bytes": log.stat().st_size,
        "seconds": round(seconds, 2),
        "page_bytes": (folder / "report.html").stat().st_size,
        "peak_bytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }


def speed(data, steps, minutes):
    """Tokens/s of a run that draws every `minutes`, at evaluations."""
    log = train(
        f"--data_dir={data}",
        *SETTINGS,
        f"--max_steps={steps}",
        f"--eval_interval={max(1, steps // 4)}",
        f"--report_minutes={minutes}",
    )
    last = [record for record in log if "loss" in record][-1]
    return round(last["tokens"] / last["elapsed_s"], 1)


def main(argv):
    """The command line's work."""
    parser = argument_parser("report", __doc__)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--steps", type=int, default=120, help="of each short run; default %(default)s"
    )
    parser.add_argument("--data", default="data/python_stdlib")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        long = long_log(Path(temporary), args.lines)
    print(
        f"{args.lines:,} lines: {long['seconds']} s, a page of {long['page_bytes'] / 1e6:.2f}"
        f" MB, {long['peak_bytes'] / 1e6:,.0f} MB of memory",
        flush=True,
    )
    data = Path(args.data).absolute()
    runs = {
        "tokens_per_second": functools.partial(speed, data, args.steps, 0),
        "while_drawing": functools.partial(speed, data, args.steps, 1e-6),
    }
    rounds = in_turn(runs, args.rounds)
    result = {"cores": os.cpu_count(), "long_log": long, "rounds": rounds}
    if rounds:
        ratio = round(median_ratio(rounds, "while_drawing", "tokens_per_second"), 4)
        result["speed_while_drawing_median"] = ratio
        print(f"speed while drawing: {ratio:.1%} (median)")
    write_json("report", result)


if __name__ == "__main__":
    main(sys.argv[1:])
