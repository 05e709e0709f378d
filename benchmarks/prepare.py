"""What prepare_data.py costs on this machine.

    python -m benchmarks.prepare [--gpuburnout PATH] [--gigabytes G] [--kills N]

The text is real: sources of the standard library and of installed packages, and /usr/share/doc;
beyond what is there it is repeated with the paragraphs of each document in another order every
time. Writes benchmarks/results/prepare*.json.
"""

import argparse
import functools
import json
import platform
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path

import psutil

from benchmarks import RESULTS
from formats.data_folder import read_meta
from formats.files import sha256, write_json
from preparing.engines import usable_cores
from tokenizer_bpe import EOT, Tokenizer

ROOT = Path(__file__).parent.parent


@functools.cache
def documents() -> list[bytes]:
    """Real texts of this machine, each one file, always in the same order."""
    roots = [
        Path(sysconfig.get_paths()["stdlib"]),
        Path(sysconfig.get_paths()["purelib"]),
        Path("/usr/share/doc"),
    ]
    found = []
    for root in dict.fromkeys(roots):
        for path in sorted(root.rglob("*")):
            wanted = path.suffix == ".py" or ("doc" in root.parts and path.suffix != ".gz")
            if wanted and path.is_file() and is_document(data := path.read_bytes()):
                found.append(data)
    return found


def is_document(data: bytes) -> bool:
    """Whether bytes are a text in UTF-8 that is not too short, and a single one."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return len(data) > 200 and b"\0" not in data and EOT.encode() not in data


def make_text(path: Path, size: int) -> None:
    """Write a text file of `size` bytes or a little more.

    It is the documents, and then again and again with their paragraphs shuffled.
    """
    shuffle = random.Random(1)
    rounds = 0
    with open(path, "wb") as file:
        while True:
            for text in documents():
                paragraphs = text.rstrip(b"\n").split(b"\n\n")
                if rounds:
                    shuffle.shuffle(paragraphs)
                file.write(b"\n\n".join(paragraphs) + b"\n" + EOT.encode() + b"\n")
                if file.tell() >= size:
                    return
            rounds += 1


class MemoryWatch(threading.Thread):
    """The peak memory of a process and its children, looked at ten times a second.

    In bytes: sums of their resident sizes, peak_rss, and of their proportional sizes, peak_pss.
    """

    def __init__(self, pid: int):
        super().__init__(daemon=True)
        self.process = psutil.Process(pid)
        self.done = threading.Event()
        self.peak_rss = 0
        self.peak_pss = 0

    def run(self) -> None:
        """Look until `done` is set."""
        while not self.done.wait(0.1):
            try:
                members = [self.process, *self.process.children(recursive=True)]
                sizes = [member.memory_full_info() for member in members]
            except psutil.Error:
                continue
            self.peak_rss = max(self.peak_rss, sum(size.rss for size in sizes))
            self.peak_pss = max(self.peak_pss, sum(getattr(size, "pss", 0) for size in sizes))


def run(command: list, cwd=ROOT) -> dict:
    """Run a command to its end: seconds, peak memory of it and its children, output."""
    started = time.perf_counter()
    process = start(command, cwd)
    watch = MemoryWatch(process.pid)
    watch.start()
    output, errors = process.communicate()
    watch.done.set()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{output[-2000:]}{errors[-2000:]}")
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "peak_rss_mb": watch.peak_rss // 10**6,
        "peak_pss_mb": watch.peak_pss // 10**6,
        "output": output,
    }


def start(command: list, cwd=ROOT) -> subprocess.Popen:
    """Begin `python *command`."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )


def prepare(*arguments) -> dict:
    """Run prepare_data.py; adds the tokenising stage's own time and speed from its summary."""
    result = run(["prepare_data.py", *arguments])
    found = re.search(r"tokenising ([\d,.]+) MB took ([\d,.]+) s, ([\d,.]+) MB/s", result["output"])
    megabytes, seconds, speed = (float(x.replace(",", "")) for x in found.groups())
    return result | {"megabytes": megabytes, "tokenising_s": seconds, "tokenising_mb_s": speed}


def bare(tokenizer: Path, text: Path) -> float:
    """MB/s of the plainest loop: tiktoken over the text in strings of a million characters.

    In this process, nothing read or written while it runs.
    """
    encoding = Tokenizer.load(tokenizer)._tiktoken
    whole = text.read_text(encoding="utf-8")
    parts = [whole[n : n + (1 << 20)] for n in range(0, len(whole), 1 << 20)]
    started = time.perf_counter()
    for part in parts:
        encoding.encode_to_numpy(part, disallowed_special=())
    return text.stat().st_size / 1e6 / (time.perf_counter() - started)


