"""Encoded documents -> train.bin and val.bin, in order, so that a killed run goes on where it was.

From the first conversation on, a mask grows beside each, a byte for each token.

Splits the documents between training and validation, drops copies, and notes twice a second how far
the files are finished. Independent of text: documents are token ids and hashes here.
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
from preparing.cleaning import CleaningReport
from preparing.encoder import Encoded, hash64
from preparing.errors import PrepareError
from preparing.pieces import PIECE, Position
from preparing.seen import Seen
from tokenizer_bpe import Tokenizer

SPLITS = ("train", "val")
SAVE_SECONDS = 0.5  # between two notes of how far the files are finished
EXAMPLE_TOKENS = 30  # of a copy, for the report


@dataclass
class Journal:
    """How far the files are finished; progress.json has it.

    position: where the next piece begins. tokens: in each file. text_bytes: UTF-8 bytes of the text
    written; read: of the text so far, written or not. seen, near: keys in the logs of these names.
    seconds: spent tokenising, over all starts. masked: whether there are masks. complete: whether
    all of the text is there; split: how it was split then.

    Of a document of more than one piece that is under way: long_hash, its hash so far; long_noise,
    the rule by which its beginning was noise; before_long, the tokens in training and the text
    bytes before it, to return to should it prove a copy.
    """

    position: Position = field(default_factory=Position)
    tokens: dict[str, int] = field(default_factory=functools.partial(dict.fromkeys, SPLITS, 0))
    text_bytes: int = 0
    report: CleaningReport = field(default_factory=CleaningReport)
    seen: int = 0
    near: int = 0
    read: int = 0
    seconds: float = 0.0
    masked: bool = False
    complete: bool = False
    split: str = ""
    long_hash: int = 0
    long_noise: str = ""
    before_long: tuple[int, int] = (0, 0)

    @classmethod
    def load(cls, path: Path) -> "Journal":
        """As it was saved, or a new one where there is none, or one that knew no masks."""
        values = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        if "masked" not in values:
            return cls()
        values["position"] = Position(**values["position"])
        values["report"] = CleaningReport(**values["report"])
        return cls(**values)


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
        self.work = work
        self.tokenizer = tokenizer
        self.val_fraction = val_fraction
        self.most_bytes = most_bytes
        self.width = np.dtype(dtype_for(tokenizer.vocab_size)).itemsize
        self.path = work / "progress.json"
        self.journal = Journal.load(self.path)
        self.saved = self.journal.position  # as the journal on the disk has it
        self.files = {name: self._open(self._bin(name), name, self.width) for name in SPLITS}
        self.masks = {}
        for name in SPLITS:
            if self.journal.masked:
                self.masks[name] = self._open(self._mask(name), name, 1)
            else:
                self._mask(name).unlink(missing_ok=True)
        self.seen = Seen(work, "seen", self.journal.seen) if dedupe else None
        self.near = Seen(work, "near", self.journal.near) if dedupe == "near" else None
        self.start_clock()

    def _open(self, path, name, width):
        """A file of a split, to be continued; what the journal does not count is cut off.

        width: bytes a token.
        """
        size = self.journal.tokens[name] * width
        path.touch()
        if path.stat().st_size < size:
            raise PrepareError(
                f"{path} is shorter than it was when the work stopped; the disk lost data: delete"
                f" {self.work} and start anew"
            )
        file = open(path, "r+b")  # noqa: SIM115 - finish() closes it
        file.truncate(size)
        file.seek(size)
        return file

    @property
    def is_full(self) -> bool:
        """Whether the text that was asked for is there, up to the end of a document."""
        journal = self.journal
        return journal.text_bytes >= self.most_bytes and not journal.position.inside

    def _bin(self, name):
        return self.work / f"{name}.bin"

    def _mask(self, name):
        return self.work / f"{name}.mask.bin"

    def _begin_masks(self):
        """Begin the masks: what was written so far is in no conversation."""
        for name in SPLITS:
            file = open(self._mask(name), "w+b")  # noqa: SIM115 - finish() closes it
            file.truncate(self.journal.tokens[name])
            file.seek(0, os.SEEK_END)
            self.masks[name] = file
        self.journal.masked = True

    def start_clock(self) -> None:
        """Start counting the seconds spent tokenising, and those to the next save."""
        self.counted_from = time.monotonic()

    def add(self, part: Encoded) -> None:
        """Write the documents of the next piece, and at times note how far it went."""
        self.journal.report.merge(part.report)
        if part.whole:
            self._add_documents(part)
        else:
            self._add_part_of_long_document(part)
        self.journal.position = part.after
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
        val = chosen & (part.text_bytes <= PIECE)
        self._write_documents("train", part, new & ~val)
        self._write_documents("val", part, new & val)

    def _write_documents(self, name, part, rows):
        """Write the documents for which `rows`, bool [documents], says so."""
        chosen = slice(None) if rows.all() else np.repeat(rows, part.tokens)
        mask = None if part.mask is None else part.mask[chosen]
        self._write(name, part.ids[chosen], mask, part.text_bytes[rows])

    def _add_part_of_long_document(self, part):
        """Write a part of a document of several pieces.

        It goes to training, unless its beginning was noise, and is taken back should it prove a
        copy.
        """
        journal = self.journal
        if part.begins:
            journal.long_hash = 0
            journal.long_noise = part.report.noise
            journal.before_long = (journal.tokens["train"], journal.text_bytes)
        journal.long_hash = hash64(journal.long_hash.to_bytes(8, "little") + part.hashes.tobytes())
        if journal.long_noise:
            journal.report.add(journal.long_noise, 0, int(part.text_bytes.sum()), [])
            return
        self._write("train", part.ids, part.mask, part.text_bytes)
        if part.ends and not len(part.ids) and journal.tokens["train"] > journal.before_long[0]:
            # Nothing was left of its last part, which would have ended it.
            eot = np.array([self.tokenizer.eot_id], part.ids.dtype)
            self._write("train", eot, None, part.text_bytes)
        if part.ends and self.seen:
            hashes = np.array([journal.long_hash], np.uint64)
            if not self.seen.first(hashes[:, None])[0]:
                self._take_back(part)

    def _take_back(self, part):
        """Return to where the long document that ends with `part` began: it is a copy."""
        journal = self.journal
        tokens, text_bytes = journal.before_long
        self._report_copy("exact duplicates", part.ids, journal.text_bytes - text_bytes)
        journal.tokens["train"] = tokens
        journal.text_bytes = text_bytes
        # Not cut off: the journal on the disk may still count the copy.
        self.files["train"].seek(tokens * self.width)
        if self.masks:
            self.masks["train"].seek(tokens)

    def _write(self, name, ids, mask, text_bytes):
        """Write tokens to a split. mask: uint8 [len(ids)]; None where none is in a conversation."""
        if mask is not None and mask.any() and not self.masks:
            self._begin_masks()
        self.files[name].write(ids.tobytes())
        if self.masks:
            self.masks[name].write(bytes(len(ids)) if mask is None else mask.tobytes())
        self.journal.tokens[name] += len(ids)
        self.journal.text_bytes += int(text_bytes.sum())

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
        """Note how far the files are finished, safe from a power cut."""
        for file in (*self.files.values(), *self.masks.values()):
            file.flush()
            sync(Path(file.name))
        if self.seen:
            self.journal.seen = self.seen.save()
        if self.near:
            self.journal.near = self.near.save()
        self.journal.seconds += time.monotonic() - self.counted_from
        self.start_clock()
        write_json(self.path, asdict(self.journal))
        self.saved = self.journal.position

    def finish(self) -> None:
        """See that both splits hold text, note how it was split, and close the files."""
        if not self.journal.complete:
            self.journal.split = self._settle_split()
            self.journal.complete = True
            self.save()
        for files, width in ((self.files, self.width), (self.masks, 1)):
            for name, file in files.items():
                file.truncate(self.journal.tokens[name] * width)
                file.close()
        for seen in (self.seen, self.near):
            if seen:
                seen.log.close()

    def _settle_split(self):
        """Give a split that is empty its share of the text; says how the text is split then."""
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
        for files, width in ((self.files, self.width), (self.masks, 1)):
            if files:
                files[target].seek(0)
                files[source].seek(tokens[source] * width)
                shutil.copyfileobj(files[source], files[target])
