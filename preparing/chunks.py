"""Chunks: the portions of about 1 MB in which text is read and encoded, and how to read them.

Decides where text may be cut (between lines or documents, or inside a long document at a place that
no token crosses), and which small chunks go together. Knows neither files nor the command line.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tokenizer_bpe import EOT, safe_cut

# Bytes that a thread encodes per call. Much larger calls are slower and take far more memory.
CHUNK_BYTES = 1 << 20
UNCUT_BYTES = 16 * CHUNK_BYTES  # after this much text without a place to cut, it is cut anyway
LOOK_BACK = 1 << 14  # bytes before the end of a chunk that are searched for a place to cut
LOOK_AHEAD = 8  # bytes after a place that decide whether it may be cut there
MARK = EOT.encode()
# A mark takes with it up to 50 bytes of blanks on each side, and a line break after it.
AFTER_MARK = re.compile(rb"[^\S\n]{0,50}\n?")
# A mark in quotes is part of the text. A quote after a word or a sentence does not count as an
# opening one, since it closes a quotation, unless the word is a string prefix of Python, such as b.
OPENING_QUOTE = re.compile(rb"(?:(?:\A|[^\w.!?\x80-\xff])[bfruBFRU]{0,2}([\"'`])|\xe2\x80\x9c)\Z")
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # the bytes of a UTF-8 character after its first


@dataclass(frozen=True)
class Options:
    """The options for turning records into texts; --help explains each."""

    text_field: str | None = None  # None: the usual names, listed in records.py
    on_error: str = "stop"
    encoding: str | None = None  # None: UTF-8
    clean: bool = False
    dedupe: bool = False


@dataclass
class Position:
    """A place in the input.

    source: index of the file. offset: byte in its decompressed content, or row of a table. line:
    lines before it in the file. inside: whether a document continues across it. on_disk: bytes on
    disk of all input before it.
    """

    source: int = 0
    offset: int = 0
    line: int = 0
    inside: bool = False
    on_disk: int = 0


@dataclass
class Chunk:
    """Whole documents, or a part of a single long one.

    data: bytes, or rows of a table as records.py yields them: (place, row). size: bytes, roughly if
    rows. start, end: where it begins and ends in the input. encoding: of the file; None: UTF-8.
    """

    path: str
    kind: str
    data: bytes | list
    size: int
    start: Position
    end: Position
    encoding: str | None = None

    @property
    def whole(self) -> bool:
        """False if this is a part of a document."""
        return not (self.start.inside or self.end.inside)


def together(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Group consecutive small chunks, as small files give them, into lists of up to CHUNK_BYTES.

    A larger chunk, or a part of a document, is a list of its own.
    """
    found = []
    size = 0
    for chunk in chunks:
        size += chunk.size
        joins = size <= CHUNK_BYTES and chunk.whole
        if found and not (joins and found[-1].whole):
            yield found
            found = []
            size = chunk.size
        found.append(chunk)
    if found:
        yield found


def cut_lines(buffer: bytearray, ended: bool) -> int:
    """The end of the last whole line within CHUNK_BYTES, else of the first line; 0 to read on.

    ended: whether the buffer holds the rest of the file.
    """
    end = buffer.rfind(b"\n", 0, CHUNK_BYTES) + 1 or buffer.find(b"\n", CHUNK_BYTES) + 1
    if not end and ended:
        return len(buffer)
    return end


def cut_documents(buffer: bytearray, ended: bool, inside: bool) -> tuple[int, bool]:
    """The end of the documents that fit in CHUNK_BYTES, else of a part of the first document.

    ended: whether the buffer holds the rest of the file. inside: whether it begins inside a
    document; the end of that one is then the next place to cut. Returns the end (0 to read on) and
    whether a document ends there.
    """
    if not inside:
        if ended and len(buffer) <= CHUNK_BYTES:
            return len(buffer), True
        _, end = next(separators(buffer, CHUNK_BYTES, ended, backwards=True), (0, 0))
        if end:
            return end, True
    for limit in range(CHUNK_BYTES, UNCUT_BYTES + 1, CHUNK_BYTES):
        reaches_beyond = len(buffer) >= limit + LOOK_AHEAD
        if not (reaches_beyond or ended):
            return 0, False
        _, end = next(separators(buffer, limit if reaches_beyond else len(buffer), ended), (0, 0))
        if end or not reaches_beyond:
            return end or len(buffer), True
        end = _cut_between_tokens(buffer, limit)
        if end:
            return end, False
    end = UNCUT_BYTES
    while buffer[end] in CONTINUATION_BYTES and end > UNCUT_BYTES - 3:  # broken text may have more
        end -= 1
    return end, False


def _cut_between_tokens(buffer, limit):
    """The last place before `limit` that no token can cross; 0 if there is none."""
    tail = buffer[max(0, limit - LOOK_BACK) : limit + LOOK_AHEAD]
    tail = tail.lstrip(CONTINUATION_BYTES)  # from the first whole character
    # surrogateescape turns a broken byte into one character, and back.
    text = tail.decode("utf-8", "surrogateescape")
    before_limit = len(tail[:-LOOK_AHEAD].decode("utf-8", "surrogateescape"))
    cut = safe_cut(text, before_limit)
    if not cut:
        return 0
    return limit + LOOK_AHEAD - len(text[cut:].encode("utf-8", "surrogateescape"))


def separators(
    data: bytes, limit: int, ended: bool, backwards: bool = False
) -> Iterator[tuple[int, int]]:
    """Start and end of each end-of-text mark that ends within `limit`, in order or backwards.

    Both include the blanks around the mark. A mark whose end depends on what follows is left to a
    later call. find() searches, since a regular expression took 28 ms per chunk, as long as
    encoding it.
    """
    at = data.rfind(MARK, 0, limit) if backwards else data.find(MARK, 0, limit)
    while at >= 0:
        found = AFTER_MARK.match(data, at + len(MARK), limit)
        end = found.end()
        known = end < limit or found[0].endswith(b"\n") or (ended and end == len(data))
        if known and not _is_quoted(data, at):
            before = data[max(0, at - 50) : at]
            yield at - len(before) + len(before.rstrip(b" \t")), end
        at = data.rfind(MARK, 0, at) if backwards else data.find(MARK, at + 1, limit)


def _is_quoted(data, at):
    """True if the mark at `at` has a quote on each side."""
    opening = OPENING_QUOTE.search(data[max(0, at - 4) : at])
    if not opening:
        return False
    closing = opening[1] or "\u201d".encode()
    return data.startswith(closing, at + len(MARK))


def split_documents(data: bytes) -> Iterator[tuple[int, bytes, bool]]:
    """Split a text that ends where its last document ends.

    Yields, for each document, the byte where it begins, its text, and whether the next document
    begins on its last line.
    """
    start = 0
    for separator, after in separators(data, len(data), ended=True):
        ends_line = separator == start or data[separator - 1 : separator] == b"\n"
        begins_line = after == len(data) or data[after - 1 : after] == b"\n"
        yield start, data[start:separator], not (ends_line or begins_line)
        start = after
    yield start, data[start:], False
