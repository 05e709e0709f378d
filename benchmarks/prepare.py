"""Seconds and memory that prepare_data.py takes for a text of some gigabytes.

    python -m benchmarks.prepare [--gigabytes 12] [--tokenizer char ...]

The text is real: sources of the standard library and of installed packages, and /usr/share/doc;
beyond what is there it is repeated, with the paragraphs of each document in another order. It and
its tokens take up to twice its size in data/ meanwhile. Further arguments are options of
prepare_data.py.
"""

import contextlib
import itertools
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import torch

from benchmarks import argument_parser, report, run_main
from command_line import positive
from tokenizer_bpe import EOT


def documents() -> list[bytes]:
    """Real texts of this machine, each one file in UTF-8, always in the same order."""
    packages = [Path(sysconfig.get_path(name)).rglob("*.py") for name in ("stdlib", "purelib")]
    found = []
    for path in itertools.chain(*map(sorted, [*packages, Path("/usr/share/doc").rglob("*")])):
        with contextlib.suppress(OSError, UnicodeDecodeError):  # a folder, or not a text
            text = path.read_bytes()
            if "\0" not in text.decode():
                found.append(text)
    return found


def make_text(path: Path, size: float) -> None:
    """Write `size` bytes or a little more: the texts, then again with their paragraphs shuffled."""
    texts, random_order = documents(), random.Random(1)
    with open(path, "wb") as file:
        for n in itertools.count():
            if file.tell() >= size:
                break
            paragraphs = texts[n % len(texts)].rstrip(b"\n").split(b"\n\n")
            if n >= len(texts):
                random_order.shuffle(paragraphs)
            file.write(b"\n\n".join(paragraphs) + b"\n" + EOT.encode() + b"\n")


def prepare(arguments: list[str]) -> tuple[dict[str, float], str]:
    """Run prepare_data.py: what it took, and its summary."""
    started, peak = time.perf_counter(), 0
    words = [sys.executable, "prepare_data.py", *arguments]
    process = psutil.Popen(words, stdout=subprocess.PIPE, encoding="utf-8")
    while process.poll() is None:
        with contextlib.suppress(psutil.Error):  # it has just ended, or 0.1 s are over
            peak = max(peak, process.memory_info().rss)
            process.wait(0.1)
    figures = {"seconds": time.perf_counter() - started, "MB of memory": peak / 1e6}
    if process.returncode:
        sys.exit(process.returncode)  # it has said why
    summary = process.stdout.read()
    speed = re.search(r"tokenizing .* took .* ([\d,.]+) MB/s", summary)
    if speed:  # of 1 MB and more
        figures["tokenising, MB/s"] = float(speed[1].replace(",", ""))
    return figures, summary


def main(argv: list[str]) -> None:
    parser = argument_parser("prepare", __doc__)
    parser.add_argument("--gigabytes", type=positive, default=12)
    args, extra = parser.parse_known_args(argv)
    Path("data").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir="data") as work:
        make_text(Path(work, "text.txt"), 1e9 * args.gigabytes)
        figures, summary = prepare([f"{work}/text.txt", "--out", f"{work}/tokens", *extra])
    print(summary)
    details = {"options": extra, "summary": summary.splitlines()}
    report(f"prepare_{args.gigabytes:g}gb", figures, torch.device("cpu"), **details)


if __name__ == "__main__":
    run_main("prepare", main)
