"""The curves of runs, drawn with matplotlib: losses with marks for what happened, and small ones.

Takes histories (history.py), returns SVG or writes PNG; knows no page. Colours are Okabe and Ito's,
which the colour-blind tell apart; marks differ in shape as well.
"""

import functools
import io
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from tools.history import History

BLUE, RED, GREY = "#0072B2", "#D55E00", "#666666"
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
    "legend.framealpha": 0.9,
    "svg.hashsalt": "report",
    "font.family": "DejaVu Sans",
    "path.simplify": True,
}
SMALL_TITLES = {
    "lr": "learning rate",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_second": "tokens a second",
    "mfu": "MFU, % of the device's peak",
}
SMALL_UNITS = {
    "lr": "step size",
    "grad_norm": "L2 norm",
    "tokens_per_second": "tokens/s",
    "mfu": "%",
}
POINTS = 700  # of a curve: more than a screen shows
SAVE_MARKS = 100  # roughly; of more saves, evenly spread ones


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which a span of time reads best, and its length in seconds."""
    for name, length in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return name, length
    return "seconds", 1


def training_time_unit(runs: list[History]) -> tuple[str, float]:
    """One unit of time for all runs, and its length in seconds."""
    return time_unit(max(run.last("elapsed_s") or 0 for run in runs))


def axes_of(runs: list[History]) -> dict[str, str]:
    """What losses can be drawn against, as {column: label}: what every run has counted."""
    unit, _ = training_time_unit(runs)
    labels = {
        "step": "steps",
        "tokens": "training tokens",
        "elapsed_s": f"{unit} of training",
        "cost": "cost, in the unit of cost_per_hour",
    }
    return {name: label for name, label in labels.items() if all(run.last(name) for run in runs)}


def small_columns(runs: list[History]) -> list[str]:
    """The columns that a small curve can be drawn of: those in which some run has a number."""
    return [
        name for name in SMALL_TITLES if any(np.isfinite(run.columns[name]).any() for run in runs)
    ]


def thin(y: np.ndarray) -> np.ndarray:
    """The indices of at most POINTS values, in order, no spike lost.

    Of each stretch these are the lowest and the highest value.
    """
    if len(y) <= POINTS:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), POINTS // 2 + 1).astype(int)
    kept = set()
    for start, end in itertools.pairwise(edges):
        kept.add(start + int(y[start:end].argmin()))
        kept.add(start + int(y[start:end].argmax()))
    return np.array(sorted(kept))


def smooth(y: np.ndarray) -> np.ndarray:
    """Means over a running window of a fiftieth of the values, shorter at both ends."""
    half = len(y) // 100
    n = np.arange(len(y))
    total = np.concatenate(([0.0], np.cumsum(y)))
    low = np.maximum(n - half, 0)
    high = np.minimum(n + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


@dataclass(frozen=True)
class Curve:
    """A column thinned for drawing: rows of the run and the values there; the same smoothed."""

    rows: np.ndarray
    values: np.ndarray
    smooth_rows: np.ndarray
    smooth_values: np.ndarray


@functools.cache  # every picture of a run needs it again
def curve_of(run: History, column: str) -> Curve:
    """What a curve of a run's column is drawn through; values that are not finite are left out."""
    rows = np.flatnonzero(np.isfinite(run.columns[column]))
    values = run.columns[column][rows]
    smoothed = smooth(values)
    raw, even = thin(values), thin(smoothed)
    return Curve(rows[raw], values[raw], rows[even], smoothed[even])


