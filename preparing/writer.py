"""Encoded documents -> train.bin and val.bin, in order, so that a killed run goes on where it was.

Where there are conversations, a mask next to each has a byte for each token. Splits the documents
between training and validation, drops copies, and records twice a second how far the files are
finished. Independent of text: documents are token ids and hashes here.
"""

import dataclasses
import hashlib
import math
import os
import shutil
import time
from pathlib import Path

import numpy as np

from formats.data_folder import IN_REPLY, Split, dtype_for
from formats.files import read_json, sha256, write_json
from preparing import PrepareError
from preparing.chunks import CHUNK_BYTES, Position
from preparing.cleaning import CleaningReport
from preparing.copies import Seen
from preparing.encoder import Encoded, token_lengths
from preparing.work_folder import WorkFolder
from tokenizer_bpe import Tokenizer

SPLITS = ("train", "val")
SAVE_SECONDS = 0.5  # between two records of how far the files are finished


class SplitWriter:
    """train.bin or val.bin as it grows, and its mask.

    tokens: in the file. digest: SHA-256 of them. counts, in_replies: how often each id occurs, and
    in replies, int64 [vocab_size]. last: the last id.
    """

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, tokens: int):
        """Continue the files after `tokens` tokens; what follows in them is cut off."""
        self.tokenizer = tokenizer
        self.dtype = np.dtype(dtype_for(tokenizer.vocab_size))
        self.tokens = tokens
        self.file = _open(folder / f"{name}.bin", tokens * self.dtype.itemsize)
        self.mask = _open(folder / f"{name}.mask.bin", tokens)
        self._count_all()

    def _count_all(self):
        """Count the tokens in the files."""
        self.digest = hashlib.sha256()
        self.counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        self.in_replies = np.zeros_like(self.counts)
        self.last = self.tokenizer.eot_id
        self.file.seek(0)
        self.mask.seek(0)
        for start in range(0, self.tokens, CHUNK_BYTES):
            size = min(CHUNK_BYTES, self.tokens - start)
            ids = np.fromfile(self.file, self.dtype, size)
            self._count(ids, np.fromfile(self.mask, np.uint8, size))

    def _count(self, ids, mask):
        self.digest.update(ids)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self.last = int(ids[-1])
        if mask is not None:
            replies = ids[mask & IN_REPLY > 0]
            self.in_replies += np.bincount(replies, minlength=len(self.counts))

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Write tokens. mask: uint8 [len(ids)]; None for zeros, which its file may lack."""
        if not len(ids):
            return
        self.file.write(ids)
        if mask is not None:
            self.mask.seek(self.tokens)
            self.mask.write(mask)
        self.tokens += len(ids)
        self._count(ids, mask)

    def end_document(self) -> None:
        """Write the end-of-text of a document that came in parts, unless none of it is left."""
        if self.last != self.tokenizer.eot_id:
            self.write(np.array([self.tokenizer.eot_id], self.dtype))

    def move_end(self, other: "SplitWriter", tokens: int) -> None:
        """Copy the last tokens to another split, which is empty; finish() cuts them off here."""
        self.mask.truncate(self.tokens)
        self.tokens -= tokens
        other.tokens = tokens
        self.file.seek(self.tokens * self.dtype.itemsize)
        self.mask.seek(self.tokens)
        for source, target in ((self.file, other.file), (self.mask, other.mask)):
            target.seek(0)
            shutil.copyfileobj(source, target)
        self._count_all()
        other._count_all()

    def sync(self) -> None:
        """Wait until the disk has what is written."""
        for file in (self.file, self.mask):
            file.flush()
            os.fsync(file.fileno())

    def finish(self, masked: bool) -> Split:
        """Close the files and describe them. masked: whether to keep the mask."""
        path, mask_path = Path(self.file.name), Path(self.mask.name)
        self.file.truncate(self.tokens * self.dtype.itemsize)
        if masked:
            self.mask.truncate(self.tokens)
        self.file.close()
        self.mask.close()
        lengths = token_lengths(self.tokenizer)
        ends = int(self.counts[self.tokenizer.eot_id])
        split = Split(
            file=path.name,
            tokens=self.tokens,
            documents=ends + int(self.last != self.tokenizer.eot_id),
            text_bytes=int(self.counts @ lengths),
            sha256=self.digest.hexdigest(),
        )
        if masked:
            split.mask = Split(
                file=mask_path.name,
                tokens=int(self.in_replies.sum()),
                text_bytes=int(self.in_replies @ lengths),
                sha256=sha256(mask_path),
            )
        else:
            mask_path.unlink()
        return split


def _open(path, size):
    """Open a file of exactly `size` bytes; what a shorter one lacks becomes zeros."""
    path.touch()
    os.truncate(path, size)
    return open(path, "r+b")


class TokenWriter:
    """Both splits as they grow in the working folder, and their journal, progress.json.

    position: where the next chunk begins. text_bytes: UTF-8 bytes of the text written; read: of the
    text that this start has read, written or not. split_by: how the text was split, in words, once
    all of it is written.
    """

    def __init__(self, work: WorkFolder, tokenizer: Tokenizer):
        """Continue where the journal ends. Raises PrepareError if a file has changed since."""
        self.work = work
        self.tokenizer = tokenizer
        saved = read_json(work.journal)
        self.position = Position(**saved.get("position", {}))
        self.report = CleaningReport(**saved.get("report", {}))
        self.text_bytes = saved.get("text_bytes", 0)
        self.read = 0
        self.split_by = saved.get("split", "")
        self.seen = None
        if work.plan.options.dedupe:
            self.seen = Seen(work.path / "hashes.bin", saved.get("seen", 0))
        self.splits = {}
        for name in SPLITS:
            tokens = saved["tokens"][name] if saved else 0
            split = SplitWriter(work.path, name, tokenizer, tokens)
            if saved and split.digest.hexdigest() != saved["sha256"][name]:
                raise PrepareError(
                    f"{work.path / name}.bin is not what it was when the work stopped: delete"
                    f" {work.path} and start again"
                )
            self.splits[name] = split
        self.train, self.val = self.splits.values()
        self.started = self.saved_at = time.monotonic()

    @property
    def is_full(self) -> bool:
        """True once the text that was asked for is written, up to the end of a document."""
        return self.text_bytes >= self.work.most_bytes and not self.position.inside

    @property
    def done(self) -> int:
        """Bytes of text so far where --gigabytes limits them, else of the input files."""
        return self.position.on_disk if math.isinf(self.work.most_bytes) else self.text_bytes

    def add(self, part: Encoded) -> None:
        """Write the new documents of the next chunk, and at times record how far it went.

        The hash of its text chooses a document's split. Parts of a long one are for training.
        """
        self.report.merge(part.report)
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
        val_fraction = self.work.settings["val_fraction"]
        val = short & (part.hashes < np.uint64(val_fraction * 2**64))
        for split, rows in ((self.train, new & ~val), (self.val, new & val)):
            tokens = slice(None) if rows.all() else np.repeat(rows, part.tokens)
            split.write(part.ids[tokens], None if part.mask is None else part.mask[tokens])
            self.text_bytes += int(part.text_bytes[rows].sum())
        if not part.whole and not part.end.inside:
            self.train.end_document()
        self.position = part.end
        self.read += int(part.text_bytes.sum())
        if time.monotonic() - self.saved_at > SAVE_SECONDS:
            self.save()

    def save(self) -> None:
        """Record how far the files are finished, safe from a power cut."""
        for split in self.splits.values():
            split.sync()
        self.saved_at = time.monotonic()
        values = {
            "position": dataclasses.asdict(self.position),
            "tokens": {name: split.tokens for name, split in self.splits.items()},
            "sha256": {name: split.digest.hexdigest() for name, split in self.splits.items()},
            "text_bytes": self.text_bytes,
            "report": dataclasses.asdict(self.report),
            "seen": self.seen.save() if self.seen else 0,
            "split": self.split_by,
        }
        write_json(self.work.journal, values)

    def finish(self) -> dict[str, Split]:
        """Make sure that both splits hold text, close their files, and describe them."""
        if not self.split_by:
            self.split_by = self._settle_split()
            self.save()
        self.seconds = time.monotonic() - self.started
        masked = any(split.in_replies.any() for split in self.splits.values())
        return {name: split.finish(masked) for name, split in self.splits.items()}

    def _settle_split(self):
        """Give an empty split its share of the text; returns how the text is split, in words."""
        train, val = self.train, self.val
        val_fraction = self.work.settings["val_fraction"]
        share = f"{100 * val_fraction:.3g}%"
        if not train.tokens:  # few documents, all with low hashes
            val.move_end(train, val.tokens)
        if not val_fraction:
            return "all of it in training (--val_fraction 0)"
        if val.tokens or train.tokens < 2:
            return f"{share} of the documents by a hash of their text, those above 1 MB in training"
        train.move_end(val, max(1, int(train.tokens * val_fraction)))
        return f"the last {share} of the text, for no document is small enough or has such a hash"
