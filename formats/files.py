"""Reads, writes and locks files for all formats: whole or not at all, even after a power cut."""

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

DRIVE = Path("/content/drive")  # Colab's mount point
PAUSES = (0.1, 0.2, 0.4, 0.8, 1.6)  # seconds between the tries of `patiently`


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file whole or not at all: yields a temporary path for the body to write to."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        sync(partial)
        patiently(os.replace, partial, path)
    finally:
        partial.unlink(missing_ok=True)
    sync(path.parent)


@contextlib.contextmanager
def writing(path: Path, remedy: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn write errors in the body into an OSError that names `path` and `remedy`.

    numpy's own errors name no file. errors: types that a package raises in place of an OSError.
    """
    try:
        yield
    except (OSError, *errors) as error:
        raise OSError(
            f"the disk took only a part of {path.name} ({error_message(error)}); make room, or"
            f" {remedy}"
        ) from None


@contextlib.contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Write a folder whole or not at all: yields a temporary folder for the body to fill.

    Replaces an existing folder.
    """
    partial = path.with_name(f".{path.name}.partial")
    old = path.with_name(f".{path.name}.old.partial")
    delete_folder(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        for file in partial.iterdir():
            sync(file)
        sync(partial)
        if path.is_dir():
            delete_folder(old)  # left by a crash
            patiently(os.replace, path, old)
        patiently(os.replace, partial, path)
    finally:
        delete_folder(partial)
    delete_folder(old)
    sync(path.parent)


def patiently(action: Callable, *arguments) -> None:
    """Call action(*arguments), with tries for three seconds while it is not permitted.

    Windows neither renames nor deletes what another program has open, such as a virus scanner.
    """
    for pause in PAUSES:
        with contextlib.suppress(PermissionError):
            return action(*arguments)
        time.sleep(pause)
    return action(*arguments)


def delete_folder(path: Path) -> None:
    """Delete a folder of files. A crash leaves nothing half-deleted under its name.

    On a mounted Google Drive the files are emptied first, since deleted files count against the
    quota for 30 days.
    """
    hidden = path if path.name.startswith(".") else path.with_name(f".{path.name}.partial")
    with contextlib.suppress(OSError):
        patiently(os.replace, path, hidden)
        if path.resolve().is_relative_to(DRIVE.resolve()):
            for file in hidden.iterdir():
                os.truncate(file, 0)
    shutil.rmtree(hidden, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all.

    A lone surrogate, which Python uses in file names that are not UTF-8, is escaped as in JSON.
    """
    data = text.encode("utf-8", "backslashreplace")
    with atomic_write(path) as partial:
        partial.write_bytes(data)


def is_foreign(content: str, mark: str) -> bool:
    """True if a file was not written by this program: its content lacks `mark`.

    An empty file is not foreign, since a power cut may have emptied one of ours.
    """
    return bool(content.strip("\0 \r\n")) and mark not in content


def read_text(path: Path) -> str:
    """The text of a file, with U+FFFD where it is damaged; "" if there is no file."""
    return path.read_text("utf-8", "replace") if path.is_file() else ""


def write_json(path: Path, value: dict) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def object_in(text: str | bytes) -> dict:
    """Parse a JSON object; {} if the text is damaged or is another kind of value."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_json(path: Path) -> dict:
    """The object in a small JSON file; {} if the file is missing or damaged."""
    return object_in(read_text(path))


def write_checked(path: Path, value: dict) -> None:
    """As write_json, with the checksum of the values as "sha256", which is not one of them."""
    write_json(path, value | {"sha256": fingerprint(value)})


def read_checked(path: Path) -> dict:
    """The values that write_checked wrote; {} if the file is missing or damaged."""
    values = read_json(path)
    checksum = values.pop("sha256", None)
    return values if checksum == fingerprint(values) else {}


def few(names: list[str]) -> str:
    """List names in a message: the first five, and how many more there are."""
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def sync(path: Path) -> None:
    """Flush a file, or a folder's directory entries, to disk."""
    if path.is_dir() and os.name == "nt":
        return  # Windows cannot open folders
    handle = os.open(path, os.O_RDWR if os.name == "nt" else os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if not path.is_dir():  # some network mounts cannot sync folders
            error.filename = str(path)
            raise
    finally:
        os.close(handle)


def take_lock(path: Path, timeout: float = -1) -> FileLock:
    """Lock a file until release(), or until the process ends, however it ends.

    timeout: seconds to wait for another process; -1: without end. Raises Timeout. On a disk without
    flock, processes of other machines do not count.
    """
    lock = FileLock(path, mode=0o666)  # another user of a shared folder takes it, too
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        # Without flock, filelock takes the file itself for the lock, which a kill leaves behind. It
        # removes those of dead processes on this machine, but cannot know about another machine's.
        if "cannot probe" in str(error):
            path.unlink(missing_ok=True)
        lock.acquire(timeout=timeout)
    except (NotImplementedError, OSError):
        pass  # this file system has no locks
    return lock


def sha256(path: str | Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(values: dict) -> str:
    """The SHA-256 of plain values, as JSON with sorted keys."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def check_room(folder: Path, size: int, remedy: str) -> None:
    """Raises OSError unless `size` bytes and a margin are free. remedy: ends the message."""
    free = shutil.disk_usage(folder).free
    if free < size * 1.02 + (1 << 20):
        raise OSError(
            f"it takes {size / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free; make room, or"
            f" {remedy}"
        )


def error_message(error: BaseException) -> str:
    """An error in one line; for a system error, the file and the reason."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, FileExistsError) and os.path.islink(error.filename):  # to a lost disk
        return f"{error.filename} is a link to {os.readlink(error.filename)}, which is not there"
    if isinstance(error, OSError) and line.startswith(("[Errno", "[WinError")):
        place = f"{error.filename}: " if error.filename else ""
        reason = error.strerror
        if isinstance(error, PermissionError) and os.name == "nt":
            place = f"{error.filename2}: " if error.filename2 else place  # what a file replaces
            reason += ", or another program has it open"
        return place + reason
    if error.__cause__ and "://" in line and " " not in line:
        return error_message(error.__cause__)  # fsspec's http errors hold just the address
    return line[:300] or type(error).__name__
