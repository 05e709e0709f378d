"""formats/files.py: files that are whole or absent, room on a disk, errors in one line."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from filelock import Timeout

from formats import files
from formats.files import check_room, error_message
from tests.conftest import ROOT


def test_a_file_that_fails_while_it_is_written_stays_as_it_was(tmp_path):
    path = tmp_path / "a.txt"
    files.write_text(path, "before")
    with pytest.raises(RuntimeError), files.atomic_write(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_fails_while_it_is_written_stays_as_it_was(tmp_path):
    path = tmp_path / "step"
    with files.atomic_folder(path) as partial:
        (partial / "a.txt").write_text("before")
    with pytest.raises(RuntimeError), files.atomic_folder(path) as partial:
        (partial / "a.txt").write_text("half")
        raise RuntimeError
    assert (path / "a.txt").read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_is_replaced_with_all_that_was_in_it(tmp_path):
    path = tmp_path / "step"
    for name in ("old", "new"):
        with files.atomic_folder(path) as partial:
            (partial / name).touch()
    assert [file.name for file in path.iterdir()] == ["new"]
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_not_permitted_is_tried_again_for_seconds():
    errors = [PermissionError(errno.EACCES, "in use")] * 2
    begin, done = time.monotonic(), []

    def action(value):
        if errors:
            raise errors.pop()
        done.append(value)

    files.patiently(action, 1)
    assert done == [1] and time.monotonic() - begin > 0.29
    begin = time.monotonic()
    with pytest.raises(FileNotFoundError):
        files.patiently(os.unlink, "nothing")
    assert time.monotonic() - begin < 1


@pytest.mark.skipif(os.name != "nt", reason="elsewhere a file that is open can be replaced")
def test_a_file_that_another_program_reads_for_a_moment_is_replaced(tmp_path):
    path = tmp_path / "a.txt"
    files.write_text(path, "before")
    with open(path, encoding="utf-8") as scanner:
        threading.Timer(0.5, scanner.close).start()
        files.write_text(path, "after")
    assert path.read_text("utf-8") == "after"
    with open(path, encoding="utf-8"), pytest.raises(PermissionError) as found:
        files.write_text(path, "again")
    message = error_message(found.value)
    assert message.startswith(f"{path}: ") and message.endswith("another program has it open")


def test_only_an_error_of_the_disk_asks_for_room(tmp_path):
    for error, raised in (
        (OSError("no"), OSError),
        (KeyError("no"), OSError),
        (TypeError, TypeError),
    ):
        with pytest.raises(raised) as found, files.writing(tmp_path / "a.bin", "move", KeyError):
            raise error
        assert ("took only a part of a.bin" in str(found.value)) == (raised is OSError)


def test_json_keeps_its_characters_and_comes_back(tmp_path):
    path = tmp_path / "a.json"
    files.write_json(path, {"name": "Größe", "file": "\udcff"})
    assert '"Größe"' in path.read_text(encoding="utf-8")
    assert files.read_json(path) == {"name": "Größe", "file": "\udcff"}


@pytest.mark.parametrize("kind, fails", [("folder", False), ("file", True)])
def test_only_a_folder_may_fail_to_be_flushed(tmp_path, monkeypatch, kind, fails):
    """As on network mounts that flush no folders; a file that is not flushed is not written."""

    def flush(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode) == (kind == "folder"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", flush)
    with pytest.raises(OSError, match=r"a\.txt\.partial") if fails else nullcontext():
        files.write_text(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").exists() != fails


def test_room_is_asked_for_with_two_per_cent_and_a_mebibyte_to_spare(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=52_048_576))
    check_room(tmp_path, 50_000_000, "")
    words = r"^it takes 50.1 MB, and 52.0 MB are free; make room, or lower it$"
    with pytest.raises(OSError, match=words):
        check_room(tmp_path, 50_060_000, "lower it")


def test_of_a_long_list_a_few_are_named():
    assert files.few(list("abcde")) == "a, b, c, d, e"
    assert files.few(list("abcdefgh")) == "a, b, c, d, e and 3 more"


def caused(error, words):
    """An error with another as its cause."""
    error.__cause__ = OSError(words)
    return error


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(30, "Read-only file system", "a/b"), "a/b: Read-only file system"),
        (OSError(28, "No space left on device"), "No space left on device"),
        (ValueError("first\nsecond"), "first"),
        (ValueError(), "ValueError"),
        (FileNotFoundError("https://host/a"), "https://host/a"),
        (caused(FileNotFoundError("https://host/a"), "refused"), "refused"),
        (caused(ValueError("no a at s3://b"), "refused"), "no a at s3://b"),
        (caused(ValueError("a"), "refused"), "a"),
    ],
)
def test_an_error_is_one_line(error, words):
    assert error_message(error) == words


def test_a_link_to_a_disk_that_is_not_there_is_named_as_such(tmp_path):
    (tmp_path / "runs").symlink_to("/mnt/nowhere")
    with pytest.raises(FileExistsError) as error:
        (tmp_path / "runs" / "a").mkdir(parents=True, exist_ok=True)
    words = f"{tmp_path}/runs is a link to /mnt/nowhere, which is not there"
    assert error_message(error.value) == words


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("left", ["", "12345\nanother-machine\n"])
def test_what_a_killed_process_left_locks_nothing_on_a_disk_without_flock(
    tmp_path, monkeypatch, left
):
    """As on Lustre without its option flock; an empty file is of a disk with locks."""
    pytest.importorskip("fcntl")  # which Windows lacks

    def flock(handle, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    (tmp_path / "lock").write_text(left)
    for timeout in (0, -1):
        files.take_lock(tmp_path / "lock", timeout).release()
    lock = files.take_lock(tmp_path / "lock")
    with pytest.raises(Timeout):  # of a process that lives
        files.take_lock(tmp_path / "lock", timeout=0)
    lock.release()


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
def test_a_lock_in_a_container_on_a_disk_without_flock_is_not_taken_twice(tmp_path):
    """filelock adds the container to the machine's name."""
    code = """if True:
        import errno, fcntl, sys
        from pathlib import Path
        from filelock import Timeout
        from formats import files

        def flock(handle, operation):
            raise OSError(errno.ENOSYS, "Function not implemented")

        fcntl.flock = flock
        first = files.take_lock(Path(sys.argv[1]))
        try:
            files.take_lock(Path(sys.argv[1]), timeout=0)
        except Timeout:
            print("taken once")
    """
    own_processes = ["unshare", "--map-root-user", "--pid", "--fork"]
    if subprocess.run([*own_processes, "true"], capture_output=True).returncode:
        pytest.skip("may not make a namespace here")
    command = [*own_processes, sys.executable, "-c", code, tmp_path / "lock"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert result.stdout == "taken once\n", result.stderr


def test_a_lock_is_waited_for_until_it_is_released(tmp_path):
    path = tmp_path / "lock"
    with ThreadPoolExecutor(1) as other:
        lock = other.submit(files.take_lock, path).result()
        with pytest.raises(Timeout):
            files.take_lock(path, timeout=0)
        other.submit(time.sleep, 0.1)
        other.submit(lock.release)
        files.take_lock(path).release()


@pytest.mark.skipif(os.name == "nt", reason="modes of files")
def test_a_lock_can_be_taken_by_each_user_of_a_shared_folder(tmp_path):
    files.take_lock(tmp_path / "lock").release()
    assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o666
