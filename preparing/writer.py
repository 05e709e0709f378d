"""Encoded documents -> train.bin and val.bin, in order, so that a killed run goes on where it was.

From the first conversation on, a mask grows next to each, with a byte for each token. Splits the
documents between training and validation, drops copies, and records twice a second how far the
files are finished. Independent of text: documents are token ids and hashes here.
"""

import hashlib
import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from formats.data_folder import IN_REPLY, Split, dtype_for
from formats.files import sha256, write_json
from preparing import PrepareError
from preparing.chunks import CHUNK_BYTES, Position
from preparing.cleaning import CleaningReport
from preparing.copies import Seen
from preparing.encoder import Encoded, token_lengths
from preparing.work_folder import WorkFolder
from tokenizer_bpe import Tokenizer

SPLITS = ("train", "val")
SAVE_SECONDS = 0.5  # between two records of how far the files are finished
EXAMPLE_TOKENS = 30  # of a copy, for the report


@dataclass
class Journal:
    """How far the files are finished; the content of progress.json.

    position: where the next chunk begins. tokens: in each file. sha256: of these. masked: bytes in
    each mask; tokens after them are in no conversation. text_bytes: UTF-8 bytes of the text
    written; read: of the text so far, written or not. seen: documents in the log of hashes.
    seconds: spent tokenising, over all starts. split: how the text was split, in words, once all of
    it is there.
    """

    position: Position = field(default_factory=Position)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    sha256: dict[str, str] = field(default_factory=dict)
    masked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: int = 0
    report: CleaningReport = field(default_factory=CleaningReport)
    seen: int = 0
    read: int = 0
    seconds: float = 0.0
    split: str = ""

    @classmethod
    def load(cls, path: Path) -> "Journal":
        """As save() wrote it, or a new one where there is none."""
        if not path.exists():
            return cls()
        values = json.loads(path.read_text(encoding="utf-8"))
        values["position"] = Position(**values["position"])
        values["report"] = CleaningReport(**values["report"])
        return cls(**values)


