"""Pieces of text -> train.bin and val.bin, by worker processes, so that a run which is killed goes
on where it was.

Workers encode pieces; the main process writes their tokens in order, splits documents between
training and validation, drops copies, and notes twice a second how far the files are finished.
Knows no command line and no file formats of text.
"""

import contextlib
import functools
import hashlib
import json
import os
import queue
import re
import shutil
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from formats.files import write_text
from preparing.text_sources import (
    PIECE,
    InputError,
    Options,
    Piece,
    Position,
    Report,
    Source,
    read_pieces,
    texts_of,
)
from tokenizer_bpe import Tokenizer, TokenizerError, safe_cut

SPLITS = ("train", "val")


class PrepareError(RuntimeError):
    """What went wrong while running, in a sentence for the user; what was finished before is kept."""


# -- worker processes -----------------------------------------------------------------------------


class Pool:
    """Worker processes, ready once it is made; `start(*arguments)` is the first that each does.
    They end with this process, however it ends.

    Neither multiprocessing.Pool nor ProcessPoolExecutor: their workers outlive a main process that
    was killed, they cannot be stopped in the middle of an item, and the semaphores of both are
    leaked by a kill. peak: the most bytes of memory that all workers of a pool together have taken
    so far.
    """

    peak = 0

    def __init__(self, count: int, start=int, *arguments):
        context = get_context("spawn")
        self.load, self.peaks, self.processes = {}, {}, []
        with held_back():
            for _ in range(count):
                ours, theirs = context.Pipe()
                self.processes.append(context.Process(target=_work, args=(theirs,), daemon=True))
                self.processes[-1].start()
                theirs.close()
                self.load[ours] = 0
        for _ in self.map(functools.partial(_call, start), [arguments] * count):
            pass

    def map(self, function, items):
        """Yield function(item) for each item, in order, at most four items a worker ahead. Raises
        what the function raises, and PrepareError when a worker dies.
        """
        items, results, sent, done, ended = iter(items), {}, 0, 0, False
        try:
            while not ended or done < sent:
                worker = min(self.load, key=self.load.get)
                if not ended and self.load[worker] < 3 and sent - done < 4 * len(self.load):
                    item = next(items, self)
                    ended = item is self
                    if not ended:
                        worker.send((sent, function, item))
                        self.load[worker], sent = self.load[worker] + 1, sent + 1
                elif done in results:
                    result = results.pop(done)
                    if isinstance(result, Exception):
                        raise result
                    yield result
                    done += 1
                else:
                    for worker in connection.wait([w for w, load in self.load.items() if load]):
                        index, results[index], self.peaks[worker] = worker.recv()
                        self.load[worker] -= 1
        except (EOFError, ConnectionError):
            raise PrepareError(
                "a worker process died, most likely for want of memory: try fewer --workers; the"
                " same command continues"
            ) from None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        Pool.peak = max(Pool.peak, sum(self.peaks.values()))
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def held_back():
    """Hold Ctrl-C and SIGTERM back while processes are started, which half started would complain.
    They inherit that a Ctrl-C is not for them.
    """
    mask, came = getattr(signal, "pthread_sigmask", lambda *_: None), []  # not on Windows
    handlers = {
        signum: signal.signal(signum, lambda signum, _: came.append(signum))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    mask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        mask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if came:
            signal.raise_signal(came[0])


def _call(function, arguments):
    function(*arguments)


def _work(channel):
    """The life of a worker process. Receiving and sending each have a thread: a worker ends as soon
    as the main process does, and goes on while its results wait to be read.
    """
    tasks, results = queue.SimpleQueue(), queue.SimpleQueue()

    def receive():
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(channel.recv())
        os._exit(0)

    def send():
        with contextlib.suppress(OSError):
            while True:
                channel.send(results.get())

    for job in (receive, send):
        threading.Thread(target=job, daemon=True).start()
    while True:
        index, function, item = tasks.get()
        try:
            result = function(item)
        except (InputError, TokenizerError, OSError) as error:
            result = error
        except Exception as error:
            result = PrepareError(f"{type(error).__name__} in a worker process: {error}")
        results.put((index, result, peak_memory()))


def peak_memory() -> int:
    """Largest resident memory of this process so far in bytes; 0 where the system does not say."""
    status = Path("/proc/self/status")
    if status.exists():  # getrusage() counts in what the program that started this one had
        return int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]) << 10
    if sys.platform != "darwin":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def worker_count(workers: int, sources: list[Source]) -> int:
    """No more processes than there are pieces to share, nor than Windows can wait for."""
    return max(
        1, min(workers, 61, sum(s.size * (4 if s.compression else 1) for s in sources) // PIECE)
    )


def batches(pieces):
    """Pieces in lists of about PIECE bytes together: small files are not worth a message to a
    worker each.
    """
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece.light())
        size += piece.size
        if size >= PIECE // 2:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class Progress(tqdm):
    """A bar with MB/s and time left; a line every half minute where the output is no terminal."""

    def __init__(self, total: int, what: str, start: int = 0):
        pace = {"mininterval": 0.2} if sys.stderr.isatty() else {"mininterval": 30, "delay": 10}
        super().__init__(
            total=total,
            initial=start,
            desc=what,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            **pace,
        )

    def to(self, done: int) -> None:
        """Set how many bytes are done."""
        self.update(done - self.n)


Progress.set_lock(threading.RLock())  # tqdm's own is one between processes, which a kill leaks


# -- encoding, in a worker ------------------------------------------------------------------------


@functools.cache
def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer at a path, read once a process."""
    return Tokenizer.load(path)


@dataclass
class Encoded:
    """The documents of a piece. ids: their tokens, each document ended by end-of-text; of a part of
    a long document, only its tokens. tokens, text_bytes, hashes: one entry a document; a hash is
    64 bits of BLAKE2b of the text, white space at its end aside.
    """

    ids: np.ndarray
    tokens: np.ndarray
    text_bytes: np.ndarray
    hashes: np.ndarray
    report: Report
    begins: bool
    ends: bool
    after: Position


def encode_pieces(
    tokenizer_path: Path, dtype: str, options: Options, pieces: list[Piece]
) -> list[Encoded]:
    """Encode the documents of each piece. Raises InputError or TokenizerError, naming the file."""
    return [
        encode_piece(load_tokenizer(tokenizer_path), dtype, options, piece.loaded())
        for piece in pieces
    ]


def encode_piece(tokenizer: Tokenizer, dtype: str, options: Options, piece: Piece) -> Encoded:
    """Encode the documents of one piece."""
    texts, report = texts_of(piece, options)
    try:
        parts = [encode(tokenizer, text) for text in texts]
    except TokenizerError as error:
        raise TokenizerError(f"{piece.path}, from offset {piece.at.offset:,}: {error}") from None
    eot = np.array([tokenizer.eot_id] if piece.ends else [], np.uint32)
    ids = np.concatenate([array for part in parts for array in (part, eot)] or [eot[:0]])
    if ids.size and int(ids.max()) > min(tokenizer.vocab_size - 1, np.iinfo(dtype).max):
        raise TokenizerError(
            f"token id {ids.max()} does not fit a vocabulary of {tokenizer.vocab_size} in {dtype}"
        )
    raw = [text.encode() for text in texts]
    tokens, text_bytes = [len(part) + len(eot) for part in parts], [len(data) for data in raw]
    hashes = [hash64(data.rstrip() if piece.ends else data) for data in raw]
    return Encoded(
        ids.astype(dtype),
        np.array(tokens, np.int64),
        np.array(text_bytes, np.int64),
        np.array(hashes, np.uint64),
        report,
        piece.begins,
        piece.ends,
        piece.after,
    )


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids of a text of any length, uint32: a long one in parts, because encoding takes many
    times its argument in memory.
    """
    parts = []
    while len(text) > 2 * PIECE and (cut := safe_cut(text, PIECE)):
        parts.append(tokenizer.encode(text[:cut]))
        text = text[cut:]
    return np.concatenate([*parts, tokenizer.encode(text)])


