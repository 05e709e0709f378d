"""What prepare_data.py costs, on this machine: python -m benchmarks.prepare [--gpuburnout PATH]
[--gigabytes G] [--kills N]

The text is real: sources of the standard library and of installed packages, and /usr/share/doc;
beyond what is there it is repeated with the paragraphs of each document in another order every
time. Writes benchmarks/results/prepare*.json.
"""

import argparse
import functools
import hashlib
import json
import os
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
            if path.is_file() and (
                path.suffix == ".py" or "doc" in root.parts and path.suffix != ".gz"
            ):
                data = path.read_bytes()
                if (
                    utf8(data)
                    and b"\0" not in data
                    and EOT.encode() not in data
                    and len(data) > 200
                ):
                    found.append(data)
    return found


def utf8(data: bytes) -> bool:
    """Whether bytes are text in UTF-8."""
    try:
        return bool(data.decode())
    except UnicodeDecodeError:
        return False


def make_text(path: Path, size: int) -> None:
    """Write a text file of `size` bytes or a little more: the documents, and then again and again
    with their paragraphs shuffled.
    """
    shuffle, rounds = random.Random(1), 0
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


def run(command: list, cwd=ROOT) -> dict:
    """Run a command to its end: seconds, peak memory of it and its children (sum of resident and of
    proportional sizes), output.
    """
    started, peak, done = time.perf_counter(), {"rss": 0, "pss": 0}, threading.Event()
    process = subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )

    def watch():
        parent = psutil.Process(process.pid)
        while not done.wait(0.1):
            sums = {"rss": 0, "pss": 0}
            try:
                for member in [parent, *parent.children(recursive=True)]:
                    info = member.memory_full_info()
                    sums["rss"], sums["pss"] = (
                        sums["rss"] + info.rss,
                        sums["pss"] + getattr(info, "pss", 0),
                    )
            except psutil.Error:
                continue
            peak.update({key: max(peak[key], value) for key, value in sums.items()})

    threading.Thread(target=watch, daemon=True).start()
    output, errors = process.communicate()
    done.set()
    if process.returncode:
        raise SystemExit(f"{command} failed:\n{output[-2000:]}{errors[-2000:]}")
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "peak_rss_mb": peak["rss"] // 10**6,
        "peak_pss_mb": peak["pss"] // 10**6,
        "output": output,
    }


def prepare(*arguments) -> dict:
    """Run prepare_data.py; adds the tokenising stage's own time and speed, as its summary gives
    them.
    """
    result = run(["prepare_data.py", *arguments])
    found = re.search(r"tokenising ([\d,.]+) MB took ([\d,.]+) s, ([\d,.]+) MB/s", result["output"])
    megabytes, seconds, speed = (float(x.replace(",", "")) for x in found.groups())
    return result | {"megabytes": megabytes, "tokenising_s": seconds, "tokenising_mb_s": speed}


def bare(tokenizer: Path, text: Path) -> float:
    """MB/s of the plainest loop: tiktoken over the text in strings of a million characters, in this
    process, nothing read or written while it runs.
    """
    encoding, whole = Tokenizer.load(tokenizer)._tiktoken, text.read_text(encoding="utf-8")
    parts = [whole[n : n + (1 << 20)] for n in range(0, len(whole), 1 << 20)]
    started = time.perf_counter()
    for part in parts:
        encoding.encode_to_numpy(part, disallowed_special=())
    return text.stat().st_size / 1e6 / (time.perf_counter() - started)


def bare_together(tokenizer: Path, text: Path, count: int) -> float:
    """MB/s of `count` such loops side by side: what the cores have to give when all of them work."""
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
    speeds = {"bare_mb_s": [], "bare_all_cores_mb_s": [], "prepare_mb_s": []}
    for _ in range(rounds):
        shutil.rmtree(work / "stage", ignore_errors=True)
        speeds["bare_mb_s"].append(round(bare(tokenizer, text), 2))
        speeds["prepare_mb_s"].append(
            prepare(text, "--tokenizer", tokenizer, "--workers", workers, "--out", work / "stage")[
                "tokenising_mb_s"
            ]
        )
        speeds["bare_all_cores_mb_s"].append(round(bare_together(tokenizer, text, workers), 2))
    one, together, ours = (
        statistics.median(speeds[k]) for k in ("bare_mb_s", "bare_all_cores_mb_s", "prepare_mb_s")
    )
    return {
        "megabytes": 200,
        "workers": workers,
        **speeds,
        "of_workers_times_bare": round(ours / workers / one, 3),
        "of_bare_on_all_cores": round(ours / together, 3),
    }


def characters(work: Path) -> dict:
    """250 MB of characters, from text to a finished folder."""
    text = work / "characters.txt"
    make_text(text, 250_000_000)
    result = prepare(text, "--tokenizer", "char", "--out", work / "characters")
    return {
        key: result[key]
        for key in (
            "megabytes",
            "seconds",
            "tokenising_s",
            "tokenising_mb_s",
            "peak_rss_mb",
            "peak_pss_mb",
        )
    }


def against_gpuburnout(work: Path, path: Path) -> dict:
    """Both on the same 40 MB with a vocabulary of 32,000, one after the other. Its script runs
    where it lies.
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
    """Kill a run `count` times at random moments; the files must be those of an uninterrupted one."""
    text, moments = work / "kills.txt", random.Random(2)
    make_text(text, 600_000_000)
    arguments = ["prepare_data.py", text, "--tokenizer", tokenizer, "--clean", "--out"]
    whole = run([*arguments, work / "whole"])
    shutil.rmtree(work / "killed", ignore_errors=True)
    waits, continued = [], 0
    while True:
        process = subprocess.Popen(
            [sys.executable, *map(str, [*arguments, work / "killed"])],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait = (
                round(moments.uniform(0.2, 1.6 * whole["seconds"] / count), 2)
                if len(waits) < count
                else None
            )
            errors = process.communicate(timeout=wait)[1]
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            errors = process.communicate()[1]
            waits.append(wait)
        continued += "continuing after" in errors
        if process.returncode == 0:
            break
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


def sha256(path: Path) -> str:
    """Checksum of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(argv):
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
    args = parser.parse_args(argv)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cores = len(os.sched_getaffinity(0))
    results = {
        "machine": {
            "cores": cores,
            "processor": platform.processor() or platform.machine(),
            "python": platform.python_version(),
        }
    }
    if args.gigabytes:
        results["large"] = large(work, args.gigabytes)
        name = f"prepare_{args.gigabytes:g}gb.json"
    else:
        name, small, tokenizer = "prepare.json", work / "tokenizer.txt", work / "tokenizer"
        before = (
            json.loads((RESULTS / name).read_text(encoding="utf-8"))
            if (RESULTS / name).exists()
            else {}
        )
        make_text(small, 40_000_000)
        prepare(small, "--out", tokenizer)
        parts = {
            "tokenising": lambda: stage(work, tokenizer, args.rounds, cores),
            "characters": lambda: characters(work),
        }
        parts |= (
            {"gpuburnout": lambda: against_gpuburnout(work, args.gpuburnout.resolve())}
            if args.gpuburnout
            else {}
        )
        parts |= {"kills": lambda: kills(work, tokenizer, args.kills)}
        results = before | results | {part: parts[part]() for part in args.only if part in parts}
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / name).write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(results, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1:])
