"""What a document is: pieces of bytes or rows -> the texts of their documents.

In a text file, what stands between lines of end-of-text; in JSON lines and parquet, a record's text
or its conversation. Independent of where pieces come from and of token ids.
"""

import functools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from formats.conversation import turns_of
from preparing import encodings
from preparing.cleaning import CleaningReport, clean, noise
from preparing.cutting import split_documents
from preparing.errors import InputError
from preparing.options import Options
from preparing.pieces import Piece

EXAMPLE_BEFORE = 30  # characters before and after a broken place that the report shows


@dataclass
class Document:
    """A document's text; of a conversation also its parts, as conversation.turns_of gives them."""

    text: str
    turns: list[str] = field(default_factory=list)

    def corrected(
        self, correct: Callable[[str, CleaningReport], str], report: CleaningReport
    ) -> "Document":
        """The document after correct(text, report), which acts on each part as on the whole."""
        text = correct(self.text, report)
        if text == self.text:
            return self
        unreported = CleaningReport()
        return Document(text, [correct(part, unreported) for part in self.turns])


def documents_of(piece: Piece, options: Options) -> tuple[list[Document], CleaningReport]:
    """The documents of a piece, as valid Unicode, and what was left out.

    Raises InputError for what on_error = stop does not let pass.
    """
    report = CleaningReport()
    whole = piece.begins and piece.ends
    documents = []
    for document in _raw_documents(piece, options, report):
        if document.text and options.clean:
            document = document.corrected(clean, report)
            rule = noise(document.text, options) if piece.begins else ""
            if rule:
                report.noise = rule
                report.add(rule, 1, len(document.text.encode()), [document.text])
                continue
        # White space alone is no document, but it may be a part of one.
        if document.text.strip() or (document.text and not whole):
            documents.append(document)
    return documents, report


def _raw_documents(piece, options, report) -> Iterator[Document]:
    """The documents of a piece before they are cleaned."""
    if piece.kind == "txt":
        return _plain_documents(piece, options, report)
    if piece.kind == "jsonl":
        return _documents_of_lines(piece, options, report)
    return _documents_of_rows(piece, options, report)


def _plain_documents(piece, options, report):
    """The documents of a text file."""
    for start, part in split_documents(piece.data):
        text, broken = _decoded(part, piece.at.offset + start)
        if broken is not None:
            if options.on_error == "stop":
                raise _not_utf8(piece, part, start, broken, options)
            if options.on_error == "skip":
                report.add(_what_it_is(part, piece, start, options), 1, len(part), [text])
                continue
            _report_replaced(report, piece, part, start, broken, options)
        yield Document(text)


