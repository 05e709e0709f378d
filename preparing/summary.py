"""What a finished dataset is: its metadata, read back from the disk, and a summary for the user.

Writes no file.
"""

import time

import numpy as np

from formats.data_folder import Meta, dtype_for
from formats.files import sha256
from preparing import PrepareError
from preparing.cleaning import CleaningReport
from preparing.folders import scan, scan_mask
from preparing.plan import Plan
from preparing.progress import Progress
from preparing.work_folder import WorkFolder
from preparing.writer import SPLITS, Journal
from tokenizer_bpe import EOT, Tokenizer

FIRST_TOKENS = 1000  # of the text, in which its first line is looked for
SHOWN = 100  # characters of that line
EXAMPLE_SHOWN = 90  # characters of what was left out


def describe(
    plan: Plan, work: WorkFolder, tokenizer: Tokenizer, journal: Journal
) -> tuple[Meta, float]:
    """The metadata of the files as read back from the disk, and which share of the ids occurs.

    Raises PrepareError where they differ from what was written.
    """
    dtype = dtype_for(tokenizer.vocab_size)
    splits = {}
    occur = np.zeros(tokenizer.vocab_size, bool)
    size = sum((work.path / f"{name}.bin").stat().st_size for name in SPLITS)
    with Progress(size, "checking") as bar:
        for name in SPLITS:
            splits[name], found = scan(work.path, f"{name}.bin", dtype, tokenizer, bar)
            splits[name].mask = scan_mask(work.path, splits[name], dtype, tokenizer)
            occur |= found
    tokens = {name: split.tokens for name, split in splits.items()}
    text_bytes = sum(split.text_bytes for split in splits.values())
    back = (tokens, text_bytes)
    written = (journal.tokens, journal.text_bytes)
    if back != written:
        raise PrepareError(
            f"{work.path} reads back as {back} tokens and bytes of text, not {written} as written:"
            " check the disk"
        )
    meta = Meta(
        dtype=dtype,
        vocab_size=tokenizer.vocab_size,
        eot_id=tokenizer.eot_id,
        tokenizer={
            "kind": tokenizer.kind,
            "file": "tokenizer.json",
            "sha256": sha256(work.tokenizer),
        },
        splits=splits,
        sources=plan.listed_sources(),
        settings=plan.settings,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )
    return meta, float(occur.mean())


def summary(
    plan: Plan,
    meta: Meta,
    journal: Journal,
    tokenizer: Tokenizer,
    *,
    origin: str,
    used: float,
    seconds: float,
) -> str:
    """What to know of a finished dataset, in lines.

    origin: where the tokenizer came from, in words. used: share of its ids that occur. seconds:
    that the command took.
    """
    tokens = sum(journal.tokens.values())
    megabytes = journal.text_bytes / 1e6
    bytes_a_token = journal.text_bytes / tokens
    read = journal.read / 1e6
    speed = read / max(journal.seconds, 1e-9)
    lines = [
        f"{plan.out}: {tokens:,} tokens of {megabytes:,.1f} MB of text from {len(meta.sources):,}"
        f" files, {bytes_a_token:.2f} bytes a token, {meta.dtype}"
    ]
    for name, split in meta.splits.items():
        in_replies = f", {split.mask.tokens:,} tokens in replies" if split.mask else ""
        lines.append(
            f"  {name:10} {split.tokens:>14,} tokens, {split.documents:,} documents{in_replies}"
        )
    lines += [
        f"  validation {journal.split}",
        f"  tokenizer  {meta.tokenizer['kind']}, {meta.vocab_size:,} ids, {used:.1%} of them occur;"
        f" {origin}",
        f"  time       {seconds:,.1f} s; tokenising {read:,.1f} MB took {journal.seconds:,.1f} s,"
        f" {speed:,.1f} MB/s",
    ]
    ids = np.fromfile(plan.out / "train.bin", meta.dtype, FIRST_TOKENS)
    document = tokenizer.decode(ids).partition(EOT)[0]
    first = document.strip().partition("\n")[0]
    lines.append(f"  begins     {first[:SHOWN]!r}")
    return "\n".join(lines + report_lines(journal.report))


def report_lines(report: CleaningReport) -> list[str]:
    """What was left out by each rule, with examples; nothing where nothing was."""
    lines = []
    if report.rules:
        lines.append("left out or corrected:")
    for rule, (documents, size, examples) in sorted(report.rules.items()):
        lines.append(f"  {rule}: {documents:,} documents, {size:,} bytes")
        for example in examples:
            lines.append(f"    {example[:EXAMPLE_SHOWN]!r}")
    return lines
