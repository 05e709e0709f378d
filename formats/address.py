"""Lists, reads and writes the files of a folder, at an address such as s3://bucket/runs or a path.

fsspec does the work, with one package per protocol; these read tokens and endpoints from the
environment (HF_TOKEN, AWS_*).
"""

import contextlib
import importlib.util
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from command_line import UserError, without_credentials
from formats.files import atomic_write, check_room, error_message, take_lock

ADDRESS = re.compile(r"([a-z][a-z0-9+]*)://")
# How to get permission, per protocol.
PERMISSION = {
    "hf": "accept its terms on its page if it has any, make a token at"
    " https://huggingface.co/settings/tokens, and give it as HF_TOKEN=hf_...",
    "s3": "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) of an account that"
    " may, or FSSPEC_S3_ANON=true for a public bucket",
    "gs": "run gcloud auth application-default login with an account that may",
}
WEB = ("https", "http")
# A web page of the Hugging Face Hub; the group is what follows hf:// in the address of its files.
PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface|hf)\.co/((?:datasets/)?[^/?#]+/[^/?#]+)")
STALL_S = 60  # timeout over http(s), seconds without a byte; other packages have shorter ones
PAUSES = (0.5, 1, 2)  # seconds between the tries of a request
QUIET_TRIES = 3  # failures before the first message
BUSY = (408, 425, 429)  # HTTP statuses worth a retry, besides 500 and above
BUGS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
# Keys under which file systems report a version of a file's content, the most reliable first.
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "updated", "mtime")
FETCHED = Path("checkpoints", ".fetched")  # local copies of remote runs and models


class AddressError(UserError):
    """An address that cannot be read or written."""


def protocol_of(address: str) -> str:
    """The protocol of an address such as s3://bucket/file; "" for a path."""
    found = ADDRESS.match(address)
    return found[1] if found else ""


def version_of(info: dict) -> str:
    """A version that changes with a file's content; "" if unknown. info: from fsspec's info()."""
    return next((str(info[name]) for name in TAGS if info.get(name)), "")


def client_options(protocol: str) -> dict:
    """fsspec's options for a protocol. aiohttp alone ends after 300 s, and ignores HTTPS_PROXY."""
    if protocol not in WEB or not importlib.util.find_spec("aiohttp"):
        return {}  # without aiohttp, fsspec names the packages that it needs
    import aiohttp

    wait = aiohttp.ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S)
    return {"client_kwargs": {"timeout": wait, "trust_env": True}}


