"""What a report says about runs: key figures, tables, samples and notes, as plain values.

Takes histories (history.py). Knows neither HTML, which is templates/report.html.j2's, nor pictures,
which are charts.py's.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tools.history import History
from tools.wording import counted, duration, number, perplexity, short, visible

ROWS = 30  # of a table; of more, evenly spread ones
EVALUATIONS = 8  # whose samples are shown; of more, evenly spread ones
LOSS_FIGURES = ("best validation loss", "perplexity")  # which depend on the tokenizer


class KeyFigure(NamedTuple):
    """A number that says how a run did; `detail` qualifies its name and may be empty."""

    name: str
    detail: str
    value: str

    @property
    def label(self) -> str:
        """Name and detail."""
        return f"{self.name}, {self.detail}" if self.detail else self.name


@dataclass
class Table:
    """A table of text. kind: "words" for columns of text; best: the row that stands out."""

    head: list[str]
    rows: list[list[str]]
    kind: str = ""
    best: int | None = None


@dataclass
class ProgressTable:
    """How a run went on, by "epoch" or by "evaluation". total: rows there are, shown or not."""

    by: str
    table: Table
    total: int
    has_evaluations: bool


class Answer(NamedTuple):
    """What a prompt was continued with at a step; loss: the validation loss there, or empty."""

    step: int
    loss: str
    text: str


class Prompt(NamedTuple):
    """A prompt and its answers, in the order of the steps."""

    text: str
    answers: list[Answer]


@dataclass
class Samples:
    """The same prompts, answered at one evaluation after the other. total: evaluations in all."""

    prompts: list[Prompt]
    shown: int
    total: int
    log: Path


class Happening(NamedTuple):
    """A thing that happened to a run."""

    step: int
    what: str
    detail: str


@dataclass
class Events:
    """What happened to a run, and in words how often it was saved and continued."""

    table: Table | None
    counts: str


@dataclass
class RunPart:
    """What the page says of one run."""

    name: str
    summary: str
    figures: list[KeyFigure]
    progress: ProgressTable
    samples: Samples
    events: Events
    settings: dict[str, str]


@dataclass
class Comparison:
    """Several runs beside each other. settings: None where they have the same ones."""

    figures: Table
    settings: Table | None


@dataclass
class Page:
    """What a report says. nats: losses compare in nats a token; else only in bits per byte."""

    title: str
    nats: bool
    runs: list[RunPart]
    comparison: Comparison | None = None  # of one run
    data: list[str] = field(default_factory=list)  # of each run, where that differs
    folders: list[str] = field(default_factory=list)


def page_of(runs: list[History]) -> Page:
    """All that a report of these runs says."""
    nats = comparable(runs)
    page = Page(title_of(runs), nats, [part_of(run) for run in runs])
    page.folders = [str(run.folder) for run in runs]
    if len(runs) > 1:
        page.comparison = compare(runs, nats)
    if not nats:
        page.data = [f"{run.name}: {data_of(run)}" for run in runs]
    return page


def data_of(run: History) -> str:
    """The data of a run, and what of it counted in the loss if not all."""
    folder = run.config.get("data_dir", "unknown")
    if run.config.get("loss_on") == "assistant":
        return f"the replies in {folder}"
    return folder


def comparable(runs: list[History]) -> bool:
    """Whether the losses of runs compare in nats a token: they do on the same data."""
    return len({run.data for run in runs}) == 1


def title_of(runs: list[History]) -> str:
    """The names of up to four runs, else how many there are."""
    names = [run.name for run in runs]
    if len(names) == 1:
        return names[0]
    if len(names) <= 4:
        return f"{', '.join(names[:-1])} and {names[-1]}"
    return f"{len(names)} runs"


def part_of(run: History) -> RunPart:
    """What the page says of one run."""
    return RunPart(
        name=run.name,
        summary=summary(run),
        figures=key_figures(run),
        progress=progress(run),
        samples=samples(run),
        events=events(run),
        settings=settings(run),
    )


def spread(items: list, count: int) -> list:
    """At most `count` of the items, evenly spread, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / (count - 1))] for i in range(count)]


