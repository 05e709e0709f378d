"""A report on one or several runs as a page: losses, small curves, a table, samples, settings.

    python -m tools.report checkpoints/RUN [checkpoints/OTHER ...] [--out FILE.html]

Several runs share the page, which compares their final losses. Reads only log.jsonl and
config.json, so it works while a run trains. The page needs neither scripts nor network;
templates/report.html.j2 is its layout. Knows neither models nor checkpoints; does not import
PyTorch.
"""

import startup

if __name__ == "__main__":
    startup.begin()  # before the slow imports

import base64
import io
import itertools
import math
import os
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from command_line import Parser, UserError, duration, local_path, plural, short
from formats import files, run_folder
from tools import command

SMALL = {  # {field: title} of the small curves
    "lr": "learning rate",
    "grad_norm": "gradient norm, before clipping",
    "tokens_per_second": "tokens per second",
    "mfu": "MFU, share of the device's peak",
}
UNITS = {"val_loss": "nats per token", "bits_per_byte": "bits per byte"}
MARK = "by python -m tools.report"  # occurs in every page
SAMPLES = 8  # answers per prompt
STYLE = [  # for matplotlib
    "seaborn-v0_8-whitegrid",
    "seaborn-v0_8-colorblind",  # the colors C0, C1, ...
    {"path.simplify_threshold": 1.0},  # pixels; keeps the picture of a long log small
    {"text.parse_math": False},  # a "$" in a name is a plain character
    {"svg.fonttype": "none"},  # text stays text; browsers have fonts for every script
]


# -- a run as numbers ------------------------------------------------------------------------------


@dataclass
class History:
    """The history of one run.

    log: the records of log.jsonl, all with tokens, epoch and minutes. Those of evaluations also
    have training_loss, the mean since the evaluation before, or None.
    """

    name: str
    config: dict
    log: list[dict]

    def records(self, field: str) -> list[dict]:
        """The records in which a field has a value.

        Every logged step has "lr", evaluations have "val_loss", and starts have "total_steps".
        """
        return [record for record in self.log if record.get(field) is not None]

    def series(self, field: str, over: str = "step") -> tuple[np.ndarray, np.ndarray]:
        """A curve of the field `field` over the field `over`: x and y."""
        records = self.records(field)
        return np.array([r[over] for r in records]), np.array([r[field] for r in records])

    @property
    def start(self) -> dict:
        """The record of the last start, which has the machine, the data and the run's length."""
        return self.records("total_steps")[-1]

    @property
    def last(self) -> dict:
        """The record of the last logged step."""
        return self.records("lr")[-1]

    @property
    def best(self) -> dict | None:
        return min(self.records("val_loss"), key=lambda r: r["val_loss"], default=None)

    @property
    def settings(self) -> dict:
        """All in which runs may differ: their settings, hardware and software."""
        names = ("device", "dtype", "torch", "python", "processes", "parameters", "commit")
        return self.config | {f"run: {name}": self.start.get(name) for name in names}


def names_of(folders: list[Path]) -> list[str]:
    """The shortest ends of these paths that tell them apart. folders: all different."""
    paths = [folder.resolve() for folder in folders]
    for count in itertools.count(1):
        names = [Path(*path.parts[-count:]).as_posix() for path in paths]
        if len(set(names)) == len(names):  # non-UTF-8 names cannot be drawn
            return [os.fsencode(name).decode("utf-8", "backslashreplace") for name in names]


def read_history(folder: Path, name: str) -> History:
    """The history of a run, finished or not. Raises UserError if it has no start or no step."""
    config, log = files.read_json(folder / "config.json"), run_folder.read_log(folder)
    config.pop("run", None)  # its id
    run = History(name, config, log)
    if not config or not run.records("total_steps") or not run.records("lr"):
        hint = "" if run_folder.steps(folder) else f"; {run_folder.what_is_there(folder)}"
        raise UserError(f"{folder} is not a run that has logged its start and a step{hint}")
    for field in ("tokens", "epoch"):  # interpolated between the logged steps
        x, y = run.series(field)
        values = np.interp([record["step"] for record in log], [0, *x], [0, *y])
        for record, value in zip(log, values, strict=True):
            record[field] = value
    losses = []  # training losses since the evaluation before
    for record in log:
        record["minutes"] = record.get("elapsed_s", 0) / 60
        if record.get("loss") is not None:
            losses.append(record["loss"])
        if record.get("val_loss") is not None:
            record["training_loss"] = np.mean(losses) if losses else None
            losses = []
    return run


