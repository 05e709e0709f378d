"""A run at a glance, as one picture: its losses over time, and what it wrote at each evaluation.

    python -m tools.report checkpoints/RUN [--out FILE.png]
"""
import argparse
import sys
import textwrap
from pathlib import Path

import checkpoint
from checkpoint import CheckpointError

BLUE, ORANGE = "#0072B2", "#D55E00"  # told apart by the colour-blind too (Okabe and Ito)


def draw(run: Path, out: Path) -> None:
    """Write the picture of a run's log. Raises CheckpointError for a run that has logged no loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    log = checkpoint.read_log(run)
    steps = [r for r in log if r.get("loss") is not None]
    evaluations = [r for r in log if r.get("val_loss") is not None]
    samples = [(r["step"], r["samples"][0]) for r in log if r.get("samples")]
    if not steps:
        raise CheckpointError(f"{run} has logged no loss; {checkpoint.what_is_there(run)}")
    unit, scale = ("minutes", 60) if steps[-1]["elapsed_s"] < 7200 else ("hours", 3600)
    figure, axes = plt.subplots(1, 2 if samples else 1, figsize=(11 if samples else 6, 4.2), squeeze=False, width_ratios=[5, 6] if samples else [1])
    curve = axes[0][0]
    curve.plot([r["elapsed_s"] / scale for r in steps], [r["loss"] for r in steps], color=BLUE, linewidth=1, label="training")
    curve.plot([r["elapsed_s"] / scale for r in evaluations], [r["val_loss"] for r in evaluations], color=ORANGE, marker="o", markersize=4, label="validation")
    curve.set(xlabel=f"{unit} of training", ylabel="loss, nats a token", title=run.name)
    if evaluations:
        last = evaluations[-1]
        words = f"{last['val_loss']:.3f}\n{last['bits_per_byte']:.2f} bits per byte"
        curve.annotate(words, (last["elapsed_s"] / scale, last["val_loss"]), xytext=(-4, 14), textcoords="offset points", ha="right", color=ORANGE)
    curve.grid(alpha=0.25)
    curve.legend(frameon=False)
    if samples:
        shown = [samples[i] for i in sorted({0, len(samples) // 2, len(samples) - 1})]
        panel, y = axes[0][1], 1.0
        panel.axis("off")
        for step, sample in shown:
            lines = [part for line in (sample["prompt"] + sample["text"]).expandtabs(4).splitlines() for part in textwrap.wrap(line, 62, replace_whitespace=False, drop_whitespace=False) or [""]][:7]
            panel.text(0, y, f"step {step:,}", color=ORANGE, va="top", fontsize=9, transform=panel.transAxes)
            panel.text(0, y - 0.055, "\n".join(lines).replace("$", r"\$"), family="monospace", fontsize=7.5, va="top", transform=panel.transAxes)
            y -= 0.36
    figure.tight_layout()
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(prog="python -m tools.report", description="The losses and samples of a run as one picture.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, such as checkpoints/demo")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: report.png in the run's folder")
    args = parser.parse_args(argv)
    out = args.out or args.run / "report.png"
    draw(args.run, out)
    print(out)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except CheckpointError as error:
        print(f"tools.report: {error}", file=sys.stderr)
        sys.exit(2)
    except ImportError as error:
        print(f"tools.report: {error.name} is missing; pip install -r requirements-dev.txt -c constraints.txt", file=sys.stderr)
        sys.exit(1)
