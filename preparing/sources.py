"""The files to read: from the INPUT arguments to a list of sources.

Looks at names, sizes and permissions, and at the metadata of remote files. Opens no file, except to
download tiny Shakespeare and to store standard input. CATALOG has texts on the Hugging Face Hub;
tests/preparing/test_remote.py has the names of their files.
"""

import functools
import glob
import http.client
import os
import re
import shutil
import stat
import sys
import sysconfig
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from command_line import plural, quote, without_credentials
from formats.address import PAGE, protocol_of
from formats.files import few, sha256, write_text
from preparing import InputError, need
from preparing.foreign import foreign
from preparing.remote import list_files, spread

KNOWN = re.compile(r"\.((txt|jsonl|ndjson)(\.gz|\.zst)?|parquet)$")
FORMATS = ".txt, .jsonl or .parquet file (also .gz, .zst)"
KINDS = {".jsonl": "jsonl", ".ndjson": "jsonl", ".parquet": "parquet"}
KINDS |= {".csv": "csv", ".tsv": "tsv", ".json": "json"}
WITHOUT = "without ending"
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
# Below a folder: hidden files, and those that macOS and Office put next to files.
HIDDEN = re.compile(r"(?:\A|(?<=/))(?:\.[^./]|~\$|__MACOSX/)")

# Names that data sets give to the parts that are not for training; code has other tests.
HELD_OUT = re.compile(
    r"(?i)(?:\A|[/_.-])(?:test|val|valid|validation|dev|eval)(?=[/_.-])"
    r"(?!.*\.(?:py|[ch]|cc|cpp|js|ts|go|rs|java|rb|md)$)"
)


@dataclass
class Source:
    """One input file.

    path: or address. kind: a value of KINDS, or txt. compression: "", gzip or zstd. size: bytes on
    disk. version: changes with the content: a local file's modification time, a remote file's ETag
    or the like, or the checksum of standard input.
    """

    path: str
    kind: str
    compression: str
    size: int
    version: str

    @functools.cached_property
    def name(self) -> str:
        """The path as messages and files show it: without credentials."""
        return without_credentials(self.path)

    @functools.cached_property
    def is_remote(self) -> bool:
        return bool(protocol_of(self.path))

    def is_unchanged(self) -> bool:
        """True if a local file still has its size and modification time."""
        try:
            stat = os.stat(self.path)
        except OSError:
            return False
        return (stat.st_size, str(stat.st_mtime_ns)) == (self.size, self.version)


def find_sources(inputs: list[str]) -> list[Source]:
    """The files of INPUT arguments (names, addresses, files, folders, globs), each once.

    A file that is reached by several links or spellings is listed under the first. Files of a
    folder are sorted by name. Without INPUT, these are the files of the standard library. Raises
    InputError if an input is missing or cannot be read, or if all are empty.
    """
    sources = {}
    real_folder = functools.cache(os.path.realpath)  # many files share few folders
    for given in inputs or standard_library():
        for source in _sources_of(given):
            place = source.path
            if not source.is_remote:
                folder, name = os.path.split(place)
                linked = os.path.islink(place)
                place = os.path.realpath(place) if linked else f"{real_folder(folder)}/{name}"
            if source.size:
                sources.setdefault(place, source)
    if not sources:
        raise InputError(f"no text in {few(inputs)}: the files are empty")
    return list(sources.values())


def _sources_of(given) -> Iterator[Source]:
    """The files of one INPUT. An existing path takes precedence over the name of a text."""
    if not os.path.exists(given):  # Path.exists() raises for a name that is too long
        if given == SHAKESPEARE:
            given = shakespeare()
        elif corpus := CATALOG.get(given):
            print(f"{given}: {corpus.repository}; license: {corpus.license}", file=sys.stderr)
            given = f"hf://datasets/{corpus.repository}/{corpus.files}"
    if protocol_of(given):
        for address, (size, version) in _files_at(given).items():
            yield _source(address, size, version)
    else:
        for path in _expand(given):
            try:
                found = os.stat(path)
            except OSError as error:
                raise InputError(f"{path} cannot be read: {error.strerror}") from None
            if not stat.S_ISREG(found.st_mode):
                raise InputError(f"{path} is a pipe or a device; give - for standard input")
            yield _source(path, found.st_size, str(found.st_mtime_ns))