def common_loss(runs: list[History]) -> str:
    """The loss by which to compare runs: "val_loss", or "bits_per_byte" if their data differs."""
    data = {(r.start["data"]["sha256"].get("val"), r.config.get("loss_on")) for r in runs}
    return "val_loss" if len(data) == 1 else "bits_per_byte"


# -- tables ----------------------------------------------------------------------------------------


def key_figures(run: History, loss: str) -> dict[str, str]:
    """{name: figure} of a run, as far as they are known. loss: from common_loss."""
    figures, best, last = {}, run.best, run.last
    if best and loss == "val_loss":
        figures["best validation loss"] = f"{best['val_loss']:.4f}"
        figures["perplexity"] = command.number(command.perplexity(best["val_loss"]))
    if best:
        figures["bits per byte"] = f"{best['bits_per_byte']:.3f}"
    figures["training tokens"] = short(last["tokens"])
    figures["training time"] = duration(last["elapsed_s"])
    figures["tokens per second, median"] = f"{np.median(run.series('tokens_per_second')[1]):,.0f}"
    if run.records("mfu"):
        figures["MFU, median"] = f"{np.median(run.series('mfu')[1]):.1%}"
    if last["cost"]:
        figures["cost"] = f"{last['cost']:,.2f}"
    return figures


def table_of(runs: list[History]) -> dict[str, list]:
    """{name: its value in each run}: final losses, key figures, and the settings that differ."""
    rows = losses_at_the_end(runs)
    figures = [key_figures(run, common_loss(runs)) for run in runs]
    for columns in (figures, [run.settings for run in runs]):
        for name in dict.fromkeys(itertools.chain(*columns)):
            values = [column.get(name, "") for column in columns]
            if columns is figures or len(set(map(str, values))) > 1:
                rows[name] = values
    return rows


def losses_at_the_end(runs: list[History]) -> dict[str, list[str]]:
    """{name: the validation loss of each run} after the same tokens and the same seconds.

    These are those of the run that has the fewest. Bits per byte are compared only after the same
    seconds, since tokens of different tokenizers hold different amounts of text.
    """
    if len(runs) == 1 or not all(run.records("val_loss") for run in runs):
        return {}
    loss, rows = common_loss(runs), {}
    for column in ("tokens", "elapsed_s") if loss == "val_loss" else ("elapsed_s",):
        curves = [run.series(loss, column) for run in runs]
        end = min(x[-1] for x, _ in curves)
        losses = [float(np.interp(end, x, y, left=math.nan)) for x, y in curves]
        if math.isfinite(sum(losses)):  # all runs had an evaluation by then
            amount = f"{short(end)} tokens" if column == "tokens" else duration(end)
            name = f"loss after {amount} of training, in {UNITS[loss]}"
            rows[name] = [f"{loss:.4f}" for loss in losses]
    return rows


def answers(runs: list[History]) -> list[dict]:
    """Samples with run, step and loss: evenly spread over a single run, or the last of each run."""
    found = []
    for run in runs:
        losses = dict(zip(*run.series("val_loss"), strict=True))
        records = run.records("samples")
        spread = np.linspace(0, len(records) - 1, min(SAMPLES, len(records)), dtype=int)
        for record in [records[i] for i in spread] if len(runs) == 1 else records[-1:]:
            step = record["step"]
            known = {"run": run.name, "step": step, "val_loss": losses.get(step)}
            found += [sample | known for sample in record["samples"]]
    return found


# -- curves ----------------------------------------------------------------------------------------


def plot(runs: list[History], column: str):
    """A Figure of the losses over "step", "tokens" or "minutes", with the small curves below."""
    # These imports take a second, so they come after all checks of the runs.
    from matplotlib import style
    from matplotlib.figure import Figure

    style.use(STYLE)
    warnings.filterwarnings("ignore", "Glyph .* missing")  # the PNG shows a box
    small = [field for field in SMALL if any(run.records(field) for run in runs)]
    figure = Figure(figsize=(14, 8), layout="constrained")
    parts = figure.subplot_mosaic([["loss"] * len(small), small], height_ratios=[2, 1])
    plot_losses(parts["loss"], runs, column)
    for field in small:
        for n, run in enumerate(runs):
            parts[field].plot(*run.series(field, column), f"C{n}", linewidth=1)
        values = np.concatenate([run.series(field)[1] for run in runs])
        top = min(values.max(), 3 * np.percentile(values, 99))  # cuts off huge spikes
        parts[field].set(title=SMALL[field], ylim=(0, 1.08 * top or 1))
        parts[field].locator_params(nbins=5)
    for axes in parts.values():
        axes.set_xlabel(column)
        axes.xaxis.set_major_formatter(lambda value, _: short(value))
    return figure


