"""Input files -> chunks of about 1 MB, in order and in bounded memory.

Reads .txt, .jsonl, .parquet, .csv, .tsv and .json, all but .parquet also compressed and in other
encodings than UTF-8. The ends of the chunks follow from the content alone.
"""

import csv
import dataclasses
import functools
import io
import itertools
import json
from collections.abc import Callable, Iterator

from formats.files import error_message
from preparing import InputError
from preparing.chunks import CHUNK_BYTES, Chunk, Options, Position, cut_documents, cut_lines
from preparing.sources import Source

LONGEST_LINE = 256 << 20  # bytes of a line of JSON
BOM = b"\xef\xbb\xbf"


def read_chunks(
    sources: list[Source], start: Position, options: Options, path_of: Callable
) -> Iterator[Chunk]:
    """The chunks of all sources from `start`, in order.

    path_of: gives the path of a source by its index. Raises InputError for what cannot be read.
    """
    before = sum(source.size for source in sources[: start.source])  # bytes on disk
    for index, source in enumerate(sources[start.source :], start.source):
        read = _read_text if source.kind in ("txt", "jsonl") else _read_rows
        at = start if index == start.source else Position(index)
        try:
            with open(path_of(index), "rb") as raw:
                for chunk in read(source, raw, at, options):
                    chunk.end.on_disk = before + (source.size if raw.closed else raw.tell())
                    yield chunk
        except OSError as error:
            raise InputError(f"{source.name} cannot be read: {error.strerror or error}") from None
        before += source.size


# -- lines and documents of bytes


def _read_text(source, raw, at, options):
    buffer = bytearray()
    for block in itertools.chain(_blocks(source, raw, at.offset, options), [b""]):
        buffer += block
        ended = not block
        while len(buffer) > CHUNK_BYTES or ended:
            if not at.offset and buffer.startswith(BOM):
                at = dataclasses.replace(at, offset=len(BOM))
                del buffer[: len(BOM)]
            size, whole = _cut(source, buffer, ended, at)
            if not size:
                break
            data = bytes(buffer[:size])
            del buffer[:size]
            lines = data.count(b"\n") if source.kind == "jsonl" else 0
            end = Position(at.source, at.offset + size, at.line + lines, inside=not whole)
            yield Chunk(source.name, source.kind, data, size, at, end)
            at = end


def _cut(source, buffer, ended, at):
    """The size of the next chunk, 0 to read on, and whether a document ends there."""
    if source.kind == "txt":
        return cut_documents(buffer, ended, at.inside)
    end = cut_lines(buffer, ended)
    if not end and len(buffer) > LONGEST_LINE:
        raise InputError(
            f"{source.name}, line {at.line + 1:,}: longer than {LONGEST_LINE >> 20} MB; JSON Lines"
            " has one object a line (jq -c . converts)"
        )
    return end, True


def _blocks(source, raw, start, options):
    """The content in UTF-8 from byte `start` on. Raises InputError for a damaged file."""
    stream = _opened(source, raw)
    try:
        if options.encoding:
            yield from _recoded(stream, options.encoding, start)
            return
        stream.seek(start)
        while block := stream.read1(CHUNK_BYTES):
            yield block
    except UnicodeError as error:
        raise InputError(f"{source.name} is not {options.encoding}: {error}") from None
    except Exception as error:  # whatever the package of the compression raises
        if not source.compression:
            raise
        problem = f"{source.name} is cut off or damaged ({error}); copy it again"
        raise InputError(problem) from None


def _recoded(stream, encoding, start):
    """The text of a stream in UTF-8, from byte `start` of that on.

    A byte that the encoding does not have stays as it is, which is broken in UTF-8 as well.
    """
    text = io.TextIOWrapper(stream, encoding, "surrogateescape", newline="")
    while block := text.read(CHUNK_BYTES):
        data = block.encode("utf-8", "surrogateescape")
        if data[start:]:
            yield data[start:]
        start = max(0, start - len(data))


def _opened(source, raw):
    """The stream of a file's decompressed bytes."""
    if not source.compression:
        return raw
    from fsspec.compression import compr

    return compr[source.compression](raw)


# -- rows of a table


def _read_rows(source, raw, at, options):
    rows = []
    size = 0
    end = at
    try:
        columns, values_of = _open_table(source, raw, options)
        column = options.text_column(columns)
        if column not in columns:
            raise InputError(
                f"{source.name} has no column {column!r}; it has {', '.join(columns)}: name one"
                " with --text_field"
            )
        for value in itertools.islice(values_of(column), at.offset, None):
            rows.append({column: value})
            size += len(str(value))
            end = Position(at.source, end.offset + 1)
            if size >= CHUNK_BYTES:
                yield Chunk(source.name, source.kind, rows, size, at, end)
                rows = []
                size = 0
                at = end
    except (InputError, OSError):
        raise
    except Exception as error:  # whatever the package of the format raises
        raise InputError(
            f"{source.name} cannot be read as {source.kind}: {error_message(error)}"
        ) from None
    if rows:
        yield Chunk(source.name, source.kind, rows, size, at, end)


def _open_table(source, raw, options):
    """The columns of a table, and a function of a column: its values."""
    if source.kind == "parquet":
        import pyarrow.parquet

        file = pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False)
        return file.schema_arrow.names, functools.partial(_parquet_values, file)
    text = io.TextIOWrapper(_opened(source, raw), options.encoding or "utf-8-sig", newline="")
    if source.kind == "json":
        rows = json.load(text)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise InputError(
                f"{source.name} is no array of objects; a file with one object a line is a .jsonl"
            )
        columns = list(dict.fromkeys(itertools.chain(*rows)))
    else:
        csv.field_size_limit(1 << 30)
        rows = csv.DictReader(text, delimiter="\t" if source.kind == "tsv" else ",")
        columns = rows.fieldnames or []
    return columns, lambda column: (row.get(column) for row in rows)


def _parquet_values(file, column):
    for batch in file.iter_batches(64, columns=[column], use_threads=False):
        yield from batch.column(0).to_pylist()