def _source(path, size, version):
    """A Source, whose kind and compression follow from its suffix; unknown ones are plain text."""
    name, ending = os.path.splitext(_name(path))
    compression = COMPRESSIONS.get(ending, "")
    if compression:
        ending = os.path.splitext(name)[1]
    kind = KINDS.get(ending, "txt")
    if problem := foreign(ending):
        raise InputError(f"{path} is {problem}")
    if kind == "parquet":
        need(f"reading {path}", "pyarrow")
    if compression == "zstd" and sys.version_info < (3, 14):  # 3.14 includes zstd
        need(f"reading {path}", "backports.zstd")
    return Source(path, kind, compression, size, version)


def _name(path):
    """A path in lower case; an address without its query, such as ?download=true."""
    return (path.partition("?")[0] if protocol_of(path) else path).lower()


def _is_known(path):
    return KNOWN.search(_name(path))


def _without_hidden(paths, given):
    """The paths that are not hidden below the given folder, or below a glob's fixed part."""
    fixed = re.split(r"[*?[]", given)[0]
    return [path for path in paths if not HIDDEN.search(path, len(fixed))]


def _expand(given):
    """The paths that one INPUT names."""
    if os.path.isdir(given):
        return _files_of_folder(given)
    if os.path.exists(given):
        return [given]
    if not glob.has_magic(given):
        names = ", ".join([SHAKESPEARE, *CATALOG])
        if re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not os.path.exists(os.path.dirname(given)):
            names += f"; a data set of the Hugging Face Hub is hf://datasets/{given}"
        raise InputError(f"no such file or folder: {given:.300}; texts by name are {names}")
    # .txt finds .TXT, as below a folder.
    pattern = re.sub(r"(?<=\.)\w+\Z", _in_any_case, spread(given))
    matches = _without_hidden(glob.glob(pattern, recursive=True), given)
    found = sorted(Path(path).as_posix() for path in matches if os.path.isfile(path))
    if not found and any(map(os.path.isdir, matches)):
        files = quote(f"{given.rstrip('/')}/**/*.txt")
        raise InputError(
            f"{given} matches folders only; write a pattern for files, such as {files}"
        )
    if not found:
        raise InputError(f"no file matches {given}")
    _tell_held_out(given, found)
    return found


def _in_any_case(ending):
    return "".join(f"[{letter.lower()}{letter.upper()}]" for letter in ending[0])


def _files_of_folder(folder):
    """The files with a known suffix below a folder, sorted.

    Follows links to folders, but visits each folder once.
    """
    found = []
    seen = set()
    for at, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        place = os.path.realpath(at)
        if place in seen:
            folders.clear()
            continue
        seen.add(place)
        folders[:] = sorted(name for name in folders if name[0] != ".")
        # Strings are joined faster than Paths; there may be many thousand.
        prefix = Path(at, "*").as_posix()[:-1]
        found += [prefix + name for name in sorted(names)]
    below = len(Path(folder, "*").as_posix()) - 1
    escaped = glob.escape(Path(folder).as_posix())
    return sorted(_known(found, below, f"folder {folder}", escaped))


def _known(paths, below, place, folder, advice=""):
    """The paths of known types; prints which others it skips. Raises InputError if it skips all.

    below: the length of the folder that they share. place: the folder in words. folder: as it is
    written in a pattern. advice: ends the error.
    """
    known = []
    skipped = Counter()
    for path in paths:
        if HIDDEN.search(path, below):
            skipped["hidden"] += 1
        elif not _is_known(path):
            skipped[os.path.splitext(path)[1].lower() or WITHOUT] += 1
        elif not (protocol_of(path) or os.path.isfile(path)):
            skipped[f"broken link ({path[below:]})"] += 1
        else:
            known.append(path)
    counts = few([f"{n:,} {ending}" for ending, n in skipped.most_common()])
    counts = counts or "nothing, hidden folders aside"
    others = [kind for kind, _ in skipped.most_common() if kind.startswith((".", WITHOUT))]
    if others and (problem := foreign(others[0])):
        counts += f"; {others[0]} is {problem}"
    elif others:
        last = "*" if others[0] == WITHOUT else "*.ENDING"
        example = quote(f"{folder}/**/{last}")
        counts += f"; to read other types, write a pattern in quotes, such as {example}"
    if not known:
        raise InputError(f"{place} holds no {FORMATS}, but {counts}{advice}")
    place = without_credentials(place)
    if skipped:
        print(f"{place}: {plural(len(known), 'file')}, skipping {counts}", file=sys.stderr)
    _tell_held_out(place, known)
    return known


def _tell_held_out(place, known):
    """Print which of the files are hardly for training."""
    below = len(os.path.commonpath(known))
    held_out = [without_credentials(path) for path in known if HELD_OUT.search(path, below)]
    if 0 < len(held_out) < len(known):
        print(
            f"{place}: the model will also train on {few(held_out)}; if that is for tests, name the"
            " other files, or write a pattern",
            file=sys.stderr,
        )