class Folder:
    """A folder at an address or a path; it need not exist yet.

    Files are named relative to it, with slashes. A file is written whole or not at all. Raises
    AddressError if a package is missing, and in its methods if a request fails after all retries.
    read() and remove() raise FileNotFoundError if there is no such file.
    """

    def __init__(self, address: str):
        from fsspec.core import url_to_fs  # comes with torch

        self.address = address.rstrip("/")
        self.on_disk = protocol_of(address) in ("", "file", "local")
        try:
            options = client_options(protocol_of(address))
            self.files, self.root = url_to_fs(self.address, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:  # fsspec's message names the package
            raise AddressError(f"{address} cannot be opened: {error_message(error)}") from None

    def list(self) -> dict[str, int]:
        """All files below the folder: {name: bytes}; empty if it does not exist.

        The size is 0 if the server does not report it, as over http.
        """
        return {name: info["size"] or 0 for name, info in self._find().items()}

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """{name: version} of these files, as version_of returns it; omits those that are gone."""
        found = self._find()
        return {name: version_of(found[name]) for name in names if name in found}

    def _find(self):
        """{name: fsspec's info} of all files below the folder."""
        self.files.invalidate_cache()
        # On disk, fsspec skips unreadable folders by default, so a failing mount would look empty.
        options = {"on_error": "raise"} if self.on_disk else {}
        try:
            found = self._request(self.files.find, self.root, detail=True, **options)
        except FileNotFoundError as error:
            if self.on_disk:
                return {}
            # On object stores, this means that the bucket does not exist.
            raise AddressError(
                f"{self.address} cannot be reached: {error_message(error)}"
            ) from None
        below = f"{self.root}/"
        paths = [path for path in found if path.startswith(below)]
        return {path.removeprefix(below): found[path] for path in paths}

    def read(self, name: str) -> bytes:
        """The content of a file."""
        return self._request(self.files.cat_file, f"{self.root}/{name}")

    def put(self, file: Path, name: str) -> None:
        """Copy a local file into the folder."""
        if not self.on_disk:
            self._request(self.files.put_file, str(file), f"{self.root}/{name}")
            return
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            shutil.copyfile(file, partial)

    def get(self, names: Iterable[str], folder: Path) -> None:
        """Copy the files to a local folder, each whole or not at all; skips those that are gone."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileNotFoundError), atomic_write(folder / name) as partial:
                self._request(self.files.get_file, f"{self.root}/{name}", str(partial))

    def get_large(self, sizes: dict[str, int], folder: Path) -> None:
        """As get(), for large files: first check for free space and print their size.

        sizes: the wanted entries of list(). Raises OSError if writing fails.
        """
        size = sum(sizes.values())
        check_room(folder, size, "choose another disk")
        how_much = f", {size / 1e6:,.1f} MB" if size else ""
        address = without_credentials(self.address)
        print(f"fetching {address}{how_much}", file=sys.stderr, flush=True)
        self.get(sizes, folder)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with its content."""
        self._request(self.files.rm, f"{self.root}/{name}", recursive=True)

    def _request(self, action, *arguments, **options):
        """Call a method of fsspec, with retries."""
        try:
            return retry(self.address, PAUSES, action, *arguments, **options)
        except (FileNotFoundError, *BUGS):
            raise
        except Exception as error:  # each package has its own types
            problem = f"{self.address} cannot be reached: {error_message(error)}"
            is_no_address = isinstance(error, ValueError) and not hasattr(error, "response")
            if not may_pass(error) and not is_no_address:
                hint = PERMISSION.get(protocol_of(self.address), "check its permissions")
                problem = f"no access to {self.address}: {error_message(error)}; {hint}"
            raise AddressError(problem) from error


def retry(address: str, pauses: Iterable[float], action: Callable, *arguments, **options) -> object:
    """Return action(*arguments, **options), retrying failures that may be temporary.

    address: for messages. pauses: seconds before each retry. Raises the last failure.
    """
    for tries, pause in enumerate([*pauses, None], start=1):
        try:
            return action(*arguments, **options)
        except Exception as error:  # each package has its own types
            if pause is None or not may_pass(error):
                raise
            if tries > QUIET_TRIES:
                problem = without_credentials(f"{address}: {error_message(error)}")
                print(f"{problem}; trying again", file=sys.stderr, flush=True)
        time.sleep(pause)


def may_pass(error: Exception) -> bool:
    """True if a retry may succeed: the connection broke or stalled, or the server is busy."""
    while isinstance(error, FileNotFoundError) and error.__cause__:
        error = error.__cause__  # some packages raise FileNotFoundError for any failure
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None) or getattr(error, "status", None)
    if isinstance(response, dict):  # S3's
        status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if isinstance(status, int):
        return status in BUSY or status >= 500
    will_stay = (FileNotFoundError, PermissionError, ValueError, *BUGS)
    return not isinstance(error, will_stay) and type(error).__name__ != "NoCredentialsError"


@contextlib.contextmanager
def local_copy(there: Folder) -> Iterator[Path]:
    """The local folder for copies from an address, locked so that one process uses it at a time."""
    here = FETCHED / without_credentials(there.address).replace("://", "/")
    here.parent.mkdir(parents=True, exist_ok=True)
    lock = take_lock(here.with_name(f".{here.name}.lock"))
    try:
        yield here
    finally:
        lock.release()
