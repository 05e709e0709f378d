"""Every check and measurement that needs a GPU, in parts of a few minutes: `make gpu`.

    python -m benchmarks.gpu [PART ...] [--nanogpt PATH] [--minutes M] [--device cuda]
        [--data data/packages] [--out FILE] [--tiny]

Needs no network, and of packages those of requirements.txt and pytest. The parts run in the order
of their importance, each in a process with a limit of its own: one that fails or is cut off stops
no other. Results are written as soon as a part ends, to benchmarks/results/gpu_NAME.json, NAME the
GPU's; a part that is done with this PyTorch runs again only if it is named. --minutes: of the
whole, for a rented machine. The tokens come from the sources of the installed packages. --tiny: the
smallest of models, to see that all of it runs.

It ends with the results and their aims, as `make gpu-report` shows them, which needs no GPU:

    python -m benchmarks.gpu --report [FILE ...]
"""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

import hardware
from benchmarks import RESULTS, ROOT, argument_parser, machine, notices
from formats.files import read_json, write_json
from tools.command import table

TINY = "--n_layer=1 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --warmup_steps=1"
TINY += " --compile=False"


class Part(NamedTuple):
    """A part of `make gpu`.

    command: what follows `python`; {data} and {device} are filled in. minutes: its limit. aims:
    bounds of its figures, by name. nanogpt: what is added with a checkout, at {path};
    tiny: at the smallest size.
    """

    name: str
    command: str
    minutes: float
    aims: dict[str, str]
    nanogpt: str = ""
    tiny: str = ""


def throughput(name: str, options: str, aims: dict[str, str]) -> Part:
    """A part that measures the speed of train.py with some settings."""
    command = f"-m benchmarks.throughput {options} --data_dir={{data}} {{device}} --name {name}"
    tiny = f"--rounds 1 --steps 3 --skip 1 {TINY}"
    return Part(name, command, 8, aims, "--nanogpt {path}", tiny)


FASTER = {"times nanoGPT's speed": ">= 1"}
# The most important first. A setting that should make a step faster gets a line of `throughput`.
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
        "--nanogpt {path}",
        "--rounds 1",
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
        "--nanogpt {path} --leave_out GPT-2",  # so that the two others have the time
        f"{TINY} --max_steps=6 --eval_interval=2 --eval_batches=1",
    ),
    Part(
        "plan",
        "-m benchmarks.plan --data {data} --micro 16 64 {device}",
        5,
        {"memory off by": "<= 0.1", "time off by": "<= 0.15"},
        tiny=f"{TINY} --micro 2 --steps 4",
    ),
    throughput("eight_sequences", "--preset config/gpt2_small.py --batch_size=8", FASTER),
    throughput("fp8_head", "--preset config/gpt2_small.py --fp8_head=True", FASTER),
    throughput("compile_max", "--preset config/gpt2_small.py --compile=max --rounds 1", FASTER),
    Part(
        "ladder",
        "-m benchmarks.ladder --rounds 1 --steps 4 --data_dir={data} {device}",
        8,
        {"times the first rung": ">= 16", "a batch, times the first rung": ">= 50"},
        tiny=f"--preset config/gpt2_small.py --steps 2 {TINY}",
    ),
]


def parse_args(argv):
    """The command line."""
    parser = argument_parser("gpu", __doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    parser.add_argument("--nanogpt", type=Path, metavar="PATH", help="checkout to compare with")
    parser.add_argument("--minutes", type=float, default=24 * 60, help="of the whole")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--data", type=Path, help="prepared folder; made if it is not there")
    parser.add_argument("--out", type=Path, help="file of the results")
    parser.add_argument("--tiny", action="store_true", help="with the smallest of models")
    parser.add_argument(
        "--report",
        type=Path,
        nargs="*",
        metavar="FILE",
        help="run nothing, show these results, by default all of them",
    )
    args = parser.parse_args(argv)
    unknown = set(args.parts) - set(names)
    if unknown:
        parser.error(f"there is no part {', '.join(sorted(unknown))}, but {', '.join(names)}")
    return args


def main(argv):
    """The command line's work. Returns the exit status: 1 unless all that was asked for is done."""
    args = parse_args(argv)
    if args.report is not None:
        report(args.report or sorted(RESULTS.glob("gpu_*.json")))
        return 0
    deadline = time.monotonic() + 60 * args.minutes
    device = hardware.find_device(args.device)
    data = args.data or ROOT / "data" / ("gpu_tiny" if args.tiny else "packages")
    out = args.out or result_file(device, args.tiny)
    out.parent.mkdir(parents=True, exist_ok=True)
    found = read_json(out, parts=dict) or {"parts": {}}
    found["machine"] = machine(device)
    write_json(out, found)
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts]
    needed = any("{data}" in part.command for part in chosen)
    if needed and not (data / "meta.json").exists():
        print(f"{data}, the tokens to train on:", flush=True)
        # Where this fails, the parts that need the data fail.
        run(prepare_command(data, args.tiny), min(8 * 60, deadline - time.monotonic()))

    # First what was not tried yet.
    for part in sorted(chosen, key=lambda part: part.name in found["parts"]):
        words = words_of(part, data, args)
        if not args.parts and is_done(found["parts"].get(part.name), words):
            continue
        limit = min(60 * part.minutes, deadline - time.monotonic())
        if limit < 30 * part.minutes:
            print(f"\n{part.name}: less than half of its {part.minutes:g} minutes are left")
            continue
        print(f"\n{part.name}: python {shlex.join(words)}", flush=True)
        found["parts"][part.name] = run_part(words, limit)
        write_json(out, found)

    print()
    report([out])
    done = {name for name, known in found["parts"].items() if known["status"] == "done"}
    return int(any(part.name not in done for part in chosen))


