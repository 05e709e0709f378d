"""The folder in which a plan is carried out, out/.partial, until its files move to their place.

plan.json says what the work is, so that it is continued by the same command and by no other;
progress.json (writer.py) how far it is.
"""

import dataclasses
import hashlib
import itertools
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np

from formats.address import without_credentials
from formats.data_folder import DataError, Meta, dtype_for, read_meta, write_meta
from formats.files import write_json
from preparing import InputError, PrepareError
from preparing.arguments import Plan
from preparing.chunks import Position
from preparing.cleaning import CleaningReport
from preparing.ray_engine import RayPool
from preparing.readers import read_chunks
from preparing.remote import DownloadCache
from preparing.sources import find_sources, keep_stdin
from preparing.threads import Threads
from tokenizer_bpe import Tokenizer

VAL_FRACTION = 0.1  # share of the text that is held back for validation
VAL_BYTES = 20_000_000  # about the most that is held back of a large input
BINS = ("train.bin", "val.bin", "train.mask.bin", "val.mask.bin")
# A finished dataset, in the order in which it moves to its place.
FILES = (*BINS, "tokenizer.json", "cleaning.json", "meta.json")
TOKENS_A_BYTE = 0.35  # about the most that text has, unless its tokens are characters


class WorkFolder:
    """The folder, and what is done in it; a context manager that holds its lock.

    sources: the input files. settings: {name: value}, as meta.json lists them. most_bytes: of text,
    after which to stop. The lock goes with the process, however it ends.
    """

    def __init__(self, plan: Plan):
        """Find the input, without writing anything. Raises InputError and TokenizerError."""
        self.plan = plan
        self.out = plan.out
        self.path = plan.out / ".partial"
        self.tokenizer = self.path / "tokenizer.json"
        self.cache = self.path / "cache"  # remote files on their way
        self.most_bytes = plan.gigabytes * 1e9
        self.is_stdin = plan.inputs == ["-"]
        self.given_tokenizer = _given_tokenizer(plan.tokenizer)
        self.sources = [] if self.is_stdin else find_sources(plan.inputs)
        kinds = {source.kind for source in self.sources} or {plan.stdin_format}
        if plan.options.text_field and kinds == {"txt"}:
            raise InputError(
                "--text_field names a field of records (.jsonl, .json, .csv, .parquet); all of the"
                " input is plain text"
            )
        for given in plan.inputs:
            if Path(given).is_dir() and plan.out.resolve().is_relative_to(Path(given).resolve()):
                raise InputError(f"--out {plan.out} is in the input {given}; choose another folder")
        largest = max((source.size for source in self.sources if source.is_remote), default=0)
        if largest > plan.cache_bytes:
            raise InputError(
                f"--cache_gb {plan.cache_bytes / 1e9:g} does not hold the largest file; give at"
                f" least --cache_gb {largest / 1e9 + 0.01:.2f}"
            )

    def __enter__(self):
        """Raises PrepareError when another run holds the lock."""
        from filelock import FileLock, Timeout

        if self.out.is_file():
            raise InputError(f"--out {self.out}: it must be a folder, there or to be made")
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.path / "lock")
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise PrepareError(
                f"another run is preparing {self.out} at the moment; wait for it, or stop it"
            ) from None
        except (NotImplementedError, OSError):
            pass  # some network mounts have no locks
        if (self.path / "meta.json").exists():  # it was finished when a former run was stopped
            self._move_to_place()
        if self.is_stdin:
            self.sources = [keep_stdin(self.path, self.plan.stdin_format)]
        self.settings = self._settings()
        return self

    def __exit__(self, *error):
        self.lock.release()

    def _settings(self):
        tokenizer = self.plan.tokenizer
        if self.given_tokenizer:
            content = self.given_tokenizer.to_json().encode()
            tokenizer = f"sha256 {hashlib.sha256(content).hexdigest()}"
        val_fraction = self.plan.val_fraction
        if val_fraction is None:
            val_fraction = min(VAL_FRACTION, VAL_BYTES / min(self.input_size, self.most_bytes))
        return self.plan.settings(tokenizer, val_fraction)

    @property
    def input_size(self) -> int:
        """Bytes on disk of all sources."""
        return sum(source.size for source in self.sources)

    @property
    def text_size(self) -> int:
        """About how many bytes of text there are to prepare."""
        return int(min(sum(source.text_size for source in self.sources), self.most_bytes))

    def listed_sources(self) -> list[dict]:
        return [
            {"path": without_credentials(source.path), "bytes": source.size}
            for source in self.sources
        ]

    def finished(self) -> str:
        """This dataset in words if it is there, else "". Raises InputError for another one."""
        if self.plan.overwrite or not (self.out / "meta.json").exists():
            return ""
        try:
            meta = read_meta(self.out)
        except DataError as error:
            raise InputError(f"{error} (this command with --overwrite makes it again)") from None
        changed = differences(
            {"settings": meta.settings, "sources": meta.sources},
            {"settings": self.settings, "sources": self.listed_sources()},
        )
        if changed:
            raise InputError(
                f"{self.out} holds a finished dataset of other input or settings: {changed}.\nGive"
                " another --out, or replace it with --overwrite"
            )
        if not (self.path / "plan.json").exists():  # unfinished work to replace it stays
            self._clear()
        tokens = ", ".join(f"{name} {split.tokens:,} tokens" for name, split in meta.splits.items())
        described = f"{self.out} is finished already: {tokens} (--overwrite makes it again)"
        finished = datetime.fromisoformat(meta.created).timestamp()
        for source in self.sources:
            if source.modified / 1e9 > finished + 1 and not self.is_stdin:
                described += f"\n{source.path} changed after that; --overwrite takes the new text"
                break
        return described

    def start_or_resume(self) -> None:
        """Record what this work is. Raises InputError when the folder holds parts of other work."""
        path = self.path / "plan.json"
        present = {
            "settings": self.settings,
            "sources": [
                dataclasses.asdict(source) | {"path": without_credentials(source.path)}
                for source in self.sources
            ],
        }
        former = json.loads(path.read_text(encoding="utf-8")) if path.exists() else present
        if former["settings"]["on_error"] == "stop":
            # Nothing broken came up to where it stopped, so the bytes are the same.
            former["settings"]["on_error"] = self.settings["on_error"]
        changed = differences(former, present)
        if changed and self._written() and not self.plan.overwrite:
            raise InputError(
                f"{self.out} holds unfinished work on other input or settings: {changed}.\nRepeat"
                " the former command to finish it, give another --out, or start again with"
                " --overwrite"
            )
        if changed:
            self._forget_work()
        write_json(path, present)

    def _written(self):
        """Bytes of tokens in the working folder."""
        return sum(path.stat().st_size for path in self.path.glob("*.bin"))

    def _forget_work(self):
        """Delete what was made so far. The lock stays, and input that was kept or fetched.

        In an order that can be interrupted: without the journal no file counts as begun, and until
        the plan is gone it says of what work the others are.
        """
        kept = {"lock", "plan.json", "stdin.txt", "stdin.jsonl", self.cache.name}
        (self.path / "progress.json").unlink(missing_ok=True)
        for path in list(self.path.iterdir()):
            if path.name not in kept:
                path.unlink()
        (self.path / "plan.json").unlink(missing_ok=True)

    def check_room(self, vocab_size: int) -> None:
        """Warn where the disk may not hold what is to be written and fetched."""
        tokens = self.text_size
        if self.plan.tokenizer != "char":
            tokens = TOKENS_A_BYTE * tokens
        remote = sum(source.size for source in self.sources if source.is_remote)
        size = tokens * np.dtype(dtype_for(vocab_size)).itemsize - self._written()
        size += min(remote, self.most_bytes, self.plan.cache_bytes)
        free = shutil.disk_usage(self.out).free
        if size > free:
            print(
                f"{self.out} may need {size / 1e6:,.1f} MB more on disk, fetched files (--cache_gb)"
                f" included, and {free / 1e6:,.1f} MB are free: make room, or give an --out on"
                " another disk",
                file=sys.stderr,
            )

    @contextmanager
    def map_text(self, function: Callable, start: Position) -> Iterator[Iterator]:
        """Gives function(chunk) for each chunk of the text from `start` on, in order.

        Threads of this machine call it, or tasks of the Ray cluster.
        """
        plan = self.plan
        files = DownloadCache(self.sources, self.cache, plan.cache_bytes)
        workers = RayPool(function) if plan.ray else Threads(plan.workers, function)
        with files, workers as run:
            yield run(read_chunks(self.sources, start, plan.options, files.path))

    def publish(self, meta: Meta, report: CleaningReport) -> None:
        if report.rules:
            write_json(self.path / "cleaning.json", report.rules)
        write_meta(self.path, meta)  # from here on the work is finished
        self._move_to_place()
        self._clear()

    def _move_to_place(self):
        """Move the finished dataset to its place, meta.json last; goes on where it was interrupted.

        Plan and journal go first: later work would continue files that have moved.
        """
        (self.path / "progress.json").unlink(missing_ok=True)
        (self.path / "plan.json").unlink(missing_ok=True)
        if (self.path / FILES[0]).exists():  # a dataset that is replaced goes, meta.json first
            for name in reversed(FILES):
                (self.out / name).unlink(missing_ok=True)
        for name in FILES:
            if (self.path / name).exists():
                os.replace(self.path / name, self.out / name)

    def _clear(self):
        # Windows deletes no file that is open, as the lock is: it stays, and does no harm.
        shutil.rmtree(self.path, ignore_errors=os.name == "nt")


def _given_tokenizer(name):
    """The tokenizer at a path; None for the others. Raises InputError and TokenizerError."""
    if name in ("bpe", "char", "gpt2"):
        return None
    tokenizer = Tokenizer.load(name)
    if any(token["content"].isspace() for token in tokenizer.description["added_tokens"]):
        raise InputError(
            f"{name} has runs of spaces as added tokens, which its own library would use and this"
            " one does not; choose another --tokenizer"
        )
    return tokenizer


def differences(former: dict, present: dict) -> str:
    """How former work differs from this one, in words; "" where it does not.

    Both are {"settings": {name: value}, "sources": [{"path", ...}]}.
    """
    was, now = former["settings"], present["settings"]
    found = [
        f"{name} was {was.get(name)}, is now {now.get(name)}"
        for name in sorted(was | now)
        if was.get(name) != now.get(name)
    ]
    for before, after in itertools.zip_longest(former["sources"], present["sources"]):
        if before != after:
            found.append(f"the input differs from {(after or before)['path']} on")
            break
    return "; ".join(found)
