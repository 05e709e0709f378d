"""Encoded documents -> train.bin and val.bin, in order, so that a killed run goes on where it was.

From the first conversation on, a mask grows next to each, with a byte for each token. Splits the
documents between training and validation, drops copies, and records twice a second how far the
files are finished. Independent of text: documents are token ids and hashes here.
"""

import functools
import json
import math
import os
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from formats.data_folder import dtype_for
from formats.files import sync, write_json
from preparing import PrepareError
from preparing.chunks import CHUNK, Position
from preparing.cleaning import CleaningReport
from preparing.copies import Seen, hash64
from preparing.encoder import Encoded
from tokenizer_bpe import Tokenizer

SPLITS = ("train", "val")
SAVE_SECONDS = 0.5  # between two records of how far the files are finished
EXAMPLE_TOKENS = 30  # of a copy, for the report


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

    position: where the next chunk begins. tokens: in each file. text_bytes: UTF-8 bytes of the
    text written; read: of the text so far, written or not. seen, near: keys in the logs of these
    names. seconds: spent tokenising, over all starts. masked: whether there are masks. complete:
    whether all of the text is there; split: how it was split then.
    """

    position: Position = field(default_factory=Position)
    tokens: dict[str, int] = field(default_factory=functools.partial(dict.fromkeys, SPLITS, 0))
    text_bytes: int = 0
    report: CleaningReport = field(default_factory=CleaningReport)
    long: LongDocument = field(default_factory=LongDocument)
    seen: int = 0
    near: int = 0
    read: int = 0
    seconds: float = 0.0
    masked: bool = False
    complete: bool = False
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


class GrowingFile:
    """A file of `width` bytes a token, to be continued after its first tokens."""

    def __init__(self, path: Path, width: int, tokens: int):
        """Open it, or make it. Raises PrepareError when it has fewer tokens."""
        self.path = path
        self.width = width
        path.touch()
        if path.stat().st_size < tokens * width:
            raise PrepareError(
                f"{path} is shorter than it was when the work stopped; the disk lost data: delete"
                f" {path.parent} and start again"
            )
        self.file = open(path, "r+b")  # noqa: SIM115 - close() does
        self.seek(tokens)
        self.file.truncate()

    def seek(self, tokens: int) -> None:
        """Write on after the first `tokens`."""
        self.file.seek(tokens * self.width)

    def write(self, values: np.ndarray) -> None:
        """Write some tokens."""
        self.file.write(values.tobytes())

    def sync(self) -> None:
        """Have all of it on the disk."""
        self.file.flush()
        sync(self.path)

    def close(self, tokens: int) -> None:
        """Cut it off after the first `tokens`, and close it."""
        self.file.truncate(tokens * self.width)
        self.file.close()


class Output:
    """train.bin and val.bin as they grow in the working folder, their masks, and their journal."""

    def __init__(
        self,
        work: Path,
        tokenizer: Tokenizer,
        val_fraction: float,
        dedupe: str | None,
        most_bytes: float = math.inf,
    ):
        """Open the files where the journal says that they end.

        val_fraction: share of the text held back for validation. dedupe: as in Options.
        most_bytes: of text, after which the output is full. Raises PrepareError when a file is
        shorter than the journal says.
        """
        self.tokenizer = tokenizer
        self.val_fraction = val_fraction
        self.most_bytes = most_bytes
        self.work = work
        self.journal = Journal.load(work / "progress.json")
        width = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
        self.files = self._open("{}.bin", width)
        self.masks = {}
        if self.journal.masked:
            self.masks = self._open("{}.mask.bin", 1)
        self.seen = Seen(work, "seen", self.journal.seen) if dedupe else None
        self.near = Seen(work, "near", self.journal.near) if dedupe == "near" else None
        self.start_clock()

    def _open(self, name, width):
        """The file of each split; what the journal does not count is cut off."""
        return {
            split: GrowingFile(self.work / name.format(split), width, self.journal.tokens[split])
            for split in SPLITS
        }

    @property
    def is_full(self) -> bool:
        """Whether the text that was asked for is there, up to the end of a document."""
        journal = self.journal
        return journal.text_bytes >= self.most_bytes and not journal.position.inside

    def start_clock(self) -> None:
        """Start counting the seconds spent tokenising, and those to the next save."""
        self.counted_from = time.monotonic()

    def add(self, part: Encoded) -> None:
        """Write the documents of the next chunk, and at times record how far it went."""
        self.journal.report.merge(part.report)
        if part.begins and part.ends:
            self._add_documents(part)
        else:
            self._add_to_long_document(part)
        self.journal.position = part.end
        self.journal.read += int(part.text_bytes.sum())
        if time.monotonic() - self.counted_from > SAVE_SECONDS:
            self.save()

    def _add_documents(self, part):
        """Write those that are new, each to the split that the hash of its text chooses."""
        new = np.ones(len(part.hashes), bool)
        if self.seen:
            new = self.seen.first(part.hashes[:, None])
            self._report_copies("exact duplicates", part, ~new)
        if self.near:
            alike = np.zeros(len(new), bool)
            alike[new] = ~self.near.first(part.keys[new])
            self._report_copies("near duplicates", part, alike)
            new &= ~alike
        sizes = part.text_bytes * new
        written_before = self.journal.text_bytes + np.cumsum(sizes) - sizes
        new &= written_before < self.most_bytes
        chosen = part.hashes < np.uint64(self.val_fraction * 2**64)
        val = chosen & (part.text_bytes <= CHUNK)
        self._write_documents("train", part, new & ~val)
        self._write_documents("val", part, new & val)

    def _write_documents(self, split, part, rows):
        """Write the documents for which `rows`, bool [documents], says so."""
        chosen = slice(None) if rows.all() else np.repeat(rows, part.tokens)
        mask = None if part.mask is None else part.mask[chosen]
        self._write(split, part.ids[chosen], mask)
        self.journal.text_bytes += int(part.text_bytes[rows].sum())

    def _add_to_long_document(self, part):
        """Write a part of a document of several chunks to training, unless its beginning was noise.

        It is taken back at its end should it prove a copy.
        """
        journal = self.journal
        size = int(part.text_bytes.sum())
        if part.begins:
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
        if part.ends:
            self._end_long_document(part)

    def _end_long_document(self, part):
        """Write end-of-text after a long document, or return to where a copy began."""
        journal = self.journal
        long = journal.long
        if journal.tokens["train"] == long.tokens:
            return  # all of its parts were skipped
        if self.seen and not self.seen.first(np.array([[long.hash]], np.uint64))[0]:
            self._report_copy("exact duplicates", part.ids, journal.text_bytes - long.text_bytes)
            journal.tokens["train"] = long.tokens
            journal.text_bytes = long.text_bytes
            # Not cut off: the journal on the disk may still count the copy.
            self.files["train"].seek(long.tokens)
            if self.masks:
                self.masks["train"].seek(long.tokens)
        else:
            self._write("train", np.array([self.tokenizer.eot_id], part.ids.dtype))

    def _write(self, split, ids, mask=None):
        """Write tokens to a split. mask: uint8 [len(ids)]; None where none is in a conversation."""
        if mask is not None and mask.any() and not self.masks:
            self._begin_masks()
        self.files[split].write(ids)
        if self.masks:
            self.masks[split].write(np.zeros(len(ids), np.uint8) if mask is None else mask)
        self.journal.tokens[split] += len(ids)

    def _begin_masks(self):
        """Begin the masks: no token so far is in a conversation."""
        for split in SPLITS:
            path = self.work / f"{split}.mask.bin"
            path.write_bytes(b"")
            os.truncate(path, self.journal.tokens[split])
        self.masks = self._open("{}.mask.bin", 1)
        self.journal.masked = True

    def _report_copies(self, rule, part, rows):
        """Report the documents for which `rows`, bool [documents], says that they are copies."""
        ends = np.cumsum(part.tokens)
        for n in np.flatnonzero(rows):
            ids = part.ids[ends[n] - part.tokens[n] : ends[n] - 1]
            self._report_copy(rule, ids, int(part.text_bytes[n]))

    def _report_copy(self, rule, ids, text_bytes):
        example = self.tokenizer.decode(ids[:EXAMPLE_TOKENS])
        self.journal.report.add(rule, 1, text_bytes, [example])

    def save(self) -> None:
        """Record how far the files are finished, safe from a power cut."""
        for file in (*self.files.values(), *self.masks.values()):
            file.sync()
        if self.seen:
            self.journal.seen = self.seen.save()
        if self.near:
            self.journal.near = self.near.save()
        self.journal.seconds += time.monotonic() - self.counted_from
        self.start_clock()
        write_json(self.work / "progress.json", asdict(self.journal))

    def finish(self) -> None:
        """See that both splits hold text, record how it was split, and close the files."""
        if not self.journal.complete:
            self.journal.split = self._settle_split()
            self.journal.complete = True
            self.save()
        for files in (self.files, self.masks):
            for split, file in files.items():
                file.close(self.journal.tokens[split])
        for seen in (self.seen, self.near):
            if seen:
                seen.close()

    def _settle_split(self):
        """Give an empty split its share of the text; returns how the text is split, in words."""
        tokens = self.journal.tokens
        share = f"{100 * self.val_fraction:.3g}%"
        if not tokens["train"]:  # few documents, all with low hashes
            self._move("val", "train", tokens["val"])
        if not self.val_fraction:
            return "all of it in training (--val_fraction 0)"
        if not tokens["val"] and tokens["train"] > 1:
            self._move("train", "val", max(1, int(tokens["train"] * self.val_fraction)))
            return (
                f"the last {share} of the text, no document being small enough or chosen by its"
                " hash"
            )
        return (
            f"{share} of the documents by a hash of their text, those above 1 MB always in training"
        )

    def _move(self, source, target, count):
        """Copy the last `count` tokens into the other file, which is empty.

        They are cut off the source once the journal knows.
        """
        tokens = self.journal.tokens
        tokens[source] -= count
        tokens[target] = count
        for files in (self.files, self.masks):
            if files:
                files[target].seek(0)
                files[source].seek(tokens[source])
                shutil.copyfileobj(files[source].file, files[target].file)
