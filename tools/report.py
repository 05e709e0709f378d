"""What runs did, as one page: losses, four small curves, a table, samples, settings.

    python -m tools.report checkpoints/RUN [checkpoints/OTHER ...] [--out FILE.html]

Several runs share the page, which says how far apart they end. Reads log.jsonl and config.json
alone, so it works while a run trains. The page needs no scripts and no network;
templates/report.html.j2 lays it out. Knows no model and no checkpoint, and imports no PyTorch.
"""

import startup

if __name__ == "__main__":
    startup.begin()  # before the slow imports

import argparse
import base64
import io
import itertools
import math
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats import files, run_log
from formats.address import download_log, protocol_of
from tools import command
from tools.command import short
from training.terminal import duration

# The fields of a record of steps; docs/training.md describes them.
COLUMNS = ["step", "tokens", "epoch", "loss", "lr", "grad_norm", "tokens_per_second", "mfu"]
COLUMNS += ["bad_steps", "elapsed_s", "cost"]
SMALL = {  # {column: (title, unit)} of the small curves
    "lr": ("learning rate", "step size"),
    "grad_norm": ("gradient norm, before clipping", "L2 norm"),
    "tokens_per_second": ("tokens a second", "tokens/s"),
    "mfu": ("MFU", "share of the device's peak"),
}
EVALUATIONS = 30  # rows in the table
SAMPLES = 8  # answers per prompt
# Settings that change no loss. Runs that agree in all others differ only in their seed.
HARMLESS = {"seed", "checkpoint_dir", "sample_prompts", "log_interval", "eval_interval"}
HARMLESS |= {"save_interval", "save_minutes", "keep_last", "mirror", "wandb", "cost_per_hour"}

# Okabe and Ito's colours, which people with colour blindness can tell apart.
BLUE, RED = "#0072B2", "#D55E00"
COLOURS = [BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "legend.edgecolor": "none",
    "legend.fontsize": 8,
    "path.simplify_threshold": 1.0,  # in pixels, so that a long log makes no large picture
}


class ReportError(ValueError):
    """A folder that holds nothing to show, in a sentence for the user."""


# -- a run as numbers ------------------------------------------------------------------------------


@dataclass
class History:
    """The course of one run.

    columns: {name: values at the logged steps}, NaN where unknown. evaluations: those with a finite
    loss. starts: of the run and of each resume, with machine, data and length of the run.
    """

    name: str
    columns: dict[str, np.ndarray]
    evaluations: list[dict]
    samples: list[dict]
    starts: list[dict]
    config: dict

    @property
    def best(self) -> dict | None:
        return min(self.evaluations, key=lambda e: e["val_loss"], default=None)

    @property
    def settings(self) -> dict:
        """All in which runs may differ: their settings, and what they ran on."""
        start = self.starts[-1]
        names = ("device", "dtype", "torch", "python", "processes", "parameters", "commit")
        return self.config | {f"run: {name}": start[name] for name in names if name in start}

    @property
    def validated_on(self) -> tuple:
        """What losses in nats depend on: the validation tokens, and which of them count."""
        return self.starts[-1]["data"]["sha256"].get("val"), self.config.get("loss_on")

    def known(self, column: str) -> np.ndarray:
        """The values of a column without NaN and infinity."""
        values = self.columns[column]
        return values[np.isfinite(values)]

    def last(self, column: str) -> float:
        """The last known value of a column; 0 where there is none."""
        return float([0, *self.known(column)][-1])

    def at(self, column: str, steps) -> np.ndarray:
        """A column that counts from 0 (tokens, epoch, elapsed_s), interpolated at steps."""
        x = [0, *self.columns["step"]]
        return np.interp(steps, x, [0, *self.columns[column]])

    def evaluated(self, column: str, loss: str) -> tuple[np.ndarray, np.ndarray]:
        """The curve of a loss, "val_loss" or "bits_per_byte", over a column: its x and its y."""
        steps = [e["step"] for e in self.evaluations]
        return self.at(column, steps), np.array([e[loss] for e in self.evaluations])


