"""Text files as people have them -> pieces of about 1 MB, and pieces -> the texts of their documents.

Finds the files; reads .txt, .jsonl and .parquet, plain, .gz or .zst; cuts them where no token can cross; cleans documents.
The main process reads pieces in order, in bounded memory; worker processes turn them into texts. Knows no token ids.
"""
import dataclasses
import glob
import gzip
import importlib.util
import io
import json
import os
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizer_bpe import EOT, safe_cut

PIECE = 1 << 20  # bytes that a worker takes at a time; encoding much more in one call is slower and takes far more memory
NO_CUT = 16 * PIECE  # text without any place to cut for so long is cut all the same
AHEAD = 8  # bytes after a place to cut that are looked at
LONGEST_LINE = 256 * PIECE
MARK = EOT.encode()
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]")


class InputError(ValueError):
    """Input that cannot be used, in a sentence for the user."""


@dataclass
class Source:
    """One input file. kind: txt, jsonl or parquet; compression: "", gz or zst; size in bytes on disk; modified in ns since 1970."""

    path: str
    kind: str
    compression: str
    size: int
    modified: int


@dataclass
class Position:
    """A place in the input: the source's index, the byte in its decompressed content (the row of a parquet file), the line
    before it, whether a document goes on across it, and the bytes on disk of all input before it."""

    source: int = 0
    offset: int = 0
    line: int = 0
    inside: bool = False
    on_disk: int = 0


@dataclass
class Piece:
    """Whole documents, or a part of a single long one. data: bytes, or the rows of a parquet file. begins, ends: whether the first
    document begins here and the last one ends here. at, after: where the piece begins, and where the next one does."""

    path: str
    kind: str
    data: bytes | list
    at: Position
    after: Position
    begins: bool = True
    ends: bool = True

    def light(self) -> "Piece":
        """Without its data, where a worker process can read that from the file itself: sending it costs a tenth of encoding it."""
        if self.kind == "parquet" or kind_of(self.path)[1]:
            return self
        return dataclasses.replace(self, data=b"")

    def loaded(self) -> "Piece":
        """With its data."""
        if self.data:
            return self
        with open(self.path, "rb") as file:
            file.seek(self.at.offset)
            return dataclasses.replace(self, data=file.read(self.after.offset - self.at.offset))

    @property
    def size(self) -> int:
        return len(self.data) if isinstance(self.data, bytes) else sum(len(str(value)) for row in self.data for value in row.values())


@dataclass
class Options:
    """How records become texts. The rules of cleaning hold for documents after their characters are cleaned."""

    text_field: str | None = None  # None: "text", else "messages"
    on_error: str = "stop"  # stop, skip the document, or replace broken bytes by U+FFFD
    clean: bool = False
    min_chars: int = 20  # shorter documents are dropped
    max_char_share: float = 0.5  # dropped when one character makes up more of what is not white space
    min_letters: float = 0.4  # dropped when letters and digits make up less of it


# -- finding files ----------------------------------------------------------------------------------------------------------


def kind_of(path: str) -> tuple[str, str]:
    """Kind and compression by the ending of a file's name; what is not known counts as plain text."""
    name = path.lower()
    compression = next((c for c in ("gz", "zst") if name.endswith("." + c)), "")
    name = name.removesuffix("." + compression)
    return ("jsonl" if name.endswith((".jsonl", ".ndjson")) else "parquet" if name.endswith(".parquet") else "txt"), compression


def find_sources(inputs: list[str]) -> list[Source]:
    """The files of INPUT arguments (files, folders, globs), each once, folders in order of their names. Raises InputError."""
    paths = list(dict.fromkeys(path for given in inputs for path in _expand(given)))
    sources = []
    for path in paths:
        stat = os.stat(path)
        if not stat.st_size and path in inputs:
            raise InputError(f"{path} is empty; leave it out or fill it")
        if not os.access(path, os.R_OK):
            raise InputError(f"no permission to read {path}; chmod u+r {path}, or leave it out")
        sources.append(Source(path, *kind_of(path), stat.st_size, stat.st_mtime_ns))
    sources = [s for s in sources if s.size]
    if not sources:
        raise InputError(f"no text in {', '.join(inputs)}: the files are empty")
    for package, user in (("zstandard", next((s for s in sources if s.compression == "zst"), None)), ("pyarrow", next((s for s in sources if s.kind == "parquet"), None))):
        if user and not importlib.util.find_spec(package):
            raise InputError(f"reading {user.path} needs the package {package}; run\n  python -m pip install {package}")
    return sources


