"""What runs did, as one self-contained page: curves, key figures, samples, events, settings.

    python -m tools.report checkpoints/RUN [checkpoints/RUN2 ...] [--out FILE.html]

Reads the runs' logs alone, so it draws while they train and afterwards. The page needs no scripts
and no network; templates/report.html.j2 lays it out, and charts.py draws its curves, which takes
matplotlib.
"""

import startup

if __name__ == "__main__":
    startup.begin()  # before the slow imports

import argparse
import itertools
import math
import time
from pathlib import Path

import numpy as np

from formats import files
from formats.address import protocol_of, run_here
from tools import command, history
from tools.command import short
from tools.history import History
from training.terminal import duration

ROWS = 30  # of a table
EVALUATIONS = 8  # whose samples are shown
PREDICTION = {"recommended": {"run": "", "loss": 0.0, "low": 0.0, "high": 0.0}}
# Key figures that depend on the tokenizer.
IN_NATS = ("best validation loss", "perplexity")


def write(folders: list[Path], out: Path) -> None:
    """Write the page, and the losses as PNG next to it. Raises HistoryError."""
    runs = [history.read(folder) for folder in folders]
    from tools import charts  # takes a second: after what may be wrong with the runs

    nats = len({run.data for run in runs}) == 1
    predicted = prediction(runs[0]) if len(runs) == 1 else None
    band = (predicted["low"], predicted["high"]) if predicted else None
    axes = charts.x_axes(runs)
    losses = {column: charts.losses(runs, column, nats, band) for column in axes}
    small = [column for column in charts.SMALL if any(len(run.known(column)) for run in runs)]
    html = command.render(
        "report.html.j2",
        title=", ".join(run.name for run in runs),
        nats=nats,
        data=[f"{run.name}: {run.config['data_dir']}" for run in runs],
        losses=[(column, axes[column][0], charts.svg(losses[column])) for column in axes],
        small=[(charts.SMALL[c][0], charts.svg(charts.small(runs, c))) for c in small],
        comparison=comparison(runs, nats),
        differences=differences(runs),
        runs=[describe(run) for run in runs],
        drawn=time.strftime("%Y-%m-%d %H:%M"),
        command=f"python -m tools.report {' '.join(map(str, folders))}",
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.whole(out.with_suffix(".png")) as partial:
        losses["step"].savefig(partial, format="png", dpi=110)
    files.write_text(out, html)


def prediction(run: History) -> dict | None:
    """The final "loss" that tools.scaling predicted for a run, with its interval "low", "high"."""
    folder = run.folder.resolve()
    found = files.read_json(folder.parent / "scaling.json")
    if not files.has_form(found, PREDICTION) or found["recommended"]["run"] != folder.name:
        return None
    return found["recommended"]


def spread(items: list, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


# -- several runs ----------------------------------------------------------------------------------


def comparison(runs: list[History], nats: bool) -> list[list[str]]:
    """The key figures, a row each: its name, then its value in each run."""
    figures = [{name: value for name, _, value in key_figures(run)} for run in runs]
    names = dict.fromkeys(itertools.chain(*figures))
    return [
        [name, *(of_run.get(name, "") for of_run in figures)]
        for name in names
        if nats or name not in IN_NATS
    ]


def differences(runs: list[History]) -> list[list[str]]:
    """The settings that differ, a row each: its name, then its value in each run."""
    names = dict.fromkeys(itertools.chain(*(run.config for run in runs)))
    rows = [[name, *(str(run.config.get(name)) for run in runs)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1 and row[0] != "checkpoint_dir"]


# -- one run ---------------------------------------------------------------------------------------


def describe(run: History) -> dict:
    """What the page says of one run; the template names the parts."""
    return {
        "name": run.name,
        "summary": summary(run),
        "figures": key_figures(run),
        "evaluations": evaluations(run),
        "num_evaluations": len(run.evaluations),
        "best_step": f"{run.best['step']:,}" if run.best else None,
        "samples": samples(run),
        "events": spread(events(run), ROWS),
        "saves": run.saves(),
        "settings": settings(run),
    }


def summary(run: History) -> str:
    start, config = run.start, run.config
    step, total = int(run.last("step")), start["total_steps"]
    parts = [
        f"{short(start['parameters'])} parameters",
        f"{config['n_layer']} layers x {config['n_embd']}",
        f"context {config['block_size']}",
        f"trained on {config['data_dir']}",
        start["device"],
        start["dtype"],
        f"at step {step:,} of {total:,}" if step < total else f"finished after {step:,} steps",
    ]
    return " \u00b7 ".join(parts)


def key_figures(run: History) -> list[tuple[str, str, str]]:
    """(name, what qualifies it, value) of each figure that is known."""
    figures = []
    if run.best:
        loss = run.best["val_loss"]
        figures += [
            ("best validation loss", f"step {run.best['step']:,}", number(loss)),
            ("perplexity", "", perplexity(loss)),
            ("bits per byte", "", number(run.best["bits_per_byte"], 3)),
        ]
    predicted = prediction(run)
    if predicted:
        interval = f"{predicted['low']:.2f} to {predicted['high']:.2f}"
        figures.append(("final loss predicted", interval, number(predicted["loss"])))
    starts = f"{len(run.starts)} starts" if len(run.starts) > 1 else ""
    figures += [
        ("training tokens", f"{run.last('epoch'):.2f} epochs", short(run.last("tokens"))),
        ("training time", starts, duration(run.last("elapsed_s"))),
        ("tokens a second", "median", number(np.median(run.known("tokens_per_second")), 0)),
    ]
    if len(run.known("mfu")):
        figures.append(("MFU", "median", f"{np.median(run.known('mfu')):.1%}"))
    if run.last("cost"):
        figures.append(("cost", "in the unit of cost_per_hour", number(run.last("cost"), 2)))
    return figures


def number(value: float | None, digits: int = 4) -> str:
    """A number for a table: 1,234.5000; "" where it is not known."""
    if value is None or not math.isfinite(value):
        return ""
    return f"{value:,.{digits}f}"


def perplexity(loss: float) -> str:
    return number(math.exp(min(loss, 700)), 2)  # exp(710) is beyond a float


def evaluations(run: History) -> list[dict[str, str]]:
    """The table of evaluations: ROWS evenly spread ones, and the best.

    The training loss is the mean since the evaluation before.
    """
    pairs = list(itertools.pairwise([{"step": 0, "elapsed_s": 0}, *run.evaluations]))
    shown = spread(pairs, ROWS)
    best = min(pairs, key=lambda pair: pair[1]["val_loss"], default=None)
    if best and best not in shown:
        shown = sorted([*shown, best], key=lambda pair: pair[1]["step"])
    steps, loss = run.columns["step"], run.columns["loss"]
    rows = []
    for before, now in shown:
        since = loss[(steps > before["step"]) & (steps <= now["step"]) & np.isfinite(loss)]
        seconds = (now["elapsed_s"] - before["elapsed_s"]) / max(1, now["step"] - before["step"])
        row = {
            "step": f"{now['step']:,}",
            "epoch": number(run.at("epoch", now["step"]), 2),
            "training loss": number(since.mean()) if len(since) else "",
            "validation loss": number(now["val_loss"]),
            "perplexity": perplexity(now["val_loss"]),
            "bits per byte": number(now["bits_per_byte"], 3),
            "seconds a step": number(seconds, 3),
            "training time": duration(now["elapsed_s"]),
        }
        if run.last("cost"):
            row["cost"] = number(now["cost"], 2)
        rows.append(row)
    return rows


def samples(run: History) -> dict[str, list[tuple]]:
    """{prompt: [(step, validation loss there, text)]} of evaluations, evenly spread."""
    losses = {e["step"]: number(e["val_loss"], 3) for e in run.evaluations}
    answers = {}
    for record in spread(run.samples, EVALUATIONS):
        for sample in record["samples"]:
            answer = (record["step"], losses.get(record["step"]), sample["text"])
            answers.setdefault(sample["prompt"], []).append(answer)
    return answers


def events(run: History) -> list[list[str]]:
    """Starts, halvings and skipped steps, as (step, what, detail)."""
    found = []
    for step, count in run.skipped():
        found.append((step, "skipped", f"{count:,} steps: NaN or infinite loss or gradients"))
    for event in run.events:
        if event["event"] == "start":
            what = "continued" if event["step"] else "started"
            at = event["at"][:16].replace("T", " ")
            machine = f"{event['device']}, {event['dtype']}, torch {event['torch']}"
            found.append((event["step"], what, f"{at}, {machine}"))
        elif event["event"] == "out of memory":
            sizes = [f"{name} = {size}" for name, size in event.items() if "batch" in name]
            found.append((event["step"], "out of memory", f"from here on {', '.join(sizes)}"))
    return sorted(found)


def settings(run: History) -> dict[str, str]:
    """Settings, machine and data, by name."""
    values = dict(run.config)
    for name in ("device", "dtype", "torch", "python", "processes", "parameters"):
        values[f"run: {name}"] = run.start[name]
    data = run.start["data"]
    values |= {"data: tokenizer": data["tokenizer"], "data: vocab_size": data["vocab_size"]}
    values |= {f"data: {split} tokens": count for split, count in data["tokens"].items()}
    return {name: f"{v:,}" if type(v) is int else str(v) for name, v in values.items()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        usage="python -m tools.report RUN [RUN ...] [--out FILE.html]",
        description="Write one page with the curves, tables and samples of one or several runs.",
    )
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a run's folder, such as checkpoints/demo, or its address in a mirror; several are"
        " compared",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE.html",
        help="default: report.html in the run's folder; for several runs or an address, in the"
        " current directory. The losses are drawn as a PNG of the same name",
    )
    args = parser.parse_args(argv)
    one_folder = len(args.runs) == 1 and not protocol_of(args.runs[0])
    default = Path(args.runs[0] if one_folder else "", "report.html")
    out = args.out or default
    if out.suffix != ".html":
        parser.error(f"--out {out}: the name must end in .html")
    folders = [run_here(run) for run in args.runs]
    write(folders, out)
    print(f"{out} and {out.with_suffix('.png').name}")


if __name__ == "__main__":
    command.run("tools.report", main, mistakes=(history.HistoryError,))
