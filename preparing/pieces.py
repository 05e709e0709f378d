"""Pieces: the portions of about 1 MB in which text is read, sent to workers and encoded.

A piece knows where in the input it lies, and not what a document in it looks like (records.py)
nor where text may be cut (cutting.py).
"""

import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

# Bytes that a worker encodes at a time. Much more in one call is slower and takes far more memory.
PIECE = 1 << 20


@dataclass
class Position:
    """A place in the input.

    source: index of the file. offset: byte in its decompressed content, or the row of a parquet
    file. line: lines between the byte `counted_from` and it. inside: whether a document goes on
    across it. on_disk: bytes on disk of all input before it.
    """

    source: int = 0
    offset: int = 0
    line: int = 0
    inside: bool = False
    on_disk: int = 0
    counted_from: int = 0

    def line_name(self, number: int) -> str:
        """What to call the line of which `number - 1` lines are before it, counted as `line` is."""
        if self.counted_from:
            return f"line {number:,} from byte {self.counted_from:,} on"
        return f"line {number:,}"


@dataclass
class Piece:
    """Whole documents, or a part of a single long one.

    data: bytes, or the rows of a parquet file as {column: value}. at, after: where the piece
    begins, and where the next one does. begins, ends: whether the first document begins here, and
    whether the last one ends here. plain: whether the file holds these very bytes at `at`, so that
    anyone can read them there.
    """

    path: str
    kind: str
    data: bytes | list
    at: Position
    after: Position
    begins: bool = True
    ends: bool = True
    plain: bool = False

    @property
    def size(self) -> int:
        """Bytes; of rows about as many."""
        if isinstance(self.data, bytes):
            return len(self.data)
        return sum(len(str(value)) for row in self.data for value in row.values())

    def without_data(self) -> "Piece":
        """The piece to send to a worker, which reads the data of a plain one from the file itself.

        Sending the data costs a tenth of encoding it.
        """
        if not self.plain:
            return self
        return dataclasses.replace(self, data=b"")

    def with_data(self) -> "Piece":
        """The piece with its data, read from the file where it is missing."""
        if self.data:
            return self
        with open(self.path, "rb") as file:
            file.seek(self.at.offset)
            data = file.read(self.after.offset - self.at.offset)
        return dataclasses.replace(self, data=data)


def batches(pieces: Iterable, enough: int = PIECE // 2) -> Iterator[list]:
    """Pieces or spans in lists of `enough` bytes and more: small files are no work of their own."""
    batch = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= enough:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch
