"""Every check and measurement that a GPU is needed for, in parts of a few minutes: `make gpu`.

    python -m benchmarks.gpu [PART ...] [--nanogpt PATH] [--minutes M] [--device cuda]
        [--data data/packages] [--out FILE] [--tiny]

Needs no network, and of packages what requirements.txt has and pytest. The parts run in the order
of their importance, each in processes of its own and with a limit of its own: one that fails or is
cut off stops no other. What a part found is written down as soon as it ends, to
benchmarks/results/gpu_NAME.json, NAME the GPU's; a part that is done there, with this version of
PyTorch, is not run again unless it is named. --minutes: of the whole, for a machine that is lent.
PATH is a checkout of nanoGPT to compare with. The tokens are of the sources of the Python packages
that are installed. --tiny: all of it with the smallest of models, to see that it runs.

`python -m benchmarks.gpu_report`, or `make gpu-report`, shows what was found beside the aims.
"""

import contextlib
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch

import hardware
from benchmarks import RESULTS, ROOT, argument_parser, done_without, machine, print_table
from formats.files import read_json, write_json

TINY_FOLDER = ROOT / "data" / "gpu_tiny"
TINY_MODEL = (
    "--n_layer=1 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --warmup_steps=1"
    " --compile=False"
)
BESIDE = "--nanogpt {path}"


class Part(NamedTuple):
    """A part of `make gpu`.

    command: what stands behind `python`; {data} and {device} are filled in. minutes: after which it
    is cut off. aims: {what is measured, as gpu_report calls it: its bound}. nanogpt: what is added
    where there is a checkout, at {path}; tiny: at the smallest size.
    """

    name: str
    command: str
    minutes: float
    aims: dict[str, str]
    nanogpt: str = ""
    tiny: str = ""


def throughput(name: str, options: str, aims: dict[str, str]) -> Part:
    """A part that compares train.py's speed with nanoGPT's, with settings of its own."""
    command = f"-m benchmarks.throughput {options} --data_dir={{data}} {{device}} --name {name}"
    tiny = f"--rounds 1 --steps 3 --skip 1 {TINY_MODEL}"
    return Part(name, command, 8, aims, BESIDE, tiny)


# What nearly every part needs, besides PyTorch.
PACKAGES = ("numpy", "tiktoken", "tokenizers", "tqdm", "pytest")
FASTER = {"times nanoGPT's speed": ">= 1"}
# The most important first. A setting that shall make a step faster gets a line of `throughput`.
PARTS = [
    Part(
        "tests",
        "-m pytest tests/training tests/generating -m gpu -vv -rs --continue-on-collection-errors",
        8,
        {"tests failed": "<= 0"},
    ),
    throughput(
        "gpt2_small",
        "--preset config/gpt2_small.py",
        # 55% of an H200's 989 TFLOP/s are 43.0 ms at 64 x 512.
        FASTER | {"MFU": ">= 0.55", "share outside the three parts": "<= 0.02"},
    ),
    Part(
        "generate",
        "-m benchmarks.generate --rounds 3",
        4,
        {"times nanoGPT's tokens/s": ">= 1", "times transformers' tokens/s": ">= 1"},
        BESIDE,
        tiny="--rounds 1",
    ),
    throughput(
        "gpt2_small_fast", "--preset config/gpt2_small_fast.py", FASTER | {"MFU": ">= 0.55"}
    ),
    throughput("gpt2_small_modern", "--preset config/gpt2_small_modern.py", FASTER),
    Part(
        "time_to_loss",
        "-m benchmarks.time_to_loss --task gpt2_small --seeds 1 --data_dir={data} {device}",
        8,
        {"modern: share of nanoGPT's time": "<= 0.25"},
        f"{BESIDE} --leave_out GPT-2",  # so that the two others have the time
        tiny=f"{TINY_MODEL} --max_steps=6 --eval_interval=2 --eval_batches=1",
    ),
    Part(
        "plan",
        "-m benchmarks.plan --data {data} --micro 16 64 {device}",
        5,
        {"memory off by": "<= 0.1", "time off by": "<= 0.15"},
        tiny=f"{TINY_MODEL} --micro 2 --steps 4",
    ),
    throughput("eight_sequences", "--preset config/gpt2_small.py --batch_size=8", FASTER),
    throughput("fp8_head", "--preset config/gpt2_small.py --fp8_head=True", FASTER),
    throughput("compile_max", "--preset config/gpt2_small.py --compile=max --rounds 1", FASTER),
    Part(
        "ladder",
        "-m benchmarks.ladder --rounds 1 --steps 4 --data_dir={data} {device}",
        8,
        {"times the first rung": ">= 16", "a batch, times the first rung": ">= 50"},
        tiny=f"--preset config/gpt2_small.py --steps 2 {TINY_MODEL}",
    ),
]