class SplitWriter:
    """train.bin or val.bin as it grows, its mask, and what meta.json says of both."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer, tokens: int, masked: int):
        """Open the files where the journal says that they end; PrepareError if one is shorter."""
        self.name = name
        self.tokenizer = tokenizer
        self.dtype = np.dtype(dtype_for(tokenizer.vocab_size))
        self.tokens = tokens
        self.masked = masked
        self.file = _open(folder / f"{name}.bin", tokens * self.dtype.itemsize)
        self.mask = _open(folder / f"{name}.mask.bin", masked)
        self._tally()

    def _tally(self):
        """Count from the files what is in them."""
        self.digest = hashlib.sha256()
        self.counts = np.zeros(self.tokenizer.vocab_size, np.int64)
        self.in_replies = np.zeros(self.tokenizer.vocab_size, np.int64)
        self.last = self.tokenizer.eot_id
        self.file.seek(0)
        self.mask.seek(0)
        while len(ids := np.fromfile(self.file, self.dtype, CHUNK_BYTES)):
            self._count(ids, np.fromfile(self.mask, np.uint8, len(ids)))

    def _count(self, ids, mask):
        self.digest.update(ids)
        self.counts += np.bincount(ids, minlength=len(self.counts))
        if len(mask):
            replies = ids[: len(mask)][mask & IN_REPLY > 0]
            self.in_replies += np.bincount(replies, minlength=len(self.counts))
        self.last = int(ids[-1])

    def write(self, ids: np.ndarray, mask: np.ndarray | None = None) -> None:
        """Write tokens. mask: uint8 [len(ids)]; None leaves a hole in its file: zeros."""
        if not len(ids):
            return
        self.file.write(ids.tobytes())
        if mask is None or not mask.any():
            mask = np.zeros(0, np.uint8)
        else:
            self.mask.seek(self.tokens)
            self.mask.write(mask.tobytes())
            self.masked = self.mask.tell()
        self.tokens += len(ids)
        self._count(ids, mask)

    def end_document(self) -> None:
        """Write the end-of-text of a document that came in parts, unless none of it is left."""
        if self.last != self.tokenizer.eot_id:
            self.write(np.array([self.tokenizer.eot_id], self.dtype))

    def fill_mask(self) -> None:
        """Give the mask its length."""
        self.mask.truncate(self.tokens)
        self.masked = self.tokens

    def move_end(self, other: "SplitWriter", tokens: int) -> None:
        """Copy the last tokens to another one, which is empty; finish() cuts them off here."""
        self.tokens -= tokens
        self.masked = min(self.masked, self.tokens)
        other.tokens = tokens
        width = self.dtype.itemsize
        for source, target, start in (
            (self.file, other.file, self.tokens * width),
            (self.mask, other.mask, self.tokens),
        ):
            source.seek(start)
            target.seek(0)
            shutil.copyfileobj(source, target)
        other.masked = other.mask.tell()

    def sync(self) -> None:
        """Have what is written on the disk."""
        for file in (self.file, self.mask):
            file.flush()
            os.fsync(file.fileno())

    def finish(self) -> Split:
        """Close the files, the mask only where it has any bytes; what meta.json says of them."""
        self.file.truncate(self.tokens * self.dtype.itemsize)
        self.mask.truncate(self.masked)
        if self.counts.sum() != self.tokens:  # some were moved
            self._tally()
        self.file.close()
        self.mask.close()
        lengths = token_lengths(self.tokenizer)
        path, mask_path = Path(self.file.name), Path(self.mask.name)
        eots = int(self.counts[self.tokenizer.eot_id])
        split = Split(
            file=path.name,
            tokens=self.tokens,
            documents=eots + int(self.last != self.tokenizer.eot_id),
            text_bytes=int(self.counts @ lengths),
            sha256=self.digest.hexdigest(),
        )
        if self.masked:
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
    """A file to write on after its first `size` bytes; what the journal does not count goes."""
    path.touch()
    if path.stat().st_size < size:
        raise damaged(path)
    os.truncate(path, size)
    return open(path, "r+b")


def damaged(path: Path) -> PrepareError:
    return PrepareError(
        f"{path} is not what it was when the work stopped: delete {path.parent} and start again"
    )


class TokenWriter:
    """Both splits as they grow in the working folder, and their journal."""

    def __init__(self, work: WorkFolder, tokenizer: Tokenizer):
        """Open the files where the journal says that they end; PrepareError if one has changed."""
        self.tokenizer = tokenizer
        self.val_fraction = work.settings["val_fraction"]
        self.most_bytes = work.most_bytes
        self.folder = work.path
        self.journal = journal = Journal.load(self.folder / "progress.json")
        self.splits = {
            name: SplitWriter(
                self.folder, name, tokenizer, journal.tokens[name], journal.masked[name]
            )
            for name in SPLITS
        }
        known = {} if journal.split else journal.sha256  # settling the split changes the files
        for name in known:
            if known[name] != self.splits[name].digest.hexdigest():
                raise damaged(self.folder / f"{name}.bin")
        self.train, self.val = self.splits.values()
        self.seen = None
        if work.plan.options.dedupe:
            self.seen = Seen(self.folder / "hashes.bin", journal.seen)
        self.counted_from = time.monotonic()

    @property
    def is_full(self) -> bool:
        """Whether the text that was asked for is there, up to the end of a document."""
        journal = self.journal
        return journal.text_bytes >= self.most_bytes and not journal.position.inside

    @property
    def done(self) -> int:
        """How far it is: bytes of text where --gigabytes limits them, else of the input files."""
        journal = self.journal
        return journal.position.on_disk if math.isinf(self.most_bytes) else journal.text_bytes

    def add(self, part: Encoded) -> None:
        """Write the documents of the next chunk, and at times record how far it went."""
        journal = self.journal
        journal.report.merge(part.report)
        if part.whole:
            self._add_documents(part)
        else:  # a part of a long document, which is for training
            self.train.write(part.ids)
            journal.text_bytes += int(part.text_bytes.sum())
            if not part.end.inside:
                self.train.end_document()
        journal.position = part.end
        journal.read += int(part.text_bytes.sum())
        if time.monotonic() - self.counted_from > SAVE_SECONDS:
            self.save()

    def _add_documents(self, part):
        """Write those that are new, each to the split that the hash of its text chooses."""
        short = part.text_bytes <= CHUNK_BYTES
        new = np.ones(len(short), bool)
        if self.seen:
            new[short] = self.seen.first(part.hashes[short])
            self._report_copies(part, ~new)
        sizes = part.text_bytes * new
        written_before = self.journal.text_bytes + np.cumsum(sizes) - sizes
        new &= written_before < self.most_bytes
        val = short & (part.hashes < np.uint64(self.val_fraction * 2**64))
        for split, rows in ((self.train, new & ~val), (self.val, new & val)):
            tokens = slice(None) if rows.all() else np.repeat(rows, part.tokens)
            split.write(part.ids[tokens], None if part.mask is None else part.mask[tokens])
            self.journal.text_bytes += int(part.text_bytes[rows].sum())

    def _report_copies(self, part, rows):
        """Report the documents for which `rows`, bool [documents], says that they are copies."""
        ends = np.cumsum(part.tokens)
        for n in np.flatnonzero(rows):
            ids = part.ids[ends[n] - part.tokens[n] : ends[n] - 1]
            example = self.tokenizer.decode(ids[:EXAMPLE_TOKENS])
            self.journal.report.add("exact duplicates", 1, int(part.text_bytes[n]), [example])

    def save(self) -> None:
        """Record how far the files are finished, safe from a power cut."""
        journal = self.journal
        for name, split in self.splits.items():
            split.sync()
            journal.tokens[name] = split.tokens
            journal.sha256[name] = split.digest.hexdigest()
            journal.masked[name] = split.masked
        journal.seen = self.seen.save() if self.seen else 0
        now = time.monotonic()
        journal.seconds += now - self.counted_from
        self.counted_from = now
        write_json(self.folder / "progress.json", asdict(journal))

    def finish(self) -> dict[str, Split]:
        """See that both splits hold text, and close the files; what meta.json says of each."""
        if not self.journal.split:
            if self.train.masked or self.val.masked:
                self.train.fill_mask()
                self.val.fill_mask()
            self.journal.split = self._settle_split()
            self.save()
        return {name: split.finish() for name, split in self.splits.items()}

    def _settle_split(self):
        """Give an empty split its share of the text; returns how the text is split, in words."""
        train, val = self.train, self.val
        share = f"{100 * self.val_fraction:.3g}%"
        if not train.tokens:  # few documents, all with low hashes
            val.move_end(train, val.tokens)
        if not self.val_fraction:
            return "all of it in training (--val_fraction 0)"
        if val.tokens or train.tokens < 2:
            return f"{share} of the documents by a hash of their text, those above 1 MB in training"
        train.move_end(val, max(1, int(train.tokens * self.val_fraction)))
        return f"the last {share} of the text, for no document is small enough or has such a hash"

    @property
    def used(self) -> float:
        """The share of the ids that occur."""
        return float((self.train.counts + self.val.counts > 0).mean())
