"""A remote file as an open one, and any part of it, fetched with patience. Knows no format."""

import functools
import io
from collections.abc import Callable
from typing import BinaryIO

from preparing.errors import InputError
from preparing.inputs import Source
from preparing.patience import patiently
from preparing.remote import read_range, state_of

SMALLEST_PART = 1 << 18  # bytes of a request, after requests that failed
BUFFER = 4 << 20  # bytes that a reader takes at a time,
BEYOND = 1 << 20  # and behind the part of a file that it wants


def fetch(address: str, start: int, end: int) -> bytes:
    """The bytes of a remote file from `start` to before `end`.

    After a failure in smaller requests, so that a connection that breaks every few MB gets on.
    """
    data = bytearray()
    size = end - start
    while len(data) < end - start:
        at = start + len(data)

        def read(at=at):
            nonlocal size
            asked = min(size, end - at)
            size = max(SMALLEST_PART, size // 2)
            got = read_range(address, at, at + asked)
            if not 0 < len(got) <= asked:
                _check_length(address, end)
                raise OSError(f"{len(got):,} bytes came of {asked:,}")
            size = 2 * asked
            return got

        data += patiently(read, address)
    return bytes(data)


def _check_length(address, end):
    """Raises InputError when a file has fewer than `end` bytes by now."""
    size = state_of(address).size
    if size < end:
        raise InputError(
            f"{address} changed at its source: it has only {size:,} bytes now. Start anew with"
            " --overwrite"
        )


def check_unchanged(source: Source) -> None:
    """Raises InputError when a remote file is no longer what it was when it was listed."""
    now = patiently(functools.partial(state_of, source.path), source.path)
    if (now.size, now.tag) != (source.size, source.tag):
        raise InputError(
            f"{source.path} changed at its source while it was fetched: it was {source.size:,}"
            f" bytes ({source.tag}), it is {now.size:,} ({now.tag}).\nStart anew with --overwrite"
        )


class RemoteFile(io.RawIOBase):
    """A remote file as an open one.

    read_at: gives the bytes from one offset to another. wanted: where the part ends that will be
    read, most likely.
    """

    def __init__(self, read_at: Callable[[int, int], bytes], size: int, wanted: int):
        self.read_at = read_at
        self.size = size
        self.wanted = wanted
        self.at = 0

    def readable(self) -> bool:
        """Always."""
        return True

    def seekable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """The offset of the next byte."""
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to an offset; returns it."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}
        self.at = origin[whence] + offset
        return self.at

    def readinto(self, buffer: memoryview) -> int:
        """Fill a buffer with the next bytes; returns how many there were."""
        end = min(self.at + len(buffer), self.wanted)
        if self.at >= self.wanted:
            end = min(self.at + len(buffer), self.at + BEYOND, self.size)
        if end <= self.at:
            return 0
        data = self.read_at(self.at, end)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def open_source(source: Source, wanted: int | None = None) -> BinaryIO:
    """A source as an open file; a remote one is asked for what is read of it, and nothing kept.

    wanted: where the part ends that will be read, most likely; None: all of it.
    """
    if not source.is_remote:
        return open(source.path, "rb")
    return buffered(functools.partial(fetch, source.path), source.size, wanted)


def buffered(
    read_at: Callable[[int, int], bytes], size: int, wanted: int | None = None
) -> io.BufferedReader:
    """A file of `size` bytes, opened. read_at, wanted: as in RemoteFile."""
    return io.BufferedReader(RemoteFile(read_at, size, wanted or size), BUFFER)
