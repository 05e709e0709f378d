"""Pieces of text -> train.bin and val.bin, by worker processes, so that a run which is killed goes on where it was.

Workers encode pieces; the main process writes their tokens in order, splits documents between training and validation, drops
copies, and notes twice a second how far the files are finished. Knows no command line and no file formats of text.
"""
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from multiprocessing import connection, get_context
from pathlib import Path

import numpy as np
from tqdm import tqdm

from text_sources import PIECE, InputError, Options, Piece, Position, Report, Source, read_pieces, texts_of
from tokenizer_bpe import Tokenizer, TokenizerError, safe_cut

SPLITS = ("train", "val")


class PrepareError(RuntimeError):
    """What went wrong while running, in a sentence for the user; what was finished before is kept."""


# -- worker processes -----------------------------------------------------------------------------------------------------------


class Pool:
    """Worker processes that map a function over items and return the results in the order of the items.

    Not multiprocessing.Pool: its workers outlive a main process that was killed, and it reads its whole input ahead.
    """

    def __init__(self, count: int):
        context = get_context("spawn")
        self.load, self.peaks, self.processes = {}, {}, []
        if hasattr(signal, "pthread_sigmask"):  # a Ctrl-C is for the main process
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for _ in range(count):
            ours, theirs = context.Pipe()
            self.processes.append(context.Process(target=_work, args=(theirs,), daemon=True))
            self.processes[-1].start()
            theirs.close()
            self.load[ours] = 0
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})

    def map(self, function, items):
        """Yield function(item) for each item, at most four items a worker ahead. Raises what the function raises, and PrepareError when a worker dies."""
        items, results, sent, returned, ended = iter(items), {}, 0, 0, False
        while not ended or returned < sent:
            while not ended and sent - returned < 4 * len(self.load) and min(self.load.values()) < 3:
                item = next(items, self)
                ended = item is self
                if not ended:
                    worker = min(self.load, key=self.load.get)
                    self._talk(worker.send, (sent, function, item))
                    self.load[worker] += 1
                    sent += 1
            if returned in results:
                result = results.pop(returned)
                returned += 1
                if isinstance(result, Exception):
                    raise result
                yield result
            elif returned < sent:
                for worker in connection.wait([w for w in self.load if self.load[w]]):
                    index, results[index], self.peaks[worker] = self._talk(worker.recv)
                    self.load[worker] -= 1

    def _talk(self, call, *args):
        try:
            return call(*args)
        except (EOFError, OSError):
            codes = [p.exitcode for p in self.processes if p.join(1) or p.exitcode is not None]
            raise PrepareError(f"a worker process died (exit code {codes[0] if codes else '?'}), most likely for want of memory: try fewer --workers; the same command continues") from None

    def close(self) -> int:
        """End the processes; returns the sum of their peak memory in bytes."""
        for worker, process in zip(self.load, self.processes, strict=True):
            worker.close()
            process.join()
        return sum(self.peaks.values())

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close() if error == (None, None, None) else [p.kill() for p in self.processes]


def _work(channel):
    """The life of a worker process: it ends when the main process closes its end of the channel, or dies."""
    tasks, results = queue.SimpleQueue(), queue.SimpleQueue()

    def receive():
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(channel.recv())
        os._exit(0)

    def send():  # apart, because the main process may just be waiting for the disk
        with contextlib.suppress(OSError):
            while True:
                channel.send(results.get())

    for job in (receive, send):
        threading.Thread(target=job, daemon=True).start()
    while True:
        index, function, item = tasks.get()
        try:
            result = function(item)
        except (InputError, TokenizerError) as error:
            result = error
        except Exception as error:
            result = PrepareError(f"{type(error).__name__} in a worker process: {error}")
        results.put((index, result, peak_memory()))


