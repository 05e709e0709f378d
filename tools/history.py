"""What a run's folder tells of its course: log.jsonl in columns, its events, its settings.

Reads the files as formats/run_folder.py writes them, but imports none of the trainer: so a report of a
running run starts in a second and takes little memory, of a million lines too.
"""

import json
import math
from array import array
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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


class HistoryError(ValueError):
    """A run of which nothing can be shown, in a sentence for the user."""


@dataclass(eq=False)  # each is itself alone, so that what is computed from one can be kept by it
class History:
    """The course of one run. columns: {name: float array}, a value a logged step, NaN where there
    is none.
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
        """The newest start's record: machine, versions, data, length."""
        return next((e for e in reversed(self.events) if e["event"] == "start"), {})

    @property
    def total_steps(self) -> int | None:
        """The steps that the run was to have, where its log says so."""
        return self.start.get("total_steps") or self.config.get("max_steps")

    @property
    def best(self) -> dict | None:
        """The evaluation with the lowest loss."""
        return min(self.evaluations, key=lambda e: e["val_loss"], default=None)

    @property
    def data(self) -> str:
        """What identifies the data that losses were measured on: runs that agree in it compare in
        nats a token.
        """
        data = self.start.get("data") or {}
        return (
            data["tokenizer_sha256"] + data["sha256"]["val"]
            if "sha256" in data
            else str(self.config.get("data_dir"))
        )

    @property
    def starts(self) -> int:
        """How often the run was started or continued."""
        return max(1, sum(e["event"] == "start" for e in self.events))

    def last(self, name: str) -> float | None:
        """The last known value of a column."""
        return next(
            (float(value) for value in self.columns[name][::-1] if math.isfinite(value)), None
        )

    def median(self, name: str) -> float | None:
        """The median of a column's known values."""
        known = self.columns[name][np.isfinite(self.columns[name])]
        return float(np.median(known)) if len(known) else None

    def at(self, name: str, steps) -> np.ndarray:
        """A column's values at given steps, between logged ones by interpolation. From nothing at
        step 0, where the column counts something.
        """
        x, y = self.columns["step"], self.columns[name]
        if name in ("tokens", "epoch", "elapsed_s", "cost", "step"):
            x, y = np.concatenate(([0.0], x)), np.concatenate(([0.0], y))
        known = np.isfinite(y)
        return (
            np.interp(steps, x[known], y[known])
            if known.any()
            else np.full(np.shape(steps), math.nan)
        )

    def saves(self) -> list[int]:
        """Steps that were saved, as far as the log says; those that a start continued from among
        them.
        """
        return sorted(
            {e["step"] for e in self.events if e["event"] in ("save", "start") and e["step"]}
        )

    def resumes(self) -> list[int]:
        """Steps from which the run was continued."""
        return [e["step"] for e in self.events if e["event"] == "start" and e["step"]]

    def skipped(self) -> list[tuple[int, int]]:
        """(step, how many) for each logged step before which optimiser steps were skipped, their
        loss being no number.
        """
        bad = np.nan_to_num(self.columns["bad_steps"])
        new = np.diff(bad, prepend=0.0)
        return [
            (int(step), int(n))
            for step, n in zip(self.columns["step"][new > 0], new[new > 0], strict=True)
        ]

    def rows(self) -> tuple[str, list[dict]]:
        """The table of the run: "epoch" and a row an epoch, or "step" and a row an evaluation when
        there are under three epochs.

        A row: {"step", "epoch", "loss", "val_loss", "bits_per_byte", "seconds_a_step", "elapsed_s",
        "cost"}; loss is the mean of the training loss since the row before.
        """
        by_epoch = (self.last("epoch") or 0) >= 3
        if by_epoch:
            last = self.last("epoch")
            ends = np.array(
                [*range(1, math.floor(last + 1e-6) + 1)] + ([last] if last % 1 > 0.01 else [])
            )
            steps = np.interp(ends, self.columns["epoch"], self.columns["step"]).round()
        else:
            steps = np.array(
                sorted({e["step"] for e in self.evaluations}) or self.columns["step"][-1:],
                dtype=float,
            )
        evaluations = {e["step"]: e for e in self.evaluations}
        evaluated = np.array([0, *sorted(evaluations)])  # 0 stands for none
        before = np.concatenate(([0.0], steps[:-1]))
        known = np.isfinite(self.columns["loss"])
        total, ends = (
            np.concatenate(([0.0], np.cumsum(self.columns["loss"][known]))),
            np.searchsorted(self.columns["step"][known], [before, steps], side="right"),
        )
        counts = ends[1] - ends[0]
        losses = (total[ends[1]] - total[ends[0]]) / np.where(counts, counts, math.nan)
        seconds = (self.at("elapsed_s", steps) - self.at("elapsed_s", before)) / np.maximum(
            1.0, steps - before
        )
        newest = evaluated[np.searchsorted(evaluated, steps, side="right") - 1]
        values = {
            "step": steps,
            "loss": losses,
            "seconds_a_step": seconds,
            **{name: self.at(name, steps) for name in ("epoch", "elapsed_s", "cost")},
        }
        rows = []
        for n, at in enumerate(newest):
            found = evaluations.get(int(at), {}) if at > before[n] else {}
            rows.append(
                {name: float(column[n]) for name, column in values.items()}
                | {name: found.get(name) for name in ("val_loss", "bits_per_byte")}
            )
        return "epoch" if by_epoch else "step", rows


def read(folder: Path) -> History:
    """A run's history. A line that is cut off is passed over. Raises HistoryError for a folder
    whose log has no step.
    """
    values, evaluations, samples, events = array("d"), [], [], []
    if not (folder / "log.jsonl").exists():
        raise HistoryError(
            f"{folder} has no log.jsonl, so it is no run that was begun; " + runs_near(folder)
        )
    with open(folder / "log.jsonl", "rb") as file:
        for line in file:
            try:
                record = json.loads(line)
                step = record["step"]
                if "loss" in record:
                    values.extend(
                        [math.nan if (v := record.get(name)) is None else v for name in COLUMNS]
                    )
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
            f"{folder} has logged no step yet, so there is nothing to draw; " + runs_near(folder)
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    return History(
        folder,
        {name: table[:, i] for i, name in enumerate(COLUMNS)},
        evaluations,
        samples,
        events,
        config,
    )


def runs_near(folder: Path) -> str:
    """In words, which runs lie beside a folder that is none, or in it."""
    runs = sorted(
        {
            p.parent.as_posix()
            for where in (folder, folder.parent)
            for p in where.glob("*/log.jsonl")
            if p.parent != folder
        }
    )
    return (
        f"runs with a log: {', '.join(runs)}"
        if runs
        else "give the folder that train.py wrote, such as checkpoints/demo"
    )