@dataclass
class Outcome:
    """What became of a part.

    status: done, failed or cut. results: {name: JSON} of what its benchmark wrote. end: the last
    lines that it printed. without: those that say what train.py did without, as a compilation.
    """

    status: str
    seconds: float
    command: str
    torch: str
    commit: str | None
    results: dict
    end: list[str]
    without: list[str]


class Shown(NamedTuple):
    """What a process printed, and how it ended: its exit status, None where it was cut off."""

    lines: list[str]
    status: int | None


def words_of(part: Part, data: Path, device: str, nanogpt: str | None, tiny: bool) -> list[str]:
    """The command of a part, word by word, without Python's own."""
    words = shlex.split(
        part.command.format(data=shlex.quote(str(data)), device=f"--device={device}")
    )
    if nanogpt:
        words += shlex.split(part.nanogpt.format(path=shlex.quote(nanogpt)))
    return words + (shlex.split(part.tiny) if tiny else [])


def run_to_the_limit(words: list[str], seconds: float, **environment: str) -> Shown:
    """Run `python WORDS` and show what it prints; after so many seconds end it and its children."""
    process = subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        start_new_session=True,
    )
    cut = threading.Event()

    def end():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    def cut_off():
        cut.set()
        end()

    timer = threading.Timer(seconds, cut_off)
    timer.start()
    lines = []
    try:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line.rstrip("\n"))
        status = process.wait()
    finally:  # Ctrl-C ends the part too
        timer.cancel()
        end()
    return Shown(lines, None if cut.is_set() else status)


