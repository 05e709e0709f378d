"""The curves of runs, drawn with matplotlib: losses with marks for what happened, and the smaller
ones beside them.

Takes histories (history.py), returns SVG or writes PNG; knows no page. Colours are Okabe and Ito's,
which the colour-blind tell apart; marks differ in shape as well.
"""

import functools
import io
from itertools import pairwise

import matplotlib
import numpy as np
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
SMALL = {
    "lr": "learning rate",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_second": "tokens a second",
    "mfu": "MFU, % of the device's peak",
}
POINTS = 700  # of a curve: more than a screen shows


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that a span of time reads best in, and its seconds."""
    return next(
        ((name, size) for name, size in (("hours", 3600), ("minutes", 60)) if seconds >= 2 * size),
        ("seconds", 1),
    )


def axes_of(runs: list[History]) -> dict[str, str]:
    """What losses can be drawn against, {column: label}: cost only where it was counted, time in
    one unit for all runs.
    """
    unit, _ = time_unit(max(run.last("elapsed_s") or 0 for run in runs))
    labels = {
        "step": "steps",
        "tokens": "training tokens",
        "elapsed_s": f"{unit} of training",
        "cost": "cost, in the unit of cost_per_hour",
    }
    return {name: label for name, label in labels.items() if all(run.last(name) for run in runs)}


def thin(y: np.ndarray) -> np.ndarray:
    """The indices of at most POINTS values: of each stretch the lowest and the highest, so that no
    spike is lost.
    """
    if len(y) <= POINTS:
        return np.arange(len(y))
    edges = np.linspace(0, len(y), POINTS // 2 + 1).astype(int)
    return np.array(
        sorted({a + int(i) for a, b in pairwise(edges) for i in (y[a:b].argmin(), y[a:b].argmax())})
    )


@functools.cache
def curve(run: History, column: str) -> tuple[np.ndarray, ...]:
    """The rows of a run's columns that a curve is drawn through, its values there; and the same for
    the curve smoothed.
    """
    rows = np.flatnonzero(np.isfinite(run.columns[column]))
    values = run.columns[column][rows]
    calm = smooth(values)
    raw, even = thin(values), thin(calm)
    return rows[raw], values[raw], rows[even], calm[even]


def smooth(y: np.ndarray) -> np.ndarray:
    """Means over a running window of a fiftieth of the values, shorter at both ends."""
    half, n = len(y) // 100, np.arange(len(y))
    total = np.concatenate(([0.0], np.cumsum(y)))
    low, high = np.maximum(n - half, 0), np.minimum(n + half + 1, len(y))
    return (total[high] - total[low]) / (high - low)


def draw_losses(axes, runs: list[History], x: str, nats: bool = True) -> None:
    """Training and validation losses against column `x`; for one run also what happened to it.
    nats: in nats a token, else in bits a byte, which leaves the training loss out.
    """
    _, second = time_unit(max(run.last("elapsed_s") or 0 for run in runs))
    scale = second if x == "elapsed_s" else 1
    tops, starts, bottoms = [], [], []
    for n, run in enumerate(runs):
        colour, alone = COLOURS[n % len(COLOURS)], len(runs) == 1
        raw, losses, even, calm = curve(run, "loss")
        if nats and len(raw):
            axes.plot(run.columns[x][raw] / scale, losses, color=colour, linewidth=0.6, alpha=0.35)
            axes.plot(
                run.columns[x][even] / scale,
                calm,
                color=colour,
                linewidth=1.4 if alone else 0.9,
                label="training" if alone else None,
            )
            tops.append(calm[len(calm) // 25 :].max())  # the steep beginning may lie above
            starts.append(losses[0])
            bottoms.append(np.percentile(losses, 0.5))
        points = [
            (e["step"], e["val_loss"] if nats else e.get("bits_per_byte")) for e in run.evaluations
        ]
        points = [(step, value) for step, value in points if value is not None]
        if points:
            steps, values = map(np.array, zip(*points, strict=True))
            few = len(points) <= 40
            keep = thin(values)
            axes.plot(
                run.at(x, steps[keep]) / scale,
                values[keep],
                color=RED if alone else colour,
                linewidth=1.6,
                marker="o" if few else None,
                markersize=4,
                label="validation" if alone else run.name,
            )
            tops.append(values[0] if len(values) < 25 else values[len(values) // 25 :].max())
            bottoms.append(values.min())
        elif not alone:
            axes.plot([], [], color=colour, label=run.name)
    if tops:
        low, high = min(bottoms), max(tops)
        room = 0.08 * (high - low or 1)
        axes.set_ylim(low - room, high + room)
        if starts and max(starts) > high + 2 * room:
            axes.set_title(
                f"\u2191 the training loss begins at {max(starts):.1f}",
                color=GREY,
                fontsize=8,
                fontweight="normal",
            )
    if len(runs) == 1:
        mark(axes, runs[0], x, scale)
    axes.set(
        xlabel=axes_of(runs).get(x, x),
        ylabel="loss, nats a token" if nats else "validation loss, bits a byte",
    )
    readable(axes)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper right", fontsize=8)


def mark(axes, run: History, x: str, scale: float) -> None:
    """What happened to a run: saves as ticks above the axis, the rest on its training curve."""
    saves = run.saves()
    saves = saves[:: max(1, len(saves) // 100)]
    floor = axes.get_xaxis_transform()  # x in data, y in shares of the height
    if saves:
        axes.plot(
            run.at(x, saves) / scale,
            np.full(len(saves), 0.012),
            "|",
            color=GREY,
            markersize=7,
            transform=floor,
            clip_on=False,
            label="save",
        )
    for step in run.resumes():
        axes.axvline(float(run.at(x, step)) / scale, color=GREY, linestyle="--", linewidth=0.8)
    halved = [e["step"] for e in run.events if e["event"] == "out of memory"]
    skipped = [step for step, _ in run.skipped()]
    for steps, shape, label in (
        (run.resumes(), "s", "resume"),
        (halved, "X", "out of memory, micro-batch halved"),
        (skipped, "v", "skipped steps"),
    ):
        if steps:
            y = np.minimum(
                run.at("loss", steps), axes.get_ylim()[1]
            )  # of the steep beginning at the upper edge
            axes.plot(
                run.at(x, steps) / scale,
                y,
                shape,
                color="black",
                markerfacecolor="white" if shape == "s" else "black",
                markersize=6,
                linestyle="none",
                label=label,
                zorder=5,
                clip_on=False,
            )


def draw_small(axes, runs: list[History], column: str) -> None:
    """One of the smaller curves against steps."""
    scale, tops = 100 if column == "mfu" else 1, [0.0]
    for n, run in enumerate(runs):
        rows, values, _, _ = curve(run, column)
        axes.plot(
            run.columns["step"][rows], values * scale, color=COLOURS[n % len(COLOURS)], linewidth=1
        )
        if len(values):
            usual = np.percentile(values, 99)
            tops.append(
                min(values.max(), 3 * usual or 1) * scale
            )  # of a spike beyond that, the rise is seen
    axes.set_ylim(0, 1.08 * max(tops) or 1)
    axes.set(
        xlabel="steps",
        ylabel={
            "mfu": "%",
            "tokens_per_second": "tokens/s",
            "grad_norm": "L2 norm",
            "lr": "step size",
        }[column],
    )
    axes.set_title(SMALL[column])
    readable(axes)


def readable(axes) -> None:
    """Few ticks; numbers as 20k and 1.5M where they are large."""
    axes.xaxis.set_major_locator(MaxNLocator(5))
    for axis in (axes.xaxis, axes.yaxis):
        largest = max(map(abs, axis.get_view_interval()))
        if largest >= 10_000:
            axis.set_major_formatter(EngFormatter(sep=""))
        elif axis is axes.yaxis and largest < 0.01:
            axis.set_major_formatter(
                FuncFormatter(
                    lambda value, _: f"{value:.1e}".replace("e-0", "e-") if value else "0"
                )
            )


def small_columns(runs: list[History]) -> list[str]:
    """Which of the smaller curves there are."""
    return [name for name in SMALL if any(np.isfinite(run.columns[name]).any() for run in runs)]


def svg(draw, width: float, height: float) -> bytes:
    """The picture that draw(axes) makes, in inches."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return out.getvalue()


def png(path, runs: list[History], title: str, nats: bool) -> None:
    """All curves on one picture, losses above and the smaller ones below."""
    columns = small_columns(runs)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 7 if columns else 4.5), layout="constrained")
        figure.suptitle(title, fontweight="bold", fontsize=11)
        grid = figure.add_gridspec(
            2 if columns else 1, max(1, len(columns)), height_ratios=[5, 3] if columns else [1]
        )
        draw_losses(
            figure.add_subplot(grid[0, :]),
            runs,
            "elapsed_s" if "elapsed_s" in axes_of(runs) else "step",
            nats,
        )
        for n, column in enumerate(columns):
            draw_small(figure.add_subplot(grid[1, n]), runs, column)
        figure.savefig(path, format="png", dpi=110)