def _expand(given):
    """The paths that one INPUT stands for."""
    path = Path(given)
    if path.is_dir():
        files = sorted(p.as_posix() for p in _walk(path))
        known = [f for f in files if re.search(r"\.(txt|jsonl|ndjson|parquet)(\.gz|\.zst)?$", f.lower())]
        if not known:
            endings = ", ".join(f"{n} {e or 'without ending'}" for e, n in Counter(Path(f).suffix for f in files).most_common(5)) or "nothing"
            raise InputError(f"folder {given} holds no .txt, .jsonl or .parquet file (also .gz, .zst); there is {endings}.\nFor other endings give a glob in quotes: '{path.as_posix()}/**/*.md'")
        return known
    if path.exists():
        return [given]
    found = sorted(p for p in glob.glob(given, recursive=True) if Path(p).is_file())
    if not found:
        raise InputError(f"no file matches {given}" if glob.has_magic(given) else f"no such file or folder: {given}")
    return [Path(p).as_posix() for p in found]


def _walk(folder):
    def stop(error):
        raise InputError(f"folder {error.filename} cannot be read: {error.strerror}")

    for at, _, names in os.walk(folder, onerror=stop):
        yield from (Path(at, name) for name in names)


# -- reading pieces ---------------------------------------------------------------------------------------------------------


def read_pieces(sources: list[Source], start: Position, options: Options) -> Iterator[Piece]:
    """The pieces of all sources from `start`, in order. The cuts follow from the content alone. Raises InputError."""
    before = sum(s.size for s in sources[: start.source])
    for index in range(start.source, len(sources)):
        source = sources[index]
        at = start if index == start.source else Position(index, on_disk=before)
        try:
            with open(source.path, "rb") as raw:
                read = _read_rows if source.kind == "parquet" else _read_text
                for piece in read(source, raw, at, options):
                    piece.after.on_disk = before + min(raw.tell(), source.size) if not raw.closed else before + source.size
                    yield piece
        except OSError as error:
            raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from None
        before += source.size


def _read_text(source, raw, at, options):
    """Pieces of a .txt or .jsonl file."""
    stream = _decompressed(source, raw, options)
    if not source.compression:
        raw.seek(at.offset)
    for start in range(0, at.offset if source.compression else 0, PIECE):
        stream.read(min(PIECE, at.offset - start))
    cut = _cut_lines if source.kind == "jsonl" else _cut_documents
    buffer, ended, want = b"", False, PIECE
    if at.offset == 0:
        buffer = stream.read(PIECE)
        mark = 3 if buffer.startswith(b"\xef\xbb\xbf") else 0
        buffer, at = buffer[mark:], Position(at.source, mark, on_disk=at.on_disk)
    while True:
        while not ended and len(buffer) <= want:
            data = stream.read(PIECE)
            buffer, ended = buffer + data, not data
        if not buffer:
            return
        end, whole = cut(buffer, ended, at, source)
        if not end:  # no place to cut yet
            want = 2 * len(buffer)
            continue
        data, buffer, want = buffer[:end], buffer[end:], PIECE
        after = Position(at.source, at.offset + end, at.line + (data.count(b"\n") if source.kind == "jsonl" else 0), not whole)
        yield Piece(source.path, source.kind, data, at, after, not at.inside, whole)
        at = after


def _decompressed(source, raw, options):
    """A stream of the content; what ends or breaks off in the middle raises InputError, or counts as its end with on_error skip or replace."""
    stream = {"": lambda: raw, "gz": lambda: gzip.GzipFile(fileobj=raw), "zst": lambda: io.BufferedReader(_Zstandard(raw), PIECE)}[source.compression]()
    return _Guarded(stream, source, options.on_error) if source.compression else stream


class _Guarded:
    def __init__(self, stream, source, on_error):
        self.stream, self.source, self.on_error, self.broken = stream, source, on_error, False

    def read(self, size):
        if self.broken:
            return b""
        data = []
        try:
            while size > 0 and (part := self.stream.read1(size)):
                data.append(part)
                size -= len(part)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            if self.on_error == "stop":
                raise InputError(f"{self.source.path} is cut off or damaged ({error}): copy it again, or take what can be read of it with --on_error skip") from None
            self.broken = True
        return b"".join(data)


