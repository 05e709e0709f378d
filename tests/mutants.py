"""Change one thing at a time in a module, and see whether its tests notice.

    python -m tests.mutants training/schedule.py tests/training/test_schedule.py [--sample 60]

cosmic-ray makes the changes: another operator, another number, no `not`. A change that no test
notices is printed as a diff: write the test that notices it, or leave it where the program does the
same. Works on a clone of the last commit.
"""

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

import attrs
from cosmic_ray.commands import init
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import use_db
from tqdm import tqdm

from tests.conftest import ROOT

TIMEOUT_S = 300  # a change that makes the tests take this long is noticed


def mutations(module: str, folder: Path) -> list:
    """All changes to a module that change what it does when it runs; annotations do not."""
    with use_db(str(folder / "mutants.sqlite")) as database:
        init([Path(module)], database, {})
        found = [item.mutations[0] for item in database.pending_work_items]
    lines = Path(module).read_text(encoding="utf-8").splitlines()
    return [
        m for m in found if not lines[m.start_pos[0] - 1].lstrip().startswith(("def ", "self,"))
    ]


def survivors(module: str, tests: list[str], sample: int | None) -> tuple[list, int]:
    """The diffs that no test notices, and how many changes were tried."""
    with tempfile.TemporaryDirectory() as folder:
        chosen = mutations(module, Path(folder))
        if sample and sample < len(chosen):
            chosen = random.Random(1).sample(chosen, sample)
        clone = Path(folder, "repository")
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        os.chdir(clone)  # from here the programs that a test starts import their modules
        files = " ".join(str(clone / test) for test in tests)
        pytest = f"{sys.executable} -m pytest -x -c {clone}/pyproject.toml {files}"
        diffs = []
        for mutation in tqdm(chosen, module):
            there = attrs.evolve(mutation, module_path=clone / module)
            result = mutate_and_test([there], pytest, TIMEOUT_S)
            if not result.is_killed:
                diffs.append(result.diff or result.output)
        os.chdir(ROOT)
    return diffs, len(chosen)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("module", help="such as training/schedule.py")
    parser.add_argument("tests", nargs="+", help="test files that are to notice")
    parser.add_argument("--sample", type=int, help="changes to try, drawn at random; default: all")
    args = parser.parse_args()
    diffs, tried = survivors(args.module, args.tests, args.sample)
    print(*diffs, sep="\n\n")
    print(f"{args.module}: {tried - len(diffs)} of {tried} changes noticed")


if __name__ == "__main__":
    main()
