"""Folders at addresses such as s3://bucket/runs, and on disks: files are listed, read and written.

fsspec does it, with the package that it takes for each protocol; these read tokens and endpoints
from the environment (HF_TOKEN, AWS_*).
"""

import contextlib
import itertools
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from filelock import FileLock

from command_line import LOGIN
from formats.files import atomic_write, check_room, error_message

ADDRESS = re.compile(r"([a-z][a-z0-9+]*)://")
# Credentials after the "?" of an address; those before its host are a LOGIN.
KEY = re.compile(
    r"([?&](?:[^=&#]*[-_])?(?:\w*token|sig|signature|\w*secret|pass|passwd|password|pwd|auth|"
    r"credentials?|(?:api|access|secret)[-_]?key)=)[^&#]*",
    re.IGNORECASE,
)
# The remedy for a missing permission, for each protocol.
PERMISSION = {
    "hf": "accept its terms on its page if it has any, make a token at"
    " https://huggingface.co/settings/tokens, and give it as HF_TOKEN=hf_...",
    "s3": "give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) of an account that"
    " may, or FSSPEC_S3_ANON=true for a public bucket",
    "gs": "run gcloud auth application-default login with an account that may",
}
PAUSES = (0.5, 1, 2)  # seconds between the tries of a request
QUIET_TRIES = 3  # that fail before a message says so
BUSY = (408, 425, 429)  # replies of a server that may serve us later, as 500 and above
BUGS = (TypeError, AttributeError, NameError, AssertionError, LookupError)
# Names under which file systems give what changes with a file's content, the best one first.
TAGS = ("ETag", "etag", "blob_id", "md5Hash", "Last-Modified", "LastModified", "updated", "mtime")
FETCHED = Path("checkpoints", ".fetched")  # copies of what was read from addresses


class AddressError(ValueError):
    """An address that cannot be read or written, in a sentence for the user."""


def protocol_of(address: str) -> str:
    """The protocol of an address such as s3://bucket/file; "" of a path."""
    found = ADDRESS.match(address)
    return found[1] if found else ""


def without_credentials(address: str) -> str:
    """An address, or any other text, as files record it: without credentials."""
    return KEY.sub(r"\1...", LOGIN.sub("://", address)) if protocol_of(address) else address


def version_of(info: dict) -> str:
    """What changes with a file's content; "" if unknown. info: as fsspec describes a file."""
    return next((str(info[name]) for name in TAGS if info.get(name)), "")


class Folder:
    """A folder at an address, or on a disk; it need not exist yet.

    Its files are known by their names below it, with slashes. A file is written whole or not at
    all. Raises AddressError if a package is missing, and its methods do if a request fails
    again and again. What asks for a file that does not exist raises FileNotFoundError.
    """

    def __init__(self, address: str):
        from fsspec.core import url_to_fs  # comes with torch

        self.address = address.rstrip("/")
        self.on_disk = protocol_of(address) in ("", "file", "local")
        try:
            self.files, self.root = url_to_fs(self.address, use_listings_cache=False)
        except (ImportError, ValueError) as error:  # it names the package to install
            raise AddressError(f"{address} cannot be opened: {error_message(error)}") from None

    def list(self) -> dict[str, int]:
        """The files in it and below it: {name: bytes}. Empty if there is no such folder.

        Web servers do not tell sizes: 0 bytes.
        """
        return {name: info["size"] or 0 for name, info in self._find().items()}

    def versions(self, names: Iterable[str]) -> dict[str, str]:
        """What changes with the content of these files, by name; a file that is gone has none."""
        found = self._find()
        return {name: version_of(found[name]) for name in names if name in found}

    def _find(self):
        """{name: what fsspec knows} of all files in it and below it."""
        self.files.invalidate_cache()
        # On a disk fsspec passes over what it cannot read: a mount that fails would look empty.
        options = {"on_error": "raise"} if self.on_disk else {}
        try:
            found = self._request(self.files.find, self.root, detail=True, **options)
        except FileNotFoundError as error:
            if self.on_disk:
                return {}
            # The bucket does not exist.
            raise AddressError(
                f"{self.address} cannot be reached: {error_message(error)}"
            ) from None
        below = f"{self.root}/"
        paths = [path for path in found if path.startswith(below)]
        return {path.removeprefix(below): found[path] for path in paths}

    def read(self, name: str, end: int | None = None) -> bytes:
        """The bytes of a file, up to `end`."""
        return self._request(self.files.cat_file, f"{self.root}/{name}", start=0, end=end)

    def put(self, file: Path, name: str) -> None:
        """Write a copy of a file of this disk."""
        if not self.on_disk:
            self._request(self.files.put_file, str(file), f"{self.root}/{name}")
            return
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as partial:
            shutil.copyfile(file, partial)

    def get(self, names: Iterable[str], folder: Path) -> None:
        """Copy those of the files that exist to a folder of this disk, each whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            with contextlib.suppress(FileNotFoundError), atomic_write(folder / name) as partial:
                self._request(self.files.get_file, f"{self.root}/{name}", str(partial))

    def get_large(self, sizes: dict[str, int], folder: Path) -> None:
        """Copy files that take a while: check the room for them and print their size first.

        sizes: those of `list` that are wanted. Raises OSError if the disk does not take them.
        """
        size = sum(sizes.values())
        check_room(folder, size, "choose another disk")
        how_much = f", {size / 1e6:,.1f} MB" if size else ""
        print(f"fetching {self.address}{how_much}", file=sys.stderr, flush=True)
        self.get(sizes, folder)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with what is in it."""
        self._request(self.files.rm, f"{self.root}/{name}", recursive=True)

    def _request(self, action, *arguments, **options):
        """Call a method of fsspec, and again if its failure may pass."""
        try:
            return retry(self.address, PAUSES, action, *arguments, **options)
        except (FileNotFoundError, *BUGS):
            raise
        except Exception as error:  # each package has its own
            problem = f"{self.address} cannot be reached: {error_message(error)}"
            if not may_pass(error):
                hint = PERMISSION.get(protocol_of(self.address), "check its permissions")
                problem = f"no access to {self.address}: {error_message(error)}; {hint}"
            raise AddressError(problem) from error


def retry(address: str, pauses: Iterable[float], action: Callable, *arguments, **options) -> object:
    """The value of action(*arguments, **options), tried again while its failure may pass.

    pauses: seconds before each further try. Raises the last failure.
    """
    pauses = iter(pauses)
    for tries in itertools.count(1):
        try:
            return action(*arguments, **options)
        except Exception as error:  # whatever the packages raise
            pause = next(pauses, None) if may_pass(error) else None
            if pause is None:
                raise
            if tries > QUIET_TRIES:
                why = error_message(error)
                print(f"{address}: {why}; trying again", file=sys.stderr, flush=True)
        time.sleep(pause)


def may_pass(error: Exception) -> bool:
    """True if another try may succeed: the connection broke or stalled, or the server is busy."""
    while isinstance(error, FileNotFoundError) and error.__cause__:
        error = error.__cause__  # file systems raise it for any reason
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
    """The folder of this disk for copies of what is at an address; one process at a time has it."""
    here = FETCHED / without_credentials(there.address).replace("://", "/")
    here.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(here.with_name(f".{here.name}.lock")):
        yield here
