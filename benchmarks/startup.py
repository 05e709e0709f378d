"""Seconds from `python train.py` to its banner, and to the end of its first step.

    python -m benchmarks.startup [--preset config/demo.py] [--rounds 3] [--key=value ...]

With an empty compile cache, with a full one, and uncompiled, in turn.
"""

import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import config as settings
import hardware
from benchmarks import argument_parser, in_turn, medians, print_table, write


def start(arguments, folder, empty_cache=False):
    """Seconds to the banner and to the first step's line in the log.

    folder: keeps the compile cache from one start to the next.
    """
    run, cache = folder / "run", folder / "cache"
    log = run / "log.jsonl"
    shutil.rmtree(run, ignore_errors=True)
    if empty_cache:
        shutil.rmtree(cache, ignore_errors=True)
    quiet = [
        "--log_interval=1",
        "--eval_interval=0",
        "--eval_batches=1",
        "--report_minutes=0",
        "--max_steps=2",
        f"--checkpoint_dir={run}",
    ]
    begun = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments, *quiet],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)},
    )
    process.stdout.readline()
    banner = time.perf_counter() - begun
    while not (log.exists() and '"loss"' in log.read_text()):
        assert process.poll() is None, "train.py ended before its first step"
        time.sleep(0.01)
    first_step = time.perf_counter() - begun
    process.communicate()
    return {"banner_s": round(banner, 2), "first_step_s": round(first_step, 2)}


def main(argv):
    """The command line's work."""
    parser = argument_parser("startup", __doc__)
    parser.add_argument("--preset", default="config/demo.py")
    parser.add_argument("--rounds", type=int, default=3)
    args, extra = parser.parse_known_args(argv)
    extra = [args.preset, *extra]
    compiled, uncompiled = [*extra, "--compile=True"], [*extra, "--compile=False"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        kinds = {
            "empty cache": functools.partial(start, compiled, folder, empty_cache=True),
            "full cache": functools.partial(start, compiled, folder),
            "uncompiled": functools.partial(start, uncompiled, folder),
        }
        rounds = in_turn(kinds, args.rounds)
    of_kinds = {kind: medians([r[kind] for r in rounds]) for kind in kinds}
    rows = [
        [kind, f"{seconds['banner_s']:.2f}", f"{seconds['first_step_s']:.2f}"]
        for kind, seconds in of_kinds.items()
    ]
    print_table(["seconds to the", "banner", "first step"], rows)
    result = {"command": " ".join(extra), "median": of_kinds, "rounds": rounds}
    device = hardware.find_device(settings.load(extra).device)
    write(f"startup_{Path(args.preset).stem}", device, result)


if __name__ == "__main__":
    main(sys.argv[1:])
