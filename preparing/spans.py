"""Spans: parts of the input that can be read alone, by a machine that has seen nothing before them.

A span is a range of a file's bytes on disk, and holds what begins in it: documents, or the row
groups of a parquet file. All spans of a file in order are the file. What is compressed, in another
encoding, or has documents of many rows has to be read from its beginning, and is one span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

from preparing.cutting import LONGEST_SEPARATOR, line_end_after, separators
from preparing.inputs import Source
from preparing.options import Options
from preparing.pieces import Position

if TYPE_CHECKING:
    from pyarrow.parquet import FileMetaData

BLOCK = 1 << 18  # bytes read at a time to find where a document begins


@dataclass
class Span:
    """What begins from byte `start` to before byte `end` of a source, but nothing before `at`.

    at: a place where a document is known to begin, or to go on. before: bytes on disk of the
    sources before this one.
    """

    source: Source
    at: Position
    start: int
    end: int
    before: int

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self.end - self.start


def spans_of(sources: list[Source], start: Position, options: Options, size: int) -> Iterator[Span]:
    """All that is left of the input from `start` on, in spans of about `size` bytes, in order."""
    before = sum(source.size for source in sources[: start.source])
    for index in range(start.source, len(sources)):
        source = sources[index]
        at = start if index == start.source else Position(index)
        if source.compression or source.heading or options.encoding:
            yield Span(source, at, 0, source.size, before)
        else:
            first = 0 if source.kind == "parquet" else at.offset  # else that is a row
            for place in range(first, source.size, size):
                yield Span(source, at, place, min(place + size, source.size), before)
        before += source.size


def text_bounds(span: Span, raw: BinaryIO) -> tuple[Position, float]:
    """Where the first document of a span of text begins, and the byte where the last one ends.

    The second is infinity where that is the end of the file, and equal to the first where no
    document begins in the span.
    """
    at = span.at
    if span.start > at.offset:
        begins = _next_document(span.source, raw, span.start, span.end)
        at = Position(at.source, begins, counted_from=begins)
        if begins == span.end:
            return at, begins
    if span.end == span.source.size:
        return at, math.inf
    return at, _next_document(span.source, raw, span.end, math.inf)


def _next_document(source, raw, at, limit):
    """The first byte from `at` on with which a document begins; `limit` where none does before.

    Looks back for the end of the line, or of the end-of-text line, after which it begins.
    """
    find, look_back = _line_ends, 1
    if source.kind == "txt":
        find, look_back = _separator_ends, LONGEST_SEPARATOR + 1
    place = max(0, at - look_back)
    raw.seek(place)
    buffer = b""
    while place < limit and (block := raw.read1(BLOCK)):
        buffer += block
        for end in find(buffer, place):
            if place + end >= at:
                return min(place + end, limit)
        known = max(0, len(buffer) - look_back)
        buffer = buffer[known:]
        place += known
    return limit


def _line_ends(buffer, place):
    """Where the first line ends, if any does."""
    end = line_end_after(buffer, 0)
    if end:
        yield end


def _separator_ends(buffer, place):
    """Where end-of-text lines end. place: the buffer's in the file."""
    for separator in separators(buffer, len(buffer), ended=False):
        if separator.start or not place:  # else the line may begin before the buffer
            yield separator.end


def row_groups(span: Span, metadata: FileMetaData) -> tuple[list[int], int]:
    """The row groups of a span of parquet with rows from `at` on, and the rows before the first."""
    chosen = []
    rows = 0
    rows_before = 0
    place = 0
    for n in range(metadata.num_row_groups):
        group = metadata.row_group(n)
        place = max(place, min(_begin_of(group), span.source.size - 1))
        if span.start <= place < span.end and rows + group.num_rows > span.at.offset:
            if not chosen:
                rows_before = rows
            chosen.append(n)
        rows += group.num_rows
    return chosen, rows_before


def _begin_of(group):
    """The byte with which a row group begins."""
    column = group.column(0)
    if column.has_dictionary_page:
        return min(column.dictionary_page_offset, column.data_page_offset)
    return column.data_page_offset