class _Zstandard(io.RawIOBase):
    """Decompressed content of a .zst file of one or more frames; unlike zstandard's own reader it notices a file that is cut off."""

    def __init__(self, raw):
        import zstandard

        self.raw, self.error, self.new = raw, zstandard.ZstdError, zstandard.ZstdDecompressor().decompressobj
        self.frame, self.fed, self.ready = self.new(), b"", b""

    def readable(self):
        return True

    def readinto(self, target):
        while not self.ready:
            if self.frame.eof:
                self.fed, self.frame = self.frame.unused_data, self.new()
            data = self.fed or self.raw.read(1 << 17)
            if not data:
                if self.started:
                    raise EOFError("the file ends inside a frame")
                return 0
            self.fed = b""
            try:
                self.ready = self.frame.decompress(data)
            except self.error as error:
                raise EOFError(str(error)) from None
            self.started = not self.frame.eof
        count = min(len(target), len(self.ready))
        target[:count], self.ready = self.ready[:count], self.ready[count:]
        return count

    started = False  # inside a frame


def _cut_lines(buffer, ended, at, source):
    """Where whole lines of at most PIECE bytes end; more for a longer line. 0: read on."""
    if ended and len(buffer) <= PIECE:
        return len(buffer), True
    end = buffer.rfind(b"\n", 0, PIECE) + 1 or buffer.find(b"\n", PIECE) + 1 or (len(buffer) if ended else 0)
    if not end and len(buffer) > LONGEST_LINE:
        raise InputError(f"{source.path}, line {at.line + 1}: longer than {LONGEST_LINE >> 20} MB; JSON Lines has one object a line (jq -c . converts)")
    return end, True


def _cut_documents(buffer, ended, at, source):
    """Where whole documents of at most PIECE bytes end, or else a part of the first one; and whether it ends there. 0: read on."""
    if ended and len(buffer) <= PIECE and not at.inside:
        return len(buffer), True
    for limit in range(PIECE, NO_CUT + 1, PIECE):
        separator = next(_separators(buffer, limit, ended, last=limit == PIECE and not at.inside), None)
        if separator:
            return separator[1], True
        if len(buffer) < limit + AHEAD:
            return (len(buffer), True) if ended else (0, False)
        for back in (1 << 14, PIECE):  # nearly always the first does
            tail = buffer[max(0, limit - back) : limit + AHEAD]
            tail = tail[next(n for n in range(4) if tail[n] & 0xC0 != 0x80 or n == 3) :]
            text = tail.decode("utf-8", "surrogateescape")  # a broken byte stays one character, and encodes back
            cut = safe_cut(text, len(tail[:-AHEAD].decode("utf-8", "surrogateescape")))
            if cut:
                return limit + AHEAD - len(text[cut:].encode("utf-8", "surrogateescape")), False
    return next(NO_CUT - n for n in range(4) if buffer[NO_CUT - n] & 0xC0 != 0x80 or n == 3), False


def _separators(data, limit, ended, last=False):
    """Start and end of the end-of-text lines that end within `limit`, in order or, with `last`, backwards.

    By find(), because a regular expression for it took 28 ms a piece, as long as encoding."""
    at = data.rfind(MARK, 0, limit) if last else data.find(MARK, 0, limit)
    while at >= 0:
        end = data.find(b"\n", at, min(at + 64, limit)) + 1 or (len(data) if ended and len(data) <= min(at + 64, limit) else 0)
        if end and (at == 0 or data[at - 1] == 10) and not data[at + len(MARK) : end].strip():
            yield at, end
        at = data.rfind(MARK, 0, at) if last else data.find(MARK, at + 1, limit)


def _split(data):
    """The documents of whole pieces of a text file."""
    start = 0
    for at, end in _separators(data, len(data), True):
        yield data[start:at]
        start = end
    yield data[start:]


def _read_rows(source, raw, at, options):
    """Pieces of a parquet file: rows whose texts take about PIECE bytes."""
    import pyarrow
    import pyarrow.parquet as parquet

    try:
        file = parquet.ParquetFile(raw, buffer_size=PIECE, pre_buffer=False)
        names = file.schema_arrow.names
        column = options.text_field or next((n for n in ("text", "messages") if n in names), "text")
        if column not in names:
            raise InputError(f"{source.path} has no column {column!r}; it has {', '.join(names)}: name one with --text_field")
        rows, size, row = [], 0, 0
        for batch in file.iter_batches(batch_size=64, columns=[column], use_threads=False):
            for value in batch.column(0).to_pylist() if row + len(batch) > at.offset else [None] * len(batch):
                row += 1
                if row <= at.offset:
                    continue
                rows.append({column: value})
                size += len(value) if isinstance(value, str) else len(str(value))
                if size >= PIECE:
                    after = Position(at.source, row)
                    yield Piece(source.path, source.kind, rows, at, after)
                    rows, size, at = [], 0, after
    except (pyarrow.ArrowException, EOFError) as error:
        raise InputError(f"{source.path} cannot be read as parquet: {str(error).splitlines()[0]}") from None
    if rows:
        yield Piece(source.path, source.kind, rows, at, Position(at.source, row))