def hash64(data: bytes) -> int:
    """64 bits of BLAKE2b."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


# -- writing, in the main process -----------------------------------------------------------------


class Seen:
    """Which documents came before, by 64-bit hashes, in bounded memory: the newest in a set, older
    ones in sorted files mapped into memory.

    A log keeps them in order, so that a resumed run knows what it knew. In a billion documents
    about one is taken for a copy by mistake.
    """

    RUN = 1 << 19  # hashes in the set; sorted files grow by merging to 16 times this

    def __init__(self, folder: Path, count: int):
        self.folder, self.count, self.recent, self.runs = folder, 0, set(), []
        self.log = open(folder / "seen.bin", "r+b" if count else "w+b")  # noqa: SIM115
        self.log.truncate(8 * count)
        for start in range(0, count, self.RUN):
            self._add(np.fromfile(self.log, np.uint64, min(self.RUN, count - start)))

    def first(self, hashes: np.ndarray) -> np.ndarray:
        """For each hash, whether it is new; it is not from now on."""
        old = np.zeros(len(hashes), bool)
        for run in self.runs:
            old |= run[np.searchsorted(run, hashes).clip(max=len(run) - 1)] == hashes
        new = np.zeros(len(hashes), bool)
        for n, value in enumerate(hashes.tolist()):
            new[n] = not old[n] and value not in self.recent
            self.recent.add(value)
        self.log.write(hashes[new].tobytes())
        self._add(hashes[new])
        return new

    def _add(self, hashes):
        self.count += len(hashes)
        self.recent.update(hashes.tolist())
        if len(self.recent) >= self.RUN:
            self._spill(np.array(sorted(self.recent), np.uint64))
            self.recent = set()

    def _spill(self, run):
        while self.runs and len(self.runs[-1]) <= len(run) < 8 * self.RUN:
            run = np.union1d(run, self.runs.pop())
        path = self.folder / f"seen-{len(self.runs)}-{len(run)}.run"
        run.tofile(path)
        self.runs.append(np.memmap(path, np.uint64, "r"))


@dataclass
class Journal:
    """How far the files are finished. read: bytes of text so far; split: how the text was split,
    once all of it is there.

    Of a document of more than one piece, under way: its hash so far, the rule by which its
    beginning was noise, and the tokens in training and text bytes before it, to return to should it
    prove a copy.
    """

    position: Position = field(default_factory=Position)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: int = 0
    report: Report = field(default_factory=Report)
    seen: int = 0
    read: int = 0
    seconds: float = 0.0
    split: str = ""
    long_hash: int = 0
    long_noise: str = ""
    before_long: tuple[int, int] = (0, 0)

    @classmethod
    def load(cls, path: Path) -> "Journal":
        """As it was saved, or a new one where there is none."""
        raw = (
            json.loads(path.read_text(encoding="utf-8"))
            if path.exists()
            else {"position": {}, "report": {}}
        )
        return cls(
            **raw | {"position": Position(**raw["position"]), "report": Report(**raw["report"])}
        )


class Output:
    """train.bin and val.bin as they grow in the working folder, and the journal of how far they are
    finished.
    """

    def __init__(
        self, work: Path, dtype: str, val_fraction: float, dedupe: bool, tokenizer: Tokenizer
    ):
        self.tokenizer, self.width, self.val_fraction = (
            tokenizer,
            np.dtype(dtype).itemsize,
            val_fraction,
        )
        self.path = work / "progress.json"
        self.journal = Journal.load(self.path)
        self.files = {}
        for name in SPLITS:
            path, size = work / f"{name}.bin", self.journal.tokens[name] * self.width
            path.touch()
            if path.stat().st_size < size:
                raise PrepareError(
                    f"{path} is shorter than it was when the work stopped; the disk lost data:"
                    f" delete {work} and start anew"
                )
            self.files[name] = open(path, "r+b")  # noqa: SIM115
            self.files[name].truncate(size)
            self.files[name].seek(size)
        self.seen = Seen(work, self.journal.seen) if dedupe else None
        self.saved = self.started = time.monotonic()

    def add(self, part: Encoded) -> None:
        """Write the documents of the next piece, and half a second after the last time note how far
        it went.
        """
        journal = self.journal
        journal.report.merge(part.report)
        if part.begins and part.ends:
            new = self.seen.first(part.hashes) if self.seen else np.ones(len(part.hashes), bool)
            ends = np.cumsum(part.tokens)
            for n in np.flatnonzero(~new):
                self._report_copy(
                    part.ids[ends[n] - part.tokens[n] : ends[n] - 1], int(part.text_bytes[n])
                )
            val = (part.hashes < np.uint64(self.val_fraction * 2**64)) & (part.text_bytes <= PIECE)
            for name, rows in (("train", new & ~val), ("val", new & val)):
                self._write(
                    name,
                    part.ids if rows.all() else part.ids[np.repeat(rows, part.tokens)],
                    part.text_bytes[rows],
                )
        else:
            self._add_long(part)
        journal.position, journal.read = part.after, journal.read + int(part.text_bytes.sum())
        if time.monotonic() - self.saved > 0.5:
            self.save()

    def _write(self, name, ids, text_bytes):
        self.files[name].write(ids.tobytes())
        self.journal.tokens[name] += len(ids)
        self.journal.text_bytes += int(text_bytes.sum())

    def _report_copy(self, ids, text_bytes):
        self.journal.report.add(
            "exact duplicates", 1, text_bytes, [self.tokenizer.decode(ids[:30])]
        )

    def _add_long(self, part):
        """Write a part of a long document. It goes to training, unless its beginning was noise, and
        is taken back should it prove a copy.
        """
        journal = self.journal
        if part.begins:
            journal.long_hash, journal.long_noise, journal.before_long = (
                0,
                part.report.noise,
                (journal.tokens["train"], journal.text_bytes),
            )
        journal.long_hash = hash64(journal.long_hash.to_bytes(8, "little") + part.hashes.tobytes())
        if journal.long_noise:
            journal.report.add(journal.long_noise, 0, int(part.text_bytes.sum()), [])
        else:
            self._write("train", part.ids, part.text_bytes)
        if (
            part.ends
            and self.seen
            and not journal.long_noise
            and not self.seen.first(np.array([journal.long_hash], np.uint64))[0]
        ):
            tokens, text_bytes = journal.before_long
            self._report_copy(part.ids, journal.text_bytes - text_bytes)
            journal.tokens["train"], journal.text_bytes = tokens, text_bytes
            self.files["train"].seek(
                tokens * self.width
            )  # not cut: the journal on the disk may still count the copy

    def save(self) -> None:
        """Note how far the files are finished, safe from a power cut."""
        for file in (*self.files.values(), *([self.seen.log] if self.seen else [])):
            file.flush()
            os.fsync(file.fileno())
        self.journal.seen = self.seen.count if self.seen else 0
        self.journal.seconds += time.monotonic() - self.started
        self.saved = self.started = time.monotonic()
        write_text(self.path, json.dumps(asdict(self.journal), ensure_ascii=False))

    def finish(self) -> None:
        """See that both splits hold text, and close the files. The journal then says how the text
        was split.
        """
        journal, share = self.journal, f"{100 * self.val_fraction:.3g}%"
        if not journal.split:
            journal.split = (
                f"{share} of the documents by a hash of their text, those above 1 MB always in"
                " training"
            )
            if not journal.tokens["train"]:  # few documents, all with low hashes
                self._move("val", "train", journal.tokens["val"])
            if not self.val_fraction:
                journal.split = "all of it in training (--val_fraction 0)"
            elif not journal.tokens["val"] and journal.tokens["train"] > 1:
                journal.split = (
                    f"the last {share} of the text, no document being small enough or chosen by its"
                    " hash"
                )
                self._move("train", "val", max(1, int(journal.tokens["train"] * self.val_fraction)))
            self.save()
        for name, file in self.files.items():
            file.truncate(journal.tokens[name] * self.width)
            file.close()
        if self.seen:
            self.seen.log.close()

    def _move(self, source, target, count):
        """Copy the last `count` tokens into the other file, which is empty; the source is cut once
        the journal knows.
        """
        tokens = self.journal.tokens
        tokens[source], tokens[target] = tokens[source] - count, count
        self.files[target].seek(0)
        self.files[source].seek(tokens[source] * self.width)
        shutil.copyfileobj(self.files[source], self.files[target])


def encode_all(
    sources: list[Source], options: Options, args, work: Path, dtype: str, tokenizer: Tokenizer
) -> Journal:
    """Tokenise everything that is not finished yet into the working folder. Raises InputError when
    nothing is left of the text.
    """
    output = Output(work, dtype, args.val_fraction, options.clean, tokenizer)
    journal, path = output.journal, work / "tokenizer.json"
    start = journal.position
    if start != Position():
        print(f"continuing after {start.on_disk / 1e6:,.1f} MB of the input", file=sys.stderr)
    if not journal.split:
        with (
            Pool(worker_count(args.workers, sources), load_tokenizer, path) as pool,
            Progress(sum(s.size for s in sources), "tokenising", start.on_disk) as bar,
        ):
            output.started = time.monotonic()  # from here on it is tokenising
            for parts in pool.map(
                functools.partial(encode_pieces, path, dtype, options),
                batches(read_pieces(sources, start, options)),
            ):
                for part in parts:
                    output.add(part)
                bar.to(part.after.on_disk)
        output.save()
    if not any(journal.tokens.values()):
        left_out = "; ".join(
            f"{rule}: {documents:,}" for rule, (documents, _, _) in journal.report.rules.items()
        )
        more = f" and {len(sources) - 1:,} more" if sources[1:] else ""
        raise InputError(
            f"no document is left in {sources[0].path}{more}"
            + (f" ({left_out})" if left_out else ": only white space")
        )
    output.finish()
    return journal