def _files_at(given):
    """The files that one address names, as list_files returns them.

    Those of a folder have known suffixes, as on a disk. So have those of a pattern, unless it ends
    in another suffix. Prints which others it skips.
    """
    if (page := PAGE.match(given)) and "/resolve/" not in given:
        raise InputError(f"{given} is a page; the address of its files is hf://{page[1]}")
    files = list_files(given)
    if len(files) == 1:
        return files
    shown = _without_hidden(files, given)
    if not shown:
        raise InputError(f"no {FORMATS} at {given}, nor any other")
    names_type = glob.has_magic(given) and re.search(r"\.\w+\Z", given)
    if not names_type or any(map(_is_known, shown)):
        advice = ""
        if repository := re.match(r"hf://datasets/[^/@]+/[^/@]+", given):
            advice = (
                ". For most data sets, the Hub also makes Parquet files: write"
                f" {repository[0]}@refs/convert/parquet/**.parquet"
            )
        fixed = re.split(r"[*?[]", given)[0]
        shown = _known(shown, len(fixed), given, fixed.rstrip("/"), advice)
    return {address: files[address] for address in shown}


def _unreadable(error):
    raise InputError(f"folder {error.filename} cannot be read: {error.strerror}")


def keep_stdin(folder: Path, kind: str) -> Source:
    """Store standard input as a file of this kind in `folder`, since it is read more than once."""
    path = folder / f"stdin.{kind}"
    with open(path, "wb") as file:
        shutil.copyfileobj(sys.stdin.buffer, file)
    size = path.stat().st_size
    if not size:
        raise InputError("standard input is empty")
    return Source(path.as_posix(), kind, "", size, sha256(path))


# -- texts by name


SHAKESPEARE = "shakespeare"  # the INPUT for the file below
SHAKESPEARE_FILE = Path("data/shakespeare.txt")
SHAKESPEARE_URL = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
)
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
NOT_IN_STDLIB = re.compile(
    r"/(tests?|idlelib|lib2to3|encodings|pydoc_data|site-packages|dist-packages|__pycache__)/"
)


@dataclass(frozen=True)
class Corpus:
    """A named text on the Hugging Face hub.

    files: the training split, as a glob within the repository. license: of the data set as a whole.
    """

    repository: str
    files: str
    license: str


CATALOG = {
    "fineweb-edu": Corpus("HuggingFaceFW/fineweb-edu", "sample/10BT/*.parquet", "ODC-By 1.0"),
    "openwebtext": Corpus("Skylion007/openwebtext", "plain_text/train-*.parquet", "CC0 1.0"),
    "tinystories": Corpus("roneneldan/TinyStories", "data/train-*.parquet", "CDLA-Sharing 1.0"),
    "wikipedia-en": Corpus(
        "wikimedia/wikipedia", "20231101.en/train-*.parquet", "CC BY-SA 3.0 and GFDL"
    ),
    "smoltalk": Corpus(
        "HuggingFaceTB/smoltalk",
        "data/all/train-*.parquet",
        "Apache 2.0 and, of older parts, others (its card)",
    ),
    # nvidia/Nemotron-ClimbMix as text, shuffled: the first 1,000 of 6,543 files. The last is
    # nanochat's validation text.
    "climbmix": Corpus(
        "karpathy/climbmix-400b-shuffle",
        "shard_00*.parquet",
        "CC BY-NC 4.0, NOT FOR COMMERCIAL USE",
    ),
}


def standard_library() -> list[str]:
    """The source files of the running Python's library, without tests, encodings and help pages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        path.as_posix()
        for path in root.rglob("*.py")
        if not NOT_IN_STDLIB.search(f"/{path.relative_to(root).as_posix()}")
    )


def shakespeare() -> str:
    """The path of tiny Shakespeare, which is downloaded if it is missing. Raises InputError."""
    path = SHAKESPEARE_FILE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with urllib.request.urlopen(SHAKESPEARE_URL, timeout=30) as reply:
                write_text(path, reply.read().decode())
        except (OSError, http.client.HTTPException, UnicodeDecodeError) as error:
            raise InputError(
                f"tiny Shakespeare could not be downloaded ({error}). Where there is a network,"
                f" fetch\n  {SHAKESPEARE_URL}\nand put it at {path.absolute()}"
            ) from None
    if sha256(path) != SHAKESPEARE_SHA256:
        raise InputError(f"{path} is not the file it should be; delete it, to fetch it again")
    return path.as_posix()
