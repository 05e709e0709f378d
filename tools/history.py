"""What a run's folder tells of its course: log.jsonl in columns, its events, its settings.

Reads the log as formats/run_log.py writes it, but imports none of the trainer: a report of a
running run starts in a second and takes little memory, with a million log lines too.
"""

import json
import math
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from formats import files

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
COUNTS = ("step", "tokens", "epoch", "elapsed_s", "cost")  # columns that are 0 at step 0


class HistoryError(ValueError):
    """A run of which nothing can be shown, in a sentence for the user."""


@dataclass(eq=False)  # two runs are never the same one, so what is computed of one can be cached
class History:
    """The course of one run.

    columns: {name: float array}, a value for each logged step, NaN where there is none.
    """

    folder: Path
    columns: dict[str, np.ndarray]
    evaluations: list[dict]
    samples: list[dict]
    events: list[dict]
    config: dict

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.folder.resolve().name

    @property
    def start(self) -> dict:
        """The newest start's record: machine, versions, data, length. Empty where there is none."""
        for event in reversed(self.events):
            if event["event"] == "start":
                return event
        return {}

    @property
    def starts(self) -> int:
        """How often the run was started or continued."""
        return max(1, sum(e["event"] == "start" for e in self.events))

    @property
    def total_steps(self) -> int | None:
        """The steps that the run was to have, where its log says so."""
        return self.start.get("total_steps") or self.config.get("max_steps")

    @property
    def best(self) -> dict | None:
        """The evaluation with the lowest loss."""
        return min(self.evaluations, key=lambda e: e["val_loss"], default=None)

    @property
    def expected(self) -> list[float] | None:
        """The loss at the end of an unfinished run, with its interval, as last forecast."""
        return self.evaluations[-1].get("forecast") if self.evaluations else None

    @property
    def data(self) -> str:
        """What identifies the data: runs that agree in it can be compared in nats a token."""
        data = self.start.get("data") or {}
        counted = self.config.get("loss_on", "all")  # of it
        if "sha256" in data:
            return data["tokenizer_sha256"] + data["sha256"]["val"] + counted
        return str(self.config.get("data_dir")) + counted

    def last(self, name: str) -> float | None:
        """The last known value of a column."""
        for value in self.columns[name][::-1]:
            if math.isfinite(value):
                return float(value)
        return None

    def median(self, name: str) -> float | None:
        """The median of a column's known values."""
        known = self.columns[name][np.isfinite(self.columns[name])]
        return float(np.median(known)) if len(known) else None

    def at(self, name: str, steps) -> np.ndarray:
        """A column's values at the given steps, interpolated between logged ones.

        A column that counts something begins with 0 at step 0. NaN where nothing is known.
        """
        x, y = self.columns["step"], self.columns[name]
        if name in COUNTS:
            x, y = np.concatenate(([0.0], x)), np.concatenate(([0.0], y))
        known = np.isfinite(y)
        if not known.any():
            return np.full(np.shape(steps), math.nan)
        return np.interp(steps, x[known], y[known])

    def saves(self) -> list[int]:
        """The steps that were saved, as far as the log says; a start continues from a saved one."""
        of_saves = {e["step"] for e in self.events if e["event"] in ("save", "start")}
        return sorted(of_saves - {0})

    def resumes(self) -> list[int]:
        """The steps from which the run was continued."""
        return [e["step"] for e in self.events if e["event"] == "start" and e["step"]]

    def skipped(self) -> list[tuple[int, int]]:
        """Where optimiser steps were skipped because of a NaN or infinite loss or gradient.

        (step, how many) for each logged step before which there were some.
        """
        bad = np.nan_to_num(self.columns["bad_steps"])
        new = np.diff(bad, prepend=0.0)
        steps, counts = self.columns["step"][new > 0], new[new > 0]
        return [(int(step), int(count)) for step, count in zip(steps, counts, strict=True)]

    def rows(self) -> tuple[str, list[dict]]:
        """The table of the run, as (what a row stands for, rows).

        From three epochs on a row is an "epoch", before that an evaluation at a "step". A row:
        {"step", "epoch", "loss", "val_loss", "bits_per_byte", "seconds_a_step", "elapsed_s",
        "cost"}. loss is the mean of the training loss since the row before; val_loss and
        bits_per_byte are those of the newest evaluation since then, or None.
        """
        by_epoch = (self.last("epoch") or 0) >= 3
        if by_epoch:
            ends = self._ends_of_epochs()
            steps = np.interp(ends, self.columns["epoch"], self.columns["step"]).round()
        else:
            evaluated = sorted({e["step"] for e in self.evaluations})
            steps = np.array(evaluated or self.columns["step"][-1:], dtype=float)
        before = np.concatenate(([0.0], steps[:-1]))
        seconds = self.at("elapsed_s", steps) - self.at("elapsed_s", before)
        columns = {
            "step": steps,
            "loss": self._mean_losses(before, steps),
            "seconds_a_step": seconds / np.maximum(1.0, steps - before),
            "epoch": self.at("epoch", steps),
            "elapsed_s": self.at("elapsed_s", steps),
            "cost": self.at("cost", steps),
        }
        evaluations = self._newest_evaluations(before, steps)
        rows = []
        for n, evaluation in enumerate(evaluations):
            row = {name: float(column[n]) for name, column in columns.items()}
            row["val_loss"] = evaluation.get("val_loss")
            row["bits_per_byte"] = evaluation.get("bits_per_byte")
            rows.append(row)
        return "epoch" if by_epoch else "step", rows

    def _ends_of_epochs(self) -> np.ndarray:
        """1, 2, ... and where the run stands now, in epochs."""
        last = self.last("epoch")
        ends = list(range(1, math.floor(last + 1e-6) + 1))
        if last % 1 > 0.01:
            ends.append(last)
        return np.array(ends)

    def _mean_losses(self, before: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """The mean of the logged losses after each of `before`, up to each of `steps`; or NaN."""
        known = np.isfinite(self.columns["loss"])
        sums = np.concatenate(([0.0], np.cumsum(self.columns["loss"][known])))
        logged = self.columns["step"][known]
        start = np.searchsorted(logged, before, side="right")
        end = np.searchsorted(logged, steps, side="right")
        counts = end - start
        return (sums[end] - sums[start]) / np.where(counts, counts, math.nan)

    def _newest_evaluations(self, before: np.ndarray, steps: np.ndarray) -> list[dict]:
        """The newest evaluation after each of `before`, up to each of `steps`; {} for none."""
        by_step = {e["step"]: e for e in self.evaluations}
        evaluated = np.array([0, *sorted(by_step)])  # 0 stands for none
        newest = evaluated[np.searchsorted(evaluated, steps, side="right") - 1]
        return [
            by_step.get(int(at), {}) if at > start else {}
            for at, start in zip(newest, before, strict=True)
        ]


def read(folder: Path) -> History:
    """A run's history. A line that is damaged or cut off is passed over.

    Raises HistoryError for a folder without a log, or whose log has no step.
    """
    values, evaluations, samples, events = array("d"), [], [], []
    if not (folder / "log.jsonl").exists():
        raise HistoryError(f"{folder} has no log.jsonl, so it is not a run; {runs_near(folder)}")
    with open(folder / "log.jsonl", "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                step = record["step"]
                if "loss" in record:
                    values.extend(row_of(record))
                elif record.get("val_loss") is not None:
                    evaluations.append(record)
                elif "samples" in record:
                    samples.append(record)
                elif "event" in record and isinstance(step, int):
                    events.append(record)
            except (ValueError, TypeError, KeyError):
                del values[len(values) // len(COLUMNS) * len(COLUMNS) :]  # half a row
    table = np.frombuffer(values).reshape(-1, len(COLUMNS))
    if not len(table):
        raise HistoryError(
            f"{folder} has logged no step yet, so there is nothing to draw; {runs_near(folder)}"
        )
    return History(
        folder=folder,
        columns={name: table[:, i] for i, name in enumerate(COLUMNS)},
        evaluations=evaluations,
        samples=samples,
        events=events,
        config=files.read_json(folder / "config.json") or {},
    )


def row_of(record: dict) -> list[float]:
    """A logged step's values in the order of COLUMNS, NaN for those that it lacks."""
    row = [record.get(name) for name in COLUMNS]
    if None in row:
        row = [math.nan if value is None else value for value in row]
    return row


def runs_near(folder: Path) -> str:
    """In words, which runs lie in a folder that is none, or beside it."""
    logs = [*folder.glob("*/log.jsonl"), *folder.parent.glob("*/log.jsonl")]
    runs = sorted({log.parent.as_posix() for log in logs if log.parent != folder})
    if not runs:
        return "give the folder that train.py wrote, such as checkpoints/demo"
    return f"runs with a log: {', '.join(runs)}"
