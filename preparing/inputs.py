"""Which files to read: from the INPUT arguments to a list of sources, and a shard's part of it.

Looks at names, sizes and permissions, of remote files at what their source says of them. Opens no
file, except to keep standard input.
"""

import difflib
import functools
import glob
import importlib.util
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from formats.files import sha256
from preparing import remote
from preparing.catalog import CATALOG, heading_of
from preparing.errors import InputError
from preparing.patience import WHILE_LISTING, patiently

KNOWN = re.compile(r"\.((txt|jsonl|ndjson)(\.gz|\.zst)?|parquet)$")
MOST_ENDINGS = 5  # of files left aside that are named
TEXT = re.compile(  # endings of files that are text too
    r"\.(c|cpp|css|csv|go|h|html?|java|js|json|log|md|markdown|org|po|py|r|rs|rst|sh|srt|tex|text"
    r"|ts|tsv|vtt|xml|ya?ml)"
)
EXPANSION = 4  # bytes of text in a byte of a compressed file, about,
PARQUET_EXPANSION = 2.5  # and of a parquet file; OpenWebText has 1.6


@dataclass
class Source:
    """One input file.

    path: of a remote file, its address. kind: txt, jsonl or parquet. compression: "", gz or zst.
    size: bytes on disk. modified: ns since 1970. tag: of a remote file, its ETag or the like.
    heading: of parquet, what the first row of a document looks like, where a row is not one.
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
        """Whether it lies elsewhere and has to be fetched."""
        return bool(remote.protocol_of(self.path))

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
    for ending in ("gz", "zst"):
        if name.endswith("." + ending):
            compression = ending
            name = name.removesuffix("." + ending)
            break
    if name.endswith((".jsonl", ".ndjson")):
        return "jsonl", compression
    if name.endswith(".parquet"):
        return "parquet", compression
    return "txt", compression


def find_sources(inputs: list[str]) -> list[Source]:
    """The files of INPUT arguments (files, folders, globs, addresses), each once.

    Those of a folder in order of their names. Raises InputError for what is not there, is empty, or
    cannot be read.
    """
    sources = {}
    for given in inputs:
        find = _remote_sources if remote.protocol_of(given) else _local_sources
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
        if not os.access(path, os.R_OK):
            raise InputError(f"no permission to read {path}; chmod u+r {path}, or leave it out")
        _check_package(path, kind, compression)
        if stat.st_size:
            yield Source(path, kind, compression, stat.st_size, stat.st_mtime_ns)


def _remote_sources(given) -> Iterator[Source]:
    """The files that are not empty of an address."""
    remote.check_packages(given)
    files = patiently(functools.partial(remote.list_files, given), given, WHILE_LISTING)
    if len(files) != 1:
        files = [file for file in files if KNOWN.search(_name(file.address))]
    if not files:
        raise InputError(f"no .txt, .jsonl or .parquet file (also .gz, .zst) at {given}")
    for file in files:
        kind, compression = kind_of(_name(file.address))
        _check_package(file.address, kind, compression)
        if file.size:
            heading = heading_of(given)
            yield Source(file.address, kind, compression, file.size, 0, file.tag, heading)


def _name(address):
    """The address of a file up to its ending, in lower case: without ?download=true."""
    return address.partition("?")[0].lower()


def _check_package(path, kind, compression):
    """Raises InputError when the package that reads this kind of file is missing."""
    if compression == "zst":
        package = "pyzstd"
    elif kind == "parquet":
        package = "pyarrow"
    else:
        return
    if not importlib.util.find_spec(package):
        raise InputError(
            f"reading {path} needs the package {package}; run\n  python -m pip install {package}"
        )


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


def _files_of_folder(given):
    """The files with a known ending in a folder and the folders in it, in order of their names.

    Says which others are left aside.
    """
    files = sorted(_walk(given))
    known = [file for file in files if KNOWN.search(file.lower())]
    others = Counter(
        Path(file).suffix.lower()
        for file in set(files).difference(known)
        if not Path(file).name.startswith(".")
    )
    shown = sorted(others.items(), key=lambda item: (-item[1], item[0]))[:MOST_ENDINGS]
    endings = ", ".join(f"{count:,} {ending or 'without ending'}" for ending, count in shown)
    rest = sum(others.values()) - sum(count for _, count in shown)
    if rest:
        endings += f", {rest:,} others"
    text_like = [ending for ending, _ in shown if TEXT.fullmatch(ending)]
    glob_of = f"'{Path(given).as_posix()}/**/*{{}}'"
    globs = " ".join(glob_of.format(ending) for ending in text_like)
    if known:
        if others:
            how = f"; to take more, give {globs} as well" if globs else ""
            print(
                f"folder {given}: {len(known):,} files are taken, left aside are {endings}{how}",
                file=sys.stderr,
            )
        return known
    hint = f".\nFor text with other endings give a glob in quotes: {globs}" if globs else ""
    raise InputError(
        f"folder {given} holds no .txt, .jsonl or .parquet file (also .gz, .zst); there is"
        f" {endings or 'nothing'}{hint}"
    )


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
    content = int(sha256(path)[:12], 16)  # in place of a time, which is another at each start
    return Source(path.as_posix(), kind, "", size, modified=content)


def sources_of_shard(sources: list[Source], index: int, count: int) -> list[Source]:
    """The sources of shard `index` of `count` (from 1): whole files, about equal in bytes.

    The shards in order are the whole input in order. Raises InputError when there are fewer files
    than shards.
    """
    if len(sources) < count:
        raise InputError(
            f"--shard {index}/{count}: the input has only {len(sources)} files, and a file is not"
            " divided; cut large ones first, as with split --line-bytes=1G, or use fewer shards"
        )
    total = sum(source.size for source in sources)
    before = 0  # bytes of the sources so far
    shard = 0  # the shard that takes the source, from 0
    chosen = []
    for n, source in enumerate(sources):
        by_size = int((before + source.size / 2) * count / total)
        next_shard = shard + 1 if n else 0
        still_needed = count - (len(sources) - n)  # from here on each shard takes one source
        shard = max(shard, min(by_size, next_shard), still_needed)
        if shard == index - 1:
            chosen.append(source)
        before += source.size
    return chosen
