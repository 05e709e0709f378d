"""Seconds and memory that prepare_data.py takes for a text of some gigabytes.

    python -m benchmarks.prepare [--gigabytes 12] [--work data/benchmark] [--tokenizer char ...]

The text is real: sources of the standard library and of installed packages, and /usr/share/doc;
beyond what is there it is repeated, with the paragraphs of each document in another order. Further
arguments are options of prepare_data.py.
"""

import contextlib
import random
import re
import shutil
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

import psutil
import torch

from benchmarks import argument_parser, report, run_main
from tokenizer_bpe import EOT
from tools.command import positive


def documents() -> list[bytes]:
    """Real texts of this machine, each one file in UTF-8, always in the same order."""
    folders = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), "/usr/share/doc"]
    found = []
    for path in [path for folder in folders for path in sorted(Path(folder).rglob("*"))]:
        wanted = path.suffix == ".py" or ("doc" in path.parts and path.suffix != ".gz")
        if wanted and path.is_file():
            data = path.read_bytes()
            text = data.decode(errors="replace")
            if len(data) > 200 and not re.search(f"[\0\ufffd]|{re.escape(EOT)}", text):
                found.append(data)
    return found


def make_text(path: Path, size: float) -> None:
    """Write `size` bytes or a little more: the texts, then again with their paragraphs shuffled."""
    texts, shuffle = documents(), random.Random(1)
    with open(path, "wb") as file:
        while file.tell() < size:
            repeated = file.tell() > 0
            for text in texts:
                paragraphs = text.rstrip(b"\n").split(b"\n\n")
                if repeated:
                    shuffle.shuffle(paragraphs)
                file.write(b"\n\n".join(paragraphs) + b"\n" + EOT.encode() + b"\n")
                if file.tell() >= size:
                    break


def prepare(arguments: list[str]) -> tuple[dict[str, float], list[str]]:
    """Run prepare_data.py: what it and its children took, and its summary."""
    started, peak = time.perf_counter(), 0
    with tempfile.TemporaryFile("w+") as file:
        process = psutil.Popen([sys.executable, "prepare_data.py", *arguments], stdout=file)
        while process.poll() is None:
            with contextlib.suppress(psutil.Error):  # one has just ended, or 0.1 s are over
                family = [process, *process.children(recursive=True)]
                peak = max(peak, sum(member.memory_info().rss for member in family))
                process.wait(0.1)
        figures = {"seconds": time.perf_counter() - started, "MB of memory": peak / 1e6}
        file.seek(0)
        summary = file.read()
    if process.returncode:
        sys.exit(process.returncode)  # it has said why
    for speed in re.findall(r"tokenising .* took .* ([\d,.]+) MB/s", summary):
        figures["tokenising, MB/s"] = float(speed.replace(",", ""))
    return figures, summary.splitlines()


def main(argv: list[str]) -> None:
    parser = argument_parser("prepare", __doc__)
    parser.add_argument("--gigabytes", type=positive, default=12)
    help_text = "folder for text and tokens, twice the text's size; default %(default)s"
    parser.add_argument("--work", type=Path, default="data/benchmark", help=help_text)
    args, extra = parser.parse_known_args(argv)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    make_text(work / "text.txt", 1e9 * args.gigabytes)
    figures, summary = prepare([str(work / "text.txt"), "--out", str(work / "tokens"), *extra])
    shutil.rmtree(work)
    print(*summary, sep="\n")
    name = f"prepare_{args.gigabytes:g}gb"
    report(name, figures, torch.device("cpu"), options=extra, summary=summary)


if __name__ == "__main__":
    run_main("prepare", main)
