"""The disks that a power cut can leave of what a test writes."""

import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

CALLS = ("fsync", "replace", "rmdir", "unlink")  # of os, which all that is tested here uses


@contextlib.contextmanager
def power_cuts(folder: Path) -> Iterator[list[dict[str, bytes]]]:
    """Yield a list of disks, {name: content} of a folder, which grows while the body writes there.

    Two before and after each call that flushes, renames or deletes: one with all that is written,
    as a killed process leaves it, and one with the contents that were flushed. Both have all names
    so far: journals of file systems keep their order, and an earlier list is an earlier disk.
    """
    before = [path for path in folder.rglob("*") if path.is_file()]
    one_at_a_time = threading.Lock()
    disks, flushed = [], {path.stat().st_ino: path.read_bytes() for path in before}

    def look():
        paths = [path for path in folder.rglob("*") if path.is_file()]
        contents = {path.stat().st_ino: path.read_bytes() for path in paths}
        for gone in flushed.keys() - contents:  # the next file may have its number
            del flushed[gone]
        for kept in (contents, flushed):
            disk = {str(p.relative_to(folder)): kept.get(p.stat().st_ino, b"") for p in paths}
            if disk not in disks:
                disks.append(disk)
        return contents

    def watched(name, act):
        def call(*args, **options):
            with one_at_a_time:  # a file may be renamed by another thread
                look()
                act(*args, **options)
                contents = look()
                if name == "fsync" and os.fstat(args[0]).st_ino in contents:
                    flushed[os.fstat(args[0]).st_ino] = contents[os.fstat(args[0]).st_ino]
                    look()

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, watched(name, getattr(os, name)))
        yield disks
        look()


def lay(disk: dict[str, bytes], folder: Path) -> Path:
    """Write such a disk into a folder, in place of what is there; returns it."""
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in disk.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder
