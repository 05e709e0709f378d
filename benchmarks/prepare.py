"""What prepare_data.py takes on this machine: seconds, memory, and a bare tiktoken loop's time.

    python -m benchmarks.prepare [--gpuburnout PATH] [--rounds 3]
    python -m benchmarks.prepare --gigabytes 12

The text is real: sources of the standard library and of installed packages, and /usr/share/doc;
beyond what is there it is repeated, with the paragraphs of each document in another order. PATH is
a checkout of GPUburnout/gpt2-from-scratch. Writes benchmarks/results/prepare*.json.
"""

import contextlib
import json
import multiprocessing
import os
import platform
import random
import re
import shutil
import statistics
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks import RESULTS, ROOT, argument_parser, run_main, write
from formats.data_folder import read_meta
from formats.files import read_json
from tokenizer_bpe import EOT, Tokenizer
from tools.command import count


def documents() -> list[bytes]:
    """Real texts of this machine, each one file, always in the same order."""
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc"]
    found = []
    for folder in dict.fromkeys(folders):
        for path in sorted(Path(folder).rglob("*")):
            wanted = path.suffix == ".py" or ("doc" in path.parts and path.suffix != ".gz")
            if wanted and path.is_file() and is_document(data := path.read_bytes()):
                found.append(data)
    return found


def is_document(data: bytes) -> bool:
    """Whether bytes are one text in UTF-8 that is not too short."""
    with contextlib.suppress(UnicodeDecodeError):
        text = data.decode()
        return len(data) > 200 and "\0" not in text and EOT not in text
    return False


def make_text(path: Path, size: int, texts: list[bytes]) -> Path:
    """Write `size` bytes or a little more: the texts, then again with their paragraphs shuffled."""
    shuffle = random.Random(1)
    repeated = False
    with open(path, "wb") as file:
        while True:
            for text in texts:
                paragraphs = text.rstrip(b"\n").split(b"\n\n")
                if repeated:
                    shuffle.shuffle(paragraphs)
                file.write(b"\n\n".join(paragraphs) + b"\n" + EOT.encode() + b"\n")
                if file.tell() >= size:
                    return path
            repeated = True


