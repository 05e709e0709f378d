"""out/.partial, the folder in which a dataset is built before its files move to their place.

plan.json describes the work, so that only the same command continues it; progress.json (writer.py)
records how far it got.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import shutil
import sys
import threading
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from filelock import Timeout

import tokenizer_bpe
from command_line import near
from formats import conversation
from formats.address import protocol_of
from formats.data_folder import Meta, read_meta, write_meta
from formats.files import (
    fingerprint,
    is_foreign,
    patiently,
    read_checked,
    read_json,
    read_text,
    sha256,
    take_lock,
    write_json,
    write_text,
)
from preparing import InputError, PrepareError
from preparing.chunks import CHUNK_BYTES, Chunk, Position, together
from preparing.cleaning import CleaningReport
from preparing.documents import documents_of
from preparing.engines import begin, map_in_order, map_on_cluster, result_of
from preparing.readers import read_chunks
from preparing.remote import DownloadCache
from preparing.sources import Source, find_sources, keep_stdin
from tokenizer_bpe import Tokenizer

TOKENIZERS = ("bpe", "char", "gpt2")  # any other value is a path or an address
VAL_FRACTION = 0.1  # default share of the text that is held out for validation
VAL_BYTES = 20_000_000  # roughly the most that is held out by default
TEXT_BYTES = "text_bytes"  # the setting that records the estimated bytes of text in the input
SAMPLES = 16  # MB of input on which that estimate is based
# Of the code that decides which bytes are written: none but the same continues them.
CODE = fingerprint(
    [sha256(path) for path in sorted(Path(__file__).parent.glob("*.py"))]
    + [sha256(Path(module.__file__)) for module in (tokenizer_bpe, conversation)]
)
BINS = ("train.bin", "val.bin", "train.mask.bin", "val.mask.bin")
# The files of a finished dataset, in the order in which they move to their place.
FILES = (*BINS, "tokenizer.json", "cleaning.json", "meta.json")
MARK = '"eot_id"'  # occurs in every meta.json that this program wrote


class WorkFolder:
    """The folder and the work in it; as a context manager, it holds the folder's lock.

    sources: the input files. settings: {name: value}, as in meta.json. most_bytes: of text to
    write. The system releases the lock when the process ends, however it ends. A command that
    stops before there is anything to continue removes the folders that it made.
    """

    def __init__(self, plan: Namespace):
        """Find the input. Writes nothing. plan: of preparing.arguments.parse.

        Raises InputError and TokenizerError.
        """
        self.plan = plan
        self.out = plan.out
        self.path = plan.out / ".partial"
        self.tokenizer = self.path / "tokenizer.json"
        self.journal = self.path / "progress.json"
        self.cache = self.path / "cache"  # downloaded files
        self.most_bytes = math.inf if plan.gigabytes is None else plan.gigabytes * 1e9
        self.is_stdin = plan.inputs == ["-"]
        self.writing_plan = threading.Lock()
        self.given_tokenizer = _given_tokenizer(plan.tokenizer)
        self.sources = [] if self.is_stdin else find_sources(plan.inputs)
        self.open_files = contextlib.ExitStack()
        kinds = {source.kind for source in self.sources} or {plan.stdin_format}
        if plan.options.text_field and kinds == {"txt"}:
            raise InputError(
                "--text_field names a field of records, but all of the input is plain text; let the"
                " names of files with a JSON object on each line end in .jsonl, .jsonl.gz or"
                " .jsonl.zst, and give --stdin_format for standard input"
            )
        for given in plan.inputs:
            if Path(given).is_dir() and plan.out.resolve().is_relative_to(Path(given).resolve()):
                raise InputError(f"--out {plan.out} is in the input {given}; choose another folder")
        self._check_out()
        largest = max((source.size for source in self.sources if source.is_remote), default=0)
        if largest > plan.cache_gb * 1e9:
            raise InputError(
                f"--cache_gb {plan.cache_gb:g} does not hold the largest file; give at"
                f" least --cache_gb {largest / 1e9 + 0.01:.2f}"
            )

    def _check_out(self):
        """Raises InputError if --out holds files of another program or of a training run."""
        places = (self.path, self.out, *self.out.absolute().parents)
        at = next(filter(os.path.lexists, places))  # lexists: a link may be broken
        if not at.is_dir():
            raise InputError(f"--out {self.out}: {at} is a file, not a folder; give another --out")
        held = [name for name in FILES if (self.out / name).exists()]
        if "meta.json" in held and not is_foreign(read_text(self.out / "meta.json"), MARK):
            held = []
        if (self.path / "meta.json").exists():  # our own move was interrupted
            held = []
        if (self.out / "config.json").exists():
            held = ["config.json of a run or a model"]
        if held:
            raise InputError(
                f"--out {self.out} holds {held[0]}, which prepare_data.py did not write; give"
                " another --out"
            )

    def __enter__(self):
        """Take the lock, and finish an interrupted move. Raises PrepareError if it is taken."""
        folders = (self.path, *self.path.parents)
        self.made = list(itertools.takewhile(lambda folder: not folder.exists(), folders))
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock = take_lock(self.path / "lock", timeout=0)
        except Timeout:
            raise PrepareError(
                f"another run is preparing {self.out} at the moment; wait for it, or stop it"
            ) from None
        try:
            if (self.path / "meta.json").exists():  # an earlier run stopped during the move
                self._move_to_place()
            if self.is_stdin:
                self.sources = [keep_stdin(self.path, self.plan.stdin_format)]
            self.settings = self._settings()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error):
        with contextlib.suppress(OSError):  # on a full disk
            self.open_files.close()  # Windows deletes no file that is open
        finished = [self.journal, self.cache, self.path / "meta.json"]
        if self.plan.tokenizer in ("bpe", "char"):  # costly: made by reading the text
            finished.append(self.tokenizer)
        if self.path in self.made and not any(path.exists() for path in finished):
            self._clear()
        self.lock.release()
        for folder in (self.path, *self.made):
            with contextlib.suppress(OSError):  # it holds the dataset
                folder.rmdir()

    def _settings(self):
        """{name: value} of all settings that affect the output, without those that are unset."""
        plan = self.plan
        tokenizer = plan.tokenizer
        if self.given_tokenizer:
            content = self.given_tokenizer.to_json().encode()
            tokenizer = f"sha256 {hashlib.sha256(content).hexdigest()}"
        text_bytes = self._known_text_bytes() or self._estimated_text_bytes()
        self.text_size = min(text_bytes, self.most_bytes)
        val_fraction = plan.val_fraction
        if val_fraction is None:
            val_fraction = min(VAL_FRACTION, VAL_BYTES / self.text_size)
        values = dataclasses.asdict(plan.options) | {
            "tokenizer": tokenizer,
            "vocab_size": plan.vocab_size,
            "sample_bytes": plan.sample_bytes if plan.tokenizer == "bpe" else None,
            "val_fraction": val_fraction,
            "gigabytes": plan.gigabytes,
            TEXT_BYTES: text_bytes,
        }
        return _in_use(values)

    def _known_text_bytes(self):
        """The size of the text as earlier work in this folder estimated it; 0 without such work."""
        former = read_json(self.out / "meta.json") if not self.plan.overwrite else {}
        if not former and self.journal.exists():
            former = read_checked(self.path / "plan.json")
        return former.get("settings", {}).get(TEXT_BYTES, 0)

    def _estimated_text_bytes(self):
        """Estimate the bytes of text in the input from SAMPLES MB of it.

        These are spread over the input, or come from its first file if some are remote.
        """
        ends = list(itertools.accumulate(source.size for source in self.sources))
        places = [bisect.bisect(ends, (n + 0.5) * ends[-1] / SAMPLES) for n in range(SAMPLES)]
        if any(source.is_remote for source in self.sources):
            places = [0]
        found = [
            count * self._text_in_a_byte(self.sources[place], count * CHUNK_BYTES)
            for place, count in Counter(places).items()
        ]
        return max(1, round(sum(found) / len(places) * ends[-1]))

    def _text_in_a_byte(self, source, sample_bytes):
        """Bytes of text per byte on disk, from the first `sample_bytes` of a source."""
        options = dataclasses.replace(self.plan.options, on_error="skip")
        text_bytes = size = 0
        first = (0, 0)
        for chunk in self.read([source], Position()):
            size += chunk.size
            text_bytes += sum(len(doc.text.encode()) for doc in documents_of(chunk, options)[0])
            last = (text_bytes, chunk.end.on_disk)
            if first == (0, 0):
                first = last  # measured from here on, as the reader is a block ahead
            elif size > sample_bytes and last[1] > first[1]:
                return (last[0] - first[0]) / (last[1] - first[1])
        return text_bytes / source.size

    @property
    def input_size(self) -> int:
        """Bytes on disk of all sources."""
        return sum(source.size for source in self.sources)

    def listed_sources(self) -> list[dict]:
        """The input files as meta.json lists them, so that later work can be compared."""
        return [
            {"path": source.name, "bytes": source.size, "version": source.version}
            for source in self.sources
        ]

    def checked_sources(self) -> list[dict]:
        """As listed_sources(), with the checksums of local files.

        A file that changed while it was read gets none, so that it counts as changed next time.
        """
        listed = result_of(self.checksums)
        for source, values in zip(self.sources, listed, strict=True):
            if not (source.is_remote or self.is_stdin) and not source.is_unchanged():
                values.pop("sha256", None)
                print(
                    f"{source.name} changed while it was read; prepare it again with --overwrite"
                    " once it is complete",
                    file=sys.stderr,
                )
        return listed

    def _with_checksums(self, plan):
        """Read the files once more to add their checksums, to plan.json too, for a resume."""
        for source, values in zip(self.sources, plan["sources"], strict=True):
            if not source.is_remote:
                with contextlib.suppress(OSError):  # it may be gone
                    values["sha256"] = sha256(source.path)
        self._write_plan(plan)
        return plan["sources"]

    def finished(self) -> str:
        """A message if this dataset is already finished, else "".

        Raises InputError if the folder holds another dataset, DataError if it is damaged.
        """
        if self.plan.overwrite or not (self.out / "meta.json").exists():
            return ""
        meta = read_meta(self.out)
        changed = self._differences(meta.settings, meta.sources)
        if changed:
            raise InputError(
                f"{self.out} holds a finished dataset of other input or settings: {changed}.\nGive"
                " another --out, or replace it with --overwrite; then no run on it continues."
                " To train a run's weights on other text, prepare that with --tokenizer RUN under"
                " another --out, and begin a run with init_from = RUN"
            )
        if not (self.path / "plan.json").exists():  # keeps unfinished --overwrite work
            self._clear()
        return f"{self.out} is finished already (--overwrite makes it again)"

    def _differences(self, settings, former_sources):
        """Describe how earlier work differs from this; "" if it does not."""
        settings = _in_use(settings)  # data of 2026-11-23 has clean = False
        # Data of earlier versions has "conversations", which the tokenizer implies.
        compared = (settings | self.settings).keys() - {TEXT_BYTES, "conversations"}
        if settings.get("on_error") == "stop":
            compared.discard("on_error")  # nothing was broken, so it had no effect
        found = [
            f"{name} was {settings.get(name)}, is now {self.settings.get(name)}"
            for name in sorted(compared)
            if settings.get(name) != self.settings.get(name)
        ]
        for before, source in itertools.zip_longest(former_sources, self.sources):
            if not (before and source and _is_same(before, source)):
                name = source.name if source else before["path"]
                found.append(f"the input differs from {name} on")
                if before and source and (name, source.size) == (before["path"], before["bytes"]):
                    found[-1] += ", whose content has changed"
                break
        return "; ".join(found)

    def start_or_resume(self) -> None:
        """Write plan.json. Raises InputError if the folder holds another plan's unfinished work."""
        path = self.path / "plan.json"
        plan = {"code": CODE, "settings": self.settings, "sources": self.listed_sources()}
        former = read_checked(path)
        is_known = former.get("code") == CODE
        former = former if is_known else plan
        changed = self._differences(former["settings"], former["sources"])
        if not is_known and (path.exists() or self.journal.exists()):
            changed = "prepare_data.py has changed since, or plan.json is damaged"
        if changed and self.journal.exists() and not self.plan.overwrite:
            raise InputError(
                f"{self.out} holds unfinished work on other input, settings or code: {changed}.\n"
                "Repeat the former command, with the former code, to finish it, give another --out,"
                " or start again with --overwrite"
            )
        if changed:
            # The journal first: without it, no later run continues the other files.
            for name in (self.journal.name, *FILES):
                (self.path / name).unlink(missing_ok=True)
            plan["settings"] = self.settings = self._settings()
        self._write_plan(plan)
        self.checksums = begin(self._with_checksums, plan)

    def _write_plan(self, plan):
        with self.writing_plan:
            # On one line: indented, 50,000 files take Python's encoder a second.
            text = json.dumps(plan | {"sha256": fingerprint(plan)}, ensure_ascii=False)
            write_text(self.path / "plan.json", text)

    def read(self, sources: list[Source], start: Position) -> Iterator[Chunk]:
        """The chunks of sources from `start` on, in order; downloads remote files."""
        files = DownloadCache(sources, self.cache, self.plan.cache_gb * 1e9)
        return read_chunks(sources, start, self.plan.options, files.path)

    @contextlib.contextmanager
    def map_text(self, function: Callable, start: Position) -> Iterator[Iterator]:
        """Map function over lists of chunks of the text from `start` on; yields an iterator.

        Runs in threads, or in tasks of the Ray cluster; results come in order. The function must
        not write files, since an error or a stop does not wait for running calls.
        """
        chunks = together(self.read(self.sources, start))
        if self.plan.ray:
            yield map_on_cluster(function, chunks)
            return
        count = self.plan.workers
        threads = ThreadPoolExecutor(count)
        try:
            submit = functools.partial(threads.submit, function)
            yield map_in_order(submit, chunks, 2 * count)  # so threads never wait for input
        finally:
            threads.shutdown(wait=False, cancel_futures=True)

    def publish(self, meta: Meta, report: CleaningReport) -> None:
        if report.rules:
            write_json(self.path / "cleaning.json", report.rules)
        write_meta(self.path, meta)  # marks the work as finished
        self._move_to_place()
        self._clear()

    def _move_to_place(self):
        """Move the finished dataset to its place, meta.json last; continues an interrupted move.

        Deletes plan and journal first: otherwise later work would continue files that have moved.
        """
        for file in (self.journal, self.path / "plan.json"):
            patiently(file.unlink, True)
        if (self.path / FILES[0]).exists():  # delete the old dataset, meta.json first
            for name in reversed(FILES):
                patiently((self.out / name).unlink, True)
        for name in FILES:
            if (self.path / name).exists():
                patiently(os.replace, self.path / name, self.out / name)

    def _clear(self):
        with self.writing_plan:
            # Windows deletes the lock, which is open, at its release.
            shutil.rmtree(self.path, ignore_errors=True)


