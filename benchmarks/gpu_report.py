"""The results of `make gpu` with their aims: `make gpu-report`.

    python -m benchmarks.gpu_report [FILE ...]

FILE: as benchmarks/gpu.py writes it; without one, all of them in benchmarks/results/. Reads JSON;
needs no GPU.
"""

import re
import sys
from pathlib import Path

from benchmarks import RESULTS, argument_parser
from benchmarks.gpu import PARTS
from formats.files import read_json
from tools.command import table


def figures_of(known: dict) -> dict[str, float]:
    """What a part measured, by the names of its aims; nothing where it did not come so far."""
    if known["command"].split()[2] == "pytest":
        return of_tests(known["end"])
    return {name: f for r in known["results"].values() for name, f in r["figures"].items()}


def of_tests(end: list[str]) -> dict[str, float]:
    """How many tests failed, passed and were skipped; nothing where pytest itself failed."""
    counts = {word.rstrip("s"): int(count) for count, word in re.findall(r"(\d+) (\w+)", end[-1])}
    if not counts.keys() & {"passed", "failed", "error"}:
        return {}
    return {
        "tests failed": counts.get("failed", 0) + counts.get("error", 0),
        "tests passed": counts.get("passed", 0),
        "tests skipped": counts.get("skipped", 0),
    }


def verdict(value: float, aim: str) -> str:
    """Whether a value is within its bound, as in ">= 0.55"; "" without one."""
    if not aim:
        return ""
    relation, bound = aim.split()
    within = value >= float(bound) if relation == ">=" else value <= float(bound)
    return "met" if within else "MISSED"


def rows_of(found: dict) -> list[list[str]]:
    """Rows of the table: part, what was measured, its value, its aim and whether that is met."""
    rows = []
    for part in PARTS:
        known = found["parts"].get(part.name)
        if not known:
            rows.append([part.name, "not run", "", "", ""])
            continue
        if known["status"] != "done":
            end = known["end"][-1] if known["end"] else "it printed nothing"
            rows.append([part.name, f"{known['status']}: {end[:60]}", "", "", ""])
        rows += [[part.name, f"NOTE {line[:60]}", "", "", ""] for line in known["notices"]]
        figures = figures_of(known)
        for what, value in figures.items():
            aim = part.aims.get(what, "")
            rows.append([part.name, what, f"{value:.4g}", aim, verdict(value, aim)])
        for what in part.aims.keys() - figures:
            rows.append([part.name, what, "not measured", part.aims[what], ""])
    return rows


def main(argv):
    parser = argument_parser("gpu_report", __doc__)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    files = parser.parse_args(argv).files or sorted(RESULTS.glob("gpu_*.json"))
    if not files:
        sys.exit(f"nothing was measured on a GPU yet: no gpu_*.json in {RESULTS}; run `make gpu`")
    for file in files:
        found = read_json(file, machine=dict, parts=dict)
        if not found:
            sys.exit(f"{file} is not there, or not what `make gpu` writes")
        of = found["machine"]
        print(f"{of['device']}; torch {of['torch']}, driver {of.get('driver')}; {file}\n")
        print(table(["part", "measured", "value", "aim", ""], rows_of(found)))
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