def summary(run: History) -> str:
    """What a run is, in a sentence."""
    start, config = run.start, run.config
    shape = []
    if start.get("parameters"):
        shape.append(f"{short(start['parameters'])} parameters")
    if {"n_layer", "n_embd", "block_size"} <= config.keys():
        shape.append(f"{config['n_layer']} layers x {config['n_embd']}")
        shape.append(f"context {config['block_size']}")
    parts = [
        ", ".join(shape),
        f"trained on {config.get('data_dir', 'unknown data')}",
        start.get("device", ""),
        start.get("dtype", ""),
        how_far(run),
    ]
    return " \u00b7 ".join(part for part in parts if part)


def how_far(run: History) -> str:
    """How many of its steps a run has done."""
    step, total = int(run.columns["step"][-1]), run.total_steps
    if not total:
        return f"at step {step:,}"
    if step < total:
        return f"at step {step:,} of {total:,}"
    return f"finished after {step:,} steps"


def key_figures(run: History) -> list[KeyFigure]:
    """The key figures of a run, those that are known."""
    best, mfu, epochs = run.best, run.median("mfu"), run.last("epoch")
    figures = []
    if best:
        loss = best["val_loss"]
        figures += [
            KeyFigure("best validation loss", f"step {best['step']:,}", number(loss)),
            KeyFigure("perplexity", "", perplexity(loss)),
            KeyFigure("bits per byte", "", number(best.get("bits_per_byte"), 3)),
        ]
    if run.expected:
        loss, low, high = run.expected
        detail = f"{number(low, 2)} to {number(high, 2)}"
        figures.append(KeyFigure("loss expected at the end", detail, number(loss, 3)))
    in_epochs = f"{epochs:.2f} epochs" if epochs else ""
    starts = f"{run.starts} starts" if run.starts > 1 else ""
    figures += [
        KeyFigure("training tokens", in_epochs, short(run.last("tokens"))),
        KeyFigure("training time", starts, duration(run.last("elapsed_s"))),
        KeyFigure("tokens a second", "median", number(run.median("tokens_per_second"), 0)),
        KeyFigure("MFU", "median", f"{mfu:.1%}" if mfu else ""),
        KeyFigure("cost", "in the unit of cost_per_hour", number(run.last("cost"), 2)),
    ]
    return [figure for figure in figures if figure.value]


def progress(run: History) -> ProgressTable:
    """The table by epoch, or by evaluation; the one with the lowest validation loss is in it."""
    by, rows = run.rows()
    evaluated = [row for row in rows if row["val_loss"] is not None]
    best = min(evaluated, key=lambda row: row["val_loss"], default=None)
    shown = spread(rows, ROWS)
    if best and best not in shown:
        shown = sorted([*shown, best], key=lambda row: row["step"])
    with_cost = bool(run.last("cost"))
    head = ["epoch", "step"] if by == "epoch" else ["step", "epoch"]
    head += ["training loss", "validation loss", "perplexity", "bits per byte"]
    head += ["seconds a step", "training time"]
    if with_cost:
        head.append("cost")
    table = Table(head, [progress_row(row, by, with_cost) for row in shown], "progress")
    if best:
        table.best = shown.index(best)
    return ProgressTable(
        by="epoch" if by == "epoch" else "evaluation",
        table=table,
        total=len(rows),
        has_evaluations=bool(run.evaluations),
    )


def progress_row(row: dict, by: str, with_cost: bool) -> list[str]:
    """A row of history.History.rows as text."""
    step, epoch = f"{row['step']:,.0f}", number(row["epoch"], 2)
    if by == "epoch" and abs(row["epoch"] - round(row["epoch"])) < 0.02:
        epoch = f"{row['epoch']:.0f}"
    cells = [
        *([epoch, step] if by == "epoch" else [step, epoch]),
        number(row["loss"]),
        number(row["val_loss"]),
        perplexity(row["val_loss"]),
        number(row["bits_per_byte"], 3),
        number(row["seconds_a_step"], 3),
        duration(row["elapsed_s"]),
    ]
    if with_cost:
        cells.append(number(row["cost"], 2))
    return cells


