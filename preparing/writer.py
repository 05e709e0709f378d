"""Encoded documents -> train.bin and val.bin, in order, so that a killed run goes on where it was.

From the first conversation on, a mask grows next to each, with a byte for each token. Splits the
documents between training and validation, drops copies, and records twice a second how far the
files are finished. Independent of text: documents are token ids and hashes here.
"""

import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from formats.data_folder import dtype_for
from formats.files import write_json
from preparing import PrepareError
from preparing.chunks import CHUNK, Position
from preparing.cleaning import CleaningReport
from preparing.copies import Seen, hash64
from preparing.encoder import Encoded
from preparing.job import Plan, WorkFolder
from tokenizer_bpe import Tokenizer

SPLITS = ("train", "val")
SAVE_SECONDS = 0.5  # between two records of how far the files are finished
EXAMPLE_TOKENS = 30  # of a copy, for the report
COPIES = {None: (), "exact": ("exact",), "near": ("exact", "near")}  # to drop, by --dedupe


@dataclass
class LongDocument:
    """A document of several chunks that is under way.

    hash: of its chunks so far. noise: the rule by which its beginning was noise. tokens,
    text_bytes: in training before it, to return to should it prove a copy.
    """

    hash: int = 0
    noise: str = ""
    tokens: int = 0
    text_bytes: int = 0


@dataclass
class Journal:
    """How far the files are finished; the content of progress.json.

    position: where the next chunk begins. tokens: in each file. masked: bytes in each mask; tokens
    after them are in no conversation. text_bytes: UTF-8 bytes of the text written; read: of the
    text so far, written or not. seen: keys in the log of each kind of copies. seconds: spent
    tokenising, over all starts. split: how the text was split, in words, once all of it is there.
    """

    position: Position = field(default_factory=Position)
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    masked: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPLITS, 0))
    text_bytes: int = 0
    report: CleaningReport = field(default_factory=CleaningReport)
    long: LongDocument = field(default_factory=LongDocument)
    seen: dict[str, int] = field(default_factory=dict)
    read: int = 0
    seconds: float = 0.0
    split: str = ""

    @classmethod
    def load(cls, path: Path) -> "Journal":
        """As it was saved, or a new one where there is none."""
        if not path.exists():
            return cls()
        values = json.loads(path.read_text(encoding="utf-8"))
        values["position"] = Position(**values["position"])
        values["report"] = CleaningReport(**values["report"])
        values["long"] = LongDocument(**values["long"])
        return cls(**values)


