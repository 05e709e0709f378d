"""Input files -> chunks of about 1 MB, in order and in bounded memory.

Reads .txt, .jsonl and .parquet, the first two also as .gz or .zst and in other encodings than
UTF-8. Where the chunks end follows from the content alone; what the text says does not matter
here.
"""

import codecs
import dataclasses
import gzip
import itertools
import re
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator

from formats.address import without_credentials
from formats.files import in_words
from preparing import InputError
from preparing.arguments import Options
from preparing.chunks import CHUNK, Chunk, Position, cut_documents, cut_lines
from preparing.sources import Source

LONGEST = 256 * CHUNK
BOM = b"\xef\xbb\xbf"


def read_chunks(
    sources: list[Source], start: Position, options: Options, path_of: Callable, shared=True
) -> Iterator[Chunk]:
    """The chunks of all sources from `start`, in order.

    path_of: gives the path of a source by its index. shared: whether the workers see the same
    files. Raises InputError for what cannot be read.
    """
    before = sum(source.size for source in sources[: start.source])  # bytes on disk
    for index in range(start.source, len(sources)):
        source = sources[index]
        read = _read_rows if source.kind == "parquet" else _read_text
        at = start if index == start.source else Position(index)
        try:
            with open(path_of(index), "rb") as raw:
                for chunk in read(source, raw, at, options):
                    chunk.in_place &= shared
                    chunk.end.on_disk = before + (source.size if raw.closed else raw.tell())
                    yield chunk
        except OSError as error:
            raise InputError(f"{source.path} cannot be read: {error.strerror or error}") from None
        before += source.size


def _read_text(source, raw, at, options):
    in_place = not (source.compression or source.is_remote or options.encoding)
    name = without_credentials(source.path)
    blocks = _blocks(source, raw, at.offset, options)
    buffer = bytearray()
    want = CHUNK
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
        want = CHUNK
        data = bytes(buffer[:size])
        del buffer[:size]
        lines = data.count(b"\n") if source.kind == "jsonl" else 0
        end = Position(at.source, at.offset + size, at.line + lines, inside=not whole)
        yield Chunk(name, source.kind, data, at, end, in_place)
        at = end


def _cut(source, buffer, ended, at):
    """The size of the next chunk, 0 to read on, and whether a document ends there."""
    if source.kind == "txt":
        return cut_documents(buffer, ended, at.inside)
    end = cut_lines(buffer, ended)
    if not end and len(buffer) > LONGEST:
        raise InputError(
            f"{source.path}, line {at.line + 1:,}: longer than {LONGEST >> 20} MB; JSON Lines"
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
    stream = raw
    errors = ()
    if source.compression == "gz":
        stream = gzip.GzipFile(fileobj=raw)
        errors = (EOFError, zlib.error, gzip.BadGzipFile)
    elif source.compression == "zst":
        import pyzstd

        stream = pyzstd.ZstdFile(raw)
        errors = (EOFError, pyzstd.ZstdError)
    try:
        stream.seek(start)
        while block := stream.read1(CHUNK):
            yield block
    except errors as error:
        problem = f"{without_credentials(source.path)} is cut off or damaged ({error})"
        if options.on_error == "stop":
            raise InputError(
                f"{problem}: copy it again, or take what can be read of it with --on_error skip"
            ) from None
        print(f"{problem}: read up to there", file=sys.stderr)


def recoded(blocks: Iterable[bytes], encoding: str, skip: int) -> Iterator[bytes]:
    """The text of `blocks` in UTF-8, from byte `skip` of that on.

    Bytes that are broken in the encoding become byte 0xff, which is broken in UTF-8 as well, so
    that both are treated alike.
    """
    decoder = codecs.getincrementaldecoder(encoding)("prepare_data.broken")
    for block in itertools.chain(blocks, [b""]):
        text = decoder.decode(block, final=not block)
        data = text.encode("utf-8", "surrogateescape")
        if data[skip:]:
            yield data[skip:]
        skip = max(0, skip - len(data))


def _broken(error):
    """An error handler for codecs: a broken place becomes byte 0xff."""
    return "\udcff", error.end


codecs.register_error("prepare_data.broken", _broken)


def _read_rows(source, raw, at, options):
    """Chunks of a parquet file: documents of about CHUNK bytes."""
    import pyarrow
    import pyarrow.parquet as parquet

    name = without_credentials(source.path)
    documents = []
    size = 0
    row = at.offset
    try:
        file = parquet.ParquetFile(raw, buffer_size=CHUNK, pre_buffer=False)
        names = file.schema_arrow.names
        column = options.text_column(names)
        if column not in names:
            raise InputError(
                f"{source.path} has no column {column!r}; it has {', '.join(names)}: name one with"
                " --text_field"
            )
        for rows in _documents(_values(file, column, row), source.heading):
            value = "".join(value or "" for value in rows) if source.heading else rows[0]
            length = len(str(value))
            if length > LONGEST:
                raise InputError(
                    f"{source.path}, row {row + 1:,}: longer than {LONGEST >> 20} MB; make several"
                    " rows of it"
                )
            documents.append({column: value})
            row += len(rows)
            size += length
            if size >= CHUNK:
                end = Position(at.source, row)
                yield Chunk(name, source.kind, documents, at, end)
                documents = []
                size = 0
                at = end
    except (pyarrow.ArrowException, EOFError) as error:
        raise InputError(f"{source.path} cannot be read as parquet: {in_words(error)}") from None
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


def _values(file, name, first):
    """The values of a column from row number `first` on.

    Of text that is not UTF-8, its bytes; in a list, the UnicodeDecodeError.
    """
    import pyarrow

    groups = list(range(file.metadata.num_row_groups))
    while groups and first >= file.metadata.row_group(groups[0]).num_rows:
        first -= file.metadata.row_group(groups.pop(0)).num_rows
    # Each value may be all that a group holds of the column, as one of a dictionary.
    largest = max((_column_bytes(file.metadata.row_group(n), name) for n in groups), default=0)
    at_a_time = max(1, min(64, LONGEST // max(1, largest)))
    for batch in file.iter_batches(at_a_time, groups, [name], use_threads=False):
        column = batch.column(0).slice(first)
        for n, value in enumerate(column):
            try:
                value = value.as_py()
            except UnicodeDecodeError as error:
                if pyarrow.types.is_nested(column.type):
                    value = error
                else:
                    value = column[n : n + 1].cast(pyarrow.binary())[0].as_py()
            yield value
        first = max(0, first - len(batch))


def _column_bytes(group, name):
    """Bytes of a column in a row group before compression; of a nested one, of all its leaves."""
    leaves = map(group.column, range(group.num_columns))
    return sum(
        leaf.total_uncompressed_size
        for leaf in leaves
        if f"{leaf.path_in_schema}.".startswith(f"{name}.")
    )
