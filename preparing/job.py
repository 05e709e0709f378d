"""What one call of prepare_data.py has to do, and the folders in which it does it.

out is the prepared folder; out/.partial, the working folder, holds everything until it is finished:
plan.json says what the work is, so that it is continued by the same command and by no other.
Reads no text and no tokens.
"""

import contextlib
import dataclasses
import json
import math
import os
import shutil
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from formats.data_folder import DataError, Meta, datasets_in, dtype_for, read_meta, write_meta
from formats.files import try_lock, write_json
from preparing import corpora, near
from preparing.cleaning import CleaningReport
from preparing.engine import Engine, connect_to_ray
from preparing.errors import InputError, PrepareError
from preparing.fetching import Fetcher, check_cache
from preparing.folders import compress, publish
from preparing.inputs import Source, find_sources, keep_stdin, sources_of_shard
from preparing.options import Options
from preparing.pieces import PIECE, Position
from preparing.pool import MOST_WORKERS
from preparing.settings import differences, settings_of
from preparing.writer import Journal
from tokenizer_bpe import Tokenizer

VAL_FRACTION = 0.1  # of the text is held back for validation,
VAL_BYTES = 20_000_000  # but of large inputs no more than about so much
CACHE = "cache"  # the part of the working folder for remote files on their way


