"""A run's folder as numbers: log.jsonl in columns, its evaluations, samples, events, settings.

Imports no PyTorch: a report is drawn next to a run that trains.
"""

import math
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats import run_log
from formats.files import has_form, read_json

# Of the records of steps. docs/training.md describes the fields.
COLUMNS = (
    "step",
    "tokens",
    "epoch",
    "loss",
    "lr",
    "grad_norm",
    "tokens_per_second",
    "mfu",
    "bad_steps",
    "elapsed_s",
    "cost",
)
# The form of what is shown: records of another form are passed over.
CONFIG = {"data_dir": "", "n_layer": 0, "n_embd": 0, "block_size": 0}
START = {"at": "", "device": "", "dtype": "", "torch": "", "python": "", "processes": 0}
START |= {"parameters": 0, "total_steps": 0}
START |= {"data": {"tokenizer": "", "vocab_size": 0, "tokens": {}, "sha256": {}}}
STEP = {"tokens": 0, "epoch": 0.0, "elapsed_s": 0.0}
EVALUATION = {"val_loss": 0.0, "bits_per_byte": 0.0, "elapsed_s": 0.0}
SAMPLE = {"prompt": "", "text": ""}


class HistoryError(ValueError):
    """A folder that holds nothing to show, in a sentence for the user."""


@dataclass
class History:
    """The course of one run. columns: {name: values at the logged steps}, NaN where unknown."""

    folder: Path
    columns: dict[str, np.ndarray]
    evaluations: list[dict]
    samples: list[dict]
    events: list[dict]
    config: dict

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def starts(self) -> list[dict]:
        """The records of the first start and of each resume."""
        return [e for e in self.events if e["event"] == "start"]

    @property
    def start(self) -> dict:
        """The newest of them: machine, versions, data and length of the run."""
        return self.starts[-1]

    @property
    def best(self) -> dict | None:
        return min(self.evaluations, key=lambda e: e["val_loss"], default=None)

    @property
    def data(self) -> tuple:
        """What losses in nats a token depend on: the validation tokens, and which of them count."""
        return str(self.start["data"]["sha256"].get("val")), str(self.config.get("loss_on"))

    def known(self, column: str) -> np.ndarray:
        """The values of a column without NaN and infinity."""
        values = self.columns[column]
        return values[np.isfinite(values)]

    def last(self, column: str) -> float | None:
        values = self.known(column)
        return float(values[-1]) if len(values) else None

    def at(self, column: str, steps) -> np.ndarray:
        """A column that counts from 0 (tokens, epoch, elapsed_s, cost), interpolated at steps."""
        values = self.columns[column]
        known = np.isfinite(values)
        x = np.insert(self.columns["step"][known], 0, 0)
        return np.interp(steps, x, np.insert(values[known], 0, 0))

    def saves(self) -> list[int]:
        """The steps that were saved; a resume begins at one."""
        return sorted({e["step"] for e in self.events if e["event"] in ("save", "start")} - {0})

    def resumes(self) -> list[int]:
        return [e["step"] for e in self.starts if e["step"]]

    def skipped(self) -> list[tuple[int, int]]:
        """(step, number of skipped steps since the logged step before), where there were any."""
        counts = np.diff(np.nan_to_num(self.columns["bad_steps"]), prepend=0)
        (rows,) = np.nonzero(counts > 0)
        return [(int(self.columns["step"][row]), int(counts[row])) for row in rows]


def read(folder: Path) -> History:
    """A run's history, while it trains or afterwards.

    Raises HistoryError without a start or a step.
    """
    columns = {name: array("d") for name in COLUMNS}  # a long log takes much memory
    evaluations, samples, events = [], [], []
    for record in run_log.iterate(folder):
        if "loss" in record and has_form(record, STEP):
            for name, column in columns.items():
                value = record.get(name)
                column.append(value if has_form(value, 0.0) else math.nan)
        elif has_form(record, EVALUATION):
            evaluations.append(record)
        elif isinstance(record.get("samples"), list):
            record["samples"] = [s for s in record["samples"] if has_form(s, SAMPLE)]
            samples.append(record)
        elif "event" in record and (record["event"] != "start" or has_form(record, START)):
            events.append(record)
    config = read_json(folder / "config.json")
    started = any(event["event"] == "start" for event in events)
    if not started or not columns["step"] or not has_form(config, CONFIG):
        problem = f"{folder} is not a run that has logged its start and a step"
        runs = {log.parent for log in folder.parent.glob("*/log.jsonl")} - {folder}
        if runs:
            problem += f"; runs next to it: {', '.join(sorted(run.as_posix() for run in runs))}"
        raise HistoryError(problem)
    return History(
        folder=folder,
        columns={name: np.array(column) for name, column in columns.items()},
        evaluations=evaluations,
        samples=samples,
        events=events,
        config=config,
    )
