"""Every check and measurement that needs a GPU, in parts of a few minutes: `make gpu`.

    python3 -m benchmarks.gpu [PART ...] [--nanogpt PATH] [--minutes M] [--device cuda]
        [--data data/packages] [--out FILE] [--tiny]

Needs no network, make or git, and of packages those of requirements.txt and pytest. The parts run
in the order of their importance, each in a process with a limit of its own: one that fails or is
cut off stops no other. benchmarks/results/gpu_NAME.json, NAME the GPU's, has what is known after
each line that a part prints; a part that is done with this PyTorch runs again only if you name it.
--minutes: of the whole, for a rented machine. The tokens come from the sources of the installed
packages. --tiny: the smallest of models, to see that all of it runs.

It ends with the results and their aims, as `make gpu-report` shows them, which needs no GPU:

    python3 -m benchmarks.gpu --report [FILE ...]
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
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import hardware
from benchmarks import RESULTS, ROOT, argument_parser, machine, nanogpt, notices, run_apart
from formats.files import read_json, write_json
from tools.command import table

TINY = "--n_layer=1 --n_head=2 --n_embd=32 --block_size=32 --batch_size=4 --warmup_steps=1"
TINY += " --compile=False"


class Part(NamedTuple):
    """A part of `make gpu`.

    command: what follows `python`; {data}, {device} and {nanogpt}, a checkout without which it does
    not run, are filled in. minutes: its limit. aims: bounds of its figures, by name. tiny: what is
    added for the smallest size.
    """

    name: str
    command: str
    minutes: float
    aims: dict[str, str]
    tiny: str = ""


def throughput(name: str, aims: dict[str, str], more: str = "") -> Part:
    """A part that measures the speed of train.py with a preset."""
    command = f"-m benchmarks.throughput --preset config/{name}.py --data_dir={{data}} {{device}}"
    tiny = f"--rounds 1 --steps 3 --skip 1 {TINY}"
    return Part(name, f"{command} --name {name} {more}", 8, aims, tiny)


# The most important first. Their times are aims for an H200; benchmarks.lowering has estimates.
PARTS = [
    Part(
        "rates",
        "-m benchmarks.rates {device}",
        3,
        {"gpt2_small: ms a step": "<= 51", "gpt2_small_fast: ms a step": "<= 46"},
        TINY,
    ),
    Part(
        "generate",
        "-m benchmarks.generate --rounds 2",
        3,
        {"tokens/s, one sequence": ">= 1200", "times transformers' tokens/s": ">= 1"},
    ),
    Part(
        "generate_qwen3",
        "-m benchmarks.generate --rounds 2 --preset config/gpt2_small_modern.py --name qwen3",
        3,
        {"tokens/s, one sequence": ">= 1200"},
    ),
    throughput(
        "gpt2_small",
        {"times nanoGPT's speed": ">= 1", "share outside the three parts": "<= 0.02"},
        "--nanogpt {nanogpt}",
    ),
    throughput("gpt2_small_fast", {"ms a step": "<= 43"}),
    throughput("gpt2_small_modern", {"ms a step": "<= 49"}),
    Part(
        "tests",
        "-m pytest tests/training tests/generating -m gpu -vv -rs --continue-on-collection-errors",
        8,
        {"tests failed": "<= 0"},
    ),
    Part(
        "plan",
        "-m benchmarks.plan --data {data} --micro 16 64 {device}",
        5,
        {"memory off by": "<= 0.1", "time off by": "<= 0.15"},
        f"{TINY} --micro 2 --steps 4",
    ),
    Part(
        "time_to_loss",  # GPT-2's recipe is left out, so that the two others have the time
        "-m benchmarks.time_to_loss --task gpt2_small --seeds 1 --data_dir={data} {device}"
        " --nanogpt {nanogpt} --leave_out GPT-2",
        8,
        {"modern: share of nanoGPT's time": "<= 0.25"},
        f"{TINY} --max_steps=6 --eval_interval=2 --eval_batches=1",
    ),
    Part(
        "ladder",
        "-m benchmarks.ladder --rounds 1 --steps 4 --data_dir={data} {device}",
        8,
        {"times the first rung": ">= 16", "a batch, times the first rung": ">= 50"},
        f"--preset config/gpt2_small.py --steps 2 {TINY}",
    ),
]


def parse_args(argv):
    """The command line."""
    parser = argument_parser("gpu", __doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}")
    nanogpt.add_option(parser)
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
    here = run_apart(describe, args.device)  # this process takes no memory of the GPU
    data = args.data or ROOT / "data" / ("gpu_tiny" if args.tiny else "packages")
    out = args.out or result_file(here["device"], args.tiny)
    out.parent.mkdir(parents=True, exist_ok=True)
    found = read_json(out, parts=dict) or {"parts": {}}
    found["machine"] = here
    write_json(out, found)
    chosen = [part for part in PARTS if not args.parts or part.name in args.parts]
    if not args.nanogpt:
        chosen = [part for part in chosen if "{nanogpt}" not in part.command]

    # First what was not tried yet.
    for part in sorted(chosen, key=lambda part: part.name in found["parts"]):
        if not args.parts and is_done(found["parts"].get(part.name)):
            continue
        if "{data}" in part.command and not (data / "meta.json").exists():
            print(f"{data}, the tokens to train on:", flush=True)
            # Where this fails, the parts that need the data fail.
            run(prepare_command(data, args.tiny), min(8 * 60, deadline - time.monotonic()))
        limit = min(60 * part.minutes, deadline - time.monotonic())
        if limit < 30 * part.minutes:
            print(f"\n{part.name}: less than half of its {part.minutes:g} minutes are left")
            continue
        words = words_of(part, data, args)
        print(f"\n{part.name}: python {shlex.join(words)}", flush=True)

        def keep(known: dict, name=part.name) -> None:
            found["parts"][name] = known
            write_json(out, found)

        run_part(words, limit, keep)

    print()
    report([out])
    done = {name for name, known in found["parts"].items() if known["status"] == "done"}
    return int(any(part.name not in done for part in chosen))


def describe(device: str) -> dict:
    """The machine, as a process of its own sees it."""
    return machine(hardware.find_device(device))


def result_file(device: str, tiny: bool) -> Path:
    """The file of this GPU's results."""
    name = re.sub("[^A-Za-z0-9]+", "_", device.partition(",")[0])
    return (ROOT / "data" if tiny else RESULTS) / f"gpu_{name}{'_tiny' if tiny else ''}.json"


