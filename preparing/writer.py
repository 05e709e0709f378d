"""Encoded documents -> train.bin and val.bin, in order, so that a killed run continues.

If there are conversations, a mask file next to each has one byte per token. Splits the documents
between training and validation, drops copies, and records twice a second how far the files are
finished. Knows documents by their token ids and hashes, not their text.
"""

import dataclasses
import hashlib
import math
import os
import time
from pathlib import Path

import numpy as np

from command_line import plural
from formats.data_folder import IN_REPLY, TURN_BEGINS, Split, dtype_for
from formats.files import patiently, read_checked, sha256, write_checked
from preparing import PrepareError
from preparing.chunks import CHUNK_BYTES, Position
from preparing.cleaning import CleaningReport
from preparing.documents import Seen
from preparing.encoder import Encoded, token_lengths
from preparing.split import draw_by_chance, draw_of, find_cut, is_fair
from preparing.work_folder import WorkFolder
from tokenizer_bpe import Tokenizer

SPLITS = ("train", "val")
KNOWN_BYTES = 4 << 20  # texts up to this size are read whole before they are split
SAVE_SECONDS = 0.5  # between records of progress


class SplitWriter:
    """train.bin or val.bin as it grows, and its mask.

    tokens: how many the file has. digest: their SHA-256. counts, in_replies: int64 [vocab_size],
    how often each id occurs, in all and in replies. last: the last id.
    """

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, tokens: int, marked: int = 0):
        """Continue the files after `tokens` tokens, and cut off the rest.

        marked: how many tokens there were when mark() was called.
        """
        self.tokenizer = tokenizer
        self.dtype = np.dtype(dtype_for(tokenizer.vocab_size))
        self.file = _open(folder / f"{name}.bin", tokens * self.dtype.itemsize)
        self.mask = _open(folder / f"{name}.mask.bin", tokens)
        self._start_counting()
        self._count_to(marked)
        self.mark()
        self._count_to(tokens)

    def _start_counting(self):
        self.tokens = 0
        self.digest = hashlib.sha256()
        self.counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        self.in_replies = np.zeros_like(self.counts)
        self.last = self.tokenizer.eot_id

    def _count_to(self, tokens):
        """Count the file's tokens from self.tokens up to `tokens`."""
        for ids, mask in self._blocks(self.tokens, tokens):
            self._count(ids, mask)

    def _blocks(self, start, end):
        """Tokens start .. end - 1 of the file with their mask, in blocks."""
        for first in range(start, end, CHUNK_BYTES):
            size = min(CHUNK_BYTES, end - first)
            self.file.seek(first * self.dtype.itemsize)
            self.mask.seek(first)
            mask = np.zeros(size, np.uint8)
            found = np.fromfile(self.mask, np.uint8, size)
            mask[: len(found)] = found
            yield np.fromfile(self.file, self.dtype, size), mask

    def _count(self, ids, mask):
        self.tokens += len(ids)
        self.digest.update(ids)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.last = int(ids[-1])
        if mask is not None:
            replies = ids[mask & IN_REPLY > 0]
            self.in_replies += np.bincount(replies, minlength=len(self.counts))

    @property
    def text_bytes(self) -> int:
        return int(self.counts @ token_lengths(self.tokenizer))

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Write tokens. mask: uint8 [len(ids)]; None for zeros, which need not be written."""
        if not len(ids):
            return
        self.file.seek(self.tokens * self.dtype.itemsize)
        self.file.write(ids)
        if mask is not None:
            self.mask.seek(self.tokens)
            self.mask.write(mask)
        self._count(ids, mask)

    def end_document(self) -> None:
        """Write end-of-text if the last document lacks it."""
        if self.is_inside:
            eot = np.array([self.tokenizer.eot_id], self.dtype)
            self.write(eot, np.zeros(1, np.uint8))

    def mark(self) -> None:
        """Save the counts at this point, so that a later move_end() need not count again."""
        arrays = (self.digest, self.counts, self.in_replies)
        self.marked = (self.tokens, self.last, *(array.copy() for array in arrays))

    def place_to_cut(self, start: int, end_bytes: float) -> int:
        """A place after `start` that roughly the last `end_bytes` bytes follow; else `start`."""
        if self.tokens == start:
            return start
        self.file.flush()
        ids = np.memmap(self.file.name, self.dtype, "r", shape=(self.tokens,))[start:]
        self.mask.truncate(self.tokens)  # which flushes
        mask = np.memmap(self.mask.name, np.uint8, "r", shape=(self.tokens,))[start:]
        return start + find_cut(self.tokenizer, ids, end_bytes, mask)

    def move_end(self, other: "SplitWriter", start: int) -> None:
        """Move the tokens from `start` on to the end of another split.

        In this file their bytes remain until write() overwrites or finish() truncates them.
        """
        end = self.tokens
        for ids, mask in self._blocks(start, end):
            if mask[0] == IN_REPLY | TURN_BEGINS and not other.is_inside:
                # The speaker's name counted as the end of a reply, which now is in another file.
                mask[: np.argmin(mask & IN_REPLY)] &= ~np.uint8(IN_REPLY)
            other.write(ids, mask)
        marked, last, *arrays = self.marked
        if marked > start:
            self._start_counting()
        else:
            self.tokens = marked
            self.last = last
            self.digest, self.counts, self.in_replies = (array.copy() for array in arrays)
        self._count_to(start)

    @property
    def is_inside(self) -> bool:
        """True if the last document lacks its end-of-text."""
        return self.last != self.tokenizer.eot_id

    def sync(self) -> None:
        """Flush both files to disk."""
        for file in (self.file, self.mask):
            file.flush()
            os.fsync(file.fileno())

    def finish(self, masked: bool) -> Split:
        """Close the files and describe them. masked: whether to keep the mask."""
        path, mask_path = Path(self.file.name), Path(self.mask.name)
        self.file.truncate(self.tokens * self.dtype.itemsize)
        if masked:
            self.mask.truncate(self.tokens)
        self.sync()
        self.file.close()
        self.mask.close()
        split = Split(
            file=path.name,
            tokens=self.tokens,
            documents=int(self.counts[self.tokenizer.eot_id]),
            text_bytes=self.text_bytes,
            sha256=self.digest.hexdigest(),
        )
        if masked:
            split.mask = Split(
                file=mask_path.name,
                tokens=int(self.in_replies.sum()),
                text_bytes=int(self.in_replies @ token_lengths(self.tokenizer)),
                sha256=sha256(mask_path),
            )
        else:
            patiently(mask_path.unlink)
        return split


def _open(path, size):
    """Open a file, truncated or padded with zeros to exactly `size` bytes."""
    path.touch()
    os.truncate(path, size)
    return open(path, "r+b")


class TokenWriter:
    """Both splits as they grow in the working folder, and their journal, progress.json.

    position: where the next chunk begins. text_bytes: UTF-8 bytes of the text written. read: those
    that this process has read, written or not. split_by: how the text was split, in words; "" until
    all of it is written. waiting: the parts of the text until it exceeds KNOWN_BYTES; then None.
    """

    def __init__(self, work: WorkFolder, tokenizer: Tokenizer):
        """Continue where the journal ends. Raises PrepareError if a file has changed since."""
        self.work = work
        self.tokenizer = tokenizer
        saved = read_checked(work.journal)
        self.position = Position(**saved.get("position", {}))
        self.report = CleaningReport(**saved.get("report", {}))
        self.text_bytes = saved.get("text_bytes", 0)
        self.read = 0
        self.split_by = saved.get("split", "")
        self.ends = saved.get("ends", 0)
        self.long = saved.get("long")  # first token, bytes and hash of an unfinished document
        self.waiting = None if saved else []
        self.val_fraction = work.settings["val_fraction"]
        self.draw = draw_by_chance(self.val_fraction, work.text_size)
        self.seen = None
        if work.plan.options.dedupe:
            self.seen = Seen(work.path / "hashes.bin", saved.get("seen", 0))
            work.open_files.enter_context(self.seen.log)
        self.splits = {}
        for name in SPLITS:
            tokens = saved["tokens"][name] if saved else 0
            marked = self.long["first"] if self.long and name == "train" else 0
            split = SplitWriter(work.path, name, tokenizer, tokens, marked)
            for file in (split.file, split.mask):
                work.open_files.enter_context(file)
            if saved and split.digest.hexdigest() != saved["digests"][name]:
                raise PrepareError(
                    f"{work.path / name}.bin is not what it was when the work stopped: delete"
                    f" {work.path} and start again"
                )
            self.splits[name] = split
        self.train, self.val = self.splits.values()
        if not self.position.inside:
            self.train.end_document()
        self.started = self.saved_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """True once as much text as --gigabytes asks for is written, with whole documents."""
        return self.text_bytes >= self.work.most_bytes and not self.position.inside

    @property
    def done(self) -> int:
        """Progress in bytes: of text if --gigabytes limits it, else of the input files."""
        return self.position.on_disk if math.isinf(self.work.most_bytes) else self.text_bytes

    def add(self, part: Encoded) -> None:
        """Write the new documents of the next chunk, and record progress every SAVE_SECONDS."""
        self.report.merge(part.report)
        self.read += int(part.text_bytes.sum())
        self.position = part.end
        part = part.only(self._asked_for(part))
        self.text_bytes += int(part.text_bytes.sum())
        if self.waiting is not None:
            self.waiting.append(part)
            if self.text_bytes > KNOWN_BYTES:
                self._write_waiting()
                self.save()
        else:
            moved = self._write(part)
            # Later writes overwrite tokens that were moved, which the last record still counts.
            if moved or time.monotonic() - self.saved_at > SAVE_SECONDS:
                self.save()
            if not self.position.inside:
                self.train.end_document()

    def _asked_for(self, part):
        """Which documents are neither copies nor beyond --gigabytes, bool [documents]."""
        short = part.whole & (part.text_bytes <= CHUNK_BYTES)
        new = np.ones(len(short), bool)
        if self.seen:
            new[short] = self.seen.first(part.hashes[short])
            copies = part.text_bytes[~new]
            if len(copies):
                self.report.add("exact duplicates", len(copies), int(copies.sum()), [])
        if part.whole:
            sizes = part.text_bytes * new
            written_before = self.text_bytes + np.cumsum(sizes) - sizes
            new &= written_before < self.work.most_bytes
        return new

    def _write_waiting(self):
        """Write the waiting parts. save() must not be called in the meantime."""
        for part in self.waiting:
            self._write(part)
            if not part.end.inside:
                self.train.end_document()
        self.waiting = None

    def _write(self, part):
        """Write documents, or a part of one; returns True if text moved from train to val."""
        if not part.whole:
            return self._write_part(part)
        shares = self._shares(part.hashes, part.text_bytes, part.conversations)
        ends = np.cumsum(part.tokens)
        val = np.repeat(shares > 0, part.tokens)
        cuts = []
        for n in np.flatnonzero((shares > 0) & (shares < 1)):
            first = ends[n] - part.tokens[n]
            ids = part.ids[first : ends[n]]
            cut = find_cut(self.tokenizer, ids, shares[n] * part.text_bytes[n])
            val[first : first + (cut or len(ids))] = False
            if cut:
                cuts.append(first + cut)
        self.ends += len(cuts)
        ids = np.insert(part.ids, cuts, self.tokenizer.eot_id)
        val = np.insert(val, cuts, False)
        mask = None if part.mask is None else np.insert(part.mask, cuts, 0)
        for split, rows in ((self.train, ~val), (self.val, val)):
            split.write(ids[rows], None if mask is None else mask[rows])
        return False

    def _write_part(self, part):
        """Write a part of a long document; after the last part, move its end to validation.

        Returns True if text moved.
        """
        if not self.long:
            self.long = {"first": self.train.tokens, "bytes": 0, "hash": None}
            self.train.mark()
        self.train.write(part.ids, part.mask)
        self.long["bytes"] += int(part.text_bytes.sum())
        if self.long["hash"] is None and len(part.hashes):
            self.long["hash"] = int(part.hashes[0])
        if part.end.inside:
            return False
        first, size, found = self.long.values()
        self.long = None
        (share,) = self._shares(np.array([found or 0], np.uint64), np.array([size]), np.array([0]))
        cut = self.train.place_to_cut(first, share * size) if share else first
        if cut == first:
            return False
        self._move_end(cut)
        self.ends += 1
        return True

    def _shares(self, hashes, sizes, uncut):
        if not self.val_fraction:
            return np.zeros(len(hashes))
        return self.draw.shares(hashes, sizes, uncut > 0)

    def _move_end(self, cut):
        self.train.move_end(self.val, cut)
        self.val.end_document()

    def save(self) -> None:
        """Record how far the files are finished; survives a power cut."""
        for split in self.splits.values():
            split.sync()
        self.saved_at = time.monotonic()
        values = {
            "position": dataclasses.asdict(self.position),
            "tokens": {name: split.tokens for name, split in self.splits.items()},
            "digests": {name: split.digest.hexdigest() for name, split in self.splits.items()},
            "text_bytes": self.text_bytes,
            "report": dataclasses.asdict(self.report),
            "seen": self.seen.save() if self.seen else 0,
            "long": self.long,
            "ends": self.ends,
            "split": self.split_by,
        }
        write_checked(self.work.journal, values)

    def finish(self) -> dict[str, Split]:
        """Make sure that both splits hold text, close their files, and describe them."""
        if not self.split_by:
            if self.waiting:
                if self.val_fraction:
                    self.draw = self._draw_of_waiting()
                self._write_waiting()
            self.split_by = self._settle_split()
            self.save()
        self.train.end_document()
        self.seconds = time.monotonic() - self.started
        masked = any(split.in_replies.any() for split in self.splits.values())
        return {name: split.finish(masked) for name, split in self.splits.items()}

    def _draw_of_waiting(self):
        """The draw for a text that is waiting as a whole."""
        documents = []  # hash, bytes, whether it is a conversation
        is_inside = False
        for part in self.waiting:
            columns = (part.hashes, part.text_bytes, part.conversations)
            for row in zip(*(column.tolist() for column in columns), strict=True):
                if is_inside:
                    first, size, _ = documents[-1]
                    documents[-1] = (first, size + row[1], False)
                else:
                    documents.append(row)
                    is_inside = part.end.inside
            is_inside &= part.end.inside
        hashes, sizes, uncut = zip(*documents, strict=True)
        arrays = (np.array(hashes, np.uint64), np.array(sizes), np.array(uncut))
        return draw_of(self.val_fraction, *arrays)

    def _settle_split(self):
        """Give validation the end of the text if the draw was far from its share.

        Returns how the text was split, in words.
        """
        train, val = self.train, self.val
        if not self.val_fraction:
            return "none (--val_fraction 0)"
        if is_fair(self.val_fraction, train.text_bytes, val.text_bytes):
            whole = int(val.counts[self.tokenizer.eot_id]) - self.ends
            found = {"whole": whole, "cut, of which it gets the end": self.ends}
            counted = [f"{plural(n, 'document')} {how}" for how, n in found.items() if n]
            return " and ".join(counted)
        val.move_end(train, 0)
        self.save()
        cut = train.place_to_cut(0, self.val_fraction * train.text_bytes)
        if not cut:
            return "none, because the text is too short"
        self._move_end(cut)
        return "the end of the text"