def samples(run: History) -> Samples:
    """The same prompts, answered at one evaluation after the other."""
    losses = {e["step"]: f"{e['val_loss']:.3f}" for e in run.evaluations}
    records = spread(run.samples, EVALUATIONS)
    answers = {}  # by prompt, in the order in which they first come
    for record in records:
        step = record["step"]
        for sample in record["samples"]:
            answer = Answer(step, losses.get(step, ""), visible(sample["text"]))
            answers.setdefault(sample["prompt"], []).append(answer)
    return Samples(
        prompts=[Prompt(visible(prompt), of_it) for prompt, of_it in answers.items()],
        shown=len(records),
        total=len(run.samples),
        log=run.folder / "log.jsonl",
    )


def events(run: History) -> Events:
    """Starts, halvings and skipped steps in a table, the newest last; saves are counted."""
    happenings = [
        Happening(step, "skipped", f"{counted(n, 'step')}: NaN or infinite loss or gradients")
        for step, n in run.skipped()
    ]
    for event in run.events:
        if event["event"] == "start":
            what = "continued" if event["step"] else "started"
            happenings.append(Happening(event["step"], what, machine(event)))
        elif event["event"] == "out of memory":
            happenings.append(Happening(event["step"], "out of memory", halving(event)))
    happenings.sort(key=lambda happening: happening.step)
    table = None
    if happenings:
        shown = [[f"{h.step:,}", h.what, h.detail] for h in spread(happenings, ROWS)]
        table = Table(["step", "what", ""], shown, "words")
    saves = run.saves()
    counts = counted(len(saves), "save")
    if saves:
        counts += f", the last at step {saves[-1]:,}"
    return Events(table, f"{counts}; {counted(len(run.resumes()), 'resume')}.")


def machine(start: dict) -> str:
    """When and on what a run was started."""
    parts = [str(start.get("at", ""))[:16].replace("T", " "), start.get("device")]
    parts.append(start.get("dtype"))
    if start.get("torch"):
        parts.append(f"torch {start['torch']}")
    return ", ".join(part for part in parts if part)


def halving(event: dict) -> str:
    """What follows from a lack of memory."""
    if "micro_batch" in event:
        sequences = f"{event['micro_batch']} sequences"
    else:
        sequences = f"{event.get('eval_micro_batch')} sequences in evaluations"
    return f"from here on {sequences} at once; the batch stays"


def settings(run: History) -> dict[str, str]:
    """Settings, machine and data of a run, by name."""
    values = dict(run.config)
    for name, value in run.start.items():
        if name in ("device", "dtype", "torch", "python", "parameters"):
            values[f"run: {name}"] = value
    data = run.start.get("data", {})
    for name, value in data.items():
        if name in ("tokenizer", "vocab_size"):
            values[f"data: {name}"] = value
    for split, tokens in data.get("tokens", {}).items():
        values[f"data: {split} tokens"] = tokens
    return {name: setting_text(value) for name, value in values.items()}


def setting_text(value) -> str:
    """A setting as text; large integers with commas."""
    if type(value) is int and value >= 10_000:
        return f"{value:,}"
    return str(value)


def compare(runs: list[History], nats: bool) -> Comparison:
    """The key figures of several runs, and the settings in which they differ: a column a run."""
    names = [run.name for run in runs]
    figures = [{figure.name: figure.value for figure in key_figures(run)} for run in runs]
    known = dict.fromkeys(name for of_run in figures for name in of_run)
    rows = [
        [name, *(of_run.get(name, "") for of_run in figures)]
        for name in known
        if nats or name not in LOSS_FIGURES
    ]
    differing = [
        [key, *(str(run.config.get(key, "not recorded")) for run in runs)]
        for key in differing_settings(runs)
    ]
    table = Table(["setting", *names], differing, "words") if differing else None
    return Comparison(Table(["", *names], rows), table)


def differing_settings(runs: list[History]) -> list[str]:
    """The settings that have several values in those runs that record them."""
    keys = dict.fromkeys(key for run in runs for key in run.config)
    differing = []
    for key in keys:
        values = {str(run.config[key]) for run in runs if key in run.config}
        if len(values) > 1 and key != "checkpoint_dir":
            differing.append(key)
    return differing
