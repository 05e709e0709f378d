"""Prepare a dataset from an unreliable hub, killed again and again: always the same bytes.

    python -m tests.preparing.torture --runs 50

Each run draws what goes wrong and how often (connections that are cut and that stall, replies 429
and 500), the number of workers and the moments of its SIGKILLs, and must end as the same text did
from local files.
"""

import argparse
import os
import random
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.conftest import prose
from tests.preparing.conftest import DOCUMENTS, command, ok, prepare, sha, start, write
from tests.preparing.hub import Faults, Hub
from tests.preparing.hubs import write_rows
from tokenizer_bpe import EOT, Tokenizer
from tools.command import count

PACE = 2_000_000  # bytes a second, so that there is time to be killed in
AFTER_START = (0.2, 4)  # seconds until a kill,
AFTER_NOTE = (0, 1)  # and until one that waits for the journal to be written first


class Outcome(NamedTuple):
    """The kills of a run, and how many of its starts went on from where another was stopped."""

    kills: int
    continued: int


def make_input(folder: Path) -> Path:
    """A repository with files of each kind and size; the folder that they lie in."""
    dice = random.Random(3)
    files = folder / "ORG" / "NAME" / "files"
    for n in range(3):
        texts = [dice.choice(DOCUMENTS) * 3 + str(dice.random()) for _ in range(1500)]
        rows = [{"text": text, "id": str(dice.random())} for text in texts]
        write_rows(files / f"{n}.parquet", rows, compression="none" if n == 1 else "snappy")
    write(files / "3.jsonl.gz", "jsonl.gz", [dice.choice(DOCUMENTS) for _ in range(4000)])
    long = prose() * 8
    (files / "4.txt").write_text(f"{long}\n{EOT}\nAnd a short one.", newline="\n")
    write(files / "5.jsonl", "jsonl", DOCUMENTS)
    return files


def run(hub: Hub, dice: random.Random, tokenizer: Path, out: Path) -> Outcome:
    """Prepare what the hub has, with kills on the way."""
    environment = os.environ | hub.environment | {"HF_HUB_DOWNLOAD_TIMEOUT": "1"}
    kills = continued = 0
    planned = dice.randrange(1, 4)
    while True:
        words = command(
            "hf://datasets/ORG/NAME/files",
            tokenizer=tokenizer,
            workers=dice.randrange(1, 4),
            cache_gb=dice.choice([0.006, 0.01, 10]),
            clean=True,
            out=out,
        )
        process = start(words, env=environment)
        wait = 280
        if kills < planned:
            wait = dice.uniform(*AFTER_START)
            if dice.random() < 0.6:
                wait = dice.uniform(*AFTER_NOTE)
                wait_for(out / ".partial/progress.json", process)
        try:
            _, errors = process.communicate(timeout=wait)
        except subprocess.TimeoutExpired:
            process.kill()
            _, errors = process.communicate()
            kills += 1
        continued += "continuing after" in errors
        if process.returncode == 0:
            return Outcome(kills, continued)
        # A listing is given up after a while: then the same command continues, as after a kill.
        assert process.returncode == -9 or "the same command continues" in errors, errors


def wait_for(path: Path, process: subprocess.Popen) -> None:
    """Wait until a file is there, or the process has ended."""
    while not path.exists() and process.poll() is None:
        time.sleep(0.02)


def torture(folder: Path, runs: int, seed: int = 0, report=print) -> list[Outcome]:
    """Run again and again; raises AssertionError when a result is another."""
    hub_folder = folder / "hub"
    files = make_input(hub_folder)
    tokenizer = folder / "tokenizer.json"
    Tokenizer.train([prose()], 600).save(tokenizer)
    whole = folder / "whole"
    ok(prepare(files, tokenizer=tokenizer, clean=True, out=whole))
    outcomes = []
    for n in range(seed, seed + runs):
        dice = random.Random(n)
        faults = Faults(
            cut=dice.uniform(0, 0.3),
            stall=dice.uniform(0, 0.05),
            too_many=dice.uniform(0, 0.1),
            broken=dice.uniform(0, 0.1),
            stall_seconds=3,
            seed=n,
        )
        out = folder / f"run-{n}"
        with Hub(hub_folder, PACE, faults) as hub:
            outcome = run(hub, dice, tokenizer, out)
        assert sha(out) == sha(whole), f"run {n} ended in other bytes"
        outcomes.append(outcome)
        report(f"run {n}: {outcome.kills} kills, continued {outcome.continued} times, same bytes")
    return outcomes


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=count, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcomes = torture(Path(folder), args.runs, args.seed)
    kills = sum(outcome.kills for outcome in outcomes)
    print(f"{len(outcomes)} runs, {kills} kills: one sha256")


if __name__ == "__main__":
    main()