def _decoded(data, offset):
    """The text of bytes, U+FFFD for what is no UTF-8, and the first byte that is none, or None.

    Zero bytes at every other place are UTF-8, and are taken for the UTF-16 that they are. offset:
    of the bytes in their file.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return data.decode("utf-8", "replace"), error.start
    if "\0" in text and encodings.seeming(data, offset):
        return text, data.index(0)
    return text, None


def _what_it_is(data, piece, start, options):
    """The rule in the report for bytes that are no UTF-8: with the encoding that they seem to have.

    start: where they begin in their piece.
    """
    if options.encoding:
        return f"not {options.encoding}"
    encoding = encodings.seeming(data, piece.at.offset + start)
    if not encoding:
        return "not UTF-8"
    return f"not UTF-8, seems {encoding} (--encoding {encoding} reads it)"


def _report_replaced(report, piece, data, start, broken, options):
    """Report bytes that are no UTF-8 and were taken all the same; an example shows the first.

    A document of several pieces counts in the first of them.
    """
    before = len(data[:broken].decode("utf-8", "replace"))
    text = data.decode("utf-8", "replace")
    shown = text[max(0, before - EXAMPLE_BEFORE) : before + EXAMPLE_BEFORE]
    rule = f"{_what_it_is(data, piece, start, options)}: taken with U+FFFD"
    zeros = data.count(0)
    if zeros:
        rule += " and zero bytes"
    size = encodings.broken_bytes(data) + zeros
    report.add(rule, int(piece.begins), size, [f"{Path(piece.path).name}: {shown}"])


def _not_utf8(piece, part, start, broken, options):
    """The InputError for byte `broken` of a document that begins at byte `start` of its piece."""
    offset = piece.at.offset + start + broken
    instead = "use --on_error replace or --on_error skip"
    if options.encoding:
        return InputError(
            f"{piece.path} is not {options.encoding}, after {offset:,} bytes of text in UTF-8; give"
            f" another --encoding, or {instead}"
        )
    found = f"byte 0x{part[broken]:02x} at offset {offset:,}"
    encoding = encodings.seeming(part, piece.at.offset + start)
    if encoding:
        return InputError(
            f"{piece.path} is not UTF-8: {found}; it seems to be {encoding}: read it with"
            f" --encoding {encoding}, or {instead}"
        )
    if b"\0" in part:
        return InputError(
            f"{piece.path} is not text: {found}, and it holds zero bytes; leave it out, or skip it"
            " with --on_error skip"
        )
    return InputError(
        f"{piece.path} is not UTF-8: {found}; name its encoding with --encoding, or {instead}"
    )


def _documents_of_lines(piece, options, report):
    """The documents in JSON lines."""
    start = 0
    for number, line in enumerate(piece.data.split(b"\n"), piece.at.line + 1):
        if line.strip():
            text, broken = _decoded(line, piece.at.offset + start)
            try:
                if broken is not None and options.on_error != "replace":
                    raise _line_not_utf8(piece, line, start, broken, options)
                document = _usable(_parsed(text), options, report)
            except InputError as error:
                problem = f"{piece.path}, {piece.at.line_name(number)}: {error}"
                _leave_out(problem, len(line), options, report)
            else:
                if broken is not None:
                    _report_replaced(report, piece, line, start, broken, options)
                yield document
        start += len(line) + 1


def _line_not_utf8(piece, line, start, broken, options):
    """The InputError for byte `broken` of a line that begins at byte `start` of its piece."""
    offset = piece.at.offset + start
    what = f"not {options.encoding or 'UTF-8'} at byte offset {offset + broken:,}"
    encoding = encodings.seeming(line, offset)
    if encoding and not options.encoding:
        what += f", seems {encoding} (--encoding {encoding} reads it)"
    return InputError(f"{what} (--on_error replace takes it all the same)")


def _documents_of_rows(piece, options, report):
    """The documents in the rows of a parquet file."""
    for number, row in enumerate(piece.data, piece.at.offset + 1):
        try:
            document = _usable(row, options, report)
        except InputError as error:
            _leave_out(f"{piece.path}, row {number:,}: {error}", 0, options, report)
        else:
            yield document


def _leave_out(problem, size, options, report):
    """Report a record that has no usable text. Raises InputError with on_error = stop."""
    problem = f"{problem}; correct it, or leave such records out with --on_error skip"
    if options.on_error == "stop":
        raise InputError(problem) from None
    report.add("unusable records", 1, size, [problem])


def _parsed(line):
    """The JSON value of a line."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(f"not valid JSON ({error.msg}, column {error.colno})") from None
    except (ValueError, RecursionError) as error:  # a number too long, lists too deep
        raise InputError(f"not valid JSON ({error})") from None


def _usable(record, options, report):
    """The document in a record, in valid Unicode. Raises InputError when there is none."""
    document = record_document(record, options)
    if document.text.isascii():
        return document
    return document.corrected(functools.partial(_whole_characters, options), report)


def _whole_characters(options, text, report):
    """Text without halves of surrogate pairs, which JSON can hold and Unicode cannot.

    Each becomes U+FFFD with on_error = replace, and the report says so.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        if options.on_error != "replace":
            raise InputError(
                "half a surrogate pair (\\ud83d or the like) is not Unicode (--on_error replace"
                " takes it all the same)"
            ) from None
        whole = text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
        broken = whole.count("\ufffd") - text.count("\ufffd")
        report.add("halves of surrogate pairs: taken as U+FFFD", 1, broken, [whole])
        return whole
    return text


def record_document(record: dict, options: Options) -> Document:
    """What a JSON object or a parquet row holds. Raises InputError when it has no text."""
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
        return Document(value)
    if not isinstance(value, list):
        raise InputError(f"{name!r} is {json_kind(value)}, not a text")
    try:
        turns = turns_of(value)
    except (TypeError, KeyError, AttributeError):
        raise InputError(f'{name!r} is not a list of {{"role": ..., "content": ...}}') from None
    return Document("".join(turns), turns)


def json_kind(value: object) -> str:
    """JSON's word for what a value is, with its article."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    kinds |= {list: "an array", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")
