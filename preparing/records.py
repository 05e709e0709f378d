"""Chunks of bytes or rows -> the texts of their documents.

In a text file, what is between lines of end-of-text; in JSON lines and parquet, a record's text or
its conversation.
"""

import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from formats.conversation import turns_of
from preparing import InputError
from preparing.chunks import Chunk, Options, split_documents
from preparing.cleaning import CleaningReport, clean, noise

EXAMPLE_BEFORE = 30  # characters before and after a broken place that the report shows
BROKEN = re.compile("[\udc80-\udcff]")  # bytes that are not UTF-8, as surrogateescape has them
SURROGATE = re.compile("[\ud800-\udfff]")


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


def documents_of(chunk: Chunk, options: Options) -> tuple[list[Document], CleaningReport]:
    """The documents of a chunk, as valid Unicode, and what was left out. Raises InputError."""
    report = CleaningReport()
    read = _documents_of_text if chunk.kind == "txt" else _documents_of_records
    documents = []
    for document in read(chunk, options, report):
        if document.text and options.clean:
            document = document.corrected(clean, report)
            rule = noise(document.text) if chunk.whole else ""
            if rule:
                report.add(rule, 1, len(document.text.encode()), [document.text])
                continue
        if document.text.strip():
            documents.append(document)
    return documents, report


def _documents_of_text(chunk, options, report) -> Iterator[Document]:
    for start, data in split_documents(chunk.data):
        try:
            yield Document(_decoded(data, chunk, options, report))
        except BrokenText as broken:
            if options.on_error == "skip":
                example = data.decode("utf-8", "replace")
                report.add(_not_the_encoding(options), 1, len(data), [example])
                continue
            offset = chunk.start.offset + start + broken.at
            raise InputError(
                f"{chunk.path} is {_not_the_encoding(options)}: byte 0x{data[broken.at]:02x} at"
                f" offset {offset:,}; leave such documents out with --on_error skip, or take such"
                " bytes as U+FFFD with --on_error replace. Only where all files are in another"
                " encoding, name it: --encoding latin-1 or utf-16"
            ) from None


def _decoded(data, chunk, options, report):
    """The text of bytes; what is not UTF-8 in it is reported, or raises BrokenText."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = error.start
    if options.on_error != "replace":
        raise BrokenText(options, at)
    text = data.decode("utf-8", "replace")
    before = len(data[:at].decode())
    shown = text[max(0, before - EXAMPLE_BEFORE) : before + EXAMPLE_BEFORE]
    size = len(BROKEN.findall(data.decode("utf-8", "surrogateescape")))
    rule = f"{_not_the_encoding(options)}: taken with U+FFFD"
    report.add(rule, int(not chunk.start.inside), size, [f"{Path(chunk.path).name}: {shown}"])
    return text


def _not_the_encoding(options):
    return f"not {options.encoding or 'UTF-8'}"


class BrokenText(InputError):
    """Bytes that are not text in the encoding, from byte `at` on."""

    def __init__(self, options, at):
        self.at = at
        super().__init__(
            f"{_not_the_encoding(options)} at byte {at:,}; take it with U+FFFD by --on_error"
            " replace, or name the --encoding of all .txt and .jsonl files"
        )


def _documents_of_records(chunk, options, report) -> Iterator[Document]:
    """The documents of JSON lines, or of the rows of a table."""
    is_lines = chunk.kind == "jsonl"
    records = chunk.data.split(b"\n") if is_lines else chunk.data
    before = chunk.start.line if is_lines else chunk.start.offset
    for number, data in enumerate(records, before + 1):
        if is_lines and not data.strip():
            continue
        try:
            record = _parsed(_decoded(data, chunk, options, report)) if is_lines else data
            yield _document_of(record, options, report)
        except InputError as error:
            place = f"{chunk.path}, {'line' if is_lines else 'row'} {number:,}"
            problem = f"{place}: {error}; correct it, or skip such records with --on_error skip"
            if options.on_error == "stop":
                raise InputError(problem) from None
            report.add("unusable records", 1, len(data) if is_lines else 0, [problem])


def _parsed(line):
    try:
        return json.loads(line)
    except ValueError as error:
        raise InputError(f"not valid JSON ({error}); a record takes one line") from None


def _document_of(record, options, report):
    """The document in a JSON object or a row. Raises InputError when it has no usable text."""
    if not isinstance(record, dict):
        raise InputError(f"{record!r:.40} is not an object with a text")
    name = options.text_column(record)
    if name not in record:
        names = ", ".join(map(repr, record)) or "nothing"
        raise InputError(
            f"no field {name!r}, there is {names}; name the text's field with --text_field"
        )
    value = record[name]
    turns = []
    if isinstance(value, list):
        try:
            turns = turns_of(value)
        except (TypeError, KeyError, AttributeError):
            raise InputError(f'{name!r} is not a list of {{"role": ..., "content": ...}}') from None
        value = "".join(turns)
    if not isinstance(value, str):
        raise InputError(f"{name!r} is {value!s:.40}, not a text")
    correct = functools.partial(_without_lone_surrogates, options)
    return Document(value, turns).corrected(correct, report)


def _without_lone_surrogates(options, text, report):
    """Replace lone surrogates, which JSON can hold, with U+FFFD. Else raises InputError."""
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        if options.on_error != "replace":
            raise InputError(
                "a lone surrogate (as \\ud83d) is not Unicode (--on_error replace takes it)"
            ) from None
        whole, count = SURROGATE.subn("\ufffd", text)
        report.add("lone surrogates: taken as U+FFFD", 1, 3 * count, [whole])
        return whole
