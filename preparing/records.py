"""What a document is: pieces of bytes or rows -> the texts of their documents.

In a text file, what stands between lines of end-of-text; in JSON lines and parquet, a record's text
or its conversation. Independent of where pieces come from and of token ids.
"""

import json
from collections.abc import Iterator

from formats.conversation import format_chat
from preparing.cleaning import CleaningReport, clean, noise
from preparing.cutting import split_documents
from preparing.errors import InputError
from preparing.options import Options
from preparing.pieces import Piece

UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


def texts_of(piece: Piece, options: Options) -> tuple[list[str], CleaningReport]:
    """The documents of a piece, as valid Unicode, and what was left out.

    Raises InputError for what on_error = stop does not let pass.
    """
    report = CleaningReport()
    whole = piece.begins and piece.ends
    texts = []
    for text in _raw_texts(piece, options, report):
        if text and options.clean:
            text = clean(text, report)
            rule = noise(text, options) if piece.begins else ""
            if rule:
                report.noise = rule
                report.add(rule, 1, len(text.encode()), [text])
                continue
        # White space alone is no document, but it may be a part of one.
        if text.strip() or (text and not whole):
            texts.append(text)
    return texts, report


def _raw_texts(piece, options, report) -> Iterator[str]:
    """The texts of a piece before they are cleaned."""
    if piece.kind == "txt":
        return _plain_texts(piece, options, report)
    if piece.kind == "jsonl":
        return _line_texts(piece, options, report)
    return _row_texts(piece, options, report)


def _plain_texts(piece, options, report):
    """The documents of a text file."""
    for start, part in split_documents(piece.data):
        try:
            yield part.decode()
        except UnicodeDecodeError as error:
            if options.on_error == "stop":
                raise _not_utf8(piece, part, start, error.start) from None
            text = part.decode("utf-8", "replace")
            if options.on_error == "skip":
                report.add("not UTF-8", 1, len(part), [text])
            else:
                yield text


def _not_utf8(piece, part, start, broken):
    """The InputError for byte `broken` of a document that begins at byte `start` of its piece."""
    offset = piece.at.offset + start + broken
    found = f"byte 0x{part[broken]:02x} at offset {offset:,}"
    utf16 = part.startswith(UTF16_MARKS)
    if b"\0" in part and not utf16:
        return InputError(
            f"{piece.path} is not text: {found}, and it holds zero bytes; leave it out, or skip it"
            " with --on_error skip"
        )
    encoding = "UTF-16" if utf16 else "LATIN1"
    return InputError(
        f"{piece.path} is not UTF-8: {found}; convert it (iconv -f {encoding} -t UTF-8), or use"
        " --on_error replace or --on_error skip"
    )


def _line_texts(piece, options, report):
    """The texts of JSON lines."""
    offset = piece.at.offset
    for number, line in enumerate(piece.data.split(b"\n"), piece.at.line + 1):
        if line.strip():
            try:
                text = _usable(_parsed(line, offset, options), options)
            except InputError as error:
                problem = f"{piece.path}, line {number:,}: {error}"
                _leave_out(problem, len(line), options, report)
            else:
                yield text
        offset += len(line) + 1


def _row_texts(piece, options, report):
    """The texts of the rows of a parquet file."""
    for number, row in enumerate(piece.data, piece.at.offset + 1):
        try:
            text = _usable(row, options)
        except InputError as error:
            _leave_out(f"{piece.path}, row {number:,}: {error}", 0, options, report)
        else:
            yield text


def _leave_out(problem, size, options, report):
    """Report a record that has no usable text. Raises InputError with on_error = stop."""
    problem = f"{problem}; correct it, or leave such records out with --on_error skip"
    if options.on_error == "stop":
        raise InputError(problem) from None
    report.add("unusable records", 1, size, [problem])


def _parsed(line, offset, options):
    """The JSON value of a line that begins at byte `offset` of its file."""
    errors = "replace" if options.on_error == "replace" else "strict"
    try:
        return json.loads(line.decode("utf-8", errors))
    except UnicodeDecodeError as error:
        raise InputError(
            f"not UTF-8 at byte offset {offset + error.start:,} (--on_error replace takes it all"
            " the same)"
        ) from None
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        raise InputError(f"not valid JSON ({error})") from None


def _usable(record, options):
    """The text of a record in valid Unicode. Raises InputError when there is none."""
    text = record_text(record, options)
    if text.isascii():
        return text
    return _whole_characters(text, options)


def _whole_characters(text, options):
    """Text without halves of surrogate pairs, which JSON can hold and Unicode cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        if options.on_error != "replace":
            raise InputError(
                "half a surrogate pair (\\ud83d or the like) is not Unicode (--on_error replace"
                " takes it all the same)"
            ) from None
        return text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return text


def record_text(record: dict, options: Options) -> str:
    """The text of a JSON object or a parquet row. Raises InputError when it has none."""
    if not isinstance(record, dict):
        raise InputError(f"{json_kind(record)}, not an object with a text")
    name = options.text_column(record)
    if name not in record:
        names = ", ".join(map(repr, record)) or "nothing"
        raise InputError(
            f"no field {name!r}, there is {names}; name the text's field with --text_field"
        )
    value = record[name]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InputError(f"{name!r} is {json_kind(value)}, not a text")
    try:
        return format_chat(value)
    except (TypeError, KeyError, AttributeError):
        raise InputError(f'{name!r} is not a list of {{"role": ..., "content": ...}}') from None


def json_kind(value: object) -> str:
    """JSON's word for what a value is, with its article."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    kinds |= {list: "an array", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