def result_file(device: torch.device, tiny: bool) -> Path:
    """The file of this GPU's results."""
    name = hardware.describe(device).partition(",")[0]
    name = f"gpu_{re.sub('[^A-Za-z0-9]+', '_', name)}{'_tiny' if tiny else ''}.json"
    return (ROOT / "data" if tiny else RESULTS) / name


def prepare_command(data: Path, tiny: bool) -> list[str]:
    """The command that makes tokens of the sources of installed packages."""
    sources = [f"{sysconfig.get_path('purelib')}/**/*.py", "--clean", "--gigabytes", "0.3"]
    if tiny:
        sources = ["benchmarks/*.py", "training/*.py", "tests/**/*.py", "--vocab_size", "512"]
    return ["prepare_data.py", *sources, "--out", str(data)]


def words_of(part: Part, data: Path, args) -> list[str]:
    """The command of a part, word by word, without Python's own."""
    options = [part.command]
    if args.nanogpt:
        options.append(part.nanogpt)
    if args.tiny:
        options.append(part.tiny)
    path = shlex.quote(str(args.nanogpt and args.nanogpt.absolute()))
    data = shlex.quote(str(data.absolute()))
    command = " ".join(options).format(data=data, device=f"--device={args.device}", path=path)
    return shlex.split(command)


def is_done(known: dict | None, words: list[str]) -> bool:
    """Whether a part is done with this PyTorch, compared with nanoGPT if that is asked for."""
    if not known or known["status"] != "done" or known["torch"] != torch.__version__:
        return False
    return "--nanogpt" in known["command"] or "--nanogpt" not in words


def run_part(words: list[str], limit: float) -> dict:
    """Run a part for at most `limit` seconds; what became of it, as JSON has it."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        lines, status = run(words, limit, BENCHMARK_RESULTS=folder)
        results = {path.stem: read_json(path) for path in Path(folder).glob("*.json")}
    seconds = time.monotonic() - begun
    if status == "cut":
        lines.append(f"cut off after {seconds:.0f} s")
    print(f"{status} after {seconds:.0f} s", flush=True)
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = None
    with contextlib.suppress(OSError):  # no git there
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    return {
        "status": status,
        "seconds": round(seconds, 1),
        "command": " ".join(["python", *words]),
        "torch": torch.__version__,
        "commit": commit,
        "results": results,
        "end": lines[-5:] if status == "done" else lines[-40:],
        "notices": sorted(set(notices(lines))),
    }


def run(words: list[str], limit: float, **environment: str) -> tuple[list[str], str]:
    """Run `python WORDS` and show its lines; returns them, and done, failed or cut.

    After `limit` seconds it ends with all processes that it has started.
    """
    process = subprocess.Popen(
        ["timeout", "--signal=KILL", f"{limit}", sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        start_new_session=True,
    )
    lines = []
    try:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line.rstrip("\n"))
        # timeout kills itself with the rest, and returns the status of a part that was not cut.
        status = {0: "done", -signal.SIGKILL: "cut"}.get(process.wait(), "failed")
    finally:  # Ctrl-C ends the part too
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return lines, status


# -- the report ------------------------------------------------------------------------------------


def report(files: list[Path]) -> None:
    """Print what each file holds, with the aims."""
    if not files:
        sys.exit(f"nothing was measured on a GPU yet: no gpu_*.json in {RESULTS}; run `make gpu`")
    for file in files:
        found = read_json(file, machine=dict, parts=dict)
        if not found:
            sys.exit(f"{file} is not there, or not what `make gpu` writes")
        of = found["machine"]
        print(f"{of['device']}; torch {of['torch']}, driver {of.get('driver')}; {file}\n")
        print(table(["part", "measured", "value", "aim", ""], rows_of(found)))
        print()


def figures_of(known: dict) -> dict[str, float]:
    """What a part measured, by the names of its aims; nothing where it did not come so far."""
    if known["command"].split()[2] == "pytest":
        return of_tests(known["end"])
    return {name: f for r in known["results"].values() for name, f in r["figures"].items()}


def of_tests(end: list[str]) -> dict[str, float]:
    """How many tests failed, passed and were skipped; nothing where pytest itself failed."""
    counts = {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (\w+)", end[-1])}
    if not counts.keys() & {"passed", "failed", "error"}:
        return {}
    return {
        "tests failed": counts.get("failed", 0) + counts.get("error", 0),
        "tests passed": counts.get("passed", 0),
        "tests skipped": counts.get("skipped", 0),
    }


def verdict(value: float, aim: str) -> str:
    """Whether a value is within its bound, as in ">= 0.55"; "" without one."""
    if not aim:
        return ""
    relation, bound = aim.split()
    within = value >= float(bound) if relation == ">=" else value <= float(bound)
    return "met" if within else "MISSED"


def rows_of(found: dict) -> list[list[str]]:
    """Rows of the table: part, what was measured, its value, its aim and whether that is met."""
    rows = []
    for part in PARTS:
        known = found["parts"].get(part.name)
        if not known:
            rows.append([part.name, "not run", "", "", ""])
            continue
        if known["status"] != "done":
            end = known["end"][-1] if known["end"] else "it printed nothing"
            rows.append([part.name, f"{known['status']}: {end[:60]}", "", "", ""])
        rows += [[part.name, f"NOTE {line[:60]}", "", "", ""] for line in known["notices"]]
        figures = figures_of(known)
        for what, value in figures.items():
            aim = part.aims.get(what, "")
            rows.append([part.name, what, f"{value:.4g}", aim, verdict(value, aim)])
        for what in part.aims.keys() - figures:
            rows.append([part.name, what, "not measured", part.aims[what], ""])
    return rows


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except hardware.DeviceError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        sys.exit(2)