def plot_losses(axes, runs: list[History], column: str) -> None:
    """Plot training and validation losses; for runs on different data, only validation losses.

    For a single run, also mark resumes and skipped steps.
    """
    single, loss = len(runs) == 1, common_loss(runs)
    late = [0.0]  # losses after the first 4%, whose steep descent would flatten the rest
    for n, run in enumerate(runs):
        x, y = run.series("loss", column)
        if loss == "val_loss" and len(y):
            axes.plot(x, y, f"C{n}", linewidth=0.6, alpha=0.35)
            count = 1 + len(y) // 50
            x, y = (np.convolve(values, np.ones(count) / count, "valid") for values in (x, y))
            axes.plot(x, y, f"C{n}", linewidth=1, label="training" if single else None)
            late.extend(y[len(y) // 25 :])
        x, y = run.series(loss, column)
        # The blank, since matplotlib omits labels that begin with "_" from the legend.
        color, name = ("C2", "validation") if single else (f"C{n}", f" {run.name}")
        axes.plot(x, y, color, marker="o" if len(y) <= 40 else None, label=name)
        late.extend(y[len(y) // 25 :])
    if single:
        mark_events(axes, runs[0], column)
    axes.set(ylim=(None, 1.02 * max(late) or None), ylabel=f"loss, {UNITS[loss]}")
    axes.legend(loc="upper right")


def mark_events(axes, run: History, column: str) -> None:
    """Mark resumes by dashed lines, and skipped steps at the top of the axes."""
    where = axes.get_xaxis_transform()  # y is 0 at the bottom and 1 at the top
    resumes = run.series("total_steps", column)[0][1:]
    if len(resumes):
        axes.vlines(resumes, 0, 1, "black", "--", label="resume", transform=where)
    x, skipped = run.series("bad_steps", column)
    skips = x[np.diff(skipped, prepend=0) > 0]
    if len(skips):
        label = "skipped steps (NaN)"
        axes.vlines(skips, 0.97, 1, "black", label=label, transform=where)


def as_address(figure) -> str:
    """The figure as an SVG data URL, for an <img>."""
    file = io.BytesIO()
    figure.savefig(file, format="svg")
    return "data:image/svg+xml;base64," + base64.b64encode(file.getvalue()).decode()


# -- the page --------------------------------------------------------------------------------------


def write_page(runs: list[History], out: Path) -> None:
    """Write the page, and the curves over steps as a PNG. Raises UserError if that fails."""
    curves = {column: plot(runs, column) for column in ("step", "tokens", "minutes")}
    html = command.render(
        "report.html.j2",
        runs=runs,
        loss=common_loss(runs),
        table=table_of(runs),
        curves={column: as_address(figure) for column, figure in curves.items()},
        answers=answers(runs),
        drawn=time.strftime("%Y-%m-%d %H:%M"),
        short=short,
        duration=duration,
        plural=plural,
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        curves["step"].savefig(out.with_suffix(".png"))
        files.write_text(out, html)
    except OSError as error:  # as in the input of a notebook, which is read-only
        raise UserError(f"{files.error_message(error)}; give another --out") from None


def check_own(out: Path) -> None:
    """Raises UserError if the page or its PNG would overwrite a file that no report wrote."""
    is_ours = out.exists() and not files.is_foreign(files.read_text(out), MARK)
    for path in (out, out.with_suffix(".png")):
        if path.exists() and not is_ours:
            raise UserError(f"{path} exists already, and no report wrote it; give another --out")


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="python -m tools.report",
        description="Write one page with the curves, tables and samples of one or several runs.",
    )
    text = "a run's folder, such as checkpoints/demo; several are compared"
    parser.add_argument("runs", nargs="+", type=local_path, metavar="RUN", help=text)
    text = "default: report.html in the run's folder; for several runs, here"
    parser.add_argument("--out", type=local_path, metavar="FILE.html", help=text)
    args = parser.parse_args(argv)
    folders = list({run.resolve(): run for run in args.runs}.values())
    if len(folders) < len(args.runs):
        print("a run that was given twice is shown once")
    out = args.out or Path(folders[0] if len(folders) == 1 else "", "report.html")
    if out.suffix != ".html":
        parser.error(f"--out {out}: the name must end in .html")
    check_own(out)
    runs = [read_history(*run) for run in zip(folders, names_of(folders), strict=True)]
    write_page(runs, out)
    for name, losses in losses_at_the_end(runs).items():
        of_runs = [f"{run.name} {loss}" for run, loss in zip(runs, losses, strict=True)]
        print(f"{name}: {', '.join(of_runs)}")
    print(f"{out} and {out.with_suffix('.png').name}")


if __name__ == "__main__":
    command.run("tools.report", main)
