"""Input files -> chunks of about 1 MB, in order and in bounded memory.

Reads .txt, .jsonl, .parquet, .csv, .tsv and .json, all but .parquet also compressed and in other
encodings than UTF-8.
Where the chunks end follows from the content alone; what the text says does not matter here.
"""

import codecs
import contextlib
import csv
import dataclasses
import functools
import io
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator

from formats.address import without_credentials
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
    for index in range(start.source, len(sources)):
        source = sources[index]
        read = _read_text if source.kind in ("txt", "jsonl") else _read_rows
        at = start if index == start.source else Position(index)
        try:
            with open(path_of(index), "rb") as raw:
                for chunk in read(source, raw, at, options):
                    chunk.end.on_disk = before + (source.size if raw.closed else raw.tell())
                    yield chunk
        except OSError as error:
            raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from None
        before += source.size


# -- lines and documents of bytes


def _read_text(source, raw, at, options):
    name = without_credentials(source.path)
    blocks = _blocks(source, raw, at.offset, options)
    buffer = bytearray()
    want = CHUNK_BYTES
    ended = False
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
        size, whole = _cut(source, buffer, ended, at)
        if not size:
            want = 2 * len(buffer)
            continue
        want = CHUNK_BYTES
        data = bytes(buffer[:size])
        del buffer[:size]
        lines = data.count(b"\n") if source.kind == "jsonl" else 0
        end = Position(at.source, at.offset + size, at.line + lines, inside=not whole)
        yield Chunk(name, source.kind, data, at, end)
        at = end


def _cut(source, buffer, ended, at):
    """The size of the next chunk, 0 to read on, and whether a document ends there."""
    if source.kind == "txt":
        return cut_documents(buffer, ended, at.inside)
    end = cut_lines(buffer, ended)
    if not end and len(buffer) > LONGEST_LINE:
        raise InputError(
            f"{source.path}, line {at.line + 1:,}: longer than {LONGEST_LINE >> 20} MB; JSON Lines"
            " has one object a line (jq -c . converts)"
        )
    return end, True


def _blocks(source, raw, start, options):
    """The content in UTF-8 from byte `start` on."""
    if not options.encoding:
        yield from _unpacked(source, raw, start, options)
        return
    try:
        yield from recoded(_unpacked(source, raw, 0, options), options.encoding, skip=start)
    except UnicodeError:
        raise InputError(
            f"{source.path} does not begin with the byte order mark of {options.encoding}; name the"
            f" order, as in --encoding {options.encoding}-le, or another --encoding"
        ) from None


def _unpacked(source, raw, start, options):
    """The content from byte `start` on. A damaged file raises InputError or ends early."""
    stream = _opened(source, raw)
    try:
        stream.seek(start)
        while block := stream.read1(CHUNK_BYTES):
            yield block
    except Exception as error:  # whatever the package of the compression raises
        if not source.compression:
            raise
        problem = f"{without_credentials(source.path)} is cut off or damaged ({error})"
        if options.on_error == "stop":
            raise InputError(
                f"{problem}: copy it again, or take what can be read of it with --on_error skip"
            ) from None
        print(f"{problem}: read up to there", file=sys.stderr)


def _opened(source, raw):
    """The stream of a file's decompressed bytes."""
    if not source.compression:
        return raw
    from fsspec.compression import compr

    return compr[source.compression](raw)


def recoded(blocks: Iterable[bytes], encoding: str, skip: int) -> Iterator[bytes]:
    """The text of `blocks` in UTF-8, from byte `skip` of that on.

    Bytes that are broken in the encoding become byte 0xff, which is broken in UTF-8 as well, so
    that both are treated alike.
    """
    for text in codecs.iterdecode(blocks, encoding, "prepare_data.broken"):
        data = text.encode("utf-8", "surrogateescape")
        if data[skip:]:
            yield data[skip:]
        skip = max(0, skip - len(data))


# A broken place becomes the surrogate that surrogateescape writes as byte 0xff.
codecs.register_error("prepare_data.broken", lambda error: ("\udcff", error.end))


# -- rows of a table


def _read_rows(source, raw, at, options):
    open_table = {"parquet": _open_parquet, "json": _open_json}.get(source.kind, _open_csv)
    name = without_credentials(source.path)
    documents = []
    size = 0
    row = at.offset
    try:
        names, values_of = open_table(source, raw, options)
        column = options.text_column(names)
        if column not in names:
            raise InputError(
                f"{source.path} has no column {column!r}; it has {', '.join(names)}: name one with"
                " --text_field"
            )
        for rows in _documents(values_of(column, row), source.heading):
            value = "".join(value or "" for value in rows) if source.heading else rows[0]
            documents.append({column: value})
            row += len(rows)
            size += len(str(value))
            if size >= CHUNK_BYTES:
                end = Position(at.source, row)
                yield Chunk(name, source.kind, documents, at, end)
                documents = []
                size = 0
                at = end
    except (InputError, OSError):
        raise
    except Exception as error:  # whatever the package of the format raises
        raise InputError(
            f"{source.path} cannot be read as {source.kind}: {error_message(error)}"
        ) from None
    if documents:
        yield Chunk(name, source.kind, documents, at, Position(at.source, row))


def _documents(values, heading):
    """The rows of each document: one or, with a heading, from one that matches to the next."""
    rows = []
    for value in values:
        if heading and isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if rows and (not heading or re.fullmatch(heading, value or "")):
            yield rows
            rows = []
        rows.append(value)
    if rows:
        yield rows


def _open_csv(source, raw, options):
    """The columns of a .csv or .tsv file, and a function that gives the values of one."""
    csv.field_size_limit(1 << 30)
    text = _text_stream(source, raw, options)
    reader = csv.DictReader(text, delimiter="\t" if source.kind == "tsv" else ",")

    def values(column, first):
        return (row[column] for row in itertools.islice(reader, first, None))

    return reader.fieldnames or [], values


def _open_json(source, raw, options):
    """The fields of a JSON array of objects, and a function that gives the values of one."""
    records = json.load(_text_stream(source, raw, options))
    if not isinstance(records, list) or not all(isinstance(r, dict) for r in records):
        raise InputError(
            f"{source.path} is no array of objects; a file with one object a line is a .jsonl"
        )
    names = dict.fromkeys(itertools.chain(*records))
    return list(names), lambda column, first: (record.get(column) for record in records[first:])


def _text_stream(source, raw, options):
    encoding = options.encoding or "utf-8-sig"
    return io.TextIOWrapper(_opened(source, raw), encoding, newline="")


def _open_parquet(source, raw, options):
    """The columns of a parquet file, and a function that gives the values of one."""
    import pyarrow.parquet

    file = pyarrow.parquet.ParquetFile(raw, buffer_size=CHUNK_BYTES, pre_buffer=False)
    return file.schema_arrow.names, functools.partial(_values, file)


def _values(file, name, first):
    """The values of a column from row number `first` on; of text that is not UTF-8, its bytes."""
    import pyarrow
    from pyarrow import types

    groups = list(range(file.num_row_groups))
    while groups and first >= file.metadata.row_group(groups[0]).num_rows:
        first -= file.metadata.row_group(groups.pop(0)).num_rows
    for batch in file.iter_batches(64, groups, [name], use_threads=False):
        column = batch.column(0).slice(first)
        first = max(0, first - len(batch))
        if not (types.is_nested(column.type) or types.is_primitive(column.type)):
            column = column.cast(pyarrow.large_binary())
        for value in column:
            value = value.as_py()
            if isinstance(value, bytes):
                with contextlib.suppress(UnicodeDecodeError):
                    value = value.decode()
            yield value
