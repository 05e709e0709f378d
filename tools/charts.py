"""The curves of runs, drawn with matplotlib: losses with marks for events, and small ones.

Takes histories, returns figures; knows no page. The colours are Okabe and Ito's, which people with
colour blindness can tell apart.
"""

import base64
import io
import itertools

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from tools.history import History

BLUE, RED, GREY = "#0072B2", "#D55E00", "#666666"
COLOURS = [BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000"]
STYLE = {
    "font.family": "DejaVu Sans",
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
    "path.simplify_threshold": 1.0,  # pixels: a long log makes no large picture
}
SMALL = {  # {column: (title, unit)} of the small curves
    "lr": ("learning rate", "step size"),
    "grad_norm": ("gradient norm, before clipping", "L2 norm"),
    "tokens_per_second": ("tokens a second", "tokens/s"),
    "mfu": ("MFU", "share of the device's peak"),
}


def x_axes(runs: list[History]) -> dict[str, tuple[str, float]]:
    """What losses can be drawn against: {column: (label, unit)} of what all runs count."""
    axes = {"step": ("steps", 1), "tokens": ("tokens", 1)}
    longest = max(run.last("elapsed_s") or 0 for run in runs)
    for unit, seconds in (("hours", 3600), ("minutes", 60), ("seconds", 1)):
        if longest >= 2 * seconds:
            axes["elapsed_s"] = (f"{unit} of training", seconds)
            break
    axes["cost"] = ("cost", 1)
    return {column: axis for column, axis in axes.items() if all(run.last(column) for run in runs)}


def smooth(y: np.ndarray) -> np.ndarray:
    """Means over a running window of a fiftieth of the values, shorter at both ends."""
    half = len(y) // 100
    n = np.arange(len(y))
    total = np.concatenate(([0.0], np.cumsum(y)))
    low = np.maximum(n - half, 0)
    high = np.minimum(n + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def without_beginning(y: np.ndarray) -> np.ndarray:
    """All but the first 4%: its steep descent would flatten the rest of the picture."""
    return y[len(y) // 25 :]


@matplotlib.rc_context(STYLE)
def losses(
    runs: list[History],
    column: str,
    nats: bool = True,
    predicted: tuple[float, float] | None = None,
) -> Figure:
    """Training and validation losses against a column; of a single run its events as well.

    nats: in nats a token; otherwise in bits a byte, and the validation loss alone. predicted: the
    interval of the final loss that tools.scaling predicted.
    """
    figure = Figure(figsize=(11.4, 4.6), layout="constrained")
    axes = figure.add_subplot()
    label, unit = x_axes(runs)[column]
    single = len(runs) == 1
    tops = []
    for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
        if nats:
            logged = np.isfinite(run.columns["loss"])
            x = run.columns[column][logged] / unit
            loss = run.columns["loss"][logged]
            average = smooth(loss)
            axes.plot(x, loss, color=colour, linewidth=0.6, alpha=0.35)
            name = "training" if single else None
            axes.plot(x, average, color=colour, linewidth=1.2, label=name)
            tops.append(without_beginning(average).max(initial=0))
        loss = np.array([e["val_loss" if nats else "bits_per_byte"] for e in run.evaluations])
        axes.plot(
            run.at(column, [e["step"] for e in run.evaluations]) / unit,
            loss,
            color=RED if single else colour,
            linewidth=1.6,
            marker="o" if len(loss) <= 40 else None,
            markersize=4,
            label="validation" if single else run.name,
        )
        tops.append(without_beginning(loss).max(initial=0))
    if max(tops):
        axes.set_ylim(top=1.02 * max(tops))
    if single:
        mark_events(axes, runs[0], column, unit)
    if predicted:
        axes.axhspan(*predicted, color=GREY, alpha=0.15, label="predicted by tools.scaling")
    axes.set_xlabel(label)
    axes.set_ylabel("loss, nats a token" if nats else "validation loss, bits a byte")
    if column in ("step", "tokens"):
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.legend(loc="upper right")
    return figure


def mark_events(axes: Axes, run: History, column: str, unit: float) -> None:
    """Saves, resumes, halvings and skipped steps along the x axis."""
    resumes = run.resumes()
    for x in run.at(column, resumes) / unit:
        axes.axvline(x, color=GREY, linestyle="--", linewidth=0.8)
    halved = [e["step"] for e in run.events if e["event"] == "out of memory"]
    skipped = [step for step, _ in run.skipped()]
    for label, steps, marker, fill in (
        ("save", run.saves(), "|", GREY),
        ("resume", resumes, "s", "white"),
        ("out of memory, micro-batch halved", halved, "X", "black"),
        ("skipped steps", skipped, "v", "black"),
    ):
        if steps:
            axes.plot(
                run.at(column, steps) / unit,
                np.full(len(steps), 0.02),  # of the height
                marker,
                transform=axes.get_xaxis_transform(),
                color=GREY,
                markerfacecolor=fill,
                markersize=6,
                label=label,
            )


@matplotlib.rc_context(STYLE)
def small(runs: list[History], column: str) -> Figure:
    """One of the curves of SMALL against steps; only the rise of an enormous spike is seen."""
    figure = Figure(figsize=(3.7, 2.4), layout="constrained")
    axes = figure.add_subplot()
    top = 0
    for run, colour in zip(runs, itertools.cycle(COLOURS), strict=False):
        known = np.isfinite(run.columns[column])
        y = run.columns[column][known]
        axes.plot(run.columns["step"][known], y, color=colour, linewidth=1)
        if len(y):
            top = max(top, min(y.max(), 3 * np.percentile(y, 99)))
    axes.set_ylim(0, 1.08 * top or 1)
    title, unit = SMALL[column]
    axes.set(title=title, xlabel="steps", ylabel=unit)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.locator_params(nbins=5)
    if column == "tokens_per_second":
        axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    return figure


@matplotlib.rc_context(STYLE)
def svg(figure: Figure) -> str:
    """The figure as an address that holds it, for an <img>."""
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()
