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

from benchmarks import ROOT, argument_parser, run_main, write
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


def make_text(path: Path, size: float, texts: list[bytes]) -> Path:
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
        seconds = time.perf_counter() - started
        file.seek(0)
        output = file.read().splitlines()
    if process.returncode:
        sys.exit(process.returncode)  # it has said why
    return {"seconds": round(seconds, 2), "peak_rss_mb": peak // 10**6, "output": output}


def prepare(*arguments) -> dict:
    """Run prepare_data.py; adds the tokenising stage's own speed, from its summary."""
    result = run(["prepare_data.py", *arguments])
    found = re.search(r"tokenising .* took .* ([\d,.]+) MB/s", "\n".join(result["output"]))
    return result | {"tokenising_mb_s": float(found[1].replace(",", ""))}


# -- the measurements ------------------------------------------------------------------------------


def bare(tokenizer: Path, text: Path) -> float:
    """MB/s of the plainest loop: tiktoken over a text in memory, a million characters at a time."""
    encoding = Tokenizer.load(tokenizer)._tiktoken
    whole = text.read_text(encoding="utf-8")
    parts = [whole[n : n + (1 << 20)] for n in range(0, len(whole), 1 << 20)]
    started = time.perf_counter()
    for part in parts:
        encoding.encode_to_numpy(part, disallowed_special=())
    return text.stat().st_size / 1e6 / (time.perf_counter() - started)


def bare_on_all_cores(tokenizer: Path, text: Path) -> float:
    """MB/s of as many such loops at once as there are cores, each in a process of its own."""
    cores = len(os.sched_getaffinity(0))
    with multiprocessing.get_context("spawn").Pool(cores) as pool:
        return sum(pool.starmap(bare, [(tokenizer, text)] * cores, chunksize=1))


def tokenising(work: Path, texts: list[bytes], rounds: int, size: float) -> dict:
    """The tokenising stage and bare loops over `size` bytes, in turn."""
    tokenizer = work / "tokenizer"
    prepare(make_text(work / "small.txt", size / 5, texts), "--out", tokenizer)
    text = make_text(work / "tokenising.txt", size, texts)
    speeds = {"prepare_mb_s": [], "bare_on_all_cores_mb_s": []}
    for _ in range(rounds):
        shutil.rmtree(work / "tokenising", ignore_errors=True)
        result = prepare(text, "--tokenizer", tokenizer, "--out", work / "tokenising")
        speeds["prepare_mb_s"].append(result["tokenising_mb_s"])
        speeds["bare_on_all_cores_mb_s"].append(bare_on_all_cores(tokenizer, text))
    ratios = [ours / theirs for ours, theirs in zip(*speeds.values(), strict=True)]
    return speeds | {"times_bare": statistics.median(ratios)}


def gpuburnout(work: Path, text: Path, checkout: Path) -> dict:
    """GPUburnout's script and ours on the same text with a vocabulary of 32,000."""
    script = checkout.resolve() / "tokenize_local_bpe.py"
    theirs = run([script, "--input", text, "--output_dir", work / "theirs"], cwd=script.parent)
    ours = prepare(text, "--out", work / "ours")
    return {"gpuburnout": theirs, "prepare_data": ours}


def measure(work: Path, args) -> dict:
    """What the command line asks for."""
    texts = documents()
    if args.gigabytes:
        text = make_text(work / "text.txt", 1e9 * args.gigabytes, texts)
        return {"large": prepare(text, "--out", work / "large")}
    text = make_text(work / "characters.txt", 250e6, texts)
    characters = prepare(text, "--tokenizer", "char", "--out", work / "characters")
    results = {"tokenising": tokenising(work, texts, args.rounds, 200e6), "characters": characters}
    if args.gpuburnout:
        text = make_text(work / "forty.txt", 40e6, texts)
        results["gpuburnout"] = gpuburnout(work, text, args.gpuburnout)
    return results


def main(argv: list[str]) -> None:
    parser = argument_parser("prepare", __doc__)
    text = "folder for text and results, several times the text's size; default %(default)s"
    parser.add_argument("--work", type=Path, default="data/benchmark", help=text)
    parser.add_argument("--gpuburnout", type=Path, metavar="PATH", help="checkout to compare with")
    text = "only one run of this size, such as 12"
    parser.add_argument("--gigabytes", type=float, metavar="G", help=text)
    parser.add_argument("--rounds", type=count, default=3, help="of the tokenising stage")
    args = parser.parse_args(argv)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    results = measure(work, args)
    shutil.rmtree(work)
    results["machine"] = {
        "cores": len(os.sched_getaffinity(0)),
        "processor": platform.processor() or platform.machine(),
        "python": platform.python_version(),
    }
    print(json.dumps(results, indent=1))
    write(f"prepare_{args.gigabytes:g}gb" if args.gigabytes else "prepare", results)


if __name__ == "__main__":
    run_main("prepare", main)
