"""A Ray cluster in the place of this machine's worker processes.

Its tasks fetch or read spans of the input and call the function; this process takes what comes of
it in order. A task whose node dies is done again elsewhere, which is Ray's work. Imported where
there is a package ray; the nodes need what is needed here to read the same text.
"""

import functools
import itertools
import os
import queue
import re
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import ray

from formats.address import short
from preparing.errors import InputError, PrepareError
from preparing.inputs import Source
from preparing.options import Options
from preparing.pieces import Piece, Position, batches
from preparing.pool import attempt, lacking, value_of
from preparing.readers import read_span
from preparing.remote_file import check_unchanged, open_source
from preparing.spans import Span, spans_of

ROOT = Path(__file__).parent.parent
CODE = ("preparing", "formats", "tokenizer_bpe.py")  # what the nodes get
SETTINGS = re.compile(r"(HF|AWS|FSSPEC|GOOGLE)_.*|https?_proxy|no_proxy", re.IGNORECASE)
SMALLEST_SHARE = 1 << 20  # bytes on disk for a task,
LARGEST_SHARE = 16 << 20  # and the most,
SHARES = 16  # a core, where that lies between
AHEAD = 2  # tasks a core that are under way or wait for an earlier one
READ_AHEAD = 4  # pieces that a task reads before their turn: the network hides behind the function
RETRIES = 20  # of a task whose node dies
CONNECTING = 10  # seconds until an address counts as wrong
SILENCE = 60  # seconds without a result until something is said


class Work(NamedTuple):
    """What every task has to know.

    folder: from which the paths of local files go out. settings: of the environment, for packages
    that fetch.
    """

    function: Callable
    options: Options
    folder: str
    settings: dict[str, str]


# -- in the main process


def connect(address: str) -> None:
    """Connect this process to a cluster. address: HOST:PORT, or auto for that of this machine.

    Raises InputError where there is none.
    """
    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address != "auto":
        _check_address(address)
    code = [str(ROOT / name) for name in CODE]
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of tasks that are given up
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        ray.init(
            address,
            runtime_env={"py_modules": code, "excludes": ["__pycache__"]},
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (Exception, SystemExit) as error:  # whatever it raises
        raise InputError(f"--ray {address}: {short(error)}") from None
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


def _check_address(address):
    """Raises InputError where nobody answers: Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not re.fullmatch(r"[\w.-]+", host) or not port.isdecimal():
        raise InputError(
            f"--ray {address} is no address of a cluster: give HOST:PORT of its head, as in"
            " 10.0.0.1:6379, or auto; either on a machine that belongs to it"
        )
    try:
        socket.create_connection((host, int(port)), CONNECTING).close()
    except (OSError, OverflowError) as error:
        raise InputError(
            f"--ray {address}: nobody answers there ({error}); `ray start --head` starts a cluster"
            " and says its address"
        ) from None


class RayEngine:
    """A function of batches of pieces, and a cluster, connected to, that calls it.

    Used as a context manager, in which the first result is there.
    """

    def __init__(
        self, function: Callable, start: Position, options: Options, sources: list[Source]
    ):
        """start: of the first piece."""
        settings = {name: value for name, value in os.environ.items() if SETTINGS.fullmatch(name)}
        self.work = Work(function, options, os.getcwd(), settings)
        self.sources = sources
        self.start = start
        self.tasks = deque()  # the generators of their results, in order
        self.cores = cores()

    def __enter__(self):
        left = sum(source.size for source in self.sources[self.start.source :])
        size = min(LARGEST_SHARE, max(SMALLEST_SHARE, left // (SHARES * self.cores)))
        spans = spans_of(self.sources, self.start, self.work.options, size)
        self.shares = batches(spans, size // 2)
        self.task = ray.remote(results_of).options(num_returns="streaming", max_retries=RETRIES)
        self.reference = ray.put(self.work)
        self._begin_tasks()
        if self.tasks:
            self._wait()
        return self

    def __exit__(self, *error):
        for task in self.tasks:
            ray.cancel(task)

    def results(self) -> Iterator:
        """What the function makes of each batch, in order. Raises what it raises."""
        while self.tasks:
            try:
                self._wait()
                result = ray.get(next(self.tasks[0]))
            except StopIteration:
                self.tasks.popleft()
                self._begin_tasks()
            except ray.exceptions.RayError as error:
                raise _failure(error) from None
            else:
                yield value_of(result)

    def _begin_tasks(self):
        """Hand out as many as keep all of the cluster busy."""
        self.cores = cores()
        room = AHEAD * self.cores + 1 - len(self.tasks)
        for share in itertools.islice(self.shares, max(0, room)):
            # In a list, for a reference alone is replaced by what it stands for, in each task.
            self.tasks.append(self.task.remote([self.reference], share))

    def _wait(self):
        """Wait for the first task's next result, or its end; say so where that takes long."""
        while not ray.wait([self.tasks[0]], timeout=SILENCE)[0]:
            print("waiting for the Ray cluster; see `ray status`", file=sys.stderr, flush=True)

    def release(self, source: int) -> None:
        """Do nothing: no files are kept."""

    def status(self) -> str:
        """How it goes, in a few words for the progress bar."""
        return f"{self.cores} cores of Ray"


def cores() -> int:
    """The cores of the cluster by now, at least 1."""
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def _failure(error):
    """The PrepareError for a task that Ray gave up."""
    missing = re.search(r"No module named '(\w+)", str(error))
    if missing:
        return lacking(missing[1], "a node of the Ray cluster")
    return PrepareError(f"the Ray cluster failed: {short(error)}; the same command continues")


# -- on the cluster


def results_of(references: list, spans: list[Span]) -> Iterator:
    """What the function makes of each batch of pieces of some spans; an exception, if it is one.

    references: the one of the Work.
    """
    work = _received(references[0])
    results = map(work.function, batches(read_ahead(_pieces(work, spans))))
    while (result := attempt(_next, results)) is not None:
        yield result


@functools.cache
def _received(reference):
    """The Work that a reference stands for, once a process."""
    work = ray.get(reference)
    os.environ.update(work.settings)
    return work


def _next(results):
    """The next result, None after the last."""
    return next(results, None)


def _pieces(work, spans):
    """The pieces of some spans. Raises InputError for what cannot be read, or changed."""
    for span in spans:
        opened = functools.partial(open_here, work.folder, span.end)
        yield from read_span(span, work.options, opened)
        if span.source.is_remote:
            check_unchanged(span.source)


def open_here(folder: str, wanted: int, source: Source) -> BinaryIO:
    """A source as an open file. folder: of the main process. wanted: as of open_source.

    Raises InputError for a local file that this machine does not see.
    """
    if source.is_remote:
        return open_source(source, wanted)
    path = Path(folder, source.path)
    if not path.exists() or path.stat().st_size != source.size:
        raise InputError(
            f"{path} is not there, or another file, on {socket.gethostname()} of the Ray cluster:"
            " put it where all nodes see it under this path, or where they can fetch it, as with"
            " s3://bucket/texts"
        )
    return open(path, "rb")


def read_ahead(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces, read by a thread before they are asked for. Raises what reading them raises."""
    read = queue.Queue(READ_AHEAD)

    def run():
        try:
            for piece in pieces:
                read.put(piece)
            read.put(None)
        except Exception as error:
            read.put(error)

    threading.Thread(target=run, daemon=True).start()
    while (piece := value_of(read.get())) is not None:
        yield piece
