"""Text files as people have them -> pieces of about 1 MB, and pieces -> the texts of their
documents.

Finds the files; reads .txt, .jsonl and .parquet, plain, .gz or .zst; cuts them where no token can
cross; cleans documents. The main process reads pieces in order, in bounded memory; worker processes
turn them into texts. Knows no token ids.
"""

import dataclasses
import functools
import glob
import gzip
import importlib.util
import json
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from formats.conversation import format_chat
from tokenizer_bpe import EOT, safe_cut

PIECE = (
    1 << 20
)  # bytes that a worker takes at a time; encoding much more in one call is slower and takes far more memory
NO_CUT = 16 * PIECE  # text without any place to cut for so long is cut all the same
LOOK_BACK = 1 << 16  # bytes before the end of a piece in which a place to cut is looked for
AHEAD = 8  # bytes after a place to cut that are looked at
LONGEST_LINE = 256 * PIECE
MARK = EOT.encode()
BOM = b"\xef\xbb\xbf"
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]")
CLEANING = {
    "line ends other than \\n": lambda text: text.replace("\r\n", "\n").replace("\r", "\n"),
    "broken encoding": lambda text: text.replace("\ufffd", ""),
    "not in NFC": functools.partial(unicodedata.normalize, "NFC"),
    "control characters": functools.partial(CONTROL.sub, ""),
}


class InputError(ValueError):
    """Input that cannot be used, in a sentence for the user."""


@dataclass
class Source:
    """One input file. kind: txt, jsonl or parquet; compression: "", gz or zst; size in bytes on
    disk; modified in ns since 1970.
    """

    path: str
    kind: str
    compression: str
    size: int
    modified: int


@dataclass
class Position:
    """A place in the input: the source's index, the byte in its decompressed content (the row of a
    parquet file), the line before it, whether a document goes on across it, and the bytes on
    disk of all input before it.
    """

    source: int = 0
    offset: int = 0
    line: int = 0
    inside: bool = False
    on_disk: int = 0


@dataclass
class Piece:
    """Whole documents, or a part of a single long one. data: bytes, or the rows of a parquet file,
    as {column: value}. at, after: where the piece begins, and where the next one does. begins,
    ends: whether the first document begins here and the last one ends here.
    """

    path: str
    kind: str
    data: bytes | list
    at: Position
    after: Position
    begins: bool = True
    ends: bool = True

    @property
    def size(self) -> int:
        """Bytes, of rows about."""
        return (
            len(self.data)
            if isinstance(self.data, bytes)
            else sum(len(str(value)) for row in self.data for value in row.values())
        )

    def light(self) -> "Piece":
        """Without its data, where a worker process can read that from the file itself: sending it
        costs a tenth of encoding it.
        """
        return (
            self
            if self.kind == "parquet" or kind_of(self.path)[1]
            else dataclasses.replace(self, data=b"")
        )

    def loaded(self) -> "Piece":
        """With its data."""
        if self.data:
            return self
        with open(self.path, "rb") as file:
            file.seek(self.at.offset)
            return dataclasses.replace(self, data=file.read(self.after.offset - self.at.offset))


@dataclass
class Options:
    """How records become texts. The rules of cleaning hold for documents after their characters are
    cleaned.
    """

    text_field: str | None = None  # None: "text", else "messages"
    on_error: str = "stop"  # stop, skip the document, or replace broken bytes by U+FFFD
    clean: bool = False
    min_chars: int = 20  # shorter documents are dropped
    max_char_share: float = (
        0.5  # dropped when one character makes up more of what is not white space
    )
    min_letters: float = 0.4  # dropped when letters and digits make up less of it


# -- finding files --------------------------------------------------------------------------------


def kind_of(path: str) -> tuple[str, str]:
    """Kind and compression by the ending of a file's name; what is not known counts as plain text."""
    name = path.lower()
    compression = next((c for c in ("gz", "zst") if name.endswith("." + c)), "")
    name = name.removesuffix("." + compression)
    return (
        "jsonl"
        if name.endswith((".jsonl", ".ndjson"))
        else "parquet"
        if name.endswith(".parquet")
        else "txt"
    ), compression