def peak_memory() -> int:
    """Largest resident memory of this process so far in bytes; 0 where the system does not say."""
    try:
        return next(int(line.split()[1]) << 10 for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        with contextlib.suppress(ImportError):
            import resource

            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
        return 0


def worker_count(workers: int, sources: list[Source]) -> int:
    """No more processes than there are pieces to share."""
    return max(1, min(workers, sum(s.size * (4 if s.compression else 1) for s in sources) // PIECE))


def batches(pieces):
    """Pieces in lists of about PIECE bytes together: small files are not worth a message to a worker each."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece.light())
        size += piece.size
        if size >= PIECE // 2:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def progress_bar(total: int, start: int, what: str) -> tqdm:
    """A bar with MB/s and time left; a line every half minute where the output is no terminal."""
    tqdm.set_lock(threading.RLock())  # its own is one between processes, which a kill would leak
    pace = {"mininterval": 0.2} if sys.stderr.isatty() else {"mininterval": 30, "delay": 10}
    return tqdm(total=total, initial=start, desc=what, unit="B", unit_scale=True, dynamic_ncols=True, leave=False, **pace)


# -- encoding, in a worker ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def load_tokenizer(path: str) -> Tokenizer:
    """The tokenizer at a path, read once a process."""
    return Tokenizer.load(path)


def load_tokenizer_once(path: str) -> None:
    """Let a worker be ready."""
    load_tokenizer(path)


@dataclass
class Encoded:
    """The documents of a piece. ids: their tokens, each document ended by end-of-text; of a part of a long document, only its tokens.
    tokens, text_bytes, hashes: one entry a document; a hash is 64 bits of BLAKE2b of the text, white space at its end aside."""

    ids: np.ndarray
    tokens: np.ndarray
    text_bytes: np.ndarray
    hashes: np.ndarray
    report: Report
    begins: bool
    ends: bool
    after: Position


def encode_pieces(tokenizer_path: str, dtype: str, options: Options, pieces: list[Piece]) -> list[Encoded]:
    """encode_piece for each of a batch, the data read from its file where it was not sent."""
    return [encode_piece(tokenizer_path, dtype, options, piece.loaded()) for piece in pieces]


def encode_piece(tokenizer_path: str, dtype: str, options: Options, piece: Piece) -> Encoded:
    """Encode the documents of a piece, in a worker. Raises InputError or TokenizerError, naming the file."""
    tokenizer = load_tokenizer(tokenizer_path)
    texts, report = texts_of(piece, options)
    try:
        parts = [encode(tokenizer, text) for text in texts]
    except TokenizerError as error:
        raise TokenizerError(f"{piece.path}, from offset {piece.at.offset:,}: {error}") from None
    eot = np.array([tokenizer.eot_id] if piece.ends else [], np.uint32)
    ids = np.concatenate([array for part in parts for array in (part, eot)] or [eot[:0]])
    if ids.size and int(ids.max()) > min(tokenizer.vocab_size - 1, np.iinfo(dtype).max):
        raise TokenizerError(f"token id {ids.max()} does not fit a vocabulary of {tokenizer.vocab_size} in {dtype}")
    raw = [text.encode() for text in texts]
    hashes = [int.from_bytes(hashlib.blake2b(data.rstrip() if piece.ends else data, digest_size=8).digest(), "little") for data in raw]
    counts = np.array([len(part) + len(eot) for part in parts], np.int64), np.array([len(data) for data in raw], np.int64)
    return Encoded(ids.astype(dtype), *counts, np.array(hashes, np.uint64), report, piece.begins, piece.ends, piece.after)


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids of a text of any length, uint32: a long one in parts, because encoding takes many times its argument in memory."""
    parts = []
    while len(text) > 2 * PIECE and (cut := safe_cut(text, PIECE)):
        parts.append(tokenizer.encode(text[:cut]))
        text = text[cut:]
    return np.concatenate([*parts, tokenizer.encode(text)])


# -- writing, in the main process -----------------------------------------------------------------------------------------------


class Seen:
    """Which documents came before, by 64-bit hashes, in bounded memory: the newest in a set, older ones in sorted files mapped into memory.

    A log keeps them in order, so that a resumed run knows what it knew. In a billion documents about one is taken for a copy by mistake.
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
class Counts:
    """What one split holds so far."""

    tokens: int = 0
    documents: int = 0
    text_bytes: int = 0


@dataclass
class Long:
    """A document of more than one piece, under way. It goes to training, unless the first piece was noise; before: the counts of
    training without it, to return to should it prove a copy."""

    before: Counts
    hash: int = 0
    noise: str = ""


@dataclass
class Journal:
    """How far the files are finished."""

    position: Position
    train: Counts
    val: Counts
    report: Report
    long: Long | None = None
    seen: int = 0
    input_bytes: int = 0  # of text read so far
    seconds: float = 0.0
    split: str = ""  # how the text was split, once all of it is there

    @classmethod
    def load(cls, path: Path) -> "Journal":
        raw = json.loads(path.read_text(encoding="utf-8"))
        long = raw.pop("long")
        long = long and Long(**long | {"before": Counts(**long["before"])})
        nested = {"position": Position, "train": Counts, "val": Counts, "report": Report}
        return cls(**{name: nested[name](**value) if name in nested else value for name, value in raw.items()}, long=long)


class Output:
    """train.bin and val.bin as they grow in the working folder, and the journal of how far they are finished."""

    def __init__(self, work: Path, dtype: str, val_fraction: float, dedupe: bool, tokenizer: Tokenizer):
        self.work, self.dtype, self.tokenizer = work, np.dtype(dtype), tokenizer
        self.threshold = np.uint64(int(val_fraction * 2**64)) if val_fraction < 1 else np.uint64(2**64 - 1)
        self.path = work / "progress.json"
        self.journal = Journal.load(self.path) if self.path.exists() else Journal(Position(), Counts(), Counts(), Report())
        self.files = {}
        for name in SPLITS:
            path, size = work / f"{name}.bin", getattr(self.journal, name).tokens * self.dtype.itemsize
            self.files[name] = open(path, "r+b" if self.path.exists() else "wb")  # noqa: SIM115
            if os.fstat(self.files[name].fileno()).st_size < size:
                raise PrepareError(f"{path} is shorter than it was when the work stopped; the disk lost data: delete {work} and start anew")
            self.files[name].truncate(size)
            self.files[name].seek(size)
        self.seen = Seen(work, self.journal.seen) if dedupe else None
        self.saved = self.started = time.monotonic()

    def add(self, part: Encoded) -> None:
        """Write the documents of the next piece, and half a second after the last time note how far it went."""
        journal = self.journal
        journal.report.merge(part.report)
        if part.begins and part.ends:
            new = self.seen.first(part.hashes) if self.seen else np.ones(len(part.tokens), bool)
            self._report_copies(part, new)
            val = (part.hashes < self.threshold) & (part.text_bytes <= PIECE)
            for name, rows in (("train", new & ~val), ("val", new & val)):
                self._write(name, part.ids if rows.all() else part.ids[np.repeat(rows, part.tokens)], int(rows.sum()), int(part.text_bytes[rows].sum()))
        else:
            self._add_long(part)
        journal.position, journal.input_bytes = part.after, journal.input_bytes + int(part.text_bytes.sum())
        if time.monotonic() - self.saved > 0.5:
            self.save()

    def _write(self, name, ids, documents, text_bytes):
        self.files[name].write(ids.tobytes())
        counts = getattr(self.journal, name)
        counts.tokens, counts.documents, counts.text_bytes = counts.tokens + len(ids), counts.documents + documents, counts.text_bytes + text_bytes

    def _add_long(self, part):
        journal = self.journal
        if part.begins:
            journal.long = Long(dataclasses.replace(journal.train), noise=part.report.noise)
        long, text_bytes = journal.long, int(part.text_bytes.sum())
        long.hash = int.from_bytes(hashlib.blake2b(long.hash.to_bytes(8, "little") + part.hashes.tobytes(), digest_size=8).digest(), "little")
        if long.noise:
            journal.report.add(long.noise, text_bytes, "", documents=0)
        else:
            self._write("train", part.ids, int(part.ends), text_bytes)
        if part.ends:
            journal.long = None
            if self.seen and not long.noise and not self.seen.first(np.array([long.hash], np.uint64))[0]:
                journal.report.add("exact duplicates", journal.train.text_bytes - long.before.text_bytes, self.tokenizer.decode(part.ids[:30]))
                journal.train, journal.position = long.before, part.after
                self.save()  # before the file is cut: a journal never speaks of more than there is
                self.files["train"].truncate(journal.train.tokens * self.dtype.itemsize)
                self.files["train"].seek(0, os.SEEK_END)

    def _report_copies(self, part, new):
        ends = np.cumsum(part.tokens)
        for n in np.flatnonzero(~new):
            start = int(ends[n] - part.tokens[n])
            self.journal.report.add("exact duplicates", int(part.text_bytes[n]), self.tokenizer.decode(part.ids[start : min(start + 30, int(ends[n]) - 1)]))

    def save(self) -> None:
        """Note how far the files are finished, safe from a power cut."""
        for file in (*self.files.values(), *([self.seen.log] if self.seen else [])):
            file.flush()
            os.fsync(file.fileno())
        self.journal.seen = self.seen.count if self.seen else 0
        self.journal.seconds += time.monotonic() - self.started
        self.saved = self.started = time.monotonic()
        write_whole(self.path, json.dumps(asdict(self.journal), ensure_ascii=False))

    def finish(self, val_fraction: float) -> None:
        """See that both splits hold text, and close the files. The journal then says how the text was split."""
        journal, share = self.journal, f"{100 * val_fraction:.3g}%"
        if not journal.split:
            journal.split = f"{share} of the documents by a hash of their text, those above 1 MB always in training"
            if not journal.train.tokens:  # few documents, all with low hashes
                self._move("val", "train", 0)
            if not val_fraction:
                journal.split = "all of it in training (--val_fraction 0)"
            elif not journal.val.tokens and journal.train.tokens > 1:
                journal.split = f"the last {share} of the text, no document being small enough or chosen by its hash"
                self._move("train", "val", journal.train.tokens - max(1, int(journal.train.tokens * val_fraction)))
            self.save()
        for name, file in self.files.items():
            file.truncate(getattr(self.journal, name).tokens * self.dtype.itemsize)
            file.close()
        if self.seen:
            self.seen.log.close()

    def _move(self, source, target, start):
        """Move the tokens from `start` on into the other file, which is empty; the source is cut once the journal knows."""
        lengths, text_bytes, documents = token_lengths(self.tokenizer), 0, 0
        self.files[source].flush()
        self.files[target].seek(0)
        for ids in read_ids(self.work / f"{source}.bin", self.dtype, start):
            self.files[target].write(ids.tobytes())
            text_bytes += int(lengths[ids].sum())
            documents += int((ids == self.tokenizer.eot_id).sum())
        old = getattr(self.journal, source)
        inside = start and self._last_before(source, start) != self.tokenizer.eot_id
        setattr(self.journal, target, Counts(old.tokens - start, documents, text_bytes))
        setattr(self.journal, source, Counts(start, old.documents - documents + int(inside), old.text_bytes - text_bytes))

    def _last_before(self, name, start):
        return np.fromfile(self.work / f"{name}.bin", self.dtype, 1, offset=(start - 1) * self.dtype.itemsize)[0]


def encode_all(sources: list[Source], options: Options, args, work: Path, dtype: str, tokenizer: Tokenizer) -> tuple[Journal, int]:
    """Tokenise everything that is not finished yet into the working folder. Returns the journal and peak memory of all processes in bytes."""
    output = Output(work, dtype, args.val_fraction, options.clean, tokenizer)
    start, peak = output.journal.position, 0
    if start != Position():
        print(f"continuing after {start.on_disk / 1e6:,.1f} MB of the input", file=sys.stderr)
    if not output.journal.split:
        function = functools.partial(encode_pieces, str(work / "tokenizer.json"), dtype, options)
        with Pool(worker_count(args.workers, sources)) as pool, progress_bar(sum(s.size for s in sources), start.on_disk, "tokenising") as bar:
            for _ in pool.map(load_tokenizer_once, [str(work / "tokenizer.json")] * len(pool.processes)):
                pass
            output.saved = output.started = time.monotonic()  # from here on it is tokenising
            for parts in pool.map(function, batches(read_pieces(sources, start, options))):
                for part in parts:
                    output.add(part)
                bar.update(part.after.on_disk - bar.n)
            peak = pool.close()
        output.save()
    if not output.journal.train.tokens and not output.journal.val.tokens:
        left_out = "; ".join(f"{rule}: {entry[0]:,}" for rule, entry in output.journal.report.rules.items())
        raise InputError(f"no document is left in {sources[0].path}" + (f" and {len(sources) - 1:,} more" if sources[1:] else "") + (f" ({left_out})" if left_out else ": only white space"))
    output.finish(args.val_fraction)
    return output.journal, peak + peak_memory()


def write_whole(path: Path, text: str) -> None:
    """Write a small file whole or not at all, also when the power fails."""
    partial = path.with_suffix(".partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def read_ids(path: Path, dtype, start: int = 0):
    """Yield the ids of a .bin from number `start` on, four million at a time."""
    with open(path, "rb") as file:
        file.seek(start * np.dtype(dtype).itemsize)
        while len(ids := np.fromfile(file, dtype, 1 << 22)):
            yield ids


def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of each id's text, 0 for end-of-text and for ids that stand for nothing, int32 [vocab_size]."""
    lengths = np.zeros(tokenizer.vocab_size, np.int32)
    for n in range(tokenizer.vocab_size):
        with contextlib.suppress(KeyError):
            lengths[n] = 0 if n == tokenizer.eot_id else len(tokenizer.decode_bytes([n]))
    return lengths
