"""Prepare a dataset from an unreliable hub, killed again and again: always the same bytes.

    python -m tests.preparing.torture --runs 50

Each run draws what goes wrong and how often (connections that are cut and that stall, replies 429
and 500), the number of workers and the moments of its SIGKILLs, and must end as the same text did
from local files.
"""

import argparse
import random
import subprocess
import tempfile
from pathlib import Path

from command_line import count
from tests.conftest import ok, prose
from tests.preparing.conftest import DOCUMENTS, prepare, sha, start, wait_for_progress, write
from tests.preparing.hub import Hub
from tokenizer_bpe import EOT, Tokenizer

PACE = 2_000_000  # bytes a second of each file, so that there is time to be killed in
AFTER_START = (0.2, 2)  # seconds until a kill,
AFTER_NOTE = (0, 0.5)  # and until one that waits for the journal to be written first


def make_input(folder: Path) -> Path:
    """A repository with files of each kind and size; the folder that they lie in."""
    dice = random.Random(3)
    files = folder / "ORG/NAME/files"
    files.mkdir(parents=True)
    for n in range(3):
        texts = [dice.choice(DOCUMENTS) * 3 + str(dice.random()) for _ in range(1500)]
        write(files / f"{n}.parquet", "parquet", texts)
    write(files / "3.jsonl.gz", "jsonl.gz", [dice.choice(DOCUMENTS) for _ in range(4000)])
    long = prose() * 8
    (files / "4.txt").write_text(f"{long}\n{EOT}\nAnd a short one.", "utf-8", newline="\n")
    write(files / "5.jsonl", "jsonl", DOCUMENTS)
    return files


def run(hub: Hub, dice: random.Random, tokenizer: Path, out: Path) -> tuple[int, int]:
    """Prepare what the hub has, with kills on the way.

    Returns how many, and how many starts went on from where another was stopped.
    """
    kills = continued = 0
    planned = dice.randrange(1, 4)
    while True:
        process = start(
            "hf://datasets/ORG/NAME/files",
            hub=hub,
            tokenizer=tokenizer,
            workers=dice.randrange(1, 4),
            cache_gb=dice.choice([0.006, 0.01, 10]),
            clean=True,
            out=out,
        )
        wait = 280
        if kills < planned:
            wait = dice.uniform(*AFTER_START)
            if dice.random() < 0.6:
                wait = dice.uniform(*AFTER_NOTE)
                wait_for_progress(process, out)
        try:
            _, errors = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            kills += 1
        continued += "continuing after" in errors
        if process.returncode == 0:
            return kills, continued
        # A listing is given up after a while: then the same command continues, as after a kill.
        assert process.returncode == -9 or "the same command continues" in errors, errors


def torture(folder: Path, runs: int, seed: int) -> None:
    """Run again and again; raises AssertionError when a result is another."""
    hub_folder = folder / "hub"
    files = make_input(hub_folder)
    tokenizer = folder / "tokenizer.json"
    Tokenizer.train([prose()], 600).save(tokenizer)
    whole = folder / "whole"
    ok(prepare(files, tokenizer=tokenizer, clean=True, out=whole))
    for n in range(seed, seed + runs):
        dice = random.Random(n)
        most = {"cut": 0.3, "stall": 0.05, 429: 0.1, 500: 0.1}
        out = folder / f"run-{n}"
        with Hub(hub_folder) as hub:
            hub.bytes_a_second = PACE
            hub.faults = {fault: dice.uniform(0, share) for fault, share in most.items()}
            hub.dice = random.Random(n)
            kills, continued = run(hub, dice, tokenizer, out)
        assert sha(out) == sha(whole), f"run {n} ended in other bytes"
        print(f"run {n}: {kills} kills, continued {continued} times, same bytes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=count, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torture(Path(folder), args.runs, args.seed)


if __name__ == "__main__":
    main()