def bare_together(tokenizer: Path, text: Path, count: int) -> float:
    """MB/s of `count` such loops side by side: what the cores give when all of them work."""
    code = (
        "from benchmarks.prepare import bare; from pathlib import Path;"
        f" print(bare(Path({str(tokenizer)!r}), Path({str(text)!r})))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    return sum(float(p.communicate()[0]) for p in processes)


def stage(work: Path, tokenizer: Path, rounds: int, workers: int) -> dict:
    """The tokenising stage against bare loops, alternated."""
    text = work / "stage.txt"
    make_text(text, 200_000_000)
    bare_speeds = []
    prepare_speeds = []
    bare_speeds_together = []
    for _ in range(rounds):
        shutil.rmtree(work / "stage", ignore_errors=True)
        bare_speeds.append(round(bare(tokenizer, text), 2))
        flags = ["--tokenizer", tokenizer, "--workers", workers, "--out", work / "stage"]
        prepare_speeds.append(prepare(text, *flags)["tokenising_mb_s"])
        bare_speeds_together.append(round(bare_together(tokenizer, text, workers), 2))
    ours = statistics.median(prepare_speeds)
    return {
        "megabytes": 200,
        "workers": workers,
        "bare_mb_s": bare_speeds,
        "bare_all_cores_mb_s": bare_speeds_together,
        "prepare_mb_s": prepare_speeds,
        "of_workers_times_bare": round(ours / workers / statistics.median(bare_speeds), 3),
        "of_bare_on_all_cores": round(ours / statistics.median(bare_speeds_together), 3),
    }


def characters(work: Path) -> dict:
    """250 MB of characters, from text to a finished folder."""
    text = work / "characters.txt"
    make_text(text, 250_000_000)
    result = prepare(text, "--tokenizer", "char", "--out", work / "characters")
    return {name: value for name, value in result.items() if name != "output"}


def against_gpuburnout(work: Path, path: Path) -> dict:
    """Both on the same 40 MB with a vocabulary of 32,000, one after the other.

    Its script runs where it lies.
    """
    text = work / "forty.txt"
    make_text(text, 40_000_000)
    theirs = run(
        [path / "tokenize_local_bpe.py", "--input", text, "--output_dir", work / "theirs"], cwd=path
    )
    ours = prepare(text, "--out", work / "ours")
    rows = {"gpuburnout": theirs, "prepare_data": ours}
    rows = {
        name: {key: row[key] for key in ("seconds", "peak_rss_mb", "peak_pss_mb")}
        for name, row in rows.items()
    }
    return rows | {
        "times_faster": round(theirs["seconds"] / ours["seconds"], 2),
        "share_of_memory": round(ours["peak_rss_mb"] / theirs["peak_rss_mb"], 3),
    }


def kills(work: Path, tokenizer: Path, count: int) -> dict:
    """Kill a run `count` times at random moments, and compare with an uninterrupted one."""
    text = work / "kills.txt"
    make_text(text, 600_000_000)
    arguments = ["prepare_data.py", text, "--tokenizer", tokenizer, "--clean", "--out"]
    whole = run([*arguments, work / "whole"])
    shutil.rmtree(work / "killed", ignore_errors=True)
    moments = random.Random(2)
    longest = 1.6 * whole["seconds"] / count
    waits = []
    continued = 0
    returncode = None
    while returncode != 0:
        wait = round(moments.uniform(0.2, longest), 2) if len(waits) < count else None
        process = start([*arguments, work / "killed"])
        try:
            errors = process.communicate(timeout=wait)[1]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            errors = process.communicate()[1]
            waits.append(wait)
        continued += "continuing after" in errors
        returncode = process.returncode
    digests = {
        name: [sha256(work / name / f"{split}.bin") for split in ("train", "val")]
        for name in ("whole", "killed")
    }
    return {
        "megabytes": 600,
        "killed_after_s": waits,
        "continued": continued,
        "sha256": digests,
        "identical": digests["whole"] == digests["killed"],
    }


def large(work: Path, gigabytes: float) -> dict:
    """One run from text to a finished folder, tokenizer included."""
    text = work / "large.txt"
    make_text(text, int(gigabytes * 1e9))
    result = prepare(text, "--out", work / "large")
    meta = read_meta(work / "large")
    tokens = {name: split.tokens for name, split in meta.splits.items()}
    disk = sum(path.stat().st_size for path in (work / "large").iterdir())
    return {key: value for key, value in result.items() if key != "output"} | {
        "tokens": tokens,
        "bytes_on_disk": disk,
        "summary": result["output"].splitlines(),
    }


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.prepare", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("data/benchmark"),
        help="folder for text and results, several times the text's size; default %(default)s",
    )
    parser.add_argument(
        "--gpuburnout",
        type=Path,
        metavar="PATH",
        help="a clone of GPUburnout/gpt2-from-scratch, to compare with",
    )
    parser.add_argument(
        "--gigabytes",
        type=float,
        default=0,
        metavar="G",
        help="only a large run of this size, as with 12",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=["tokenising", "characters", "gpuburnout", "kills"],
        metavar="PART",
        help="parts to measure; the others keep their results; default: %(default)s",
    )
    parser.add_argument(
        "--kills",
        type=int,
        default=10,
        metavar="N",
        help="SIGKILLs on the way; default %(default)s",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        metavar="N",
        help="of prepare and bare loops in turn; default %(default)s",
    )
    return parser.parse_args(argv)


def small_runs(work: Path, args: argparse.Namespace, cores: int) -> dict:
    """The parts that --only names."""
    small = work / "tokenizer.txt"
    tokenizer = work / "tokenizer"
    make_text(small, 40_000_000)
    prepare(small, "--out", tokenizer)
    results = {}
    if "tokenising" in args.only:
        results["tokenising"] = stage(work, tokenizer, args.rounds, cores)
    if "characters" in args.only:
        results["characters"] = characters(work)
    if "gpuburnout" in args.only and args.gpuburnout:
        results["gpuburnout"] = against_gpuburnout(work, args.gpuburnout.resolve())
    if "kills" in args.only:
        results["kills"] = kills(work, tokenizer, args.kills)
    return results


def main(argv: list[str]) -> None:
    """Measure, write the results and print them."""
    args = parse_args(argv)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cores = usable_cores()
    results = {
        "machine": {
            "cores": cores,
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
    }
    if args.gigabytes:
        path = RESULTS / f"prepare_{args.gigabytes:g}gb.json"
        results["large"] = large(work, args.gigabytes)
    else:
        path = RESULTS / "prepare.json"
        if path.exists():
            results = json.loads(path.read_text(encoding="utf-8")) | results
        results |= small_runs(work, args, cores)
    RESULTS.mkdir(exist_ok=True)
    write_json(path, results)
    print(json.dumps(results, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1:])
