"""Remote text: addresses -> a list of files, and these files on this disk, fetched ahead.

fsspec does the transfers, with the package that it takes for each protocol: huggingface_hub, s3fs,
gcsfs, aiohttp. These read tokens and endpoints from the environment (HF_TOKEN, HF_ENDPOINT, AWS_*)
and send them to no other host. tenacity tries again. Knows no format.
"""

import functools
import hashlib
import math
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from formats.address import PERMISSION, protocol_of
from formats.files import in_words, sync
from preparing import InputError, PrepareError, need

# What reads each protocol, as `python -m pip install` takes it.
PACKAGES = {
    "hf": ("huggingface_hub",),
    "s3": ("s3fs",),
    "gs": ("gcsfs",),
    "https": ("fsspec", "aiohttp"),
    "http": ("fsspec", "aiohttp"),
}
BUGS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
BLOCK = 16 << 20  # bytes of a request
AT_A_TIME = 4  # files that are fetched
STALL = 60  # seconds without a byte over http(s); other packages have shorter times of their own
WHILE_LISTING = 10  # seconds of trying before a run begins,
PATIENCE = 30 * 60  # and without a block while it goes on; it can be continued
BUSY = (408, 425, 429)  # replies of a server that may serve us later, as 500 and above
QUIET_TRIES = 3  # that fail before a message says so
CHANGED = "{} changed at its source; start again with --overwrite"
# Names under which file systems give what changes with a file's content, the best one first.
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "updated")


@dataclass(frozen=True)
class RemoteFile:
    """A file as it is at its source. size: bytes. tag: changes with the content; "" if unknown."""

    address: str
    size: int
    tag: str


def check_packages(address: str) -> None:
    """Raises InputError for an unknown protocol, and where its packages are missing."""
    protocol = protocol_of(address)
    if protocol not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise InputError(f"{address}: {protocol}:// is not among {known}")
    need(address, *PACKAGES[protocol], "tenacity")


@functools.cache
def file_system(protocol: str):
    """The fsspec file system of a protocol; one for all threads of a process."""
    import fsspec

    if protocol in ("http", "https"):
        import aiohttp

        wait = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL)
        return fsspec.filesystem(protocol, client_kwargs={"timeout": wait, "trust_env": True})
    if protocol == "hf":
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # else a line for each of its own tries
    return fsspec.filesystem(protocol)


# -- what is there


def list_files(address: str) -> list[RemoteFile]:
    """The files that an address names: one, those of a folder, or those that match a glob.

    In order of their names. Raises InputError, and PrepareError where nobody answers.
    """
    check_packages(address)
    return retry(functools.partial(_list_files, address), address, WHILE_LISTING)


def _list_files(address):
    files = file_system(protocol_of(address))
    if protocol_of(address) in ("http", "https"):
        return [_web_file(address)]
    path = files._strip_protocol(address)
    if re.search(r"[*?\[]", path):
        path = re.sub(r"\*\*(?=[^/])", "**/*", path)  # **.parquet is what people write
        found = files.glob(path, detail=True)
    else:
        found = files.find(path, detail=True)
    return [
        _remote_file(files.unstrip_protocol(path), info)
        for path, info in sorted(found.items())
        if info["type"] == "file"
    ]


def _web_file(address):
    """The one file of a web address. Raises InputError when it cannot be read in parts."""
    info = file_system(protocol_of(address)).info(address)
    if info["size"] is None or info.get("partial") is False:
        raise InputError(
            f"{address}: the server does not give its size, or no parts of it; fetch it first, as"
            " with curl -LO, and give the file"
        )
    return _remote_file(address, info)


def _remote_file(address, info):
    """A RemoteFile from the description that a file system gives."""
    tags = (str(info[name]) for name in TAGS if info.get(name))
    return RemoteFile(address, info["size"], next(tags, ""))


def _file_now(address):
    """A file as it is at its source now."""
    files = file_system(protocol_of(address))
    files.invalidate_cache()
    if protocol_of(address) in ("http", "https"):
        return _remote_file(address, files.info(address))
    found = files.find(files._strip_protocol(address), detail=True)
    if not found:
        raise FileNotFoundError(address)
    (info,) = found.values()
    return _remote_file(address, info)


# -- its content


def _read_block(source, start):
    """The next BLOCK bytes of a file from `start` on."""
    size = min(BLOCK, source.size - start)
    files = file_system(protocol_of(source.address))
    with files.open(source.address, "rb", block_size=BLOCK, cache_type="none") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) == size:
        return data
    if _file_now(source.address) != source:
        raise InputError(CHANGED.format(source.address))
    raise OSError(f"{len(data):,} bytes came of {size:,}")


def retry(action: Callable, address: str, seconds: float = PATIENCE) -> object:
    """The value of action(), tried again for `seconds` while its failure may pass.

    Raises InputError for a failure that will not pass, and PrepareError at the end.
    """
    import tenacity

    def report(state):
        if state.attempt_number > QUIET_TRIES:
            why = in_words(state.outcome.exception())
            print(f"{address}: {why}; trying again", file=sys.stderr, flush=True)

    attempts = tenacity.Retrying(
        retry=tenacity.retry_if_exception(may_pass),
        stop=tenacity.stop_before_delay(seconds),
        wait=tenacity.wait_random_exponential(multiplier=0.5, max=60),
        before_sleep=report,
        reraise=True,
    )
    try:
        return attempts(action)
    except (InputError, *BUGS):
        raise
    except Exception as error:  # whatever the packages raise
        if may_pass(error):
            raise PrepareError(
                f"{address} cannot be reached: {in_words(error)}. Check the network; finished work"
                " is kept, and the same command continues"
            ) from error
        hint = PERMISSION.get(protocol_of(address), "")
        raise InputError(
            f"{address} is not there, or not open to you: {in_words(error)}; {hint}".rstrip("; ")
        ) from error


