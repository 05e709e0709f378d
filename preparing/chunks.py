"""Chunks: the portions of about 1 MB in which text is read, sent to workers and encoded.

Says where text may be cut: between lines or documents, or within a long document where no token
can cross.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tokenizer_bpe import EOT, safe_cut

# Bytes that a worker encodes at a time. Much more in one call is slower and takes far more memory.
CHUNK = 1 << 20
NO_CUT = 16 * CHUNK  # text that has no place to cut for this long is cut anyway
LOOK_BACK = 1 << 16  # bytes before the end of a chunk in which to look for a place to cut
AHEAD = 8  # bytes after a place to cut that decide whether it is one
LONGEST_SEPARATOR = 64  # bytes of an end-of-text line, with the white space after the mark
MARK = EOT.encode()
LINE_END = ord("\n")
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # the bytes of a UTF-8 character after its first


@dataclass
class Position:
    """A place in the input.

    source: index of the file. offset: byte in its decompressed content, or the row of a parquet
    file. line: lines before it in the file. inside: whether a document continues across it.
    on_disk: bytes on disk of all input before it.
    """

    source: int = 0
    offset: int = 0
    line: int = 0
    inside: bool = False
    on_disk: int = 0


@dataclass
class Chunk:
    """Whole documents, or a part of a single long one.

    data: bytes, or the rows of a parquet file as {column: value}. start, end: its positions.
    in_place: whether a worker can read these very bytes from the file.
    """

    path: str
    kind: str
    data: bytes | list
    start: Position
    end: Position
    in_place: bool = False

    @property
    def begins(self) -> bool:
        """Whether its first document begins in it."""
        return not self.start.inside

    @property
    def ends(self) -> bool:
        """Whether its last document ends in it."""
        return not self.end.inside

    @property
    def whole(self) -> bool:
        """Whether it holds whole documents, not a part of one."""
        return self.begins and self.ends

    @property
    def size(self) -> int:
        """Bytes; the same for rows, roughly."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return sum(len(str(value)) for row in self.data for value in row.values())


def batches(chunks: Iterable[Chunk]) -> Iterator[list[Chunk]]:
    """Chunks for workers in lists of half a CHUNK and more: small files share a task.

    Without the data that workers can read: sending it costs a tenth of encoding it.
    """
    batch = []
    size = 0
    for chunk in chunks:
        size += chunk.size
        batch.append(dataclasses.replace(chunk, data=b"") if chunk.in_place else chunk)
        if size >= CHUNK // 2:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def for_each(function: Callable, batch: list[Chunk]) -> list:
    """function(chunk) for each chunk of a batch, in a worker."""
    for chunk in batch:
        if chunk.in_place:
            with open(chunk.path, "rb") as file:
                file.seek(chunk.start.offset)
                chunk.data = file.read(chunk.end.offset - chunk.start.offset)
    return list(map(function, batch))


# -- where to cut


def character_boundary_before(data: bytes, at: int) -> int:
    """Where the UTF-8 character that holds byte `at` begins; in broken text, 3 bytes back."""
    for start in range(at, at - 3, -1):
        if data[start] not in CONTINUATION_BYTES:
            return start
    return at - 3


def cut_lines(buffer: bytearray, ended: bool) -> int:
    """Where whole lines of at most CHUNK bytes end, or else the first line. 0: read on.

    ended: whether the buffer holds all that is left of the file.
    """
    if ended and len(buffer) <= CHUNK:
        return len(buffer)
    end = buffer.rfind(b"\n", 0, CHUNK) + 1
    if not end:
        end = buffer.find(b"\n", CHUNK) + 1
    if not end and ended:
        end = len(buffer)
    return end


def cut_documents(buffer: bytearray, ended: bool, inside: bool) -> tuple[int, bool]:
    """Where whole documents of at most CHUNK bytes end, or else a part of the first one.

    ended: whether the buffer holds all that is left of the file. inside: whether it begins within
    a document. Returns the end, 0 to read on, and whether a document ends there.
    """
    if ended and len(buffer) <= CHUNK and not inside:
        return len(buffer), True
    for limit in range(CHUNK, NO_CUT + 1, CHUNK):
        as_many_as_fit = limit == CHUNK and not inside  # else only the first document
        short = len(buffer) < limit + AHEAD
        reach = len(buffer) if short and ended else limit
        found = separators(buffer, reach, ended, backwards=as_many_as_fit)
        _, end = next(found, (0, 0))
        if end:
            return end, True
        if short:
            return (len(buffer), True) if ended else (0, False)
        end = _cut_between_tokens(buffer, limit)
        if end:
            return end, False
    return character_boundary_before(buffer, NO_CUT), False


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
) -> Iterator[tuple[int, int]]:
    """Start and end of each end-of-text line that ends within `limit`, in order or backwards.

    Uses find(): a regular expression took 28 ms a chunk, as long as encoding it.
    """
    at = data.rfind(MARK, 0, limit) if backwards else data.find(MARK, 0, limit)
    while at >= 0:
        end = _separator_end(data, at, limit, ended)
        if end:
            yield at, end
        at = data.rfind(MARK, 0, at) if backwards else data.find(MARK, at + 1, limit)


def _separator_end(data, at, limit, ended):
    """Where the line with the mark at byte `at` ends; 0 where it holds more than the mark."""
    if at > 0 and data[at - 1] != LINE_END:
        return 0
    reach = min(at + LONGEST_SEPARATOR, limit)
    end = data.find(b"\n", at, reach) + 1
    if not end and ended and len(data) <= reach:
        end = len(data)
    if data[at + len(MARK) : end].strip():
        return 0
    return end


def split_documents(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The documents of a text that ends with its last one, each with the byte where it begins."""
    start = 0
    for separator, after in separators(data, len(data), ended=True):
        yield start, data[start:separator]
        start = after
    yield start, data[start:]
