"""Files that lie elsewhere: addresses -> a list of files, and any range of their bytes.

All of it is done by fsspec and the packages that it takes for each protocol, which read tokens and
endpoints from the environment (HF_TOKEN, HF_ENDPOINT, AWS_*). What is here tries everything once,
and says of a failure whether it may pass: patience.py tries again. Knows no format.
"""

import functools
import re
from dataclasses import dataclass

from formats.address import (
    BUGS,
    PACKAGES,
    PERMISSION,
    missing_packages,
    names_of,
    protocol_of,
    short,
    status_of,
)
from preparing.errors import InputError

# Seconds without a byte over http(s). The other packages have shorter times of their own.
STALL = 60
# Names under which file systems tell what changes with a file's content, the best one first.
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "updated")


@dataclass(frozen=True)
class FileState:
    """A file as it is at its source. size: bytes. tag: changes with the content; "" if unknown."""

    address: str
    size: int
    tag: str


def check_packages(address: str) -> None:
    """Raises InputError for a protocol that is none, and where its packages are missing."""
    protocol = protocol_of(address)
    if protocol not in PACKAGES:
        known = ", ".join(f"{name}://" for name in PACKAGES)
        raise InputError(f"{address}: {protocol}:// is not among {known}")
    missing = missing_packages(protocol)
    if missing:
        names = " ".join(missing)
        raise InputError(f"{address} needs {names}; run\n  python -m pip install {names}")


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


def list_files(address: str) -> list[FileState]:
    """The files that an address names: one, those of a folder, or those that match a glob.

    In order of their names. Raises InputError and, for what may pass, whatever the packages raise.
    """
    files = file_system(protocol_of(address))
    if protocol_of(address) in ("http", "https"):
        return [_with_ranges(address)]
    path = files._strip_protocol(address)
    if re.search(r"[*?\[]", path):
        path = re.sub(r"\*\*(?=[^/])", "**/*", path)  # **.parquet is what people write
        found = files.glob(path, detail=True)
    else:
        found = files.find(path, detail=True)
    return [
        _described(files.unstrip_protocol(path), info)
        for path, info in sorted(found.items())
        if info["type"] == "file"
    ]


def state_of(address: str) -> FileState:
    """A file as it is at its source now."""
    protocol = protocol_of(address)
    files = file_system(protocol)
    if protocol == "hf":  # its info() leaves out what tells one state from another
        path = files._strip_protocol(address)
        for info in files.ls(files._parent(path), detail=True, refresh=True):
            if info["name"] == path:
                return _described(address, info)
        raise FileNotFoundError(address)
    if protocol == "s3":
        return _described(address, files.info(address, refresh=True))
    files.invalidate_cache(address)
    return _described(address, files.info(address))


def read_range(address: str, start: int, end: int) -> bytes:
    """The bytes of a file from `start` to before `end`; fewer where the connection ended early."""
    from fsspec.asyn import AsyncFileSystem

    files = file_system(protocol_of(address))
    if isinstance(files, AsyncFileSystem):
        return files.cat_file(address, start=start, end=end)
    return files.cat_file(address, start=start, end=end, cache_type="none")


def _described(address, info):
    """A FileState out of what a file system says of it."""
    tags = (str(info[name]) for name in TAGS if info.get(name))
    return FileState(address, info["size"], next(tags, ""))


def _with_ranges(address):
    """The one file of a web address. Raises InputError when it cannot be read in ranges."""
    files = file_system(protocol_of(address))
    info = files.info(address)
    by_hand = "; fetch it first, as with curl -LO, and give the file"
    if info["size"] is None:
        raise InputError(f"{address}: the server does not say how large it is{by_hand}")
    if info["size"] > 1:
        try:
            with files.open(address, cache_type="none", size=info["size"]) as file:
                file.seek(1)
                file.read(1)
        except ValueError:
            raise InputError(f"{address}: the server gives no ranges of it{by_hand}") from None
    return _described(address, info)


def final(error: Exception, address: str) -> Exception | None:
    """What to raise for a failure that will not pass; None for one that may."""
    while isinstance(error, FileNotFoundError) and error.__cause__:
        error = error.__cause__  # a file system said so for any reason
    if isinstance(error, (InputError, *BUGS)):
        return error
    protocol = protocol_of(address)
    names = set(names_of(error))
    status = status_of(error)
    hint = PERMISSION.get(protocol, "see that the address is right and open to you")
    if "GatedRepoError" in names or status == 403 or isinstance(error, PermissionError):
        return InputError(f"no permission to read {address}: {hint}")
    if "NoCredentialsError" in names:
        return InputError(f"{address} needs credentials: {hint}")
    missing = {"RepositoryNotFoundError", "RevisionNotFoundError", "EntryNotFoundError"}
    if names & missing or isinstance(error, FileNotFoundError | ValueError) or status in (404, 410):
        private = "; one that is private needs HF_TOKEN" if protocol == "hf" else ""
        return InputError(f"{address} is not there, or not open to you{private} ({short(error)})")
    if status == 401:
        name = "the token in HF_TOKEN" if protocol == "hf" else "the credentials"
        return InputError(f"{address}: {name} was refused: {hint}")
    if status in (400, 405, 416):
        return InputError(f"{address} cannot be read: {short(error)}")
    return None