@dataclass
class LossPlot:
    """One picture of losses while it is drawn, and what its y axis has to show.

    x: the column that losses are drawn against; unit: what its values are divided by; nats: losses
    in nats a token, else in bits a byte. Of a curve, the steep beginning may lie above the picture.
    """

    axes: Axes
    x: str
    unit: float
    nats: bool
    lows: list[float] = field(default_factory=list)
    highs: list[float] = field(default_factory=list)
    beginnings: list[float] = field(default_factory=list)

    def training(self, run: History, color: str, width: float, label: str | None) -> None:
        """The training loss: pale as it was logged, and smoothed."""
        curve = curve_of(run, "loss")
        if not len(curve.rows):
            return
        x = run.columns[self.x][curve.rows] / self.unit
        self.axes.plot(x, curve.values, color=color, linewidth=0.6, alpha=0.35)
        x = run.columns[self.x][curve.smooth_rows] / self.unit
        smoothed = curve.smooth_values
        self.axes.plot(x, smoothed, color=color, linewidth=width, label=label)
        self.lows.append(np.percentile(curve.values, 0.5))
        self.highs.append(smoothed[len(smoothed) // 25 :].max())
        self.beginnings.append(curve.values[0])

    def validation(self, run: History, color: str, label: str) -> bool:
        """The validation loss; few evaluations are points as well. False where there are none."""
        name = "val_loss" if self.nats else "bits_per_byte"
        known = [e for e in run.evaluations if e.get(name) is not None]
        if not known:
            return False
        steps = np.array([e["step"] for e in known])
        losses = np.array([e[name] for e in known])
        kept = thin(losses)
        self.axes.plot(
            run.at(self.x, steps[kept]) / self.unit,
            losses[kept],
            color=color,
            linewidth=1.6,
            marker="o" if len(known) <= 40 else None,
            markersize=4,
            label=label,
        )
        self.lows.append(losses.min())
        beginning = len(losses) // 25
        self.highs.append(losses[beginning:].max() if beginning else losses[0])
        return True

    def set_limits(self) -> None:
        """Set the limits of the y axis; a title says where a training loss begins far above."""
        if not self.highs:
            return
        low, high = min(self.lows), max(self.highs)
        room = 0.08 * (high - low or 1)
        self.axes.set_ylim(low - room, high + room)
        if self.beginnings and max(self.beginnings) > high + 2 * room:
            self.axes.set_title(
                f"\u2191 the training loss begins at {max(self.beginnings):.1f}",
                color=GREY,
                fontsize=8,
                fontweight="normal",
            )

    def events(self, run: History) -> None:
        """What happened: saves as ticks above the x axis, the rest on the training curve."""
        saves, resumes = run.saves(), run.resumes()
        if saves:
            saves = saves[:: max(1, len(saves) // SAVE_MARKS)]
            self.axes.plot(
                run.at(self.x, saves) / self.unit,
                np.full(len(saves), 0.012),
                "|",
                color=GREY,
                markersize=7,
                transform=self.axes.get_xaxis_transform(),  # y in shares of the height
                clip_on=False,
                label="save",
            )
        for step in resumes:
            x = float(run.at(self.x, step)) / self.unit
            self.axes.axvline(x, color=GREY, linestyle="--", linewidth=0.8)
        halved = [e["step"] for e in run.events if e["event"] == "out of memory"]
        skipped = [step for step, _ in run.skipped()]
        self.marks(run, resumes, "resume", "s", "white")
        self.marks(run, halved, "out of memory, micro-batch halved", "X", "black")
        self.marks(run, skipped, "skipped steps", "v", "black")

    def marks(self, run: History, steps: list[int], label: str, shape: str, fill: str) -> None:
        """Marks on the training curve; of its steep beginning, at the upper edge."""
        if not steps:
            return
        self.axes.plot(
            run.at(self.x, steps) / self.unit,
            np.minimum(run.at("loss", steps), self.axes.get_ylim()[1]),
            shape,
            color="black",
            markerfacecolor=fill,
            markersize=6,
            linestyle="none",
            label=label,
            zorder=5,
            clip_on=False,
        )


def draw_losses(axes: Axes, runs: list[History], x: str, nats: bool = True) -> None:
    """Training and validation losses against column `x`; for one run also what happened to it.

    nats: in nats a token, else in bits a byte, which leaves the training loss out.
    """
    unit = training_time_unit(runs)[1] if x == "elapsed_s" else 1
    plot = LossPlot(axes, x, unit, nats)
    alone = len(runs) == 1
    for n, run in enumerate(runs):
        color = COLOURS[n % len(COLOURS)]
        if nats and alone:
            plot.training(run, color, 1.4, "training")
        elif nats:
            plot.training(run, color, 0.9, None)
        if alone:
            plot.validation(run, RED, "validation")
        elif not plot.validation(run, color, run.name):
            axes.plot([], [], color=color, label=run.name)  # so that the legend names every run
    plot.set_limits()
    if alone:
        plot.events(runs[0])
    axes.set_xlabel(axes_of(runs).get(x, x))
    axes.set_ylabel("loss, nats a token" if nats else "validation loss, bits a byte")
    make_readable(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", fontsize=8)


def draw_small(axes: Axes, runs: list[History], column: str) -> None:
    """One of the small curves against steps. Of a spike beyond all measure the rise is seen."""
    scale = 100 if column == "mfu" else 1
    tops = [0.0]
    for n, run in enumerate(runs):
        curve = curve_of(run, column)
        steps = run.columns["step"][curve.rows]
        axes.plot(steps, curve.values * scale, color=COLOURS[n % len(COLOURS)], linewidth=1)
        if len(curve.values):
            usual = np.percentile(curve.values, 99)
            tops.append(min(curve.values.max(), 3 * usual or 1) * scale)
    axes.set_ylim(0, 1.08 * max(tops) or 1)
    axes.set_xlabel("steps")
    axes.set_ylabel(SMALL_UNITS[column])
    axes.set_title(SMALL_TITLES[column])
    make_readable(axes)


def make_readable(axes: Axes) -> None:
    """Few ticks; large numbers as 20k and 1.5M, small ones as 3.0e-4."""
    axes.xaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        largest = max(map(abs, axis.get_view_interval()))
        if largest >= 10_000:
            axis.set_major_formatter(EngFormatter(sep=""))
        elif axis is axes.yaxis and largest < 0.01:
            axis.set_major_formatter(FuncFormatter(small_tick))


def small_tick(value: float, position: int) -> str:
    """How a number below 0.01 is written at a tick."""
    return f"{value:.1e}".replace("e-0", "e-") if value else "0"


def svg(width: float, height: float, draw: Callable, *arguments) -> bytes:
    """The picture that draw(axes, *arguments) makes; width and height in inches."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot(), *arguments)
        out = io.BytesIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(out, format="svg", metadata=nothing)
    return out.getvalue()


def write_png(path: Path, runs: list[History], title: str, nats: bool) -> None:
    """Write all curves as one picture, losses above and the small ones below."""
    columns = small_columns(runs)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7 if columns else 4.5), layout="constrained")
        figure.suptitle(title, fontweight="bold", fontsize=11)
        if columns:
            grid = figure.add_gridspec(2, len(columns), height_ratios=[5, 3])
        else:
            grid = figure.add_gridspec(1, 1)
        x = "elapsed_s" if "elapsed_s" in axes_of(runs) else "step"
        draw_losses(figure.add_subplot(grid[0, :]), runs, x, nats)
        for n, column in enumerate(columns):
            draw_small(figure.add_subplot(grid[1, n]), runs, column)
        figure.savefig(path, format="png", dpi=110)