def may_pass(error: Exception) -> bool:
    """Whether another try may succeed: the connection broke or stalled, or the server is busy."""
    while isinstance(error, FileNotFoundError) and error.__cause__:
        error = error.__cause__  # file systems raise it for any reason
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    if isinstance(status, int):
        return status in BUSY or status >= 500
    will_stay = (FileNotFoundError, PermissionError, ValueError, *BUGS)
    return not isinstance(error, will_stay) and type(error).__name__ != "NoCredentialsError"


# -- the cache


class Cache:
    """The remote files among some sources on this disk: fetched ahead, in order, within a limit.

    Used as a context manager by one thread, which reads the sources in order. A file is dropped
    when release() says so or, where there is no room for the next one, after its reader is done.
    """

    def __init__(
        self,
        sources: list,
        folder: Path,
        limit: float,
        first: int = 0,
        enough: float = math.inf,
    ):
        """folder: may hold files of a former run. limit: bytes in it.

        first: index of the source that is read first. enough: bytes of sources after which none is
        fetched before its reader asks for it.
        """
        self.sources = sources
        self.folder = folder
        self.limit = limit
        self.enough = enough
        self.next = first  # the source to fetch next
        self.reading = first
        self.files = {}  # a Future of its path, for each source that is or will be there
        self.begun = 0  # bytes of the sources that were or are fetched
        self.fetched = 0  # bytes, by this run
        self.writing = threading.Lock()
        self.stopped = False

    def __enter__(self):
        if any(source.is_remote for source in self.sources[self.next :]):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._drop_strangers()
            self._fetch_ahead()
        return self

    def __exit__(self, *error):
        with self.writing:
            self.stopped = True

    def path(self, index: int) -> Path:
        """Where source number `index` is on this disk; waits for a remote one.

        Raises InputError and PrepareError where it cannot be had.
        """
        source = self.sources[index]
        if not source.is_remote:
            return Path(source.path)
        self.reading = index
        self._fetch_ahead()
        try:
            return self.files[index].result()
        except OSError as error:
            raise PrepareError(
                f"{self.folder}: {error.strerror or error}; make room, or give a smaller"
                " --cache_gb. Finished work is kept, and the same command continues"
            ) from None

    def release(self, index: int) -> None:
        """Drop the sources before `index`, whose tokens are safe, and fetch others."""
        self._drop_before(index)
        self._fetch_ahead()

    def status(self) -> str:
        """How much came, in a few words for the progress bar; "" where nothing had to."""
        return f"fetched {self.fetched / 1e6:,.0f} MB" if self.fetched else ""

    def _path(self, source):
        """The file in the cache for a source, in the state in which it was listed."""
        name = hashlib.sha256(f"{source.path}\n{source.tag}\n{source.size}".encode()).hexdigest()
        return self.folder / name[:32]

    def _drop_strangers(self):
        """Delete what the cache holds, except the sources that will fill it first."""
        wanted = set()
        size = 0
        for source in self.sources[self.next :]:
            if source.is_remote:
                size += source.size
                if size <= self.limit:
                    wanted.add(self._path(source))
        for path in list(self.folder.iterdir()):
            if path not in wanted:
                path.unlink()

    def _drop_before(self, index):
        """Delete the files of the sources before `index`."""
        for n in [n for n in self.files if n < index]:
            del self.files[n]
            self._path(self.sources[n]).unlink(missing_ok=True)

    def _fetch_ahead(self):
        """Begin to fetch the next sources, as far as there is room."""
        while self.next < len(self.sources):
            source = self.sources[self.next]
            if source.is_remote:
                if not self._may_begin(source):
                    return
                self.files[self.next] = _in_a_thread(self._fetch, source)
                self.begun += source.size
            self.next += 1

    def _may_begin(self, source):
        """Whether to fetch the next source now; the one that is read always has room."""
        if self._held() + source.size > self.limit:
            self._drop_before(self.reading)
        if self._held() + source.size > self.limit:
            return False
        under_way = sum(not file.done() for file in self.files.values())
        return self.next <= self.reading or (under_way < AT_A_TIME and self.begun < self.enough)

    def _held(self):
        """Bytes of the cache that are taken or reserved."""
        return sum(self.sources[n].size for n in self.files)

    def _fetch(self, source):
        """Fetch a source, from where a stopped run left it; returns its path.

        Raises InputError when it is no longer what it was when it was listed.
        """
        listed = RemoteFile(source.path, source.size, source.tag)
        path = self._path(source)
        path.touch()
        while (start := path.stat().st_size) < source.size:
            data = retry(functools.partial(_read_block, listed, start), listed.address)
            with self.writing:
                if self.stopped:
                    return path
                with open(path, "ab") as file:
                    file.write(data)
                sync(path)
                self.fetched += len(data)
        now = retry(functools.partial(_file_now, listed.address), listed.address)
        if now != listed:
            path.unlink()
            raise InputError(CHANGED.format(listed.address))
        return path


def _in_a_thread(function, *arguments):
    """A Future of function(*arguments), called in a thread that does not outlive the process."""
    future = Future()

    def call():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return future


def check_cache(sources: list, limit: float) -> None:
    """Raises InputError when the cache cannot hold the largest of the remote sources."""
    largest = max((source.size for source in sources if source.is_remote), default=0)
    if largest > limit:
        raise InputError(
            f"--cache_gb {limit / 1e9:g} does not hold the largest file; give at least --cache_gb"
            f" {largest / 1e9 + 0.01:.2f}"
        )
