"""Remote text: lists the files at an address and downloads them ahead of the reader.

fsspec does the transfers, with one package per protocol: huggingface_hub, s3fs, gcsfs, aiohttp.
These read tokens and endpoints from the environment (HF_TOKEN, HF_ENDPOINT, AWS_*) and send them to
no other host.
"""

import functools
import hashlib
import re
from glob import has_magic
from pathlib import Path

from formats.address import (
    BUGS,
    PERMISSION,
    WEB,
    client_options,
    may_pass,
    protocol_of,
    retry,
    version_of,
)
from formats.files import error_message, sync
from preparing import InputError, PrepareError, need
from preparing.engines import begin, result_of

# The package for each protocol, by its name on PyPI.
PACKAGES = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"} | dict.fromkeys(WEB, "aiohttp")
REQUEST_BYTES = 16 << 20
# Seconds between tries: to list files before the run begins, and to fetch a block, for half an hour
# in all, after which the run stops and can be continued.
LISTING = (0.5, 1, 2, 4)
FETCHING = (*LISTING, 8, 16, 32, *[60] * 29)


@functools.cache
def file_system(protocol: str):
    """The fsspec file system for a protocol, shared by all threads."""
    import fsspec

    if protocol == "hf":
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # else it logs each of its own retries
    return fsspec.filesystem(protocol, **client_options(protocol))


def list_files(address: str) -> dict[str, tuple[int, str]]:
    """The files at an address of a file, a folder or a glob, sorted: {address: (bytes, version)}.

    version: as in Source; "" if unknown. Raises InputError, and PrepareError if the server cannot
    be reached.
    """
    protocol = protocol_of(address)
    if protocol not in PACKAGES:
        raise InputError(f"{address}: {protocol}:// is not among {'://, '.join(PACKAGES)}://")
    need(address, PACKAGES[protocol])
    return _tried(address, LISTING, _list_files, address)


def _list_files(address):
    """One try of list_files."""
    files = file_system(protocol_of(address))
    files.invalidate_cache()
    if protocol_of(address) in WEB:
        info = files.info(address)
        if info["size"] is None or info.get("partial") is False:
            raise InputError(
                f"{address}: the server does not tell its size, or sends no parts of it; download"
                " the file first, for example with curl -LO"
            )
        return {address: (info["size"], version_of(info))}
    path = spread(files._strip_protocol(address))
    found = files.glob(path, detail=True) if has_magic(path) else files.find(path, detail=True)
    return {
        files.unstrip_protocol(path): (info["size"], version_of(info))
        for path, info in sorted(found.items())
        if info["type"] == "file"
    }


def spread(pattern: str) -> str:
    """A pattern whose **.ENDING, a common form, is written out as **/*.ENDING.

    Without that, Python's glob takes two stars for one, and fsspec rejects them.
    """
    return re.sub(r"(?<![^/\\])\*\*(?=[^/\\])", "**/*", pattern)


def _check_unchanged(source):
    """Raises InputError if a source has changed since it was listed."""
    files = file_system(protocol_of(source.path))
    files.invalidate_cache()
    info = files.info(source.path)
    if (info["size"], version_of(info)) != (source.size, source.version):
        raise InputError(f"{source.path} changed at its source; start again with --overwrite")


def _read_block(source, start):
    """Up to REQUEST_BYTES bytes of a source, from `start` on."""
    size = min(REQUEST_BYTES, source.size - start)
    files = file_system(protocol_of(source.path))
    with files.open(source.path, "rb", block_size=REQUEST_BYTES, cache_type="none") as file:
        file.seek(start)
        data = file.read(size)
    if len(data) == size:
        return data
    _check_unchanged(source)
    raise OSError(f"only {len(data):,} of {size:,} bytes arrived")


def _tried(source, pauses, function, *arguments):
    """As retry(). Raises PrepareError if the failure may be temporary, else InputError."""
    try:
        return retry(source, pauses, function, *arguments)
    except (InputError, *BUGS):
        raise
    except Exception as error:  # whatever the packages raise
        why = error_message(error)
        if may_pass(error):
            raise PrepareError(
                f"{source} cannot be reached: {why}. Check the network; finished work is kept, and"
                " the same command continues"
            ) from error
        hint = PERMISSION.get(protocol_of(source), "")
        raise InputError(
            f"{source} does not exist, or you have no access to it: {why}; {hint}".rstrip("; ")
        ) from error


class DownloadCache:
    """Local copies of the remote files among some sources, limited in size.

    Sources are read in order; while one is read, the next is fetched. Files are kept until another
    one needs the room.
    """

    def __init__(self, sources: list, folder: Path, limit: float):
        """folder: may hold files of an earlier run. limit: bytes, at least the largest source."""
        self.sources = sources
        self.folder = folder
        self.limit = limit
        self.fetched = {}  # {path in the folder: future of its download}

    def path(self, index: int) -> str | Path:
        """The local path of source number `index`; waits until a remote one is downloaded."""
        source = self.sources[index]
        if not source.is_remote:
            return source.path
        wanted = [source for source in self.sources[index:] if source.is_remote][:2]
        if sum(source.size for source in wanted) > self.limit:
            wanted = [source]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._make_room(wanted)
            for source in wanted:
                path = self._path(source)
                if path not in self.fetched:
                    self.fetched[path] = begin(self._fetch, source, path)
            return result_of(self.fetched[self._path(wanted[0])])
        except OSError as error:
            raise PrepareError(
                f"{self.folder}: {error.strerror or error}; make room, or give a smaller"
                " --cache_gb; the same command continues"
            ) from None

    def _path(self, source):
        """The cache file for a source; the name depends on size and version too."""
        return self.folder / hashlib.sha256(repr(source).encode()).hexdigest()[:32]

    def _make_room(self, wanted):
        """Delete all files except those of `wanted` if together they would exceed the limit."""
        sizes = {self._path(source): source.size for source in wanted}
        others = [path for path in self.folder.iterdir() if path not in sizes]
        if sum(path.stat().st_size for path in others) + sum(sizes.values()) > self.limit:
            for path in others:
                path.unlink()

    def _fetch(self, source, path):
        """Download a source, continuing a partial file; returns its path."""
        path.touch()
        while (start := path.stat().st_size) < source.size:
            data = _tried(source.path, FETCHING, _read_block, source, start)
            # Seek rather than append: another DownloadCache may be writing the same file.
            with open(path, "r+b") as file:
                file.seek(start)
                file.write(data)
            sync(path)
        try:
            _tried(source.path, FETCHING, _check_unchanged, source)
        except InputError:
            path.unlink()
            raise
        return path