def prepare_command(data: Path, tiny: bool) -> list[str]:
    """The command that makes tokens of the sources of installed packages."""
    sources = [f"{sysconfig.get_path('purelib')}/**/*.py", "--clean", "--gigabytes", "0.1"]
    if tiny:
        sources = ["benchmarks/*.py", "training/*.py", "tests/**/*.py", "--vocab_size", "512"]
    return ["prepare_data.py", *sources, "--out", str(data)]


def words_of(part: Part, data: Path, args) -> list[str]:
    """The command of a part, word by word, without Python's own."""
    command = f"{part.command} {part.tiny if args.tiny else ''}"
    paths = {"data": data.absolute(), "nanogpt": args.nanogpt and args.nanogpt.absolute()}
    quoted = {name: shlex.quote(str(path)) for name, path in paths.items()}
    return shlex.split(command.format(device=f"--device={args.device}", **quoted))


def is_done(known: dict | None) -> bool:
    """Whether a part is done with this PyTorch."""
    return bool(known) and known["status"] == "done" and known["torch"] == torch.__version__


def run_part(words: list[str], limit: float, keep: Callable[[dict], None]) -> None:
    """Run a part for at most `limit` seconds.

    keep: called after each line, and in the end, with what became of the part, as JSON has it.
    """
    begun = time.monotonic()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = None
    with contextlib.suppress(OSError):  # no git there
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    with tempfile.TemporaryDirectory() as folder:

        def tell(lines: list[str], status: str = "cut") -> None:
            keep(
                {
                    "status": status,
                    "seconds": round(time.monotonic() - begun, 1),
                    "command": " ".join(["python", *words]),
                    "torch": torch.__version__,
                    "commit": commit,
                    "results": {file.stem: read_json(file) for file in Path(folder).glob("*.json")},
                    "end": lines[-5:] if status == "done" else lines[-40:],
                    "notices": sorted(set(notices(lines))),
                }
            )

        lines, status = run(words, limit, tell, BENCHMARK_RESULTS=folder)
        if status == "cut":
            lines.append(f"cut off after {time.monotonic() - begun:.0f} s")
        tell(lines, status)
    print(f"{status} after {time.monotonic() - begun:.0f} s", flush=True)


def run(
    words: list[str], limit: float, tell: Callable | None = None, **environment: str
) -> tuple[list[str], str]:
    """Run `python WORDS` and show its lines; returns them, and done, failed or cut.

    After `limit` seconds it ends with all processes that it has started. tell: called with the
    lines so far after each.
    """
    process = subprocess.Popen(
        ["timeout", "--signal=KILL", f"{limit}", sys.executable, *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"} | environment,
        process_group=0,
    )
    lines = []
    try:
        for line in process.stdout:
            print(f"  {line}", end="", flush=True)
            lines.append(line.rstrip("\n"))
            if tell:
                tell(lines)
        # timeout kills itself with the rest, and returns the status of a part that was not cut.
        status = {0: "done", -signal.SIGKILL: "cut"}.get(process.wait(), "failed")
    finally:  # Ctrl-C and SIGTERM end the part too
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
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except hardware.DeviceError as error:
        print(f"benchmarks.gpu: {error}", file=sys.stderr)
        sys.exit(2)
