"""Remote text: addresses -> a list of files, and these files on this disk, fetched ahead.

fsspec does the transfers, with the package that it takes for each protocol: huggingface_hub, s3fs,
gcsfs, aiohttp. These read tokens and endpoints from the environment (HF_TOKEN, HF_ENDPOINT, AWS_*)
and send them to no other host. tenacity tries again.
"""

import functools
import hashlib
import math
import queue
import re
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from formats.address import PERMISSION, protocol_of
from formats.files import in_words, sync
from preparing import InputError, PrepareError, need

WEB = ("https", "http")
# What reads each protocol, as `python -m pip install` takes it.
PACKAGES = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"} | dict.fromkeys(WEB, "aiohttp")
BUGS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
BLOCK = 16 << 20  # bytes of a request
AT_A_TIME = 4  # files that are fetched
STALL = 60  # seconds without a byte over http(s); other packages have shorter times of their own
WHILE_LISTING = 10  # seconds of trying before a run begins,
PATIENCE = 30 * 60  # and without a block while it goes on; it can be continued
BUSY = (408, 425, 429)  # replies of a server that may serve us later, as 500 and above
QUIET_TRIES = 3  # that fail before a message says so
# Names under which file systems give what changes with a file's content, the best one first.
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "updated")


@functools.cache
def file_system(protocol: str):
    """The fsspec file system of a protocol; one for all threads of a process."""
    import fsspec

    if protocol in WEB:
        import aiohttp

        wait = aiohttp.ClientTimeout(total=None, sock_connect=STALL, sock_read=STALL)
        return fsspec.filesystem(protocol, client_kwargs={"timeout": wait, "trust_env": True})
    if protocol == "hf":
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # else a line for each of its own tries
    return fsspec.filesystem(protocol)


def list_files(address: str) -> dict[str, tuple[int, str]]:
    """The files that an address names: one, those of a folder, or those that match a glob.

    In order of their names, {address: (bytes, tag)}. tag: changes with the content; "" if unknown.
    Raises InputError, and PrepareError where nobody answers.
    """
    protocol = protocol_of(address)
    if protocol not in PACKAGES:
        raise InputError(f"{address}: {protocol}:// is not among {'://, '.join(PACKAGES)}://")
    need(address, PACKAGES[protocol], "tenacity")
    return retry(functools.partial(_list_files, address), address, WHILE_LISTING)


def _list_files(address, expand=True):
    """The same, once. expand: whether an address may be a glob."""
    files = file_system(protocol_of(address))
    files.invalidate_cache()
    if protocol_of(address) in WEB:
        info = files.info(address)
        if info["size"] is None or info.get("partial") is False:
            raise InputError(
                f"{address}: the server does not give its size, or no parts of it; fetch it first,"
                " as with curl -LO, and give the file"
            )
        return {address: _size_and_tag(info)}
    path = files._strip_protocol(address)
    if expand and re.search(r"[*?\[]", path):
        path = re.sub(r"\*\*(?=[^/])", "**/*", path)  # **.parquet is what people write
        found = files.glob(path, detail=True)
    else:
        found = files.find(path, detail=True)
    return {
        files.unstrip_protocol(path): _size_and_tag(info)
        for path, info in sorted(found.items())
        if info["type"] == "file"
    }


def _size_and_tag(info):
    tags = (str(info[name]) for name in TAGS if info.get(name))
    return info["size"], next(tags, "")


def _check_unchanged(source):
    """Raises InputError when a source is no longer what it was when it was listed."""
    found = list(_list_files(source.path, expand=False).values())
    if not found:
        raise FileNotFoundError(source.path)
    if found != [(source.size, source.tag)]:
        raise InputError(f"{source.path} changed at its source; start again with --overwrite")


def _read_block(source, start):
    """The next BLOCK bytes of a source from `start` on."""
    size = min(BLOCK, source.size - start)
    files = file_system(protocol_of(source.path))
    with files.open(source.path, "rb", block_size=BLOCK, cache_type="none") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) == size:
        return data
    _check_unchanged(source)
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


class Cache:
    """The remote files among some sources on this disk: fetched ahead, in order, within a limit.

    Used as a context manager by one thread, which reads the sources in order. A file goes, after
    its reader is done with it, when there is no room for the next one.
    """

    def __init__(self, sources: list, folder: Path, limit: float, first=0, enough=math.inf):
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
        self.files = {}  # a Future of the path for each source that is or will be there
        self.begun = 0  # bytes of the sources that were or are fetched
        self.waiting = queue.SimpleQueue()  # (source, Future) for each that is not begun
        self.writing = threading.Lock()
        self.stopped = False

    def __enter__(self):
        if any(source.is_remote for source in self.sources[self.next :]):
            self.folder.mkdir(parents=True, exist_ok=True)
            self._drop_strangers()
            for _ in range(AT_A_TIME):
                threading.Thread(target=self._fetch_waiting, daemon=True).start()
            self._fetch_ahead()
        return self

    def __exit__(self, *error):
        with self.writing:
            self.stopped = True
        for _ in range(AT_A_TIME):
            self.waiting.put((None, None))

    def path(self, index: int) -> Path:
        """Where source number `index` is on this disk; waits for a remote one."""
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
                " --cache_gb; the same command continues"
            ) from None

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

    def _fetch_ahead(self):
        """Begin to fetch the next sources, as far as there is room."""
        while self.next < len(self.sources):
            source = self.sources[self.next]
            if source.is_remote:
                is_wanted = self.next <= self.reading or self.begun < self.enough
                if not is_wanted or not self._make_room(source.size):
                    return
                self.files[self.next] = Future()
                self.waiting.put((source, self.files[self.next]))
                self.begun += source.size
            self.next += 1

    def _make_room(self, size):
        """Whether `size` bytes fit, if need be without the files that are read."""
        held = sum(self.sources[n].size for n in self.files)
        for n in [n for n in self.files if n < self.reading]:
            if held + size > self.limit:
                del self.files[n]
                self._path(self.sources[n]).unlink(missing_ok=True)
                held -= self.sources[n].size
        return held + size <= self.limit

    def _fetch_waiting(self):
        """Fetch the sources that wait until the cache is left; daemon threads do."""
        while True:
            source, path = self.waiting.get()
            if self.stopped:
                return
            try:
                path.set_result(self._fetch(source))
            except BaseException as error:
                path.set_exception(error)

    def _fetch(self, source):
        """Fetch a source, from where a stopped run left it; returns its path."""
        path = self._path(source)
        path.touch()
        while (start := path.stat().st_size) < source.size:
            data = retry(functools.partial(_read_block, source, start), source.path)
            with self.writing:
                if self.stopped:
                    return path
                with open(path, "ab") as file:
                    file.write(data)
                sync(path)
        try:
            retry(functools.partial(_check_unchanged, source), source.path)
        except InputError:
            path.unlink()
            raise
        return path
