"""Whether fetching hides behind tokenising: a source on loopback, held to some MB/s.

    python -m benchmarks.fetch [--megabytes 200] [--speeds 50 5]

The same text is prepared from local files, only fetched, and prepared from the source; the last
should take little longer than the slower of the other two. Each takes two seconds to start, so that
less than a minute of work says little. The text is that of benchmarks.prepare,
as parquet files. Writes benchmarks/results/fetch.json.
"""

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import time
from pathlib import Path

from benchmarks import RESULTS
from benchmarks.hub import Hub
from benchmarks.prepare import make_text, prepare, run
from formats.files import write_json
from preparing.pool import usable_cores
from tokenizer_bpe import EOT

FILES = 8
ADDRESS = "hf://datasets/ORG/NAME/*.parquet"
# Fetch all files as prepare_data.py does, and read what has come.
ONLY_FETCH = """
import sys
from pathlib import Path
from preparing.fetching import Fetcher
from preparing.inputs import find_sources
sources = find_sources(sys.argv[1:2])
with Fetcher(sources, Path(sys.argv[2]), limit=10e9) as files:
    for source in sources:
        with files.open(source) as file:
            while file.read(1 << 20):
                pass
"""


def make_files(folder: Path, text: Path) -> int:
    """The documents of a text as parquet files; returns their bytes on disk."""
    import pyarrow
    import pyarrow.parquet

    folder.mkdir(parents=True, exist_ok=True)
    documents = text.read_text(encoding="utf-8").split(f"\n{EOT}\n")
    for n in range(FILES):
        table = pyarrow.table({"text": documents[n::FILES]})
        pyarrow.parquet.write_table(table, folder / f"{n}.parquet", row_group_size=1000)
    return sum(path.stat().st_size for path in folder.iterdir())


def median_of(rounds: int, out: Path, *arguments) -> float:
    """Seconds that prepare_data.py takes from nothing to a finished folder, several times."""
    seconds = []
    for _ in range(rounds):
        shutil.rmtree(out, ignore_errors=True)
        seconds.append(prepare(*arguments, "--out", out)["seconds"])
    return round(statistics.median(seconds), 2)


def measure(work: Path, megabytes: float, speeds: list[float], workers: int, rounds: int) -> dict:
    """Seconds of each way, for each speed in MB/s."""
    text = work / "text.txt"
    make_text(text, int(megabytes * 1e6))
    files = work / "hub" / "ORG" / "NAME"
    size = make_files(files, text)
    prepare(text, "--out", work / "tokenizer", "--sample_bytes", 40_000_000)
    flags = ["--tokenizer", work / "tokenizer", "--workers", workers]
    results = {"megabytes_of_text": megabytes, "megabytes_to_fetch": round(size / 1e6, 1)}
    local = median_of(rounds, work / "local", files, *flags)
    results["local_s"] = local
    for speed in speeds:
        with Hub(work / "hub", bytes_a_second=speed * 1e6) as hub:
            os.environ.update(hub.environment)
            cache = work / "cache"
            cache.mkdir()
            started = time.perf_counter()
            run(["-c", ONLY_FETCH, ADDRESS, cache])
            fetching = round(time.perf_counter() - started, 2)
            whole = median_of(rounds, work / "remote", ADDRESS, *flags)
        shutil.rmtree(cache)
        results[f"at_{speed:g}_mb_s"] = {
            "only_fetching_s": fetching,
            "whole_s": whole,
            "of_the_slower": round(whole / max(local, fetching), 3),
        }
    return results


def main(argv: list[str]) -> None:
    """Measure, write the results and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fetch", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--work", type=Path, default=Path("data/benchmark"))
    parser.add_argument("--megabytes", type=float, default=200, help="of text; default %(default)s")
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[50, 5], help="MB/s; default %(default)s"
    )
    parser.add_argument("--rounds", type=int, default=3, help="medians of; default %(default)s")
    args = parser.parse_args(argv)
    work = args.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    cores = usable_cores()
    results = {"machine": {"cores": cores, "processor": platform.processor()}}
    results |= measure(work, args.megabytes, args.speeds, cores, args.rounds)
    RESULTS.mkdir(exist_ok=True)
    write_json(RESULTS / "fetch.json", results)
    print(json.dumps(results, indent=1))
    shutil.rmtree(work)


if __name__ == "__main__":
    main(sys.argv[1:])
