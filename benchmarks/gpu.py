"""Every check and measurement that needs a GPU, one after the other: `make gpu`.

    python3 -m benchmarks.gpu [PART ...] [--nanogpt PATH] [--minutes M] [--device cuda] [--tiny]

Needs no network, make or git, and the packages of requirements.txt alone; the tests need pytest.
Each part is a command with a limit of its own: one that fails or is cut off stops no other.
results/gpu_NAME/, NAME the GPU's, keeps what the parts print and measure, and parts.json what
became of each; the next call runs those that are not done with this PyTorch, first those that were
not tried. --minutes: for all of them. --tiny: the smallest of models, to see that all of it runs.
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import hardware
from benchmarks import RESULTS, ROOT, argument_parser, machine, nanogpt, run_apart, run_main
from formats.files import read_json, write_json
from tools.command import table

# {part: (minutes, what follows `python`)}, the most important first.
PARTS = {
    "gpt2_small": (9, "-m benchmarks.throughput {nanogpt} {settings}"),
    "gpt2_small_modern": (9, "-m benchmarks.throughput {modern} {settings}"),
    "rates": (2, "-m benchmarks.rates {settings}"),
    "generate": (4, "-m benchmarks.generate --rounds 2 {nanogpt} {settings}"),
    "generate_modern": (4, "-m benchmarks.generate --rounds 2 {modern} --name modern {settings}"),
    "tests": (
        9,
        "-m pytest tests/training tests/generating -m gpu -rs --continue-on-collection-errors",
    ),
    "time_to_loss": (
        9,
        "-m benchmarks.time_to_loss --task gpt2_small --seeds 1 {nanogpt} {settings} {few}",
    ),
    "ladder": (
        9,
        "-m benchmarks.ladder --preset config/gpt2_small.py --rounds 1 --steps 4 {settings}",
    ),
}
TINY = "--n_layer=1 --n_head=2 --n_embd=32 --block_size=512 --batch_size=4 --warmup_steps=1"
TINY += " --compile=False"


def prepare_command(data: Path, tiny: bool) -> list[str]:
    """The words of the command that makes tokens of the sources of installed packages."""
    text = [f"{sysconfig.get_path('purelib')}/**/*.py", "--clean", "--gigabytes", "0.1"]
    if tiny:
        text = ["training/*.py", "tests/**/*.py", "--vocab_size", "512"]
    return [sys.executable, "prepare_data.py", *text, "--out", str(data)]


def command(part: str, data: Path, args) -> list[str]:
    """The words of a part's command."""
    values = {
        "settings": f"--data_dir={shlex.quote(str(data))} --device={args.device}",
        "modern": "--preset config/gpt2_small_modern.py",
        "nanogpt": f"--nanogpt {shlex.quote(str(args.nanogpt))}" if args.nanogpt else "",
        "few": "--max_steps=6 --eval_interval=2 --eval_batches=1" if args.tiny else "",
    }
    if args.tiny:
        values["settings"] += f" {TINY}"
    return [sys.executable, *shlex.split(PARTS[part][1].format(**values))]


def run(words: list[str], limit: float, folder: Path, part: str) -> str:
    """Run a part and show its lines; returns done, failed, or cut after `limit` seconds.

    It ends with all processes that it has started.
    """
    environment = {"PYTHONUNBUFFERED": "1", "BENCHMARK_RESULTS": str(folder)}
    process = subprocess.Popen(
        ["timeout", "--signal=KILL", f"{limit:.0f}", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | environment,
        process_group=0,
    )
    try:
        with open(folder / f"{part}.log", "w") as log:
            for line in process.stdout:
                print(f"  {line}", end="", flush=True)
                print(line, end="", file=log, flush=True)
        # timeout kills itself with the rest.
        return {0: "done", -signal.SIGKILL: "cut"}.get(process.wait(), "failed")
    finally:  # Ctrl-C ends the part too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main(argv):
    """The command line's work. Returns the exit status: 1 unless all that was wanted is done."""
    parser = argument_parser("gpu", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    nanogpt.add_option(parser)
    parser.add_argument("--minutes", type=float, default=24 * 60, help="for all parts together")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="with the smallest of models")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}, but {', '.join(PARTS)}")
    deadline = time.monotonic() + 60 * args.minutes
    here = run_apart(describe, args.device)  # this process takes no memory of the GPU
    name = re.sub("[^A-Za-z0-9]+", "_", here["device"].partition(",")[0])
    folder = RESULTS / f"gpu_{name}{'_tiny' if args.tiny else ''}"
    folder.mkdir(parents=True, exist_ok=True)
    known = read_json(folder / "parts.json") or {}
    data = folder / "data" if args.tiny else ROOT / "data" / "packages"
    if not (data / "meta.json").exists():
        run(prepare_command(data, args.tiny), 60 * args.minutes, folder, "data")

    def is_done(part: str) -> bool:
        return known.get(part, {}).get("status") == "done" and known[part]["torch"] == here["torch"]

    wanted = args.parts or [part for part in PARTS if not is_done(part)]
    for part in sorted(wanted, key=lambda part: part in known):
        words = command(part, data, args)
        begun = time.monotonic()
        limit = min(60 * PARTS[part][0], deadline - begun)
        if limit < 1:
            break
        print(f"\n{part}: {shlex.join(words)}", flush=True)
        known[part] = {"command": shlex.join(words), "status": "cut", "torch": here["torch"]}
        write_json(folder / "parts.json", known)
        known[part]["status"] = run(words, limit, folder, part)
        known[part]["seconds"] = round(time.monotonic() - begun, 1)
        write_json(folder / "parts.json", known)
    print()
    rows = [[part, known.get(part, {}).get("status", "not run")] for part in PARTS]
    for path in sorted(folder.glob("*_*.json")):
        figures = read_json(path).get("figures", {})
        rows += [[f"{path.stem}: {what}", f"{value:.4g}"] for what, value in figures.items()]
    print(table([str(folder), here["device"]], rows))
    return int(not all(is_done(part) for part in args.parts or PARTS))


def describe(device: str) -> dict:
    """The machine, as a process of its own sees it."""
    return machine(hardware.find_device(device))


if __name__ == "__main__":
    run_main("gpu", main)
