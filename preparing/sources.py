"""Which files to read: from the INPUT arguments to a list of sources.

Looks at names, sizes and permissions, for remote files at what their source says about them. Opens
no file, except to keep standard input.
"""

import difflib
import glob
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from formats.address import protocol_of
from formats.files import sha256
from preparing import InputError, need, remote
from preparing.catalog import CATALOG, heading_of

KNOWN = re.compile(r"\.((txt|jsonl|ndjson)(\.gz|\.zst)?|parquet)$")
MOST_ENDINGS = 5  # of skipped files that a message names
EXPANSION = 4  # bytes of text in a byte of a compressed file, about,
PARQUET_EXPANSION = 2.5  # and of a parquet file; OpenWebText has 1.6


@dataclass
class Source:
    """One input file.

    path: the address, of a remote file. kind: txt, jsonl or parquet. compression: "", gz or zst.
    size: bytes on disk. modified: ns since 1970. tag: the ETag or the like of a remote file.
    heading: the first row of a document in parquet files whose rows are paragraphs, as a regular
    expression; "" where a row is a document.
    """

    path: str
    kind: str
    compression: str
    size: int
    modified: int
    tag: str = ""
    heading: str = ""

    @property
    def is_remote(self) -> bool:
        """Whether it has to be fetched."""
        return bool(protocol_of(self.path))

    @property
    def text_size(self) -> int:
        """About how many bytes of text the file holds."""
        if self.compression:
            return EXPANSION * self.size
        if self.kind == "parquet":
            return int(PARQUET_EXPANSION * self.size)
        return self.size


def kind_of(path: str) -> tuple[str, str]:
    """Kind and compression by the ending of a file's name; an unknown ending is plain text."""
    name = path.lower()
    compression = ""
    if name.endswith((".gz", ".zst")):
        name, _, compression = name.rpartition(".")
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl", compression
    if name.endswith(".parquet"):
        return "parquet", compression
    return "txt", compression


def find_sources(inputs: list[str]) -> list[Source]:
    """The files of INPUT arguments (files, folders, globs, addresses), each once.

    Those of a folder in order of their names. Raises InputError for what is missing, empty or
    cannot be read.
    """
    sources = {}
    for given in inputs:
        find = _remote_sources if protocol_of(given) else _local_sources
        for source in find(given):
            sources.setdefault(source.path, source)
    if not sources:
        raise InputError(f"no text in {', '.join(inputs)}: the files are empty")
    return list(sources.values())


def _local_sources(given) -> Iterator[Source]:
    """The files that are not empty of one INPUT that is no address."""
    for path in _expand(given):
        stat = os.stat(path)
        kind, compression = kind_of(path)
        if not stat.st_size and path == given:
            raise InputError(f"{path} is empty; leave it out or fill it")
        _check_package(path, kind, compression)
        if stat.st_size:
            yield Source(path, kind, compression, stat.st_size, stat.st_mtime_ns)


def _remote_sources(given) -> Iterator[Source]:
    """The files that are not empty of an address."""
    files = remote.list_files(given)
    if len(files) != 1:
        files = [file for file in files if KNOWN.search(_name(file.address))]
    if not files:
        raise InputError(f"no .txt, .jsonl or .parquet file (also .gz, .zst) at {given}")
    for file in files:
        kind, compression = kind_of(_name(file.address))
        _check_package(file.address, kind, compression)
        if file.size:
            yield Source(file.address, kind, compression, file.size, 0, file.tag, heading_of(given))


def _name(address):
    """The address of a file up to its ending, in lower case: without ?download=true."""
    return address.partition("?")[0].lower()


def _check_package(path, kind, compression):
    """Raises InputError when the package that reads this kind of file is missing."""
    if compression == "zst":
        need(f"reading {path}", "pyzstd")
    elif kind == "parquet":
        need(f"reading {path}", "pyarrow")


def _expand(given):
    """The paths that one INPUT stands for."""
    if Path(given).is_dir():
        return _files_of_folder(given)
    if Path(given).exists():
        return [given]
    matches = (Path(path) for path in glob.glob(given, recursive=True))
    found = sorted(path.as_posix() for path in matches if path.is_file())
    if found:
        return found
    if glob.has_magic(given):
        raise InputError(f"no file matches {given}")
    near = difflib.get_close_matches(given.lower(), CATALOG, 1)
    names = f"did you mean {near[0]}?" if near else f"texts by name are {', '.join(CATALOG)}"
    raise InputError(f"no such file or folder: {given}; {names}")


def _files_of_folder(folder):
    """The files with a known ending in a folder and its subfolders, in order of their names.

    Prints which others it skips.
    """
    known = []
    skipped = Counter()
    for file in sorted(_walk(folder)):
        if KNOWN.search(file.lower()):
            known.append(file)
        elif not Path(file).name.startswith("."):
            skipped[Path(file).suffix.lower() or "without ending"] += 1
    counts = ", ".join(f"{n:,} {ending}" for ending, n in skipped.most_common(MOST_ENDINGS))
    hint = f"a glob in quotes takes other text, as in '{Path(folder).as_posix()}/**/*.md'"
    if not known:
        raise InputError(
            f"folder {folder} holds no .txt, .jsonl or .parquet file (also .gz, .zst), but"
            f" {counts or 'nothing'}; {hint}"
        )
    if skipped:
        print(f"folder {folder}: {len(known):,} files, skipping {counts}; {hint}", file=sys.stderr)
    return known


def _walk(folder) -> Iterator[str]:
    """The path of every file under a folder. Raises InputError when a folder cannot be read."""

    def unreadable(error):
        raise InputError(f"folder {error.filename} cannot be read: {error.strerror}")

    for at, _, names in os.walk(folder, onerror=unreadable):
        for name in names:
            yield Path(at, name).as_posix()


def keep_stdin(folder: Path, kind: str) -> Source:
    """Standard input as a file in `folder`, because the text is read twice, or more after a kill.

    kind: txt or jsonl. Raises InputError when there is nothing in it.
    """
    path = folder / f"stdin.{kind}"
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    size = path.stat().st_size
    if not size:
        raise InputError("standard input is empty")
    content = int(sha256(path)[:12], 16)  # in place of a time, which differs at each start
    return Source(path.as_posix(), kind, "", size, modified=content)
