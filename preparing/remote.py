"""Remote text: addresses -> a list of files, and these files on this disk, fetched ahead.

fsspec does the transfers, with the package that it takes for each protocol: huggingface_hub, s3fs,
gcsfs, aiohttp. These read tokens and endpoints from the environment (HF_TOKEN, HF_ENDPOINT, AWS_*)
and send them to no other host.
"""

import functools
import hashlib
import re
from glob import has_magic
from pathlib import Path

from formats.address import BUGS, PERMISSION, may_pass, protocol_of, retry, version_of
from formats.files import error_message, sync
from preparing import InputError, PrepareError, need
from preparing.engines import begin

WEB = ("https", "http")
# What reads each protocol, as `python -m pip install` takes it.
PACKAGES = {"hf": "huggingface_hub", "s3": "s3fs", "gs": "gcsfs"} | dict.fromkeys(WEB, "aiohttp")
REQUEST_BYTES = 16 << 20
STALL_S = 60  # seconds without a byte over http(s); other packages have shorter times of their own
# Seconds between the tries to list files, before a run begins, and to fetch a block: half an hour
# in all, after which the run can be continued.
LISTING = (0.5, 1, 2, 4)
FETCHING = (*LISTING, 8, 16, 32, *[60] * 29)


@functools.cache
def file_system(protocol: str):
    """The fsspec file system of a protocol; one for all threads of a process."""
    import fsspec

    if protocol in WEB:
        import aiohttp

        wait = aiohttp.ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S)
        return fsspec.filesystem(protocol, client_kwargs={"timeout": wait, "trust_env": True})
    if protocol == "hf":
        from huggingface_hub.utils import logging

        logging.set_verbosity_error()  # else a line for each of its own tries
    return fsspec.filesystem(protocol)


def list_files(address: str) -> dict[str, tuple[int, str]]:
    """The files that an address names: one, those of a folder, or those that match a glob.

    In order of their names, {address: (bytes, version)}, as a Source has them; "" if unknown.
    Raises InputError, and PrepareError if nobody answers.
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
    path = re.sub(r"\*\*(?=[^/])", "**/*", files._strip_protocol(address))  # **.parquet is common
    found = files.glob(path, detail=True) if has_magic(path) else files.find(path, detail=True)
    return {
        files.unstrip_protocol(path): (info["size"], version_of(info))
        for path, info in sorted(found.items())
        if info["type"] == "file"
    }


def _check_unchanged(source):
    """Raises InputError when a source is no longer what it was when it was listed."""
    files = file_system(protocol_of(source.path))
    files.invalidate_cache()
    info = files.info(source.path)
    if (info["size"], version_of(info)) != (source.size, source.version):
        raise InputError(f"{source.path} changed at its source; start again with --overwrite")


def _read_block(source, start):
    """The next REQUEST_BYTES bytes of a source from `start` on."""
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
    """As retry(). Raises InputError for a failure that will not pass, else PrepareError."""
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
    """The remote files among some sources on this disk, within a limit.

    The sources are read in order; while one is read, the next is fetched. Files stay until there is
    no room for another.
    """

    def __init__(self, sources: list, folder: Path, limit: float):
        """folder: may hold files of a former run. limit: bytes in it, enough for each source."""
        self.sources = sources
        self.folder = folder
        self.limit = limit
        self.fetched = {}  # the future of each file that is or will be there

    def path(self, index: int) -> str | Path:
        """The path of source number `index` on this disk; waits for a remote one."""
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
            return self.fetched[self._path(wanted[0])].result()
        except OSError as error:
            raise PrepareError(
                f"{self.folder}: {error.strerror or error}; make room, or give a smaller"
                " --cache_gb; the same command continues"
            ) from None

    def _path(self, source):
        """The file in the cache for a source, in the state in which it was listed."""
        return self.folder / hashlib.sha256(repr(source).encode()).hexdigest()[:32]

    def _make_room(self, wanted):
        """Delete all files but those of `wanted`, if all together would be above the limit."""
        sizes = {self._path(source): source.size for source in wanted}
        others = [path for path in self.folder.iterdir() if path not in sizes]
        if sum(path.stat().st_size for path in others) + sum(sizes.values()) > self.limit:
            for path in others:
                path.unlink()

    def _fetch(self, source, path):
        """Fetch a source, from where a stopped run left it; returns its path."""
        path.touch()
        while (start := path.stat().st_size) < source.size:
            data = _tried(source.path, FETCHING, _read_block, source, start)
            # At its place: another cache may be at the same file.
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