def read_history(folder: Path) -> History:
    """A run's history, while it trains or afterwards. Raises ReportError without start or steps."""
    log = run_log.read(folder)
    steps = [record for record in log if "loss" in record]
    starts = [record for record in log if record.get("event") == "start"]
    config = files.read_json(folder / "config.json")
    if not steps or not starts or not config:
        runs = {log.parent for log in folder.parent.glob("*/log.jsonl")} - {folder}
        hint = f"; runs next to it: {', '.join(sorted(map(str, runs)))}" if runs else ""
        raise ReportError(f"{folder} is not a run that has logged its start and a step{hint}")
    columns = {name: np.array([r.get(name) for r in steps], dtype=float) for name in COLUMNS}
    evaluations = [record for record in log if record.get("val_loss") is not None]
    samples = [record for record in log if "samples" in record]
    return History(folder.resolve().name, columns, evaluations, samples, starts, config)


# -- tables ----------------------------------------------------------------------------------------


def spread_out(items: list, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def key_figures(run: History) -> dict[str, str]:
    """The figures of a run that are known, by name."""
    figures = {}
    if run.best:
        figures["best validation loss"] = f"{run.best['val_loss']:.4f}"
        figures["perplexity"] = f"{math.exp(run.best['val_loss']):,.2f}"
        figures["bits per byte"] = f"{run.best['bits_per_byte']:.3f}"
    figures["training tokens"] = short(run.last("tokens"))
    figures["training time"] = duration(run.last("elapsed_s"))
    figures["tokens a second, median"] = f"{np.median(run.known('tokens_per_second')):,.0f}"
    if len(run.known("mfu")):
        figures["MFU, median"] = f"{np.median(run.known('mfu')):.1%}"
    if run.last("cost"):
        figures["cost"] = f"{run.last('cost'):,.2f}"
    return figures


def evaluations(run: History) -> list[dict]:
    """Evenly spread evaluations, and the best, with what only the table has.

    training_loss is the mean since the evaluation before; None where no loss was logged since.
    """
    steps, loss = run.columns["step"], run.columns["loss"]
    rows = []
    for before, now in itertools.pairwise([{"step": 0}, *run.evaluations]):
        since = loss[(steps > before["step"]) & (steps <= now["step"]) & np.isfinite(loss)]
        training_loss = since.mean() if len(since) else None
        more = {"epoch": run.at("epoch", now["step"]), "training_loss": training_loss}
        rows.append(now | more | {"time": duration(now["elapsed_s"])})
    shown = spread_out(rows, EVALUATIONS)
    return [row for row in rows if row in shown or row["step"] == run.best["step"]]


def side_by_side(runs: list[History], nats: bool) -> list[list[str]]:
    """The table of several runs, {name: the value in each}: key figures, settings that differ.

    nats: whether losses in nats a token compare.
    """
    figures = [key_figures(run) for run in runs]
    names = dict.fromkeys(itertools.chain(*figures))
    if not nats:
        names = [name for name in names if name not in ("best validation loss", "perplexity")]
    rows = [[name, *(of_run.get(name, "") for of_run in figures)] for name in names]
    for name in dict.fromkeys(itertools.chain(*(run.settings for run in runs))):
        values = [str(run.settings.get(name)) for run in runs]
        if len(set(values)) > 1 and name != "checkpoint_dir":
            rows.append([name, *values])
    return rows


def answers(runs: list[History]) -> dict[str, list[tuple[str, str]]]:
    """{prompt: [(when, text)]} of sample_prompts: of a run as it learns, of several at the end."""
    found = {}
    for run in runs:
        losses = {e["step"]: f", validation loss {e['val_loss']:.3f}" for e in run.evaluations}
        records = spread_out(run.samples, SAMPLES) if len(runs) == 1 else run.samples[-1:]
        for record in records:
            when = f"step {record['step']:,}{losses.get(record['step'], '')}"
            if len(runs) > 1:
                when = f"{run.name}, {when}"
            for sample in record["samples"]:
                found.setdefault(sample["prompt"], []).append((when, sample["text"]))
    return found


# -- how far apart runs end ------------------------------------------------------------------------


def compare_ends(runs: list[History], nats: bool) -> list[str]:
    """The validation losses over the same tokens and over the same seconds, in sentences.

    nats: in nats a token; otherwise in bits per byte, and over the same seconds alone, as tokens of
    another tokenizer hold more text, or less.
    """
    if len(runs) == 1 or not all(run.evaluations for run in runs):
        return []
    sentences = []
    for column in ("tokens", "elapsed_s") if nats else ("elapsed_s",):
        curves = [run.evaluated(column, "val_loss" if nats else "bits_per_byte") for run in runs]
        end = min(x[-1] for x, _ in curves)
        losses = [float(np.interp(end, x, y, left=math.nan)) for x, y in curves]
        if math.isfinite(sum(losses)):  # each run was evaluated by then
            amount = f"{short(end)} tokens" if column == "tokens" else duration(end)
            measure = "nats a token" if nats else "bits per byte"
            differences = " ".join(compare_settings(runs, losses))
            sentences.append(f"After {amount} of training, in {measure}: {differences}")
    return sentences


def compare_settings(runs: list[History], losses: list[float]) -> list[str]:
    """How far apart the mean losses of settings are, and whether that exceeds the spread of seeds.

    The spread is the largest range among runs that differ only in their seed.
    """
    groups = {}  # {settings: {name of a run: its loss}}
    for run, loss in zip(runs, losses, strict=True):
        settings = [(name, v) for name, v in run.settings.items() if name not in HARMLESS]
        groups.setdefault(str(settings), {})[run.name] = loss
    spreads = {
        ", ".join(group): max(group.values()) - min(group.values())
        for group in groups.values()
        if len(group) > 1
    }
    first, *others = groups.values()
    sentences = [f"{', '.join(first)}: {np.mean([*first.values()]):.4f}."]
    for group in others:
        difference = np.mean([*group.values()]) - np.mean([*first.values()])
        sentence = f"{', '.join(group)}: {abs(difference):.4f}"
        sentence += " more" if difference > 0 else " less"
        if spreads:
            larger = abs(difference) > max(spreads.values())
            sentence += f", {'larger' if larger else 'not larger'} than the spread of seeds"
        sentences.append(f"{sentence}.")
    for names, spread in spreads.items():
        sentences.append(f"{names} differ only in their seed; their spread is {spread:.4f}.")
    if not spreads:
        sentences.append("A run with another --seed would show how much of this is chance.")
    return sentences


# -- curves ----------------------------------------------------------------------------------------


def subplot(width: float, height: float, in_thousands: str):
    """A matplotlib Figure in inches, and its Axes. in_thousands: "xy", the axes that count in k."""
    import matplotlib  # takes a second, so it comes after what may be wrong with the runs
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    matplotlib.rcParams.update(STYLE)
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.add_subplot()
    for name in in_thousands:
        getattr(axes, f"{name}axis").set_major_formatter(EngFormatter(sep=""))
    return figure, axes


def plot_losses(runs: list[History], column: str, nats: bool = True):
    """A Figure of training and validation losses over "step", "tokens" or "elapsed_s".

    nats: in nats a token; otherwise in bits a byte, and the validation loss alone. Of a single run
    it marks resumes and skipped steps.
    """
    figure, axes = subplot(11.4, 4.6, "" if column == "elapsed_s" else "x")
    single = len(runs) == 1
    unit, label = 1, "steps" if column == "step" else "tokens"
    if column == "elapsed_s":
        in_hours = max(run.last(column) for run in runs) >= 7200
        unit, label = (3600, "hours of training") if in_hours else (60, "minutes of training")
    highest = 0.0
    for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
        x, loss = run.evaluated(column, "val_loss" if nats else "bits_per_byte")
        drawn = [loss]
        if nats and len(run.known("loss")):
            logged = np.isfinite(run.columns["loss"])
            steps, values = run.columns[column][logged] / unit, run.columns["loss"][logged]
            window = np.ones(2 * (len(values) // 100) + 1)
            counts = np.convolve(np.ones_like(values), window, "same")
            smooth = np.convolve(values, window, "same") / counts
            axes.plot(steps, values, color=colour, linewidth=0.6, alpha=0.35)
            name = "training" if single else None
            axes.plot(steps, smooth, color=colour, linewidth=1.2, label=name)
            drawn.append(smooth)
        axes.plot(
            x / unit,
            loss,
            color=RED if single else colour,
            linewidth=1.6,
            marker="o" if len(loss) <= 40 else None,
            markersize=4,
            label="validation" if single else run.name,
        )
        # The steep descent of the first 4% would flatten the rest of the picture.
        highest = max(highest, *(y[len(y) // 25 :].max(initial=0) for y in drawn))
    if highest:
        axes.set_ylim(top=1.02 * highest)
    if single:
        mark_events(axes, runs[0], column, unit)
    axes.set_xlabel(label)
    axes.set_ylabel("loss, nats a token" if nats else "validation loss, bits a byte")
    axes.legend(loc="upper right")
    return figure


def mark_events(axes, run: History, column: str, unit: float) -> None:
    """Resumes as dashed lines, skipped steps as marks at the top of the axes."""
    resumes = [start["step"] for start in run.starts if start["step"]]
    for n, x in enumerate(run.at(column, resumes) / unit):
        label = None if n else "resume"
        axes.axvline(x, color="#666666", linestyle="--", linewidth=0.8, label=label)
    skips = np.diff(np.nan_to_num(run.columns["bad_steps"]), prepend=0) > 0
    if skips.any():
        x = run.columns[column][skips] / unit
        top = np.full(len(x), 0.98)
        where = axes.get_xaxis_transform()
        axes.plot(x, top, "v", transform=where, color="black", label="skipped steps (NaN)")


def plot_small(runs: list[History], column: str):
    """A Figure of one of SMALL against steps; of an enormous spike it shows only the rise."""
    figure, axes = subplot(3.7, 2.4, "xy" if column == "tokens_per_second" else "x")
    top = 0
    for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
        y = run.known(column)
        axes.plot(run.columns["step"][np.isfinite(run.columns[column])], y, color=colour, lw=1)
        if len(y):
            top = max(top, min(y.max(), 3 * np.percentile(y, 99)))
    axes.set_ylim(0, 1.08 * top or 1)
    title, unit = SMALL[column]
    axes.set(title=title, xlabel="steps", ylabel=unit)
    axes.locator_params(nbins=5)
    return figure


def as_address(figure) -> str:
    """The figure as SVG in an address that holds it, for an <img>."""
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


# -- the page --------------------------------------------------------------------------------------


def write_page(runs: list[History], nats: bool, comparison: list[str], out: Path) -> None:
    """Write the page, and the losses as PNG next to it.

    nats: whether losses in nats a token compare. comparison: the sentences of compare_ends.
    """
    losses = {name: plot_losses(runs, name, nats) for name in ("step", "tokens", "elapsed_s")}
    small = [column for column in SMALL if any(len(run.known(column)) for run in runs)]
    html = command.render(
        "report.html.j2",
        runs=runs,
        nats=nats,
        figures=key_figures(runs[0]),
        losses=[(name, as_address(figure)) for name, figure in losses.items()],
        small=[(SMALL[column][0], as_address(plot_small(runs, column))) for column in small],
        comparison=comparison,
        side_by_side=side_by_side(runs, nats),
        evaluations=evaluations(runs[0]),
        answers=answers(runs),
        drawn=time.strftime("%Y-%m-%d %H:%M"),
        short=short,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with files.atomic_write(out.with_suffix(".png")) as partial:
        losses["step"].savefig(partial, format="png", dpi=110)
    files.write_text(out, html)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.report",
        usage="python -m tools.report RUN [RUN ...] [--out FILE.html]",
        description="Write one page with the curves, tables and samples of one or several runs.",
    )
    text = "a run's folder, such as checkpoints/demo, or its address; several are compared"
    parser.add_argument("runs", nargs="+", metavar="RUN", help=text)
    text = "default: report.html in the run's folder; for several runs or an address, here"
    parser.add_argument("--out", type=Path, metavar="FILE.html", help=text)
    args = parser.parse_args(argv)
    one_folder = len(args.runs) == 1 and not protocol_of(args.runs[0])
    out = args.out or Path(args.runs[0] if one_folder else "", "report.html")
    if out.suffix != ".html":
        parser.error(f"--out {out}: the name must end in .html")
    runs = [read_history(download_log(run)) for run in args.runs]
    nats = len({run.validated_on for run in runs}) == 1
    comparison = compare_ends(runs, nats)
    write_page(runs, nats, comparison, out)
    for sentence in comparison:
        print(sentence)
    print(f"{out} and {out.with_suffix('.png').name}")


if __name__ == "__main__":
    command.run("tools.report", main, mistakes=(ReportError,))
