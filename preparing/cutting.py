"""Where text may be cut: between lines or documents, or in a document where no token can cross.

Works on bytes in memory. Independent of files, and of what the documents are.
"""

from collections.abc import Iterator
from typing import NamedTuple

from preparing.pieces import PIECE
from tokenizer_bpe import EOT, safe_cut

NO_CUT = 16 * PIECE  # text without any place to cut for so long is cut all the same
LOOK_BACK = 1 << 16  # bytes before the end of a piece in which a place to cut is looked for
AHEAD = 8  # bytes after a place to cut that are looked at
LONGEST_SEPARATOR = 64  # bytes of an end-of-text line, white space behind the mark included
MARK = EOT.encode()
LINE_END = ord("\n")
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # the bytes of a UTF-8 character after its first


class Cut(NamedTuple):
    """A place to cut: `end` bytes from the start; `whole`: whether a document ends there.

    An end of 0 means that there is none yet: read on.
    """

    end: int
    whole: bool


class Separator(NamedTuple):
    """The first byte of an end-of-text line, and the byte after its last."""

    start: int
    end: int


def line_end_before(data: bytes, limit: int, start: int = 0) -> int:
    """Where the last line that ends within data[start:limit] ends; 0 where none does."""
    return data.rfind(b"\n", start, limit) + 1


def line_end_after(data: bytes, start: int, limit: int | None = None) -> int:
    """Where the first line that ends within data[start:limit] ends; 0 where none does."""
    return data.find(b"\n", start, limit) + 1


def character_boundary_before(data: bytes, at: int) -> int:
    """Where the UTF-8 character that holds byte `at` begins; in broken text, 3 bytes back."""
    for start in range(at, at - 3, -1):
        if data[start] not in CONTINUATION_BYTES:
            return start
    return at - 3


def character_boundary_after(data: bytes, at: int) -> int:
    """Where the first UTF-8 character at or after byte `at` begins, else the end of the data."""
    while at < len(data) and data[at] in CONTINUATION_BYTES:
        at += 1
    return at


def cut_lines(buffer: bytearray, ended: bool) -> int:
    """Where whole lines of at most PIECE bytes end, or else the first line. 0: read on.

    ended: whether the buffer holds all that is left of the file.
    """
    if ended and len(buffer) <= PIECE:
        return len(buffer)
    end = line_end_before(buffer, PIECE)
    if not end:
        end = line_end_after(buffer, PIECE)
    if not end and ended:
        end = len(buffer)
    return end


def cut_documents(buffer: bytearray, ended: bool, inside: bool) -> Cut:
    """Where whole documents of at most PIECE bytes end, or else a part of the first one.

    ended: whether the buffer holds all that is left of the file. inside: whether it begins in the
    middle of a document.
    """
    if ended and len(buffer) <= PIECE and not inside:
        return Cut(len(buffer), whole=True)
    for limit in range(PIECE, NO_CUT + 1, PIECE):
        many = limit == PIECE and not inside  # as many documents as fit, else only the first
        short = len(buffer) < limit + AHEAD
        reach = len(buffer) if short and ended else limit
        separator = next(separators(buffer, reach, ended, backwards=many), None)
        if separator:
            return Cut(separator.end, whole=True)
        if short:
            return Cut(len(buffer) if ended else 0, whole=ended)
        end = _cut_between_tokens(buffer, limit)
        if end:
            return Cut(end, whole=False)
    return Cut(character_boundary_before(buffer, NO_CUT), whole=False)


def _cut_between_tokens(buffer, limit):
    """The last place before `limit` that no token can cross; 0 where there is none."""
    tail = buffer[max(0, limit - LOOK_BACK) : limit + AHEAD]
    tail = tail.lstrip(CONTINUATION_BYTES)  # from the first whole character
    # With surrogateescape a broken byte stays one character, and encodes back.
    text = tail.decode("utf-8", "surrogateescape")
    before_limit = len(tail[:-AHEAD].decode("utf-8", "surrogateescape"))
    cut = safe_cut(text, before_limit)
    if not cut:
        return 0
    return limit + AHEAD - len(text[cut:].encode("utf-8", "surrogateescape"))


def separators(
    data: bytes, limit: int, ended: bool, backwards: bool = False
) -> Iterator[Separator]:
    """The end-of-text lines that end within `limit`, in order or backwards.

    Found by find(): a regular expression took 28 ms a piece, as long as encoding it.
    """
    at = data.rfind(MARK, 0, limit) if backwards else data.find(MARK, 0, limit)
    while at >= 0:
        end = _separator_end(data, at, limit, ended)
        if end:
            yield Separator(at, end)
        at = data.rfind(MARK, 0, at) if backwards else data.find(MARK, at + 1, limit)


def _separator_end(data, at, limit, ended):
    """Where the line with the mark at byte `at` ends; 0 where it holds more than the mark."""
    if at > 0 and data[at - 1] != LINE_END:
        return 0
    reach = min(at + LONGEST_SEPARATOR, limit)
    end = line_end_after(data, at, reach)
    if not end and ended and len(data) <= reach:
        end = len(data)
    if data[at + len(MARK) : end].strip():
        return 0
    return end


def split_documents(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The documents of a text that ends with its last one, each with the byte where it begins."""
    start = 0
    for separator in separators(data, len(data), ended=True):
        yield start, data[start : separator.start]
        start = separator.end
    yield start, data[start:]
