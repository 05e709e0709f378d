"""Bits per byte after five minutes of training on this machine, from its Python's own sources.

    python -m benchmarks.five_minutes [--preset config/demo.py] [--minutes 5] [--key=value ...]

A short run finds the time of a step, and with it the number of steps, so that the learning rate has
come down when the time is over. The text is what `make demo` trains on, the loss that of the whole
validation split.
"""

import platform
import subprocess
import sys
from pathlib import Path

import hardware
from benchmarks import ROOT, argument_parser, run_main, train, write
from tools.command import table

DATA = "data/python_stdlib"
FIRST_STEPS = 40  # of the short run; the second half is timed


def parse_args(argv):
    """The command line: our own options, and the settings of the run."""
    parser = argument_parser("five_minutes", __doc__)
    parser.add_argument("--preset", default="config/demo.py")
    parser.add_argument("--minutes", type=float, default=5.0)
    return parser.parse_known_args(argv)


def main(argv):
    args, more = parse_args(argv)
    if not (ROOT / DATA / "meta.json").exists():
        words = [sys.executable, "prepare_data.py", "--vocab_size", "512"]
        subprocess.run(words, cwd=ROOT, check=True)
    options = [args.preset, f"--data_dir={DATA}", "--sample_prompts=[]", *more]
    log = train(*options, f"--max_steps={FIRST_STEPS}", "--eval_interval=0", "--log_interval=1")
    times = [record["elapsed_s"] for record in log if "loss" in record]
    half = FIRST_STEPS // 2
    step_s = (times[-1] - times[half - 1]) / half
    before_s = times[half - 1] - half * step_s  # compilation, and steps that warm up
    steps = max(1, round((60 * args.minutes - before_s) / step_s))
    print(f"{step_s:.3f} s a step after {before_s:.0f} s: {steps:,} steps", flush=True)
    log = train(*options, f"--max_steps={steps}", "--eval_interval=0", "--eval_batches=0")
    trained = next(record for record in reversed(log) if "loss" in record)
    evaluated = next(record for record in reversed(log) if "val_loss" in record)
    result = {
        "text": f"the standard library of Python {platform.python_version()}",
        "preset": args.preset,
        "arguments": more,
        "minutes": trained["elapsed_s"] / 60,
        "steps": steps,
        "epochs": trained["epoch"],
        "val_loss": evaluated["val_loss"],
        "bits_per_byte": evaluated["bits_per_byte"],
    }
    head = ["", "minutes", "epochs", "bits per byte"]
    numbers = [f"{result[name]:,.2f}" for name in ("minutes", "epochs")]
    print(table(head, [[args.preset, *numbers, f"{result['bits_per_byte']:.3f}"]]))
    write(f"five_minutes_{Path(args.preset).stem}", result, hardware.find_device("auto"))


if __name__ == "__main__":
    run_main(main)
