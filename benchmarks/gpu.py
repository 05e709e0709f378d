"""Every check and measurement that needs a GPU, the most important first: `make gpu`.

    python3 -m benchmarks.gpu [PART ...] [--nanogpt PATH] [--minutes M] [--report] [--key=value ...]

Needs no network, make or git, and the packages of requirements.txt alone; the tests need pytest.
results/gpu_NAME/, NAME the GPU's, keeps what each part prints and measures, and parts.json the
status of each. The next call runs what is not done, first what was not tried; data/gpu and
data/compiled keep tokens and compiled kernels for it. --minutes: for all of them.
--report: only the figures that are there, as a table for docs/results.md. Further arguments are
settings.
"""

import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import ENVIRONMENT, RESULTS, argument_parser, nanogpt, run_apart, run_main
from formats.files import read_json, write_json

PARTS = {  # {part: (minutes, what follows `python`)}
    "data": (
        3,
        "prepare_data.py '{packages}/**/*.py' --clean --gigabytes 0.1 --vocab_size 32000"
        " --out data/gpu",
    ),
    "generate": (5, "-m benchmarks.generate --rounds 2 {nanogpt} {settings}"),
    "gpt2_small": (9, "-m benchmarks.throughput --rounds 2 --steps 100 {nanogpt} {settings}"),
    "gpt2_small_modern": (9, "-m benchmarks.throughput --rounds 2 --steps 100 {modern} {settings}"),
    "generate_modern": (
        5,
        "-m benchmarks.generate --rounds 2 {modern} --name generate_modern {settings}",
    ),
    "tests": (9, "-m pytest tests/training/test_gpu.py -rs"),
    "other_tests": (
        5,
        "-m pytest tests/generating/test_decode.py tests/training/test_ranks.py"
        " tests/test_hardware.py -m gpu -rs",
    ),
    "plan": (3, "train.py config/gpt2_small.py --dry_run {settings}"),
    "ladder": (
        9,
        "-m benchmarks.ladder {small} --rounds 1 --steps 30 --batch_size={sequences} {settings}",
    ),
    "time_to_loss": (
        9,
        "-m benchmarks.time_to_loss --task gpt2_small --seeds 1 {nanogpt} {settings}",
    ),
}


def command(part: str, checkout: Path | None, sequences: int, extra: list[str]) -> list[str]:
    """The words of a part's command.

    sequences: how many a plain loop's memory takes; nanoGPT's too. extra: settings of the run.
    """
    nanogpt = f"--nanogpt {shlex.quote(str(checkout))} --micro_batch_size={sequences}"
    words = PARTS[part][1].format(
        packages=sysconfig.get_path("purelib"),
        nanogpt=nanogpt if checkout else "",
        sequences=sequences,
        small="--preset config/gpt2_small.py",
        modern="--preset config/gpt2_small_modern.py",
        settings=shlex.join(["--data_dir=data/gpu", *extra]),
    )
    return [sys.executable, *shlex.split(words)]


def run(words: list[str], limit: float, log: Path) -> str:
    """Run a command and show its lines; returns done, failed, or cut after `limit` seconds.

    It ends with the processes that it has started.
    """
    tuned = {
        "PYTHONUNBUFFERED": "1",
        "BENCHMARK_RESULTS": str(log.parent),
        "TORCHINDUCTOR_CACHE_DIR": str(Path("data/compiled").absolute()),
    }
    process = subprocess.Popen(
        ["timeout", "-s", "KILL", str(limit), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=ENVIRONMENT | tuned,
    )
    try:
        with open(log, "w", encoding="utf-8") as file:
            for line in process.stdout:
                print(f"  {line}", end="", flush=True)
                print(line, end="", file=file, flush=True)
        return {0: "done", -signal.SIGKILL: "cut"}.get(process.wait(), "failed")
    finally:
        process.terminate()  # Ctrl-C ends the part too


def report(folder: Path) -> str:
    """The status of each part and all figures of a folder, in Markdown."""
    known = read_json(folder / "parts.json")
    rows = {folder.name: "", "---": "---"}
    rows |= {part: known.get(part, "not run") for part in PARTS}
    for path in sorted(folder.glob("*_*.json")):
        for name, value in read_json(path)["figures"].items():
            rows[f"{path.stem}: {name}"] = f"{value:.4g}"
    return "\n".join(f"| {name} | {value} |" for name, value in rows.items())


def main(argv):
    """The command line's work. Returns the exit status: 1 unless all that was wanted is done."""
    parser = argument_parser("gpu", __doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    nanogpt.add_option(parser)
    parser.add_argument("--minutes", type=float, default=24 * 60, help="for all parts together")
    parser.add_argument("--report", action="store_true", help="only print the figures")
    args, extra = parser.parse_known_args(argv)
    for part in set(args.parts) - set(PARTS):
        parser.error(f"there is no part {part}, but {', '.join(PARTS)}")
    if args.report:
        folders = sorted(RESULTS.glob("gpu_*"))
        print("\n\n".join(map(report, folders)) or f"{RESULTS} has no figures of a GPU yet")
        return 0
    deadline = time.monotonic() + 60 * args.minutes
    # This process takes no memory of the GPU.
    name, sequences = run_apart(find_gpu, extra)
    folder = RESULTS / f"gpu_{name}"
    folder.mkdir(parents=True, exist_ok=True)
    known = read_json(folder / "parts.json")
    wanted = args.parts or [part for part in PARTS if known.get(part) != "done"]
    for part in sorted(wanted, key=lambda part: part in known):
        words = command(part, args.nanogpt, sequences, extra)
        limit = min(60 * PARTS[part][0], deadline - time.monotonic())
        if limit < 1:
            break
        print(f"\n{part}: {shlex.join(words)}", flush=True)
        known[part] = "cut"
        write_json(folder / "parts.json", known)
        known[part] = run(words, limit, folder / f"{part}.log")
        write_json(folder / "parts.json", known)
    print(f"\n{report(folder)}")
    return int(any(known.get(part) != "done" for part in wanted))


def find_gpu(arguments: list[str]) -> tuple[str, int]:
    """The device of a run, for a folder, and the sequences for a plain loop: NVIDIA_H200, 64.

    Raises DeviceError where there is no GPU.
    """
    setting = settings.load(["config/gpt2_small.py", *arguments]).device
    device = hardware.find_device(setting)
    if device.type == "cpu" and setting == "auto":
        raise hardware.DeviceError(
            f"PyTorch {torch.__version__} finds no GPU here, and all parts need one;"
            " python -m benchmarks.gpu --device=cpu tries them on the CPU"
        )
    name, _, _ = hardware.describe(device).partition(",")
    return re.sub("[^A-Za-z0-9]+", "_", name), sequences_in(hardware.gpu_memory(device))


def sequences_in(memory: int | None) -> int:
    """As many sequences of 512 tokens as gigabytes, a power of two up to GPT-2 Small's 64.

    In float32, attention written out, one takes 0.8 GB, and weights and their moments 2.2.
    """
    return 1 << min(6, int((memory or 64e9) / 1e9).bit_length() - 1)


if __name__ == "__main__":
    run_main("gpu", main)