def run_part(part: Part, words: list[str], seconds: float) -> Outcome:
    """Run a part, for at most so many seconds."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        shown = run_to_the_limit(words, seconds, BENCHMARK_RESULTS=folder)
        found = {path.stem: read_json(path) for path in Path(folder).glob("*.json")}
    results = {name: result for name, result in found.items() if result}  # whole ones
    spent = time.monotonic() - begun
    status = "done" if shown.status == 0 else "failed"
    if shown.status is None:
        status = "cut"
        shown.lines.append(f"cut off after {spent:.0f} s, before it had ended")
    command = " ".join(["python", *words])
    kept = 5 if status == "done" else 40
    end = shown.lines[-kept:] or ["it printed nothing"]
    without = sorted(set(done_without(shown.lines)))
    return Outcome(
        status, round(spent, 1), command, torch.__version__, commit(), results, end, without
    )


def commit() -> str | None:
    """The commit of this checkout, None where git does not tell."""
    with contextlib.suppress(OSError):
        command = ["git", "rev-parse", "--short", "HEAD"]
        known = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
        return known or None
    return None


def prepare(data: Path, tiny: bool, seconds: float) -> None:
    """Make the folder of tokens from the sources of installed packages, unless it is there.

    In so many seconds at most; the same command continues. Where it fails, the parts that need it
    fail by themselves.
    """
    if (data / "meta.json").exists():
        return
    sources = [f"{sysconfig.get_path('purelib')}/**/*.py", "--clean", "--gigabytes", "0.3"]
    if tiny:
        sources = ["benchmarks/*.py", "training/*.py", "tests/**/*.py", "--vocab_size", "512"]
    print(f"{data}, the tokens to train on:", flush=True)
    run_to_the_limit(["prepare_data.py", *sources, "--out", str(data)], seconds)


def result_file(device: torch.device) -> Path:
    """Where the results of this GPU lie."""
    name = "cpu"
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    return RESULTS / f"gpu_{re.sub('[^A-Za-z0-9]+', '_', name)}.json"


def done_before(known: dict | None, words: list[str]) -> bool:
    """Whether a part is done, with the PyTorch that is here, and beside nanoGPT if it shall be.

    known: what was written of it.
    """
    if not known or known["status"] != "done" or known["torch"] != torch.__version__:
        return False
    return "--nanogpt" in known["command"] or "--nanogpt" not in words


def show(found: dict, parts: Iterable[Part]) -> bool:
    """Print what became of the parts; returns whether all of them are done."""
    rows = []
    for part in parts:
        known = found["parts"].get(part.name)
        status, minutes = "not run", ""
        if known:
            status, minutes = known["status"], f"{known['seconds'] / 60:.1f}"
        rows.append([part.name, status, minutes, f"{part.minutes:g}"])
    print()
    print_table(["part", "status", "minutes", "at most"], rows)
    return all(row[1] == "done" for row in rows)


def parse_args(argv):
    """The command line."""
    parser = argument_parser("gpu", __doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--nanogpt", metavar="PATH", help="checkout of nanoGPT to compare with")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="of the whole")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, help="prepared folder; made if it is not there")
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--tiny", action="store_true", help="with the smallest of models")
    args = parser.parse_args(argv)
    if unknown := set(args.parts) - set(names):
        parser.error(
            f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(names)}"
        )
    if args.nanogpt:
        args.nanogpt = str(Path(args.nanogpt).absolute())
    return args


def main(argv):
    """The command line's work. Returns the exit status: 1 unless all that was asked for is done."""
    args = parse_args(argv)
    deadline = time.monotonic() + 60 * args.minutes
    device = hardware.find_device(args.device)
    folder = TINY_FOLDER if args.tiny else ROOT / "data" / "packages"
    data = (args.data or folder).absolute()
    out = args.out or (TINY_FOLDER / "gpu.json" if args.tiny else result_file(device))
    out.parent.mkdir(parents=True, exist_ok=True)
    found = json.loads(out.read_text()) if out.exists() else {"parts": {}}
    found["machine"] = machine(device)
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts]
    commands = {
        part.name: words_of(part, data, args.device, args.nanogpt, args.tiny) for part in chosen
    }
    waiting = [
        part
        for part in chosen
        if args.parts or not done_before(found["parts"].get(part.name), commands[part.name])
    ]
    waiting.sort(key=lambda part: part.name in found["parts"])  # first what was not tried yet
    if missing := [name for name in PACKAGES if not importlib.util.find_spec(name)]:
        print(f"not installed: {', '.join(missing)}; parts that need them will fail", flush=True)
    if any("{data}" in part.command for part in waiting):
        prepare(data, args.tiny, min(8 * 60, deadline - time.monotonic()))
    for part in waiting:
        words = commands[part.name]
        seconds = min(60 * part.minutes, deadline - time.monotonic())
        if seconds < 30 * part.minutes:
            print(f"\n{part.name}: less than half of its {part.minutes:g} minutes are left")
            continue
        print(f"\n{part.name}: python {shlex.join(words)}", flush=True)
        outcome = run_part(part, words, seconds)
        print(f"{part.name}: {outcome.status} after {outcome.seconds:.0f} s", flush=True)
        found["parts"][part.name] = asdict(outcome)
        write_json(out, found)
    all_done = show(found, chosen)
    print(f"written to {out}; beside the aims: python -m benchmarks.gpu_report {out}")
    return int(not all_done)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except hardware.DeviceError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        sys.exit(2)
