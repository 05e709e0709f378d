"""Obtaining the tokenizer that --tokenizer asks for: trained, collected, or taken from elsewhere.

How a tokenizer works is in tokenizer_bpe.py.
"""

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from formats.files import write_text
from preparing.cutting import character_boundary_after, line_end_after, line_end_before
from preparing.job import Job
from preparing.options import Options
from preparing.pieces import PIECE, Piece, Position, batches
from preparing.pool import Pool
from preparing.progress import Progress
from preparing.readers import read_pieces
from preparing.records import texts_of
from tokenizer_bpe import Tokenizer

SLICE = 1 << 18  # bytes that a sample takes from one place


def obtain_tokenizer(job: Job) -> tuple[Tokenizer, str]:
    """The tokenizer, also saved in the working folder, and in words where it came from.

    Raises TokenizerError and InputError.
    """
    path = job.tokenizer_path
    asked = job.args.tokenizer
    if path.exists():
        origin = "as the run before made it"
    elif asked == "bpe":
        with Pool(1) as pool:  # a process of its own: its memory goes back, and Ctrl-C works
            (origin,) = pool.map(functools.partial(train_tokenizer, job), [path])
    elif asked == "char":
        found = all_characters(job)
        write_text(path, Tokenizer.characters(found).to_json())
        origin = f"{len(found)} different characters"
    elif asked == "gpt2":
        write_text(path, Tokenizer.gpt2().to_json())
        origin = asked
    else:
        write_text(path, Tokenizer.load(asked).to_json())
        origin = asked
    return Tokenizer.load(path), origin


def train_tokenizer(job: Job, path: Path) -> str:
    """Train byte-level BPE on an evenly spread sample and save it; says on how much."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(job.args.workers))
    with Progress(job.input_size, "sampling") as bar:
        pieces = read_pieces(job.sources, Position(), job.options)
        sample = spread_sample(_watched(pieces, bar), job.args.sample_bytes)
    size = f"{sum(part.size for part in sample) / 1e6:,.1f} MB"
    vocab_size = job.args.vocab_size
    print(
        f"training the tokenizer, {vocab_size:,} tokens, on {size} ...", file=sys.stderr, flush=True
    )
    texts = (text for part in sample for text in texts_of(part, job.options)[0])
    tokenizer = Tokenizer.train(texts, vocab_size, show_progress=sys.stderr.isatty())
    write_text(path, tokenizer.to_json())
    return f"trained on {size} spread over the text"


def _watched(pieces, bar):
    """The pieces, while the bar shows how far they have been used."""
    for piece in pieces:
        yield piece
        bar.to(piece.after.on_disk)


def spread_sample(pieces: Iterable[Piece], sample_bytes: int) -> list[Piece]:
    """Slices spread evenly over all pieces, together at most sample_bytes.

    It is every n-th slice, and n doubles whenever they are too many.
    """
    kept = []
    size = 0
    stride = 1
    seen = 0
    for piece in pieces:
        for part in slices(piece, SLICE):
            if seen % stride == 0:
                kept.append(part)
                size += part.size
            while size > sample_bytes and len(kept) > 1:
                kept = kept[::2]
                stride *= 2
                size = sum(part.size for part in kept)
            seen += 1
    return kept


def slices(piece: Piece, size: int) -> Iterator[Piece]:
    """A piece in parts of about `size` bytes, for samples.

    Cut at line ends or, where there are none, between characters.
    """
    rows = piece.kind == "parquet"
    start = 0
    line = piece.at.line
    while start < len(piece.data):
        if rows:
            end = start + max(1, len(piece.data) * size // PIECE)
        else:
            end = _slice_end(piece.data, start, size)
        part = piece.data[start:end]
        at = Position(piece.at.source, piece.at.offset + start, line)
        yield Piece(piece.path, piece.kind, part, at, piece.after, begins=False, ends=False)
        start = end
        if not rows:
            line += part.count(b"\n")


def _slice_end(data, start, size):
    """Where the slice that begins at byte `start` ends."""
    end = start + size
    if end >= len(data):
        return end
    line_end = line_end_before(data, end, start)
    if not line_end:
        line_end = line_end_after(data, end)
    if not line_end:
        return character_boundary_after(data, end)
    return line_end


def all_characters(job: Job) -> set[str]:
    """The different characters of the whole input."""
    found = set()
    pieces = read_pieces(job.sources, Position(), job.options)
    find = functools.partial(characters_of, job.options)
    with Pool(job.worker_count()) as pool, Progress(job.input_size, "characters") as bar:
        for characters, after in pool.map(find, batches(pieces)):
            found |= characters
            bar.to(after.on_disk)
    return found


def characters_of(options: Options, pieces: list[Piece]) -> tuple[set[str], Position]:
    """The different characters of some pieces, and where the next piece begins."""
    characters = set()
    for piece in pieces:
        texts, _ = texts_of(piece.with_data(), options)
        characters.update(*texts)
    return characters, pieces[-1].after
