"""Remote files fetched ahead of their reader, into a cache of bounded size.

Fetches in parts, several at a time, and appends them in order: what a stopped run had fetched of a
file is its beginning, and the next run goes on there. Knows no format of files.
"""

import functools
import hashlib
import math
import operator
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import BinaryIO, NamedTuple

from formats.files import sync
from preparing.errors import InputError, PrepareError
from preparing.inputs import Source
from preparing.remote_file import buffered, check_unchanged, fetch

PART = 16 << 20  # bytes of a request
UNDER_WAY = 4  # requests at a time
TAIL = 64 << 20  # bytes at the end of a file that are asked for by themselves: parquet begins there


class Part(NamedTuple):
    """The bytes from `start` to before `end` of source number `index`."""

    index: int
    start: int
    end: int


class Stopped(Exception):
    """The fetcher was closed while it waited."""


class Fetcher:
    """Fetches the remote files among some sources, in order, ahead of whoever reads them.

    Used as a context manager. Files are dropped when release() says so and, where there is no room
    for the next one, when their reader is through with them.
    """

    def __init__(
        self,
        sources: list[Source],
        folder: Path,
        limit: float,
        first: int = 0,
        enough: float = math.inf,
    ):
        """folder: the cache, which may hold files of a former run. limit: bytes in it.

        first: index of the source that is read first. enough: bytes of sources after which none is
        fetched before it is asked for.
        """
        self.sources = sources
        self.folder = folder
        self.limit = limit
        self.enough = enough
        self.first = first
        self.index = {source.path: n for n, source in enumerate(sources)}
        self.reading = first  # the source that is read
        self.dropped = first  # the sources before it are no longer in the cache
        self.reserved = {}  # bytes of the cache for each source that is or will be there
        self.have = {}  # bytes that are there, of each source
        self.changed = threading.Condition()
        self.writing = threading.Lock()
        self.failure = None
        self.closed = False
        self.fetched = 0  # bytes, by this run
        self.started = time.monotonic()
        self.idle = 0.0  # seconds of waiting for room, with nothing under way

    def __enter__(self):
        remote = [n for n, source in enumerate(self.sources) if source.is_remote]
        if any(n >= self.first for n in remote):
            self.folder.mkdir(exist_ok=True)
            self._drop_strangers()
            threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *error):
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        with self.writing:  # from now on nothing is
            pass

    # -- for the reader

    def open(self, source: Source) -> BinaryIO:
        """A source as an open file, which waits for what has not come yet."""
        if not source.is_remote:
            return open(source.path, "rb")
        index = self.index[source.path]
        with self.changed:
            self.reading = index
            self.changed.notify_all()
        return buffered(functools.partial(self.read, index), source.size)

    def read(self, index: int, start: int, end: int) -> bytes:
        """The bytes of a source from `start` to before `end`, waited for."""
        source = self.sources[index]
        with self.changed:
            while (there := self.have.get(index, 0)) < end:
                if self.failure:
                    raise self.failure
                in_tail = start >= source.size - TAIL
                if in_tail and start > there + UNDER_WAY * PART:
                    break
                self.changed.wait(1)
        if there < end:
            return fetch(source.path, start, end)
        with open(self._path(index), "rb") as file:
            file.seek(start)
            return file.read(end - start)

    def release(self, index: int) -> None:
        """Drop the sources before `index`: their tokens are safe."""
        with self.changed:
            self._drop_before(index)

    def status(self) -> str:
        """How much came how fast, in a few words; "" where nothing had to."""
        if not self.fetched:
            return ""
        speed = self.fetched / (time.monotonic() - self.started - self.idle)
        return f"fetched {self.fetched / 1e6:,.0f} MB, {speed / 1e6:,.1f} MB/s"

    # -- the cache

    def _path(self, index):
        """The file in the cache for a source, in the state in which it was listed."""
        source = self.sources[index]
        name = hashlib.sha256(f"{source.path}\n{source.tag}\n{source.size}".encode()).hexdigest()
        return self.folder / name[:32]

    def _drop_strangers(self):
        """Delete what the cache holds, except of those sources with which it will be filled."""
        wanted = set()
        size = 0
        for n in range(self.first, len(self.sources)):
            if self.sources[n].is_remote:
                size += self.sources[n].size
                if size <= self.limit:
                    wanted.add(self._path(n))
        for path in list(self.folder.iterdir()):
            if path not in wanted:
                path.unlink()

    def _drop_before(self, index):
        """Delete the files of the sources before `index`."""
        for n in range(self.dropped, index):
            if self.reserved.pop(n, 0):
                self.have.pop(n, None)
                self._path(n).unlink(missing_ok=True)
        self.dropped = max(self.dropped, index)
        self.changed.notify_all()

    def _make_room(self, index, wait):
        """Reserve room for a source; False if there is none yet. With `wait`, wait for it."""
        size = self.sources[index].size
        before = sum(source.size for source in self.sources[self.first : index])
        with self.changed:
            while index not in self.reserved:
                if self.closed:
                    raise Stopped
                wanted = before < self.enough or index <= self.reading
                if wanted and sum(self.reserved.values()) + size > self.limit:
                    self._drop_before(min(self.reading, index))
                if wanted and sum(self.reserved.values()) + size <= self.limit:
                    self.reserved[index] = size
                    self._find_what_is_there(index)
                elif wait:
                    waits = time.monotonic()
                    self.changed.wait(1)
                    self.idle += time.monotonic() - waits
                else:
                    return False
        return True

    def _find_what_is_there(self, index):
        """Count what a former run left of a source."""
        path = self._path(index)
        self.have[index] = path.stat().st_size if path.exists() else 0
        self.changed.notify_all()

    # -- the thread

    def _run(self):
        """Fetch everything, in order; what goes wrong is for the reader."""
        try:
            self._fetch_all()
        except Stopped:
            pass
        except OSError as error:
            self._fail(self._about_disk(error))
        except Exception as error:
            self._fail(error)

    def _fail(self, error):
        with self.changed:
            self.failure = error
            self.changed.notify_all()

    def _fetch_all(self):
        """Keep UNDER_WAY requests going, and append what they bring in order."""
        under_way = deque()
        for part in self._parts(under_way):
            under_way.append((part, _begin(self._fetch_part, part)))
            if len(under_way) == UNDER_WAY:
                self._append(*under_way.popleft())
        while under_way:
            self._append(*under_way.popleft())

    def _parts(self, under_way) -> Iterator[Part]:
        """What is to be fetched, as there is room. What is under way is appended before a wait."""
        for index in range(self.first, len(self.sources)):
            source = self.sources[index]
            if not source.is_remote:
                continue
            while under_way and not self._make_room(index, wait=False):
                self._append(*under_way.popleft())
            self._make_room(index, wait=True)
            for start in range(self.have[index], source.size, PART):
                yield Part(index, start, min(start + PART, source.size))

    def _fetch_part(self, part):
        """The bytes of a part. With a file's last one, see that the file is still what it was."""
        source = self.sources[part.index]
        data = fetch(source.path, part.start, part.end)
        if part.end == source.size:
            check_unchanged(source)
        return data

    def _append(self, part, future):
        """Put a part that came behind the others of its file."""
        data = future.result()
        path = self._path(part.index)
        with self.writing:
            if self.closed:
                raise Stopped
            if part.index not in self.reserved:  # its reader is through with it
                return
            with open(path, "ab") as file:
                if file.tell() < part.start:
                    raise OSError(f"{path.name} was cut or deleted by somebody else")
                file.truncate(part.start)
                file.write(data)
            sync(path)
        with self.changed:
            self.have[part.index] = part.end
            self.fetched += len(data)
            self.changed.notify_all()

    def _about_disk(self, error):
        """A PrepareError for an OSError of the cache."""
        held = sum(path.stat().st_size for path in self.folder.iterdir())
        return PrepareError(
            f"{self.folder}: {error.strerror or error}; it holds {held / 1e9:,.1f} GB of fetched"
            " files, and a smaller --cache_gb needs less. What is finished is kept, and the same"
            " command continues once there is room"
        )


def _begin(function, part):
    """Call a function in a thread of its own, which does not outlive the process."""
    future = Future()

    def call():
        try:
            future.set_result(function(part))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def check_cache(sources: list[Source], limit: float) -> None:
    """Raises InputError when the cache cannot hold the largest of the remote sources."""
    remote = [source for source in sources if source.is_remote]
    largest = max(remote, key=operator.attrgetter("size"), default=None)
    if largest and largest.size > limit:
        raise InputError(
            f"--cache_gb {limit / 1e9:g} does not hold {largest.path}, which is"
            f" {largest.size / 1e9:,.2f} GB; give at least --cache_gb"
            f" {largest.size / 1e9 + 0.01:.2f}"
        )