@contextlib.contextmanager
def lock(folder: Path) -> Iterator[None]:
    """Hold a working folder, made if need be. Raises PrepareError when another run holds it.

    The lock goes with the process, however it ends.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as file:
        if try_lock(file) is False:
            raise PrepareError(
                f"another run is preparing {folder.parent} just now; wait for it, or stop it"
            )
        yield


@dataclass
class Job:
    """What one call has to do.

    args: the command line. options: how records become texts. settings: what the bytes written
    depend on besides the input, as meta.json lists it. sources: the input files, of this shard.
    started: time.monotonic() at the beginning.
    """

    args: Namespace
    options: Options
    settings: dict
    sources: list[Source] = field(default_factory=list)
    started: float = field(default_factory=time.monotonic)

    @classmethod
    def from_args(cls, args: Namespace) -> "Job":
        """Find the input and gather the settings; writes nothing.

        Raises InputError and TokenizerError for what the command line names and is not there.
        """
        names = (option.name for option in dataclasses.fields(Options))
        options = Options(**{name: getattr(args, name) for name in names})
        if options.dedupe == "near":
            near.check_installed()
        job = cls(args, options, settings_of(args, options))
        if not job.reads_stdin:
            job._set_sources(find_sources(corpora.resolve(args.input)))
        if args.ray:
            connect_to_ray(args.ray)
        else:
            check_cache(job.sources, job.cache_limit)
        return job

    def _set_sources(self, everything):
        """Take this shard's sources. The whole input says how much of it is validation."""
        self.sources = everything
        if self.args.shard:
            self.sources = sources_of_shard(everything, *self.args.shard)
        if self.settings["val_fraction"] is None:
            size = min(sum(source.size for source in everything), self.most_bytes)
            self.settings["val_fraction"] = min(VAL_FRACTION, VAL_BYTES / size)

    @property
    def out(self) -> Path:
        """The folder that training reads in the end."""
        return Path(self.args.out)

    @property
    def work(self) -> Path:
        """The folder for all that is not finished."""
        return self.out / ".partial"

    @property
    def tokenizer_path(self) -> Path:
        """The tokenizer while the work goes on."""
        return self.work / "tokenizer.json"

    @property
    def reads_stdin(self) -> bool:
        """Whether the input is standard input."""
        return self.args.input == ["-"]

    @property
    def input_size(self) -> int:
        """Bytes on disk of all sources."""
        return sum(source.size for source in self.sources)

    @property
    def most_bytes(self) -> float:
        """Bytes of text after which to stop; infinity for all of it."""
        return (self.args.gigabytes or math.inf) * 1e9

    @property
    def cache_limit(self) -> float:
        """Bytes that remote files may take on the disk at a time."""
        return self.args.cache_gb * 1e9

    @property
    def text_size(self) -> int:
        """About how many bytes of text there are to prepare."""
        return int(min(sum(source.text_size for source in self.sources), self.most_bytes))

    @property
    def total(self) -> float:
        """What the work goes up to: bytes of text if so many are asked for, else of files."""
        return self.most_bytes if self.args.gigabytes else self.input_size

    def done(self, journal: Journal) -> int:
        """How much of that is done."""
        return journal.text_bytes if self.args.gigabytes else journal.position.on_disk

    def engine(self, function: Callable, start: Position | None = None) -> Engine:
        """What applies a function to all batches of pieces from `start` on, or all there are.

        That is an Engine, with no more worker processes than there are pieces to share, or with
        --ray a RayEngine, which has the same methods.
        """
        start = start or Position()
        if self.args.ray:
            from preparing.ray_engine import RayEngine

            return RayEngine(function, start, self.options, self.sources)
        workers = max(1, min(self.args.workers, MOST_WORKERS, self.text_size // PIECE))
        limits = {"limit": self.cache_limit, "enough": self.most_bytes}
        files = Fetcher(self.sources, self.work / CACHE, first=start.source, **limits)
        return Engine(function, start, self.options, files, workers)

    def listed_sources(self) -> list[dict]:
        """The sources as meta.json lists them."""
        return [{"path": source.path, "bytes": source.size} for source in self.sources]

    # -- where things stand

    def complete_interrupted_publish(self) -> None:
        """Put a dataset in its place that was finished when a former run was stopped."""
        if (self.work / "meta.json").exists():
            self._move_to_place()

    def keep_stdin(self) -> None:
        """Keep standard input in the working folder, as the source. Raises InputError if empty."""
        self._set_sources([keep_stdin(self.work, self.args.stdin_format)])

    def is_finished(self) -> bool:
        """Whether the folder holds this very dataset. Raises InputError when it holds another."""
        if self.args.overwrite or not (self.out / "meta.json").exists():
            return False
        try:
            meta = read_meta(self.out)
        except DataError as error:
            raise InputError(f"{error} (this command with --overwrite makes it anew)") from None
        changed = differences(
            {"settings": meta.settings, "sources": meta.sources},
            {"settings": self.settings, "sources": self.listed_sources()},
        )
        if changed:
            raise InputError(
                f"{self.out} holds a finished dataset of other input or settings: {changed}.\nGive"
                " another --out, or make this one anew with --overwrite"
            )
        return True

    def check_alone(self) -> None:
        """Raises InputError where another dataset is there, that this one cannot lie beside."""
        if self.out.is_file():
            raise InputError(f"--out {self.out}: it must be a folder, there or to be made")
        shard = self.args.shard
        folder = self.out.parent if shard else self.out
        mine = f"shard-...-of-{shard[1]}" if shard else "meta.json"
        there = datasets_in(folder)
        if mine in there and self.args.tokenizer_only:
            raise InputError(
                f"{folder} holds a finished dataset, with a tokenizer of its own; give another"
                " --out"
            )
        if there and self.args.tokenizer_only:
            raise InputError(
                f"{folder} holds shares that were made with its tokenizer; leave --tokenizer_only"
                " out, or give another --out"
            )
        if set(there) - {mine}:
            raise InputError(
                f"{folder} holds another dataset already, {', '.join(there)}; give another --out,"
                " or delete that first"
            )

    def complete_finished(self) -> str:
        """Add the compressed copies that are asked for and missing; says what is there."""
        meta = read_meta(self.out)
        compressed = all(split.compressed for split in meta.splits.values())
        if self.args.compress and not compressed:
            compress(self.out, meta.splits, self.args.workers)
            write_meta(self.out, meta)
        if not (self.work / "plan.json").exists():  # unfinished work to replace it stays
            self._clear()
        tokens = ", ".join(f"{name} {split.tokens:,} tokens" for name, split in meta.splits.items())
        return (
            f"{self.out} is finished already: {tokens} (--overwrite makes it anew)"
            + self._changed_since(meta.created)
        )

    def _changed_since(self, created):
        """Which files of the input are newer than the dataset, in words; their sizes are equal."""
        if self.reads_stdin:
            return ""
        finished = datetime.fromisoformat(created).timestamp()
        newer = [source.path for source in self.sources if source.modified / 1e9 > finished + 1]
        if not newer:
            return ""
        more = f" and {len(newer) - 1:,} more" if len(newer) > 1 else ""
        return f"\n{newer[0]}{more} changed after that; --overwrite takes the text as it is now"

    def start_or_resume(self) -> None:
        """Note what this work is; what was finished of it stays.

        Raises InputError when the folder holds finished parts of other work, or the disk is full.
        """
        path = self.work / "plan.json"
        plan = {
            "settings": self.settings,
            "sources": [dataclasses.asdict(source) for source in self.sources],
        }
        former = json.loads(path.read_text(encoding="utf-8")) if path.exists() else plan
        former["sources"] = [
            dataclasses.asdict(Source(**source))  # with fields that an earlier version had not
            for source in former["sources"]
        ]
        if former["settings"]["on_error"] == "stop":
            # Nothing broken came up to where it stopped, so the bytes are the same.
            former["settings"]["on_error"] = self.settings["on_error"]
        changed = differences(former, plan)
        if changed:
            if self._written() and not self.args.overwrite:
                raise InputError(
                    f"{self.out} holds unfinished work on other input or settings: {changed}."
                    "\nRepeat the former command to finish it, give another --out, or start anew"
                    " with --overwrite"
                )
            self._forget_work()
        elif self.args.tokenizer_only and self._written() and not self.args.overwrite:
            raise InputError(
                f"{self.out} holds unfinished work, whose tokenizer is {self.tokenizer_path}."
                "\nFinish it without --tokenizer_only, give another --out, or give it up with"
                " --overwrite"
            )
        write_json(path, plan)
        self._check_room()

    def _written(self):
        """Bytes of tokens in the working folder."""
        return sum(path.stat().st_size for path in self.work.glob("*.bin"))

    def _forget_work(self):
        """Delete what was made so far. The lock stays, and input that was kept or fetched.

        In an order that can be interrupted: without the journal no file counts as begun, and until
        the plan is gone it says of what work the others are.
        """
        kept = {"lock", "plan.json", "stdin.txt", "stdin.jsonl", CACHE}
        (self.work / "progress.json").unlink(missing_ok=True)
        for path in list(self.work.iterdir()):
            if path.name not in kept:
                path.unlink()
        (self.work / "plan.json").unlink(missing_ok=True)

    def _check_room(self):
        """Raises InputError when the disk cannot hold what is to be written."""
        tokens = self.text_size  # at most
        if self.args.tokenizer != "char":
            tokens = 0.35 * tokens
        bytes_a_token = 2 if dtype_for(self._vocab_size()) == "uint16" else 4
        size = tokens * bytes_a_token
        if self.args.compress:
            size *= 1.9
        cache = self._room_for_cache()
        need = size - self._written() + cache
        free = shutil.disk_usage(self.out).free
        if need > free:
            fetched = f", {cache / 1e9:,.1f} GB of it for files on their way (--cache_gb)"
            raise InputError(
                f"{self.out} needs about {need / 1e9:,.1f} GB more on disk"
                f"{fetched if cache else ''}, and {free / 1e9:,.1f} GB are free: make room, or give"
                " an --out on another disk"
            )

    def _vocab_size(self):
        """How many ids the tokenizer has or will have; 0 where they surely fit two bytes."""
        if self.args.tokenizer == "bpe":
            return self.args.vocab_size
        if self.args.tokenizer in ("char", "gpt2"):
            return 0
        return Tokenizer.load(self.args.tokenizer).vocab_size

    def _room_for_cache(self):
        """Bytes that remote files will take on the disk beside those that are there."""
        if self.args.ray:
            return 0
        sizes = [source.size for source in self.sources if source.is_remote]
        there = sum(path.stat().st_size for path in (self.work / CACHE).glob("*"))
        enough = self.most_bytes + max(sizes, default=0)  # a byte of text takes no more than one
        return max(0, min(sum(sizes), self.cache_limit, enough) - there)

    # -- the end

    def publish_tokenizer(self) -> Path:
        """Put the tokenizer alone in its place, and forget the work."""
        path = self.out / "tokenizer.json"
        os.replace(self.tokenizer_path, path)
        self._forget_work()
        self._clear()
        return path

    def publish(self, meta: Meta, report: CleaningReport) -> None:
        """Put the finished dataset in its place, with compressed copies where asked for."""
        if self.args.compress:
            compress(self.work, meta.splits, self.args.workers)
        if report.rules:
            write_json(self.work / "cleaning.json", report.to_json())
        write_meta(self.work, meta)  # from here on the work is finished
        self._move_to_place()
        self._clear()

    def _clear(self):
        """Delete the working folder when all is in its place.

        Windows deletes no file that is open, as the lock is: it stays, and does no harm.
        """
        shutil.rmtree(self.work, ignore_errors=os.name == "nt")

    def _move_to_place(self):
        """Move the finished dataset from the working folder to its own.

        Plan and journal go first: they would have later work continue files that have moved.
        """
        (self.work / "progress.json").unlink(missing_ok=True)
        (self.work / "plan.json").unlink(missing_ok=True)
        publish(self.work, self.out)
