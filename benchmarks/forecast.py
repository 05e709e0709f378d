"""How near the forecast of a run's final loss is, on the curves of finished runs.

    python -m benchmarks.forecast

Takes the evaluations that benchmarks/time_to_loss.py, scaling.py and promise.py left in results/:
GPT-2's recipe with a cosine and the modern one with a straight line down, from a minute to some.
Trains nothing. Writes results/forecast.json: how far forecasts are off from each quarter of a run
on, and how many final losses lie in their intervals of nine in ten.
"""

import json
import sys
from typing import NamedTuple

import numpy as np

import config as settings
from benchmarks import RESULTS, argument_parser, print_table, scaling, write_json
from training.forecast import Forecast, forecast, strayed
from training.schedule import learning_rates

STAGES = [0.25, 0.5, 0.75]
AIM = 0.02


class Finished(NamedTuple):
    """A finished run: its evaluations as shares of the run, and its learning rates."""

    name: str
    shares: list[float]
    losses: list[float]
    rates: list[float]


def finished(name, c, curve) -> Finished:
    """A run from its settings and [(step, loss)]."""
    shares, losses = [step / c.max_steps for step, _ in curve], [loss for _, loss in curve]
    return Finished(name, shares, losses, learning_rates(c.max_steps, c))


def finished_runs():
    """All runs whose curves are committed."""
    for task in ("shakespeare", "sources"):
        result = json.loads((RESULTS / f"time_to_loss_{task}_cpu.json").read_text())
        for recipe in ("GPT-2", "modern"):
            c = settings.load(result["settings"][recipe])
            for curve in result["curves"][recipe]:
                steps = [min(c.max_steps, (n + 1) * c.eval_interval) for n in range(len(curve))]
                losses = [loss for _, loss in curve]
                yield finished(f"{task} {recipe}", c, list(zip(steps, losses, strict=True)))
    path = RESULTS / "scaling_cpu.json"
    tasks = json.loads(path.read_text())["tasks"] if path.exists() else {}
    for task, result in tasks.items():
        recipe = task.split(":")[1]
        for run in result["runs"]:
            if "curve" in run:
                more = [f"--max_steps={run['steps']}", f"--warmup_steps={run['warmup_steps']}"]
                c = settings.load([*scaling.RECIPES[recipe], *scaling.SHARED, *more])
                yield finished(task, c, run["curve"])
    path = RESULTS / "promise.json"
    for run in json.loads(path.read_text())["runs"] if path.exists() else []:
        settings_of_run = settings.Config(**run["settings"])
        yield finished("recommended by tools.scaling", settings_of_run, run["curve"])


def forecasts(run: Finished) -> list[tuple[float, Forecast]]:
    """(share, forecast of the end) at each evaluation but the last."""
    found = []
    for known in range(1, len(run.losses)):
        expected = forecast(run.shares[:known], run.losses[:known], run.rates)
        if expected:
            found.append((run.shares[known - 1], expected))
    return found


def judge(runs):
    """Of many runs: how far off, and how often inside, by the quarter of the run."""
    rows = []
    for begin, end in zip(STAGES, [*STAGES[1:], 1.0], strict=True):
        off, inside = [], []
        for run in runs:
            for share, expected in forecasts(run):
                if begin <= share < end:
                    off.append(expected.loss / run.losses[-1] - 1)
                    inside.append(expected.low <= run.losses[-1] <= expected.high)
        if not off:
            continue  # too few evaluations so early
        size = np.abs(off)
        rows.append(
            {
                "from": begin,
                "forecasts": len(off),
                "median_off": float(np.median(size)),
                "within_2_percent": float(np.mean(size <= AIM)),
                "worst": float(max(off, key=abs)),
                "inside_interval": float(np.mean(inside)),
            }
        )
    return rows


def false_alarms(runs):
    """How many of the runs, which all went well, would have been said to be off course."""
    return sum(
        any(strayed(run.shares[:n], run.losses[:n], run.rates) for n in range(len(run.losses) + 1))
        for run in runs
    )


def main(argv):
    argument_parser("forecast", __doc__).parse_args(argv)
    runs = list(finished_runs())
    by_kind = {}
    for run in runs:
        by_kind.setdefault(run.name, []).append(run)
    result = {"all": judge(runs)} | {name: judge(some) for name, some in by_kind.items()}
    table = [
        [
            name,
            f"{row['from']:.0%}",
            str(row["forecasts"]),
            f"{row['median_off']:.1%}",
            f"{row['within_2_percent']:.0%}",
            f"{row['worst']:+.1%}",
            f"{row['inside_interval']:.0%}",
        ]
        for name, rows in result.items()
        for row in rows
    ]
    head = ["runs", "from", "forecasts", "median off", "within 2%", "worst", "inside"]
    print_table(head, table)
    alarms = false_alarms(runs)
    print(f"{alarms} of {len(runs)} runs, which all went well, were said to be off course")
    write_json("forecast", {"runs": len(runs), "false_alarms": alarms, "off": result})


if __name__ == "__main__":
    main(sys.argv[1:])
