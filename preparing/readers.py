"""Input files -> chunks of about 1 MB, in order and in bounded memory.

Reads .txt, .jsonl, .parquet, .csv, .tsv and .json; all but .parquet may be compressed and in
encodings other than UTF-8. Where a chunk ends depends on the content alone.
"""

import codecs
import dataclasses
import gzip
import io
import itertools
import re
import sys
from collections.abc import Callable, Iterator

from formats.files import error_message
from preparing import InputError
from preparing.chunks import CHUNK_BYTES, Chunk, Options, Position, cut_documents, cut_lines
from preparing.foreign import binary, foreign
from preparing.records import LONGEST_RECORD, csv_rows, json_kind, json_rows, parquet_rows
from preparing.sources import Source

BOM = codecs.BOM_UTF8
# Byte order marks and their encodings, which override --encoding; None: UTF-8.
MARKS = {
    codecs.BOM_UTF8: None,
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16's mark, which is a prefix of it
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# A text that is valid UTF-8, with this many continuation bytes, is not taken for another encoding.
SURELY_UTF8 = 10
# The first bytes of compressed files; a zstd file may begin with a skippable frame.
COMPRESSED = {"gzip": rb"\x1f\x8b", "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"}


def _escape(error):
    """An error handler for decoding that turns each broken byte into a lone surrogate.

    As surrogateescape, but 0xFF stands for the bytes of other encodings: several in a row could
    otherwise be valid UTF-8.
    """
    broken = error.object[error.start : error.end]
    if not error.encoding.startswith("utf-8"):
        broken = b"\xff" * len(broken)
    return broken.decode("ascii", "surrogateescape"), error.end


codecs.register_error("escape", _escape)


def read_chunks(
    sources: list[Source], start: Position, options: Options, path_of: Callable
) -> Iterator[Chunk]:
    """The chunks of all sources from `start` on, in order.

    path_of: maps the index of a source to its path on this disk. Raises InputError for a file that
    cannot be read.
    """
    before = sum(source.size for source in sources[: start.source])  # bytes on disk
    for index, source in enumerate(sources[start.source :], start.source):
        at = start if index == start.source else Position(index)
        try:
            with open(path_of(index), "rb") as raw:
                for chunk in _read(source, raw, at, options):
                    chunk.end.on_disk = before + (source.size if raw.closed else raw.tell())
                    yield chunk
        except OSError as error:
            raise InputError(f"{source.name} cannot be read: {error.strerror or error}") from None
        before += source.size


def _read(source, raw, at, options):
    """The chunks of one source."""
    kind, encoding = source.kind, options.encoding
    try:
        kind, encoding, problem = _look(source, raw, options)
        if problem:
            rows = [(source.name, InputError(f"it is {problem}"))]
        elif kind in ("txt", "jsonl"):
            blocks = _blocks(source, raw, encoding, at.offset)
            yield from _read_text(source, kind, encoding, blocks, at)
            return
        else:
            rows = _rows(source, kind, raw, encoding, options)
        yield from _read_rows(source, kind, encoding, rows, at)
    except InputError:
        raise
    except UnicodeError as error:
        raise InputError(f"{source.name} is not {encoding}: {error}") from None
    except Exception as error:  # whatever gzip, zstd, csv, json or pyarrow raises
        if source.compression:
            problem = f"{source.name} is cut off or damaged ({error}); copy it again"
            raise InputError(problem) from None
        if isinstance(error, OSError) or kind in ("txt", "jsonl"):
            raise
        problem = f"{source.name} cannot be read as {kind}: {error_message(error)}"
        raise InputError(problem) from None


def _look(source, raw, options):
    """Judge a file by its first bytes: its kind, its encoding, and what is wrong if it is not text.

    Rewinds `raw`.
    """
    if source.compression:
        packed = raw.read(4)
        raw.seek(0)
        if not re.match(COMPRESSED[source.compression], packed):
            ending = source.path.rpartition(".")[2]
            return source.kind, None, f"not compressed; let its name end without .{ending}"
    head = _opened(source, raw).read(CHUNK_BYTES)
    raw.seek(0)
    if source.kind == "parquet":
        return "parquet", None, "" if head.startswith(b"PAR1") else foreign("", head)
    marked = (name for mark, name in MARKS.items() if head.startswith(mark))
    named = None if options.encoding and _is_utf8(head) else options.encoding
    encoding = next(marked, named)
    text = codecs.getincrementaldecoder(encoding or "utf-8-sig")("replace").decode(head)
    return json_kind(source.kind, text), encoding, foreign("", head) or binary(head, text)


def _is_utf8(head):
    """True if the first bytes of a file are UTF-8, and have too many letters for that by chance.

    Most other encodings would read them without an error, as other letters.
    """
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return len(head) - len(text) >= SURELY_UTF8


# -- lines and documents of bytes


def _read_text(source, kind, encoding, blocks, at):
    buffer = bytearray()
    for block in itertools.chain(blocks, [b""]):
        buffer += block
        ended = not block
        while len(buffer) > CHUNK_BYTES or ended:
            if not at.offset and buffer.startswith(BOM):
                at = dataclasses.replace(at, offset=len(BOM))
                del buffer[: len(BOM)]
            size, whole = _cut(source, kind, buffer, ended, at)
            if not size:
                break
            data = bytes(buffer[:size])
            del buffer[:size]
            lines = data.count(b"\n") if kind == "jsonl" else 0
            end = Position(at.source, at.offset + size, at.line + lines, inside=not whole)
            yield Chunk(source.name, kind, data, size, at, end, encoding)
            at = end


def _cut(source, kind, buffer, ended, at):
    """The size of the next chunk, 0 to read on, and whether a document ends there."""
    if kind == "txt":
        return cut_documents(buffer, ended, at.inside)
    end = cut_lines(buffer, ended)
    if not end and len(buffer) > LONGEST_RECORD:
        raise InputError(
            f"{source.name}, line {at.line + 1:,}: longer than {LONGEST_RECORD >> 20} MB; JSON"
            " Lines has one object a line (jq -c . converts)"
        )
    return end, True


def _blocks(source, raw, encoding, start):
    """The content in UTF-8, in blocks, from byte `start` of it on.

    A byte that is invalid in the encoding becomes 0xFF, which is invalid in UTF-8.
    """
    stream = _opened(source, raw)
    if not encoding:
        if start:
            stream.seek(start)
        while block := stream.read1(CHUNK_BYTES):
            yield block
        return
    with io.TextIOWrapper(stream, encoding, "escape", newline="") as text:
        while block := text.read(CHUNK_BYTES):
            data = block.encode("utf-8", "surrogateescape")
            if data[start:]:
                yield data[start:]
            start = max(0, start - len(data))


def _opened(source, raw):
    """A stream of a file's decompressed bytes."""
    if source.compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if source.compression == "zstd":
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        longest = zstd.DecompressionParameter.window_log_max
        return zstd.ZstdFile(raw, options={longest: longest.bounds()[1]})  # reads zstd --long
    return raw


# -- rows of a table


def _rows(source, kind, raw, encoding, options):
    """The rows of a table, each with its place."""
    if kind == "parquet":
        return parquet_rows(source.name, raw, options)
    stream = _opened(source, raw)
    text = io.TextIOWrapper(stream, encoding or "utf-8-sig", "escape", newline="")
    if kind == "json":
        return json_rows(source.name, text, options)
    return csv_rows(source.name, kind, text, options)


def _read_rows(source, kind, encoding, rows, at):
    part = []
    size = 0
    end = at
    for place, row in itertools.islice(rows, at.offset, None):
        part.append((place, row))
        size += len(str(row))
        end = Position(at.source, end.offset + 1)
        if size >= CHUNK_BYTES:
            yield Chunk(source.name, kind, part, size, at, end, encoding)
            part = []
            size = 0
            at = end
    if part:
        yield Chunk(source.name, kind, part, size, at, end, encoding)