class Output:
    """train.bin and val.bin as they grow in the working folder, their masks, and their journal."""

    def __init__(self, plan: Plan, work: WorkFolder, tokenizer: Tokenizer):
        """Open the files where the journal says that they end; PrepareError if one is shorter."""
        self.tokenizer = tokenizer
        self.val_fraction = plan.settings["val_fraction"]
        self.most_bytes = plan.most_bytes
        self.work = work.path
        self.journal = Journal.load(self.work / "progress.json")
        self.width = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
        self.files = {}
        self.masks = {}
        for split in SPLITS:
            self.files[split] = self._open(f"{split}.bin", self.journal.tokens[split] * self.width)
            self.masks[split] = self._open(f"{split}.mask.bin", self.journal.masked[split])
        self.seen = {
            kind: Seen(self.work, kind, self.journal.seen.get(kind, 0))
            for kind in COPIES[plan.options.dedupe]
        }
        self.start_clock()

    def _open(self, name, size):
        """A file to write on after its first `size` bytes; what the journal does not count goes."""
        path = self.work / name
        path.touch()
        if path.stat().st_size < size:
            raise PrepareError(
                f"{path} is shorter than it was when the work stopped; the disk lost data: delete"
                f" {path.parent} and start again"
            )
        os.truncate(path, size)
        file = open(path, "r+b")  # noqa: SIM115 - finish() closes it
        file.seek(size)
        return file

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

    def start_clock(self) -> None:
        """Start counting the seconds spent tokenising, and those to the next save."""
        self.counted_from = time.monotonic()

    def add(self, part: Encoded) -> None:
        """Write the documents of the next chunk, and at times record how far it went."""
        self.journal.report.merge(part.report)
        if part.chunk.whole:
            self._add_documents(part)
        else:
            self._add_to_long_document(part)
        self.journal.position = part.chunk.end
        self.journal.read += int(part.text_bytes.sum())
        if time.monotonic() - self.counted_from > SAVE_SECONDS:
            self.save()

    def _add_documents(self, part):
        """Write those that are new, each to the split that the hash of its text chooses."""
        new = np.ones(len(part.hashes), bool)
        for kind, seen in self.seen.items():
            keys = part.keys if kind == "near" else part.hashes[:, None]
            copies = new.copy()
            copies[new] = ~seen.first(keys[new])
            self._report_copies(kind, part, copies)
            new &= ~copies
        sizes = part.text_bytes * new
        written_before = self.journal.text_bytes + np.cumsum(sizes) - sizes
        new &= written_before < self.most_bytes
        chosen = part.hashes < np.uint64(self.val_fraction * 2**64)
        val = chosen & (part.text_bytes <= CHUNK)
        for split, rows in (("train", new & ~val), ("val", new & val)):
            tokens = slice(None) if rows.all() else np.repeat(rows, part.tokens)
            self._write(split, part.ids[tokens], None if part.mask is None else part.mask[tokens])
            self.journal.text_bytes += int(part.text_bytes[rows].sum())

    def _add_to_long_document(self, part):
        """Write a part of a document of several chunks to training, unless its beginning was noise.

        It is taken back at its end should it prove a copy.
        """
        journal = self.journal
        size = int(part.text_bytes.sum())
        if part.chunk.begins:
            journal.long = LongDocument(
                noise=part.report.noise,
                tokens=journal.tokens["train"],
                text_bytes=journal.text_bytes,
            )
        long = journal.long
        long.hash = hash64(long.hash.to_bytes(8, "little") + part.hashes.tobytes())
        if long.noise:
            journal.report.add(long.noise, 0, size, [])
            return
        self._write("train", part.ids)
        journal.text_bytes += size
        if not part.chunk.ends or journal.tokens["train"] == long.tokens:
            return  # not at its end, or all of its parts were skipped
        if self.seen and not self.seen["exact"].first(np.array([[long.hash]], np.uint64))[0]:
            self._report_copy("exact", part.ids, journal.text_bytes - long.text_bytes)
            journal.tokens["train"] = long.tokens
            journal.text_bytes = long.text_bytes
            # Not cut off: the journal on the disk may still count the copy.
            self.files["train"].seek(long.tokens * self.width)
        else:
            self._write("train", np.array([self.tokenizer.eot_id], part.ids.dtype))

    def _write(self, split, ids, mask=None):
        """Write tokens. mask: uint8 [len(ids)]; None leaves a hole in its file: zeros."""
        self.files[split].write(ids.tobytes())
        if mask is not None and mask.any():
            self.masks[split].seek(self.journal.tokens[split])
            self.masks[split].write(mask.tobytes())
            self.journal.masked[split] = self.masks[split].tell()
        self.journal.tokens[split] += len(ids)

    def _report_copies(self, kind, part, rows):
        """Report the documents for which `rows`, bool [documents], says that they are copies."""
        ends = np.cumsum(part.tokens)
        for n in np.flatnonzero(rows):
            ids = part.ids[ends[n] - part.tokens[n] : ends[n] - 1]
            self._report_copy(kind, ids, int(part.text_bytes[n]))

    def _report_copy(self, kind, ids, text_bytes):
        example = self.tokenizer.decode(ids[:EXAMPLE_TOKENS])
        self.journal.report.add(f"{kind} duplicates", 1, text_bytes, [example])

    def save(self) -> None:
        """Record how far the files are finished, safe from a power cut."""
        for file in (*self.files.values(), *self.masks.values()):
            file.flush()
            os.fsync(file.fileno())
        self.journal.seen = {kind: seen.save() for kind, seen in self.seen.items()}
        self.journal.seconds += time.monotonic() - self.counted_from
        self.start_clock()
        write_json(self.work / "progress.json", asdict(self.journal))

    def finish(self) -> None:
        """See that both splits hold text, record how it was split, and close the files."""
        journal = self.journal
        has_masks = any(journal.masked.values())
        if not journal.split:
            if has_masks:
                for split, mask in self.masks.items():
                    mask.truncate(journal.tokens[split])
            journal.split = self._settle_split()
            if has_masks:
                journal.masked = dict(journal.tokens)
            self.save()
        for split in SPLITS:
            self.files[split].truncate(journal.tokens[split] * self.width)
            self.files[split].close()
            self.masks[split].truncate(journal.masked[split])
            self.masks[split].close()
            if not has_masks:
                (self.work / f"{split}.mask.bin").unlink()

    def _settle_split(self):
        """Give an empty split its share of the text; returns how the text is split, in words."""
        tokens = self.journal.tokens
        share = f"{100 * self.val_fraction:.3g}%"
        if not tokens["train"]:  # few documents, all with low hashes
            self._move("val", "train", tokens["val"])
        if not self.val_fraction:
            return "all of it in training (--val_fraction 0)"
        if tokens["val"] or tokens["train"] < 2:
            return f"{share} of the documents by a hash of their text, those above 1 MB in training"
        self._move("train", "val", max(1, int(tokens["train"] * self.val_fraction)))
        return f"the last {share} of the text, for no document is small enough or has such a hash"

    def _move(self, source, target, count):
        """Copy the last `count` tokens into the other, empty file; finish() cuts them off."""
        tokens = self.journal.tokens
        tokens[source] -= count
        tokens[target] = count
        for files, width in ((self.files, self.width), (self.masks, 1)):
            files[target].seek(0)
            files[source].seek(tokens[source] * width)
            shutil.copyfileobj(files[source], files[target])