def find_sources(inputs: list[str]) -> list[Source]:
    """The files of INPUT arguments (files, folders, globs), each once, folders in order of their
    names. Raises InputError.
    """
    sources = []
    for path in dict.fromkeys(path for given in inputs for path in _expand(given)):
        stat, (kind, compression) = os.stat(path), kind_of(path)
        if not stat.st_size and path in inputs:
            raise InputError(f"{path} is empty; leave it out or fill it")
        if not os.access(path, os.R_OK):
            raise InputError(f"no permission to read {path}; chmod u+r {path}, or leave it out")
        package = "pyzstd" if compression == "zst" else "pyarrow" if kind == "parquet" else ""
        if package and not importlib.util.find_spec(package):
            raise InputError(
                f"reading {path} needs the package {package}; run\n  python -m pip install"
                f" {package}"
            )
        if stat.st_size:
            sources.append(Source(path, kind, compression, stat.st_size, stat.st_mtime_ns))
    if not sources:
        raise InputError(f"no text in {', '.join(inputs)}: the files are empty")
    return sources


def _expand(given):
    """The paths that one INPUT stands for."""

    def unreadable(error):
        raise InputError(f"folder {error.filename} cannot be read: {error.strerror}")

    path = Path(given)
    if path.is_dir():
        files = sorted(
            Path(at, name).as_posix()
            for at, _, names in os.walk(path, onerror=unreadable)
            for name in names
        )
        known = [
            f for f in files if re.search(r"\.(txt|jsonl|ndjson|parquet)(\.gz|\.zst)?$", f.lower())
        ]
        if not known:
            endings = (
                ", ".join(
                    f"{n} {e or 'without ending'}"
                    for e, n in Counter(Path(f).suffix for f in files).most_common(5)
                )
                or "nothing"
            )
            raise InputError(
                f"folder {given} holds no .txt, .jsonl or .parquet file (also .gz, .zst); there is"
                f" {endings}.\nFor other endings give a glob in quotes: '{path.as_posix()}/**/*.md'"
            )
        return known
    if path.exists():
        return [given]
    found = sorted(
        Path(p).as_posix() for p in glob.glob(given, recursive=True) if Path(p).is_file()
    )
    if not found:
        raise InputError(
            f"no file matches {given}"
            if glob.has_magic(given)
            else f"no such file or folder: {given}"
        )
    return found


# -- reading pieces -------------------------------------------------------------------------------


def read_pieces(sources: list[Source], start: Position, options: Options) -> Iterator[Piece]:
    """The pieces of all sources from `start`, in order. The cuts follow from the content alone.
    Raises InputError.
    """
    before = sum(s.size for s in sources[: start.source])
    for index in range(start.source, len(sources)):
        source = sources[index]
        try:
            with open(source.path, "rb") as raw:
                read = _read_rows if source.kind == "parquet" else _read_text
                for piece in read(
                    source, raw, start if index == start.source else Position(index), options
                ):
                    piece.after.on_disk = before + (source.size if raw.closed else raw.tell())
                    yield piece
        except OSError as error:
            raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from None
        before += source.size


def _read_text(source, raw, at, options):
    """Pieces of a .txt or .jsonl file."""
    blocks, cut = (
        _blocks(source, raw, at.offset, options),
        _cut_lines if source.kind == "jsonl" else _cut_documents,
    )
    buffer, want, ended = bytearray(), PIECE, False
    while True:
        while len(buffer) <= want and not ended:
            block = next(blocks, b"")
            buffer += block
            ended = not block
        if not at.offset and buffer.startswith(BOM):
            at = dataclasses.replace(at, offset=len(BOM))
            del buffer[: len(BOM)]
        if not buffer:
            return
        end, whole = cut(buffer, ended, at, source)
        if not end:  # no place to cut yet
            want = 2 * len(buffer)
            continue
        data, want = bytes(buffer[:end]), PIECE
        del buffer[:end]
        after = Position(
            at.source,
            at.offset + end,
            at.line + (data.count(b"\n") if source.kind == "jsonl" else 0),
            not whole,
        )
        yield Piece(source.path, source.kind, data, at, after, not at.inside, whole)
        at = after


