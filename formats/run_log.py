"""log.jsonl of a run: one JSON object a line, whose fields docs/training.md lists."""

import contextlib
import json
import os
import time
from pathlib import Path

from formats.files import parse_json, write_text

NAME = "log.jsonl"


def append(run: Path, *records: dict) -> None:
    """Add lines to log.jsonl; after a line that a full disk has cut short, on a new one."""
    with open(run / NAME, "a+b") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                file.write(b"\n")
        file.write(_lines(records).encode("utf-8", "backslashreplace"))


def write(run: Path, records: list[dict]) -> None:
    """Replace log.jsonl, whole or not at all.

    A resumed run drops what came after its checkpoint.
    """
    write_text(run / NAME, _lines(records))


def saved(run: Path) -> bool:
    """True if the log of a run has recorded a checkpoint."""
    return any(record.get("event") == "save" for record in read(run))


def set_aside(run: Path) -> Path:
    """Rename log.jsonl; returns its new name."""
    aside = run / f"log_before_{time.strftime('%Y-%m-%d_%H%M%S')}.jsonl"
    os.replace(run / NAME, aside)
    return aside


def first_line(run: Path) -> bytes:
    """The first line of log.jsonl, which no two runs share; empty where there is none."""
    try:
        with open(run / NAME, "rb") as log:
            return log.readline().rstrip()
    except OSError:
        return b""


def evaluation(run: Path, step: int) -> dict | None:
    """The evaluation at a step; None where there was none, or its loss was not finite."""
    for record in read(run):
        if record["step"] == step and record.get("val_loss") is not None:
            return record
    return None


def _lines(records):
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def read(run: Path) -> list[dict]:
    """The records of log.jsonl, without lines that are none, such as one cut short by a crash."""
    path, records = run / NAME, []
    if not path.exists():
        return records
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = parse_json(line)
                if _is_record(record):
                    records.append(record)
    return records


def _is_record(value):
    if not isinstance(value, dict) or not isinstance(value.get("step"), int):
        return False
    return all(isinstance(value.get(name), int | float | None) for name in ("loss", "val_loss"))
