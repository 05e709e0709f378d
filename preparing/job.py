"""What one call of prepare_data.py has to do, and the folder in which it does it, out/.partial.

Plan finds the input and gathers the settings. WorkFolder holds all that is not finished, until it
moves to its place: plan.json says what the work is, so that it is continued by the same command and
by no other; progress.json (writer.py) how far it is.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from pathlib import Path

import numpy as np

from formats.address import recorded
from formats.data_folder import DataError, Meta, dtype_for, read_meta, write_meta
from formats.files import write_json
from preparing import InputError, PrepareError, need, ray_engine
from preparing.arguments import Options
from preparing.chunks import CHUNK, Position, batches, for_each
from preparing.cleaning import CleaningReport
from preparing.engines import workers
from preparing.readers import read_chunks
from preparing.remote import Cache
from preparing.sources import Source, find_sources, keep_stdin
from tokenizer_bpe import Tokenizer

VAL_FRACTION = 0.1  # of the text is held back for validation,
VAL_BYTES = 20_000_000  # but of large inputs only about this much
OPTIONS = tuple(option.name for option in dataclasses.fields(Options))
# The bytes written depend on these, where given, and on the input.
SETTINGS = ("tokenizer", "vocab_size", "sample_bytes", "val_fraction", "gigabytes", *OPTIONS)
BINS = ("train.bin", "val.bin", "train.mask.bin", "val.mask.bin")
# A finished dataset, in the order in which it moves to its place.
FILES = (*BINS, "tokenizer.json", "cleaning.json", "meta.json")
COPIES = tuple(f"{name}.gz" for name in BINS)  # that --compress makes
TOKENS_A_BYTE = 0.35  # at most, about, but of characters


class Plan:
    """What one call has to do.

    args: the command line, as arguments.py gives it. out: the prepared folder. options: how records
    become texts. settings: {name: value} of SETTINGS, as meta.json lists them. sources: the input
    files; empty until standard input is kept. most_bytes: of text, after which to stop; infinity
    for all of it. cache_bytes: that remote files may take on the disk at a time.
    """

    def __init__(self, args: Namespace):
        """Find the input and gather the settings. Raises InputError and TokenizerError."""
        self.args = args
        self.out = Path(args.out)
        self.options = Options(**{name: getattr(args, name) for name in OPTIONS})
        if self.options.dedupe == "near":
            need("--dedupe near", "rensa")
        unused = _without_effect(args)
        values = {name: getattr(args, name) for name in SETTINGS if name not in unused}
        self.settings = {name: value for name, value in values.items() if value is not None}
        if args.tokenizer not in ("bpe", "char", "gpt2"):
            tokenizer = Tokenizer.load(args.tokenizer)
            if any(token["content"].isspace() for token in tokenizer.description["added_tokens"]):
                raise InputError(
                    f"{args.tokenizer} has runs of spaces as added tokens, which its own library"
                    " would use and this one does not; choose another --tokenizer"
                )
            content = tokenizer.to_json()
            self.settings["tokenizer"] = f"sha256 {hashlib.sha256(content.encode()).hexdigest()}"
        self.most_bytes = (args.gigabytes or math.inf) * 1e9
        self.cache_bytes = args.cache_gb * 1e9
        self.sources = []
        if args.input != ["-"]:
            self.set_sources(find_sources(args.input))
        largest = max((source.size for source in self.sources if source.is_remote), default=0)
        if largest > self.cache_bytes:
            raise InputError(
                f"--cache_gb {args.cache_gb:g} does not hold the largest file; give at least"
                f" --cache_gb {largest / 1e9 + 0.01:.2f}"
            )
        if args.ray:
            ray_engine.connect(args.ray)

    def set_sources(self, sources: list[Source]) -> None:
        """Take the sources, and the share of validation that follows from their size."""
        self.sources = sources
        size = min(self.input_size, self.most_bytes)
        self.settings.setdefault("val_fraction", min(VAL_FRACTION, VAL_BYTES / size))

    @property
    def input_size(self) -> int:
        """Bytes on disk of all sources."""
        return sum(source.size for source in self.sources)

    @property
    def text_size(self) -> int:
        """About how many bytes of text there are to prepare."""
        return int(min(sum(source.text_size for source in self.sources), self.most_bytes))

    @property
    def is_small(self) -> bool:
        """Whether there is so little text that no process needs to be started for it."""
        return self.text_size < 2 * CHUNK

    def workers(self, function: Callable) -> AbstractContextManager:
        """Gives a `map` of the function, in processes of this machine or of the Ray cluster."""
        if self.args.ray:
            return ray_engine.RayPool(function)
        count = min(self.args.workers, self.text_size // CHUNK)
        return workers(0 if self.is_small else count, function)

    def listed_sources(self) -> list[dict]:
        return [recorded({"path": source.path, "bytes": source.size}) for source in self.sources]


def _without_effect(args):
    """The settings that change no byte with these arguments."""
    names = set()
    if args.tokenizer != "bpe":
        names.add("sample_bytes")
    if not args.clean:
        names |= {"min_chars", "max_char_share", "min_letters"}
    elif args.dedupe == "exact":  # as --clean implies
        names.add("dedupe")
    return names


class WorkFolder:
    """The folder in which a plan is carried out; a context manager that holds its lock.

    Raises PrepareError when another run holds it. The lock goes with the process, however it ends.
    """

    def __init__(self, plan: Plan):
        self.plan = plan
        self.out = plan.out
        self.path = plan.out / ".partial"
        self.tokenizer = self.path / "tokenizer.json"
        self.cache = self.path / "cache"  # remote files on their way

    def __enter__(self):
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
        if self.plan.args.input == ["-"]:
            self.plan.set_sources([keep_stdin(self.path, self.plan.args.stdin_format)])
        return self

    def __exit__(self, *error):
        self.lock.release()

    def finished(self) -> str:
        """This dataset in words if it is there, else "". Raises InputError for another one."""
        if self.plan.args.overwrite or not (self.out / "meta.json").exists():
            return ""
        try:
            meta = read_meta(self.out)
        except DataError as error:
            raise InputError(f"{error} (this command with --overwrite makes it again)") from None
        changed = differences(
            {"settings": meta.settings, "sources": meta.sources},
            {"settings": self.plan.settings, "sources": self.plan.listed_sources()},
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
        for source in self.plan.sources:
            if source.modified / 1e9 > finished + 1 and self.plan.args.input != ["-"]:
                described += f"\n{source.path} changed after that; --overwrite takes the new text"
                break
        return described

    def start_or_resume(self) -> None:
        """Record what this work is. Raises InputError when the folder holds parts of other work."""
        path = self.path / "plan.json"
        plan = {
            "settings": self.plan.settings,
            "sources": [recorded(dataclasses.asdict(source)) for source in self.plan.sources],
        }
        former = json.loads(path.read_text(encoding="utf-8")) if path.exists() else plan
        if former["settings"]["on_error"] == "stop":
            # Nothing broken came up to where it stopped, so the bytes are the same.
            former["settings"]["on_error"] = self.plan.settings["on_error"]
        changed = differences(former, plan)
        if changed and self._written() and not self.plan.args.overwrite:
            raise InputError(
                f"{self.out} holds unfinished work on other input or settings: {changed}.\nRepeat"
                " the former command to finish it, give another --out, or start again with"
                " --overwrite"
            )
        if changed:
            self._forget_work()
        write_json(path, plan)

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
        plan = self.plan
        tokens = plan.text_size
        if plan.args.tokenizer != "char":
            tokens = TOKENS_A_BYTE * tokens
        remote = [source.size for source in plan.sources if source.is_remote]
        enough = plan.most_bytes + max(remote, default=0)  # a byte of text takes at most one
        fetched = sum(path.stat().st_size for path in self.cache.glob("*"))
        cache = max(0, min(sum(remote), plan.cache_bytes, enough) - fetched)
        size = tokens * np.dtype(dtype_for(vocab_size)).itemsize - self._written() + cache
        free = shutil.disk_usage(self.out).free
        if size > free:
            print(
                f"{self.out} may need {size / 1e6:,.1f} MB more on disk, {cache / 1e6:,.1f} MB of"
                f" it for fetched files (--cache_gb), and {free / 1e6:,.1f} MB are free: make room,"
                " or give an --out on another disk",
                file=sys.stderr,
            )

    @contextmanager
    def map_text(self, function: Callable, start: Position) -> Iterator[Iterator]:
        """Gives function(chunk) for each chunk of the text from `start` on, in order."""
        plan = self.plan
        cache = Cache(plan.sources, self.cache, plan.cache_bytes, start.source, plan.most_bytes)
        with cache, plan.workers(functools.partial(for_each, function)) as run:
            chunks = read_chunks(plan.sources, start, plan.options, cache.path, not plan.args.ray)
            yield itertools.chain.from_iterable(run(batches(chunks)))

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
            for name in (*reversed(FILES), *COPIES):
                (self.out / name).unlink(missing_ok=True)
        for name in FILES:
            if (self.path / name).exists():
                os.replace(self.path / name, self.out / name)

    def _clear(self):
        # Windows deletes no file that is open, as the lock is: it stays, and does no harm.
        shutil.rmtree(self.path, ignore_errors=os.name == "nt")


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