def _blocks(source, raw, start, options):
    """The decompressed content from byte `start` on; what ends or breaks off in the middle raises
    InputError, or counts as its end with on_error skip or replace.
    """
    stream, errors = raw, ()
    if source.compression == "gz":
        stream, errors = gzip.GzipFile(fileobj=raw), (EOFError, zlib.error, gzip.BadGzipFile)
    elif source.compression == "zst":
        import pyzstd

        stream, errors = pyzstd.ZstdFile(raw), (EOFError, pyzstd.ZstdError)
    try:
        stream.seek(start)
        while block := stream.read1(PIECE):
            yield block
    except errors as error:
        if options.on_error == "stop":
            raise InputError(
                f"{source.path} is cut off or damaged ({error}): copy it again, or take what can be"
                " read of it with --on_error skip"
            ) from None


def _cut_lines(buffer, ended, at, source):
    """Where whole lines of at most PIECE bytes end; more for a longer line. 0: read on."""
    if ended and len(buffer) <= PIECE:
        return len(buffer), True
    end = (
        buffer.rfind(b"\n", 0, PIECE) + 1
        or buffer.find(b"\n", PIECE) + 1
        or (len(buffer) if ended else 0)
    )
    if not end and len(buffer) > LONGEST_LINE:
        raise InputError(
            f"{source.path}, line {at.line + 1}: longer than {LONGEST_LINE >> 20} MB; JSON Lines"
            " has one object a line (jq -c . converts)"
        )
    return end, True


def _cut_documents(buffer, ended, at, source):
    """Where whole documents of at most PIECE bytes end, or else a part of the first one; and
    whether it ends there. 0: read on.
    """
    if ended and len(buffer) <= PIECE and not at.inside:
        return len(buffer), True
    for limit in range(PIECE, NO_CUT + 1, PIECE):
        separator = next(
            _separators(buffer, limit, ended, last=limit == PIECE and not at.inside), None
        )
        if separator:
            return separator[1], True
        if len(buffer) < limit + AHEAD:
            return (len(buffer), True) if ended else (0, False)
        tail = buffer[max(0, limit - LOOK_BACK) : limit + AHEAD].lstrip(
            bytes(range(0x80, 0xC0))
        )  # from the first whole character
        text = tail.decode(
            "utf-8", "surrogateescape"
        )  # a broken byte stays one character, and encodes back
        cut = safe_cut(text, len(tail[:-AHEAD].decode("utf-8", "surrogateescape")))
        if cut:
            return limit + AHEAD - len(text[cut:].encode("utf-8", "surrogateescape")), False
    return next(NO_CUT - n for n in range(4) if buffer[NO_CUT - n] & 0xC0 != 0x80 or n == 3), False


def _separators(data, limit, ended, last=False):
    """Start and end of the end-of-text lines that end within `limit`, in order or, with `last`,
    backwards.

    By find(), because a regular expression for it took 28 ms a piece, as long as encoding.
    """
    at = data.rfind(MARK, 0, limit) if last else data.find(MARK, 0, limit)
    while at >= 0:
        end = data.find(b"\n", at, min(at + 64, limit)) + 1 or (
            len(data) if ended and len(data) <= min(at + 64, limit) else 0
        )
        if end and (at == 0 or data[at - 1] == 10) and not data[at + len(MARK) : end].strip():
            yield at, end
        at = data.rfind(MARK, 0, at) if last else data.find(MARK, at + 1, limit)


def _split(data):
    """The documents of whole pieces of a text file, and where each begins."""
    start = 0
    for at, end in _separators(data, len(data), True):
        yield start, data[start:at]
        start = end
    yield start, data[start:]