def _in_use(settings):
    """Without those that are off."""
    unused = [name for name, value in settings.items() if value is None or value is False]
    return {name: value for name, value in settings.items() if name not in unused}


def _is_same(before, source):
    """True if a source has the content of a listed one, however each path is spelled.

    That is: same size and name, and same place and version or else same checksum.
    """
    names = [os.path.basename(path) for path in (before["path"], source.name)]
    if (names[0], before["bytes"]) != (names[1], source.size):
        return False
    is_in_place = before["path"] == source.name or (
        not source.is_remote and os.path.realpath(before["path"]) == os.path.realpath(source.path)
    )
    # Data of before 2026-11-26 has no version.
    if is_in_place and before.get("version", source.version) == source.version:
        return True
    if source.is_remote or "sha256" not in before:
        return False
    return before["sha256"] == sha256(source.path)


def _given_tokenizer(name):
    """Load the tokenizer at a path or an address; None if `name` is one of TOKENIZERS.

    Raises InputError, TokenizerError, and what formats.pretrained.fetch raises.
    """
    if name in TOKENIZERS:
        return None
    if protocol_of(name):
        from formats import pretrained  # here, since it imports PyTorch, which takes seconds

        name = pretrained.fetch(name, weights=False)
    meant = near(str(name).lower(), TOKENIZERS)
    if not os.path.lexists(name):
        advice = "give a path on this disk, or an address such as hf://ORG/NAME"
        if meant:
            advice = f"did you mean --tokenizer {meant[0]}?"
        raise InputError(f"no tokenizer at {name}; {advice}")
    tokenizer = Tokenizer.load(name)
    from formats import run_folder  # here, since the nodes of a Ray cluster have no config/

    if run_folder.is_hf(Path(name)):
        from formats import huggingface  # as above

        try:
            huggingface.read_config(Path(name))
        except run_folder.CheckpointError as error:
            print(f"warning: training cannot start from its model: {error}", file=sys.stderr)
    return tokenizer