def run(words: list, cwd: Path = ROOT) -> dict:
    """Run `python WORDS`: its seconds, the peak memory of it and its children, its output."""
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as file:
        process = psutil.Popen([sys.executable, *map(str, words)], cwd=cwd, stdout=file)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # one has just ended, or 0.1 s are over
                family = [process, *process.children(recursive=True)]
                peak = max(peak, sum(member.memory_info().rss for member in family))
                process.wait(0.1)
        seconds = round(time.perf_counter() - started, 2)
        file.seek(0)
        output = file.read()
    if process.returncode:
        raise SystemExit(f"{words} failed:\n{output[-2000:]}")
    return {"seconds": seconds, "peak_rss_mb": peak // 10**6, "output": output}


def prepare(*arguments) -> dict:
    """Run prepare_data.py; adds the tokenising stage's own speed, from its summary."""
    result = run(["prepare_data.py", *arguments])
    found = re.search(r"tokenising ([\d,.]+) MB took ([\d,.]+) s, ([\d,.]+) MB/s", result["output"])
    megabytes, seconds, speed = (float(number.replace(",", "")) for number in found.groups())
    return result | {"megabytes": megabytes, "tokenising_s": seconds, "tokenising_mb_s": speed}


def bare(tokenizer: Path, text: Path) -> float:
    """MB/s of the plainest loop: tiktoken over a text in memory, a million characters at a time."""
    encoding = Tokenizer.load(tokenizer)._tiktoken
    whole = text.read_text(encoding="utf-8")
    parts = [whole[n : n + (1 << 20)] for n in range(0, len(whole), 1 << 20)]
    started = time.perf_counter()
    for part in parts:
        encoding.encode_to_numpy(part, disallowed_special=())
    return text.stat().st_size / 1e6 / (time.perf_counter() - started)


def bare_loops(tokenizer: Path, text: Path, count: int) -> float:
    """MB/s of `count` such loops at once, each in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        return sum(pool.starmap(bare, [(tokenizer, text)] * count, chunksize=1))


def tokenising(work: Path, texts: list[bytes], rounds: int) -> dict:
    """The tokenising stage and bare loops, in turn."""
    workers = len(os.sched_getaffinity(0))
    small = make_text(work / "small.txt", 40_000_000, texts)
    tokenizer = work / "tokenizer"
    prepare(small, "--out", tokenizer)
    text = make_text(work / "tokenising.txt", 200_000_000, texts)
    speeds = {"bare_mb_s": [], "prepare_mb_s": [], "bare_all_cores_mb_s": []}
    for _ in range(rounds):
        shutil.rmtree(work / "tokenising", ignore_errors=True)
        flags = ["--tokenizer", tokenizer, "--workers", workers, "--out", work / "tokenising"]
        speeds["bare_mb_s"].append(round(bare_loops(tokenizer, text, 1), 2))
        speeds["prepare_mb_s"].append(prepare(text, *flags)["tokenising_mb_s"])
        speeds["bare_all_cores_mb_s"].append(round(bare_loops(tokenizer, text, workers), 2))
    one, ours, together = (statistics.median(values) for values in speeds.values())
    ratios = {
        "of_workers_times_bare": round(ours / workers / one, 3),
        "of_bare_on_all_cores": round(ours / together, 3),
    }
    return {"megabytes": 200, "workers": workers} | speeds | ratios


def characters(work: Path, texts: list[bytes]) -> dict:
    """250 MB of characters, from text to a finished folder."""
    text = make_text(work / "characters.txt", 250_000_000, texts)
    result = prepare(text, "--tokenizer", "char", "--out", work / "characters")
    del result["output"]
    return result


def gpuburnout(work: Path, texts: list[bytes], path: Path) -> dict:
    """GPUburnout's script and ours on the same 40 MB with a vocabulary of 32,000."""
    text = make_text(work / "forty.txt", 40_000_000, texts)
    script = path.resolve() / "tokenize_local_bpe.py"
    theirs = run([script, "--input", text, "--output_dir", work / "theirs"], cwd=script.parent)
    ours = prepare(text, "--out", work / "ours")
    result = {}
    for name, row in (("gpuburnout", theirs), ("prepare_data", ours)):
        result[name] = {key: row[key] for key in ("seconds", "peak_rss_mb")}
    result["times_faster"] = round(theirs["seconds"] / ours["seconds"], 2)
    result["share_of_memory"] = round(ours["peak_rss_mb"] / theirs["peak_rss_mb"], 3)
    return result


def large(work: Path, texts: list[bytes], gigabytes: float) -> dict:
    """One run from text to a finished folder, tokenizer included."""
    text = make_text(work / "large.txt", int(gigabytes * 1e9), texts)
    result = prepare(text, "--out", work / "large")
    result["summary"] = result.pop("output").splitlines()
    splits = read_meta(work / "large").splits
    result["tokens"] = {name: split.tokens for name, split in splits.items()}
    result["bytes_on_disk"] = sum(path.stat().st_size for path in (work / "large").iterdir())
    return result


def main(argv: list[str]) -> None:
    parser = argument_parser("prepare", __doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("data/benchmark"),
        help="folder for text and results, several times the text's size; default %(default)s",
    )
    parser.add_argument(
        "--gpuburnout", type=Path, metavar="PATH", help="checkout; without it, its results stay"
    )
    parser.add_argument(
        "--gigabytes", type=float, metavar="G", help="only one run of this size, such as 12"
    )
    parser.add_argument("--rounds", type=count, default=3, help="of the tokenising stage")
    args = parser.parse_args(argv)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    texts = documents()
    name, results = "prepare", {}
    if args.gigabytes:
        name = f"prepare_{args.gigabytes:g}gb"
        results["large"] = large(work, texts, args.gigabytes)
    else:
        results = read_json(RESULTS / "prepare.json") or {}
        results["tokenising"] = tokenising(work, texts, args.rounds)
        results["characters"] = characters(work, texts)
        if args.gpuburnout:
            results["gpuburnout"] = gpuburnout(work, texts, args.gpuburnout)
    results["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    write(name, results)
    print(json.dumps(results, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    run_main(main)