def _read_rows(source, raw, at, options):
    """Pieces of a parquet file: rows whose texts take about PIECE bytes."""
    import pyarrow
    import pyarrow.parquet as parquet

    rows, size, row, start = [], 0, 0, at.offset
    try:
        file = parquet.ParquetFile(raw, buffer_size=PIECE, pre_buffer=False)
        names = file.schema_arrow.names
        column = text_column(names, options.text_field)
        if column not in names:
            raise InputError(
                f"{source.path} has no column {column!r}; it has {', '.join(names)}: name one with"
                " --text_field"
            )
        for batch in file.iter_batches(batch_size=64, columns=[column], use_threads=False):
            values = batch.column(0).slice(max(0, start - row)).to_pylist()
            row += len(batch) - len(values)
            for value in values:
                row, size = row + 1, size + len(str(value))
                rows.append({column: value})
                if size >= PIECE:
                    after = Position(at.source, row)
                    yield Piece(source.path, source.kind, rows, at, after)
                    rows, size, at = [], 0, after
    except (pyarrow.ArrowException, EOFError) as error:
        raise InputError(
            f"{source.path} cannot be read as parquet: {str(error).splitlines()[0]}"
        ) from None
    if rows:
        yield Piece(source.path, source.kind, rows, at, Position(at.source, row))


def text_column(names, text_field: str | None) -> str:
    """The field or column that holds the text: the one asked for, else text, else messages."""
    return text_field or next((n for n in ("text", "messages") if n in names), "text")


def slices(piece: Piece, size: int) -> Iterator[Piece]:
    """A piece in parts of about `size` bytes, cut at line ends or, where there are none, between
    characters: for samples.
    """
    data, start, line = piece.data, 0, piece.at.line
    while start < len(data):
        if piece.kind == "parquet":
            end = start + max(1, len(data) * size // PIECE)
        elif (end := start + size) < len(data):
            end = (
                data.rfind(b"\n", start, end) + 1
                or data.find(b"\n", end) + 1
                or next((n for n in range(end, len(data)) if data[n] & 0xC0 != 0x80), len(data))
            )
        part = data[start:end]
        yield Piece(
            piece.path,
            piece.kind,
            part,
            Position(piece.at.source, piece.at.offset + start, line),
            piece.after,
            False,
            False,
        )
        start, line = end, line + (part.count(b"\n") if piece.kind != "parquet" else 0)


# -- documents ------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was left out: {rule: [documents, bytes, [up to three examples]]}."""

    rules: dict[str, list] = field(default_factory=dict)
    noise: str = (  # the rule by which the last document was dropped; if it goes on in further pieces, they go with it
        ""
    )

    def add(self, rule: str, documents: int, size: int, examples: list[str]) -> None:
        """Count what a rule left out."""
        entry = self.rules.setdefault(rule, [0, 0, []])
        entry[:] = (
            entry[0] + documents,
            entry[1] + size,
            (entry[2] + [example[:100] for example in examples])[:3],
        )

    def merge(self, other: "Report") -> None:
        """Add another report's counts."""
        for rule, entry in other.rules.items():
            self.add(rule, *entry)


def texts_of(piece: Piece, options: Options) -> tuple[list[str], Report]:
    """The documents of a piece, valid Unicode, and what was left out. Raises InputError for what
    on_error = stop does not let pass.
    """
    report, texts = Report(), []
    for text in (_plain_texts if piece.kind == "txt" else _record_texts)(piece, options, report):
        if text and options.clean:
            text = clean(text, report)
            if piece.begins and (rule := noise(text, options)):
                report.noise = rule
                report.add(rule, 1, len(text.encode()), [text])
                continue
        if text and (text.strip() or not (piece.begins and piece.ends)):
            texts.append(text)
    return texts, report


def _plain_texts(piece, options, report):
    """Texts of the documents of a text file."""
    for start, part in _split(piece.data):
        try:
            yield part.decode()
        except UnicodeDecodeError as error:
            text = part.decode("utf-8", "replace")
            if options.on_error == "stop":
                found = (
                    f"byte 0x{part[error.start]:02x} at offset"
                    f" {piece.at.offset + start + error.start:,}"
                )
                utf16 = part.startswith((b"\xff\xfe", b"\xfe\xff"))
                if b"\0" in part and not utf16:
                    raise InputError(
                        f"{piece.path} is not text: {found}, and it holds zero bytes; leave it out,"
                        " or skip it with --on_error skip"
                    ) from None
                convert = f"iconv -f {'UTF-16' if utf16 else 'LATIN1'} -t UTF-8"
                raise InputError(
                    f"{piece.path} is not UTF-8: {found}; convert it ({convert}), or use --on_error"
                    " replace or --on_error skip"
                ) from None
            if options.on_error == "skip":
                report.add("not UTF-8", 1, len(part), [text])
            else:
                yield text


def _record_texts(piece, options, report):
    """Texts of JSON lines or parquet rows."""
    rows, offset = piece.kind == "parquet", piece.at.offset
    for number, record in enumerate(
        piece.data if rows else piece.data.split(b"\n"), 1 + (offset if rows else piece.at.line)
    ):
        size = 0 if rows else len(record)
        if rows or record.strip():
            try:
                text = record_text(
                    record if rows else _parsed(record, offset, options), options.text_field
                )
                yield text if text.isascii() else _whole_characters(text, options)
            except InputError as error:
                problem = (
                    f"{piece.path}, {'row' if rows else 'line'} {number:,}: {error}; correct it, or"
                    " leave such records out with --on_error skip"
                )
                if options.on_error == "stop":
                    raise InputError(problem) from None
                report.add("unusable records", 1, size, [problem])
        offset += size + 1


def _parsed(line, offset, options):
    """The JSON value of a line that begins at byte `offset` of its file."""
    try:
        return json.loads(
            line.decode("utf-8", "replace" if options.on_error == "replace" else "strict")
        )
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8 at byte offset {offset + error.start:,} (--on_error replace takes it all"
            " the same)"
        ) from None
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"not valid JSON ({getattr(error, 'msg', error)}, column"
            f" {getattr(error, 'colno', '?')})"
        ) from None