def slices(piece: Piece, size: int) -> Iterator[Piece]:
    """A piece in parts of about `size` bytes, cut at line ends or, where there are none, between characters: for samples."""
    if isinstance(piece.data, list):
        count = max(1, len(piece.data) * size // PIECE)
        parts = (piece.data[n : n + count] for n in range(0, len(piece.data), count))
    else:
        parts = _slice_bytes(piece.data, size)
    offset, line = piece.at.offset, piece.at.line
    for part in parts:
        yield Piece(piece.path, piece.kind, part, Position(piece.at.source, offset, line), piece.after, False, False)
        offset += len(part)
        line += part.count(b"\n") if isinstance(part, bytes) else 0


def _slice_bytes(data, size):
    start = 0
    while start < len(data):
        end = min(start + size, len(data))
        if end < len(data):
            line = data.rfind(b"\n", start, end) + 1 or data.find(b"\n", end) + 1
            end = line or next((n for n in range(end, len(data)) if data[n] & 0xC0 != 0x80), len(data))
        yield data[start:end]
        start = end


# -- documents --------------------------------------------------------------------------------------------------------------


@dataclass
class Report:
    """What was left out: {rule: [documents, bytes, [up to three examples]]}."""

    rules: dict[str, list] = field(default_factory=dict)
    noise: str = ""  # the rule by which the last document was dropped; if it goes on in further pieces, they go with it

    def add(self, rule: str, size: int, example: str, documents: int = 1) -> None:
        entry = self.rules.setdefault(rule, [0, 0, []])
        entry[0] += documents
        entry[1] += size
        if documents and len(entry[2]) < 3:
            entry[2].append(example[:100])

    def merge(self, other: "Report") -> None:
        for rule, (documents, size, examples) in other.rules.items():
            entry = self.rules.setdefault(rule, [0, 0, []])
            entry[0] += documents
            entry[1] += size
            entry[2] = (entry[2] + examples)[:3]


def texts_of(piece: Piece, options: Options) -> tuple[list[str], Report]:
    """The documents of a piece, valid Unicode, and what was left out. Raises InputError for what on_error = stop does not let pass."""
    report, texts = Report(), []
    for text in (_plain_texts if piece.kind == "txt" else _record_texts)(piece, options, report):
        text = _valid(text, piece, options, report)
        if text and options.clean:
            text = clean(text, report)
            rule = noise(text, options) if piece.begins else None
            if rule:
                report.noise = rule
                report.add(rule, len(text.encode()), text)
                continue
        if text and (text.strip() or not (piece.begins and piece.ends)):
            texts.append(text)
    return texts, report


def _plain_texts(piece, options, report):
    for part in _split(piece.data):
        try:
            yield part.decode()
        except UnicodeDecodeError as error:
            if options.on_error == "stop":
                at = piece.at.offset + _decode_error(piece.data)
                found = f"byte 0x{part[error.start]:02x} at offset {at:,}"
                raise InputError(f"{piece.path} is not UTF-8: {found}; convert it (iconv -f LATIN1 -t UTF-8), or use --on_error replace or --on_error skip") from None
            yield from _broken(part, options, report)


def _decode_error(data):
    try:
        data.decode()
    except UnicodeDecodeError as error:
        return error.start


def _broken(data, options, report):
    """The text of bytes that are no UTF-8, unless it is skipped."""
    text = data.decode("utf-8", "replace")
    if options.on_error == "skip":
        report.add("not UTF-8", len(data), text)
    else:
        yield text


def _record_texts(piece, options, report):
    """Texts of JSON lines or parquet rows."""
    lines = piece.data if isinstance(piece.data, list) else piece.data.split(b"\n")
    errors = "replace" if options.on_error == "replace" else "strict"
    for number, line in enumerate(lines, piece.at.line + 1 if piece.kind == "jsonl" else piece.at.offset + 1):
        if isinstance(line, bytes) and not line.strip():
            continue
        where = f"{piece.path}, {'line' if piece.kind == 'jsonl' else 'row'} {number:,}"
        try:
            try:
                record = json.loads(line.decode("utf-8", errors)) if isinstance(line, bytes) else line
            except UnicodeDecodeError as error:
                offset = piece.at.offset + sum(len(x) + 1 for x in lines[: number - piece.at.line - 1]) + error.start
                raise InputError(f"{where}: not UTF-8 at byte offset {offset:,}; convert the file, or use --on_error replace or --on_error skip") from None
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: not valid JSON ({getattr(error, 'msg', error)}, column {getattr(error, 'colno', '?')}); correct it, or leave such lines out with --on_error skip") from None
            yield record_text(record, options.text_field, where)
        except InputError as error:
            if options.on_error == "stop":
                raise
            report.add("unusable records", len(line) if isinstance(line, bytes) else 0, str(error))


def record_text(record: dict, text_field: str | None, where: str) -> str:
    """The text of a JSON object or a parquet row. Raises InputError, beginning with `where`, when it has none."""
    if not isinstance(record, dict):
        raise InputError(f"{where}: a {type(record).__name__}, not an object with a text; leave such lines out with --on_error skip")
    name = text_field or next((n for n in ("text", "messages") if n in record), "text")
    if name not in record:
        raise InputError(f"{where}: no field {name!r}, there is {', '.join(map(repr, record)) or 'nothing'}; name the text's field with --text_field, or leave such lines out with --on_error skip")
    value = record[name]
    if isinstance(value, list):
        try:
            return format_chat(value)
        except (TypeError, KeyError, AttributeError):
            raise InputError(f"{where}: {name!r} is not a list of {{\"role\": ..., \"content\": ...}}; leave such lines out with --on_error skip") from None
    if not isinstance(value, str):
        raise InputError(f"{where}: {name!r} is a {type(value).__name__}, not a text; leave such lines out with --on_error skip")
    return value


def format_chat(messages: list[dict]) -> str:
    """A conversation as text: `User: ...`, a blank line, `Assistant: ...`, a blank line, and so on.

    messages: [{"role", "content"}]. To let a model answer, prompt it with format_chat(messages) + "Assistant:".
    """
    return "".join(f"{message['role'].capitalize()}: {message['content'].strip()}\n\n" for message in messages)


def _valid(text, piece, options, report):
    """Text without halves of surrogate pairs, which JSON can hold and Unicode cannot; None when it is skipped."""
    if text.isascii():
        return text
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        if options.on_error == "stop":
            raise InputError(f"{piece.path}, near line {piece.at.line + 1}: half a surrogate pair (\\ud83d or the like) is no Unicode; use --on_error replace or --on_error skip") from None
        return next(_broken(text.encode("utf-8", "surrogatepass"), options, report), None)


def clean(text: str, report: Report) -> str:
    """Text in NFC, without control characters and broken encodings, its lines ended by \\n alone."""
    before = text
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if not text.isascii():
        if "\ufffd" in text:
            text = _removed("broken encoding", text, text.replace("\ufffd", ""), report)
        if not unicodedata.is_normalized("NFC", text):
            text = _removed("not in NFC", text, unicodedata.normalize("NFC", text), report)
    if CONTROL.search(text):
        text = _removed("control characters", text, CONTROL.sub("", text), report)
    if "\r" in before:
        report.add("line ends other than \\n", before.count("\r\n"), before)
    return text


def _removed(rule, before, after, report):
    report.add(rule, len(before.encode()) - len(after.encode()), before)
    return after


def noise(text: str, options: Options) -> str | None:
    """The rule by which a document is noise, or None. Shares are of what is not white space, and the share of letters and digits
    is judged on up to 500 characters taken evenly."""
    if len(text) < options.min_chars:
        return f"shorter than {options.min_chars} characters"
    sample = "".join(text[:: max(1, len(text) // 500)].split())
    if not sample:
        return f"fewer than {options.min_letters:.0%} letters and digits"
    common, _ = Counter(sample).most_common(1)[0]
    if text.count(common) > options.max_char_share * len("".join(text.split())):
        return f"one character is more than {options.max_char_share:.0%}"
    if sum(map(str.isalnum, sample)) < options.min_letters * len(sample):
        return f"fewer than {options.min_letters:.0%} letters and digits"
    return None
