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
from preparing.inputs import Source
from preparing.job import Job
from preparing.options import Options
from preparing.pieces import PIECE, Piece, Position
from preparing.pool import Pool
from preparing.progress import Progress
from preparing.readers import read_pieces, read_span
from preparing.records import documents_of
from preparing.spans import spans_of
from tokenizer_bpe import Tokenizer

SLICE = 1 << 18  # bytes that a sample takes from one place
MOST_PLACES = 64  # of remote files, from which a sample is fetched


def obtain_tokenizer(job: Job) -> tuple[Tokenizer, str]:
    """The tokenizer, also saved in the working folder, and in words where it came from.

    Raises TokenizerError and InputError.
    """
    path = job.tokenizer_path
    asked = job.args.tokenizer
    if path.exists():
        origin = "as the run before made it"
    elif asked == "bpe":
        train = functools.partial(train_tokenizer, job)
        with Pool(1, train) as pool:  # a process of its own: its memory goes back, and Ctrl-C works
            (origin,) = pool.map([path])
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
    sample = obtain_sample(job)
    size = f"{sum(part.size for part in sample) / 1e6:,.1f} MB"
    vocab_size = job.args.vocab_size
    print(
        f"training the tokenizer, {vocab_size:,} tokens, on {size} ...", file=sys.stderr, flush=True
    )
    texts = (d.text for part in sample for d in documents_of(part, job.options)[0])
    tokenizer = Tokenizer.train(texts, vocab_size, show_progress=sys.stderr.isatty())
    write_text(path, tokenizer.to_json())
    return f"trained on {size} spread over the text"


def obtain_sample(job: Job) -> list[Piece]:
    """Text to train a tokenizer on, of about sample_bytes, spread over all of the input."""
    sample_bytes = job.args.sample_bytes
    if any(source.is_remote for source in job.sources):
        with Progress(sample_bytes, "sampling") as bar:
            return sample_places(job.sources, job.options, sample_bytes, bar)
    with Progress(job.input_size, "sampling") as bar:
        pieces = read_pieces(job.sources, Position(), job.options)
        return spread_sample(_watched(pieces, bar), sample_bytes)


def sample_places(
    sources: list[Source], options: Options, sample_bytes: int, bar: Progress
) -> list[Piece]:
    """Slices from at most MOST_PLACES places, evenly spread: nothing else has to be fetched.

    What begins in a span of text makes up for spans in which nothing does, as in a single book.
    """
    count = max(1, min(MOST_PLACES, sample_bytes // SLICE))
    size = 1 + sum(source.size for source in sources) // count
    places = _evenly(list(spans_of(sources, Position(), options, size)), count)
    kept = []
    left = sample_bytes
    while places:
        share = left / len(places)
        for part in _slices_of(places.pop(), options):
            kept.append(part)
            bar.update(part.size)
            left -= part.size
            share -= part.size
            if share <= 0:
                break
    return kept


def _slices_of(span, options):
    """The slices of a span, in order."""
    for piece in read_span(span, options):
        yield from slices(piece, SLICE)


def _evenly(items, count):
    """At most `count` of the items, evenly spread."""
    if len(items) <= count:
        return items
    return [items[n * len(items) // count] for n in range(count)]


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

    Cut at line ends or, where plain text has none, between characters.
    """
    rows = piece.kind == "parquet"
    start = 0
    line = piece.at.line
    while start < len(piece.data):
        if rows:
            end = start + max(1, len(piece.data) * size // PIECE)
        else:
            end = _slice_end(piece, start, size)
        part = piece.data[start:end]
        at = Position(piece.at.source, piece.at.offset + start, line)
        yield Piece(piece.path, piece.kind, part, at, piece.after, begins=False, ends=False)
        start = end
        if not rows:
            line += part.count(b"\n")


def _slice_end(piece, start, size):
    """Where the slice that begins at byte `start` ends. A record of JSON lines stays whole."""
    data = piece.data
    end = start + size
    if end >= len(data):
        return end
    line_end = line_end_before(data, end, start)
    if not line_end:
        line_end = line_end_after(data, end)
    if line_end:
        return line_end
    if piece.kind == "jsonl":
        return len(data)
    return character_boundary_after(data, end)


def all_characters(job: Job) -> set[str]:
    """The different characters of the whole input, or of all that will be written of it."""
    found = set()
    size = 0
    find = functools.partial(characters_of, job.options)
    with job.engine(find) as engine, Progress(job.input_size, "characters") as bar:
        for characters, text_bytes, after in engine.results():
            found |= characters
            size += text_bytes
            bar.to(after.on_disk, engine.status())
            # Where copies are left out, what is written reaches further.
            if size >= job.most_bytes and not job.options.dedupe:
                break
    return found


def characters_of(options: Options, pieces: list[Piece]) -> tuple[set[str], int, Position]:
    """The different characters of some pieces, the size of the text, where the next one begins."""
    characters = set()
    size = 0
    for piece in pieces:
        documents, _ = documents_of(piece.with_data(), options)
        characters.update(*(document.text for document in documents))
        size += sum(len(document.text.encode()) for document in documents)
    return characters, size, pieces[-1].after