def _whole_characters(text, options):
    """Text without halves of surrogate pairs, which JSON can hold and Unicode cannot."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        if options.on_error != "replace":
            raise InputError(
                "half a surrogate pair (\\ud83d or the like) is no Unicode (--on_error replace"
                " takes it all the same)"
            ) from None
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def record_text(record: dict, text_field: str | None) -> str:
    """The text of a JSON object or a parquet row. Raises InputError when it has none."""
    if not isinstance(record, dict):
        raise InputError(f"a {type(record).__name__}, not an object with a text")
    name = text_column(record, text_field)
    if name not in record:
        raise InputError(
            f"no field {name!r}, there is {', '.join(map(repr, record)) or 'nothing'}; name the"
            " text's field with --text_field"
        )
    value = record[name]
    if isinstance(value, list):
        try:
            return format_chat(value)
        except (TypeError, KeyError, AttributeError):
            raise InputError(f'{name!r} is not a list of {{"role": ..., "content": ...}}') from None
    if not isinstance(value, str):
        raise InputError(f"{name!r} is a {type(value).__name__}, not a text")
    return value


def clean(text: str, report: Report) -> str:
    """Text in NFC, without control characters and broken encodings, its lines ended by \\n alone."""
    for rule, apply in CLEANING.items():
        before, text = text, apply(text)
        if text != before:
            report.add(rule, 1, len(before.encode()) - len(text.encode()), [before])
    return text


def noise(text: str, options: Options) -> str:
    """The rule by which a document is noise, or nothing. Shares are of what is not white space, and
    the share of letters and digits is judged on up to 500 characters taken evenly.
    """
    if len(text) < options.min_chars:
        return f"shorter than {options.min_chars} characters"
    sample = "".join(text[:: max(1, len(text) // 500)].split())
    most = Counter(sample).most_common(1)
    if most and text.count(most[0][0]) > options.max_char_share * len("".join(text.split())):
        return f"one character is more than {options.max_char_share:.0%}"
    if not most or sum(map(str.isalnum, sample)) < options.min_letters * len(sample):
        return f"fewer than {options.min_letters:.0%} letters and digits"
    return ""
