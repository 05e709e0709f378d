"""Input files -> pieces of about 1 MB, in order and in bounded memory.

Reads .txt, .jsonl and .parquet, the first two also as .gz or .zst and in another encoding than
UTF-8. Where the pieces end follows from the content alone. What the bytes say is of no interest
here.
"""

import dataclasses
import gzip
import re
import zlib
from collections.abc import Callable, Iterator
from typing import BinaryIO

from formats.files import first_line
from preparing.cutting import Cut, cut_documents, cut_lines
from preparing.encodings import recoded
from preparing.errors import InputError
from preparing.inputs import Source
from preparing.options import Options
from preparing.pieces import PIECE, Piece, Position
from preparing.remote_file import open_source
from preparing.spans import Span, row_groups, text_bounds

LONGEST_LINE = 256 * PIECE
BOM = b"\xef\xbb\xbf"


def read_pieces(
    sources: list[Source],
    start: Position,
    options: Options,
    opened: Callable[[Source], BinaryIO] = open_source,
) -> Iterator[Piece]:
    """The pieces of all sources from `start`, in order. opened: gives a source as an open file.

    Raises InputError for what cannot be read.
    """
    before = sum(source.size for source in sources[: start.source])
    for index in range(start.source, len(sources)):
        source = sources[index]
        at = start if index == start.source else Position(index)
        yield from read_span(Span(source, at, 0, source.size, before), options, opened)
        before += source.size


def read_span(
    span: Span, options: Options, opened: Callable[[Source], BinaryIO] = open_source
) -> Iterator[Piece]:
    """The pieces of a span, as read_pieces() gives them."""
    source = span.source
    read = _read_rows if source.kind == "parquet" else _read_text
    try:
        with opened(source) as raw:
            for piece in read(span, raw, options):
                read_so_far = source.size if raw.closed else raw.tell()
                piece.after.on_disk = span.before + read_so_far
                yield piece
    except OSError as error:
        raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from None


def _read_text(span, raw, options):
    """Pieces of a .txt or .jsonl file."""
    source = span.source
    plain = not (source.compression or source.is_remote or options.encoding)
    at, until = text_bounds(span, raw)
    blocks = _blocks(source, raw, at.offset, options)
    buffer = bytearray()
    want = PIECE
    ended = False
    while at.offset < until:
        while len(buffer) <= want and not ended:
            block = next(blocks, b"")
            buffer += block
            ended = not block
        if not at.offset and buffer.startswith(BOM):
            at = dataclasses.replace(at, offset=len(BOM))
            del buffer[: len(BOM)]
        if not buffer:
            return
        cut = _cut(source, buffer, ended, at)
        if not cut.end:
            want = 2 * len(buffer)
            continue
        want = PIECE
        if at.offset + cut.end > until:
            cut = Cut(until - at.offset, whole=True)
        data = bytes(buffer[: cut.end])
        del buffer[: cut.end]
        lines = data.count(b"\n") if source.kind == "jsonl" else 0
        after = dataclasses.replace(
            at, offset=at.offset + cut.end, line=at.line + lines, inside=not cut.whole
        )
        yield Piece(source.path, source.kind, data, at, after, not at.inside, cut.whole, plain)
        at = after


def _cut(source, buffer, ended, at):
    """Where the next piece ends. Raises InputError for an endless line of JSON."""
    if source.kind == "txt":
        return cut_documents(buffer, ended, at.inside)
    end = cut_lines(buffer, ended)
    if not end and len(buffer) > LONGEST_LINE:
        raise InputError(
            f"{source.path}, {at.line_name(at.line + 1)}: longer than {LONGEST_LINE >> 20} MB; JSON"
            " Lines has one object a line (jq -c . converts)"
        )
    return Cut(end, whole=True)


def _blocks(source, raw, start, options):
    """The content from byte `start` on, decompressed and in UTF-8."""
    if not options.encoding:
        yield from _unpacked(source, raw, start, options)
        return
    try:
        yield from recoded(_unpacked(source, raw, 0, options), options.encoding, skip=start)
    except UnicodeError:
        raise InputError(
            f"{source.path} does not begin with the byte order mark of {options.encoding}; name the"
            f" order, as in --encoding {options.encoding}-le, or another --encoding"
        ) from None


def _unpacked(source, raw, start, options):
    """The decompressed content from byte `start` on.

    What is damaged or breaks off raises InputError; with on_error skip or replace it counts as the
    end.
    """
    stream, errors = _decompressed(source, raw)
    try:
        stream.seek(start)
        while block := stream.read1(PIECE):
            yield block
    except errors as error:
        if options.on_error == "stop":
            raise InputError(
                f"{source.path} is cut off or damaged ({error}): copy it again, or take what can be"
                " read of it with --on_error skip"
            ) from None


def _decompressed(source, raw):
    """A file's content as a stream, and the errors that reading it raises when it is damaged."""
    if source.compression == "gz":
        return gzip.GzipFile(fileobj=raw), (EOFError, zlib.error, gzip.BadGzipFile)
    if source.compression == "zst":
        import pyzstd

        return pyzstd.ZstdFile(raw), (EOFError, pyzstd.ZstdError)
    return raw, ()


def _read_rows(span, raw, options):
    """Pieces of a parquet file: rows whose texts take about PIECE bytes."""
    import pyarrow

    source = span.source
    rows = []
    size = 0
    try:
        at, values = _values(span, raw, options)
        row = at.offset
        for column, value, count in _joined(values, source.heading):
            rows.append({column: value})
            row += count
            size += len(str(value))
            if size >= PIECE:
                after = Position(at.source, row)
                yield Piece(source.path, source.kind, rows, at, after)
                rows = []
                size = 0
                at = after
    except (pyarrow.ArrowException, EOFError) as error:
        why = first_line(error)
        raise InputError(f"{source.path} cannot be read as parquet: {why}") from None
    if rows:
        yield Piece(source.path, source.kind, rows, at, Position(at.source, row))


def _joined(values, heading):
    """The text column's name, a document's value, and how many rows it takes, for each document.

    That is one row or, with a heading, the rows from one that looks like it to before the next. A
    document that goes on in the next file is two.
    """
    if not heading:
        for column, value in values:
            yield column, value, 1
        return
    rows = []
    for column, value in values:
        value = value or ""
        if rows and re.fullmatch(heading, value):
            yield column, "".join(rows), len(rows)
            rows = []
        rows.append(value)
    if rows:
        yield column, "".join(rows), len(rows)


def _values(span, raw, options):
    """The first row of a span of parquet, and the text column's name and value for each row."""
    import pyarrow.parquet as parquet

    file = parquet.ParquetFile(raw, buffer_size=PIECE, pre_buffer=False)
    names = file.schema_arrow.names
    column = options.text_column(names)
    if column not in names:
        raise InputError(
            f"{span.source.path} has no column {column!r}; it has {', '.join(names)}: name one with"
            " --text_field"
        )
    groups, before = row_groups(span, file.metadata)
    first = max(before, span.at.offset)
    return Position(span.at.source, first), _values_of(file, column, groups, first - before)


def _values_of(file, column, groups, skip):
    """The column's name and value, for each row of some row groups but the first `skip`."""
    batches = file.iter_batches(64, groups, [column], use_threads=False)
    for batch in batches:
        for value in batch.column(0).slice(skip).to_pylist():
            yield column, value
        skip = max(0, skip - len(batch))
