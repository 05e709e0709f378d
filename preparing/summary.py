"""Progress bars, the metadata and summary of a finished dataset, and its verification."""

import sys
import threading
import time
from pathlib import Path

import numpy as np
from tqdm import tqdm

from command_line import plural, si
from formats.data_folder import REMEDY, DataError, Meta, dtype_for, read_meta
from formats.files import sha256
from preparing.encoder import encoder_name
from preparing.mistakes import ADVICE, REPEATED
from preparing.split import repeated
from preparing.work_folder import WorkFolder
from preparing.writer import TokenWriter

FIRST_TOKENS = 1000  # from which the beginning of the text is decoded
SHOWN_CHARS = 100  # of the text
RARE = 0.001  # of the documents and of the text: what is kept and rarer is only named
REPEATED_BYTES = 100  # of text that is the same in both splits, at least
MOST_REPEATED = 0.1  # share of validation that is usual, as in code
TIMED_BYTES = 1e6  # less text takes less time than the encoder's import


class Progress(tqdm):
    """A bar with MB/s and time left; outside a terminal, a line every half minute."""

    def __init__(self, total: float, what: str, start: int = 0):
        """total: bytes of the step. start: those already done. what: the name of the step."""
        is_terminal = sys.stderr.isatty()
        super().__init__(
            desc=what,
            total=total,
            initial=start,
            unit="B",
            unit_scale=True,
            dynamic_ncols=True,
            leave=False,
            mininterval=0.2 if is_terminal else 30,
            delay=0 if is_terminal else 10,
        )

    def to(self, done: int) -> None:
        self.update(done - self.n)


Progress.set_lock(threading.RLock())  # tqdm's own is shared by processes; a kill leaks it


def describe(work: WorkFolder, writer: TokenWriter) -> Meta:
    """Close the files and return their metadata. Reports what both splits have."""
    tokenizer = writer.tokenizer
    meta = Meta(
        dtype=dtype_for(tokenizer.vocab_size),
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer={
            "kind": tokenizer.kind,
            "file": work.tokenizer.name,
            "sha256": sha256(work.tokenizer),
        },
        splits=writer.finish(),
        sources=work.checked_sources(),
        settings=work.settings,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    _report_repeated(work.path, meta, writer)
    return meta


def _report_repeated(folder, meta, writer):
    """Report the text of validation that training has, too, if it is much."""
    train, val = meta.splits.values()
    if val.mask or not val.tokens:  # many conversations may begin with the same message
        return
    length = 1
    while length < REPEATED_BYTES * val.tokens / val.text_bytes:
        length *= 2
    ids = [
        np.memmap(folder / split.file, meta.dtype, "r", shape=split.tokens)
        for split in (train, val)
    ]
    share, places = repeated(*ids, length)
    if share > MOST_REPEATED:
        ends = np.flatnonzero(ids[1] == meta.eot_id)
        documents = len(np.unique(np.searchsorted(ends, places)))
        example = writer.tokenizer.decode(ids[1][places[0] : places[0] + length])
        writer.report.add(REPEATED, documents, int(share * val.text_bytes), [example])


def summary(meta: Meta, writer: TokenWriter, *, origin: str, seconds: float) -> str:
    """A finished dataset in a few lines of text.

    origin: where the tokenizer came from, in words. seconds: how long the command took.
    """
    out = writer.work.out
    tokens = sum(split.tokens for split in meta.splits.values())
    train, val = (split.text_bytes for split in meta.splits.values())
    used = (writer.train.counts + writer.val.counts > 0).mean()
    speed = f", {writer.read / 1e6 / max(writer.seconds, 1e-9):,.1f} MB/s"
    if writer.read < TIMED_BYTES:
        speed = ""
    lines = [
        f"{out}: {tokens:,} tokens of {si(writer.text_bytes, 'B')} of text from"
        f" {plural(len(meta.sources), 'file')}, {writer.text_bytes / tokens:.2f} bytes per token,"
        f" {meta.dtype}"
    ]
    for name, split in meta.splits.items():
        in_replies = f", {split.mask.tokens:,} tokens in replies" if split.mask else ""
        lines.append(
            f"  {name:10} {split.tokens:>14,} tokens, {plural(split.documents, 'document')}"
            f"{in_replies}"
        )
    ids = np.fromfile(out / "train.bin", meta.dtype, FIRST_TOKENS)
    document = writer.tokenizer.decode(ids).partition(writer.tokenizer.eot)[0]
    lines += [
        f"  validation {si(val, 'B')}, {100 * val / (train + val):.3g}% of the text:"
        f" {writer.split_by}",
        f"  tokenizer  {meta.tokenizer['kind']}, {meta.vocab_size:,} ids, {used:.1%} of them"
        f" occur; {origin}",
        f"  time       {seconds:,.1f} s; tokenizing {si(writer.read, 'B')} took"
        f" {writer.seconds:,.1f} s{speed}, with {encoder_name(writer.tokenizer)}",
        f"  begins     {document.strip()[:SHOWN_CHARS]!r}",
    ]
    found = writer.report.rules
    few = RARE * sum(split.documents for split in meta.splits.values())
    little = RARE * writer.text_bytes
    rare = [
        rule
        for rule in sorted(found.keys() & ADVICE.keys())
        if found[rule]["documents"] < few and found[rule]["bytes"] < little
    ]
    for title, is_listed in (
        ("left out or corrected:", lambda rule: rule not in ADVICE),
        ("not corrected, though it may be a mistake:", ADVICE.__contains__),
    ):
        rules = sorted(filter(is_listed, found))
        lines += [title] if rules else []
        for rule in rules:
            if rule in rare:
                continue
            counts = found[rule]
            documents = plural(max(1, counts["documents"]), "document")
            advice = f"; {ADVICE[rule]}" if rule in ADVICE else ""
            lines.append(f"  {rule}: {documents}, {plural(counts['bytes'], 'byte')}{advice}")
            lines += [f"    {example!r}" for example in counts["examples"]]
    if rare:
        lines.append(f"  in less than {RARE:.1%} of the text, shown in {out / 'cleaning.json'}:")
        lines += [f"    {rule}" for rule in rare]
    return "\n".join(lines)


def verify(folder: Path) -> str:
    """Compare a folder with its meta.json. Returns a summary; raises DataError for damage."""
    meta = read_meta(folder)
    files = [file for split in meta.splits.values() for file in (split, split.mask) if file]
    expected = {file.file: file.sha256 for file in files}
    expected[meta.tokenizer["file"]] = meta.tokenizer["sha256"]
    damaged = [name for name in expected if sha256(folder / name) != expected[name]]
    if damaged:
        raise DataError(
            f"{folder}: {', '.join(damaged)} is damaged: not what meta.json describes; {REMEDY}"
        )
    tokens = sum(split.tokens for split in meta.splits.values())
    return f"{folder} is good: {', '.join(expected)}; {tokens:,} tokens"
