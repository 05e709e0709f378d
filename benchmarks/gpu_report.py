"""The results of `make gpu` with their aims: `make gpu-report`.

    python -m benchmarks.gpu_report [FILE ...]

FILE: as benchmarks/gpu.py writes it; without one, all of them in benchmarks/results/. Reads JSON;
needs no GPU.
"""

import re
import sys
from pathlib import Path

from benchmarks import RESULTS, argument_parser, print_table
from benchmarks.gpu import PARTS
from formats.files import read_json


def values_of(known: dict) -> dict[str, float]:
    """What a part measured, by the names of its aims; nothing where it did not come so far."""
    module = known["command"].split()[2]
    if module == "pytest":
        return of_tests(known["end"])
    if not known["results"] or module not in VALUES:
        return {}
    (result,) = known["results"].values()
    return VALUES[module](result)


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


def of_throughput(r: dict) -> dict[str, float]:
    values = {"ms a step": 1e3 * r["tokens_a_step"] / r["tokens_per_second_median"]["ours"]}
    if r["ours_mfu"]:
        values["MFU"] = r["ours_mfu"]
    values["share outside the three parts"] = r["ours_share_outside_forward_backward_optimizer"]
    if "nanoGPT" in r["ours_over"]:
        values["times nanoGPT's speed"] = r["ours_over"]["nanoGPT"]
    return values


def of_generate(r: dict) -> dict[str, float]:
    """Tokens/s of one sequence, and the least of the ratios to each other program."""
    values = {"tokens/s, one sequence": r["median"]["ours"]}
    for other, label in (("nanoGPT", "nanoGPT's"), ("transformers", "transformers'")):
        over = [ratio for name, ratio in r["ours_over"].items() if name.startswith(other)]
        if over:
            values[f"times {label} tokens/s"] = min(over)
    return values


def of_time_to_loss(r: dict) -> dict[str, float]:
    """The share of the first recipe's time that each other one takes to its loss."""
    first = next(iter(r["curves"]))
    values = {f"{first}: seconds to its loss": r["seconds_to_aim"][first][0]}
    for name, share in r["share_of_time_median"].items():
        if name != first and share is not None:
            values[f"{name}: share of {first}'s time"] = share
    return values


def of_plan(r: dict) -> dict[str, float]:
    """By how much --dry_run is off at most."""
    memory = [abs(row["planned"] / row["measured"] - 1) for row in r["rows"]]
    times = [abs(row["planned_seconds"] / row["measured_seconds"] - 1) for row in r["rows"]]
    return {"memory off by": max(memory), "time off by": max(times)}


def of_ladder(r: dict) -> dict[str, float]:
    """The last rung over the first."""
    first, last = r["rungs"][0], r["rungs"][-1]
    return {
        "tokens a step": r["tokens_a_step"],
        "times the first rung": last["cumulative"],
        "a batch, times the first rung": first["batch_s"] / last["batch_s"],
    }


VALUES = {
    "benchmarks.throughput": of_throughput,
    "benchmarks.generate": of_generate,
    "benchmarks.time_to_loss": of_time_to_loss,
    "benchmarks.plan": of_plan,
    "benchmarks.ladder": of_ladder,
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
        values = values_of(known)
        for what, value in values.items():
            aim = part.aims.get(what, "")
            rows.append([part.name, what, f"{value:.4g}", aim, verdict(value, aim)])
        for what in part.aims.keys() - values:
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
        print_table(["part", "measured", "value", "aim", ""], rows_of(found))
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
