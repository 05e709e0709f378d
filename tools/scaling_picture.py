"""A run beside what was promised of it: small runs, the law, the prediction and its own curve.

Reads logs; draws with charts.py's colours.
"""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from formats import run_log
from tools.charts import BLUE, COLOURS, RED, smooth, thin
from tools.scaling_fit import effective_tokens
from tools.scaling_runs import evaluations
from tools.scaling_study import Findings

SIZES = [colour for colour in COLOURS if colour not in (BLUE, RED)]


def draw_promise(axes: Axes, found: Findings, run: Path) -> None:
    """Losses over operations, small runs to the left and the real one to the right."""
    promised = found.recommended
    flops = promised["size"]["flops"]
    sizes = dict.fromkeys((r["n_layer"], r["n_embd"]) for r in found.runs)
    colours = {size: SIZES[n % len(SIZES)] for n, size in enumerate(sizes)}
    lowest = []
    for small in found.runs:
        size = small["n_layer"], small["n_embd"]
        operations, losses = curve_of(found.folder / small["run"], small["flops"])
        axes.plot(operations, losses, color=colours[size], linewidth=0.8, alpha=0.5)
        axes.plot(small["compute"], small["loss"], "o", color=colours[size], markersize=4)
        lowest.append(small["loss"])
    for size, colour in colours.items():
        of_size = [r for r in found.runs if (r["n_layer"], r["n_embd"]) == size]
        to_the_promise = promised["tokens"] * flops / of_size[0]["flops"]
        tokens = np.geomspace(min(r["tokens"] for r in of_size), to_the_promise)
        losses = [
            found.law.loss(of_size[0]["weights"], effective_tokens(seen, found.unique))
            for seen in tokens
        ]
        label = f"{size[0]} x {size[1]}"
        axes.plot(
            tokens * of_size[0]["flops"], losses, "--", color=colour, linewidth=1, label=label
        )
    axes.errorbar(
        promised["tokens"] * flops,
        promised["loss"],
        [[promised["loss"] - promised["low"]], [promised["high"] - promised["loss"]]],
        fmt="D",
        color=BLUE,
        capsize=4,
        label="promised",
        zorder=4,
    )
    operations, losses = curve_of(run, flops)
    axes.plot(operations, losses, color=RED, linewidth=0.8, alpha=0.5)
    a_step = flops * promised["tokens"] / promised["steps"]
    evaluated = [step * a_step for step, _ in evaluations(run)]
    losses = [loss for _, loss in evaluations(run)]
    axes.plot(
        evaluated, losses, color=RED, linewidth=1.6, marker="o", markersize=3, label="the run"
    )
    axes.set_xscale("log")
    axes.set_ylim(0.9 * min([promised["low"], *losses]), 1.15 * np.percentile(lowest, 90))
    axes.set_xlabel("operations of training")
    axes.set_ylabel("loss, nats a token")
    axes.legend(fontsize=8)


def curve_of(run: Path, flops: float) -> tuple[np.ndarray, np.ndarray]:
    """The smoothed training loss of a run against operations, flops a token."""
    points = [(r["tokens"], r["loss"]) for r in run_log.iterate(run) if r.get("loss")]
    if not points:
        return np.array([]), np.array([])
    tokens, losses = np.array(points).T
    losses = smooth(losses)
    kept = thin(losses)
    return tokens[kept] * flops, losses[kept]
