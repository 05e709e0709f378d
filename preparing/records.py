"""Chunks of bytes or rows -> the texts of their documents.

In a text file, what is between marks of end-of-text; in JSON lines and tables, a record's text or
its conversation.
"""

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from formats.conversation import REPLY, ConversationError, turns_of
from formats.files import parse_json
from preparing import InputError
from preparing.chunks import Chunk, Options, split_documents
from preparing.cleaning import CleaningReport, clean, noise
from preparing.fields import text_of
from preparing.noticed import IN_LINES, NO_REPLY, notice
from tokenizer_bpe import EOT

EXAMPLE_BEFORE = 30  # characters before and after a broken place that the report shows
UNUSABLE = "unusable documents"  # the rule of the report for what --on_error leaves out
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
    documents = []
    for document in _readable(chunk, options, report):
        if document.text and options.clean:
            document = document.corrected(clean, report)
            rule = noise(document.text) if chunk.whole else ""
            if rule:
                report.add(rule, 1, len(document.text.encode()), [document.text])
                continue
        if document.text.strip():
            notice(document.text, chunk, options, report)
            if document.turns and REPLY not in document.turns[::2]:
                report.add(NO_REPLY, 1, len(document.text.encode()), [document.text])
            documents.append(document)
    return documents, report


def _readable(chunk, options, report) -> Iterator[Document]:
    """The documents but those that are broken and to be skipped."""
    for place, offset, record in _records_of(chunk, report):
        try:
            yield from _documents_in(record, offset, chunk, options, report)
        except InputError as error:
            problem = f"{place}: {error}"
            if options.on_error == "stop":
                advice = "--on_error skip leaves such documents out"
                raise InputError(f"{problem}. {advice}") from None
            size = len(record) if isinstance(record, bytes) else 0
            example = problem.replace(chunk.path, Path(chunk.path).name, 1)
            report.add(UNUSABLE, 1, size, [example])


def _records_of(chunk, report) -> Iterator[tuple[str, int, bytes | dict]]:
    """Each record, before it its place in words, and the offset at which that begins."""
    if isinstance(chunk.data, list):
        for place, row in chunk.data:
            yield place, 0, row
    elif chunk.kind == "txt":
        for start, data in _split(chunk.data, report):
            yield chunk.path, chunk.start.offset + start, data
    else:
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.start.line + 1):
            if line.strip():
                yield f"{chunk.path}, line {number:,}", 0, line


def _documents_in(record, offset, chunk, options, report) -> Iterator[Document]:
    """The documents in a record, one or more. Raises InputError when it has no usable text."""
    decoded = functools.partial(_decoded, chunk=chunk, options=options, report=report)
    if isinstance(record, InputError):
        raise record
    if isinstance(record, bytes):
        record = decoded(record, offset)
    if chunk.kind == "txt":
        yield Document(record)
        return
    if chunk.kind == "jsonl":
        try:
            record = parse_json(record)
        except ValueError as error:
            raise InputError(f"not valid JSON ({error}); a record takes one line") from None
    if not isinstance(record, dict):
        raise InputError(f"{record!r:.40} is not an object with a text")
    name, value = text_of(record, options.text_field)
    turns = []
    if isinstance(value, list):
        try:
            turns = turns_of(value)
        except ConversationError as error:
            raise InputError(f"{name!r} {error}") from None
        value = "".join(turns)
    if isinstance(value, bytes):
        value = decoded(value, 0)
    if not isinstance(value, str):
        raise InputError(f"{name!r} is {value!s:.40}, not a text or a list of messages")
    document = Document(value, turns).corrected(functools.partial(_valid, options, decoded), report)
    if turns or EOT not in document.text:
        yield document
        return
    for _, part in _split(document.text.encode(), report):
        yield Document(part.decode())


def _split(data, report):
    """The documents in a text, each with the byte where it begins."""
    for start, document, within_line in split_documents(data):
        if within_line:
            shown = document[-EXAMPLE_BEFORE:].decode("utf-8", "replace") + EOT
            report.add(IN_LINES, 1, len(EOT), [shown])
        yield start, document


def _decoded(data, offset, *, chunk, options, report):
    """The text of bytes, the first at `offset`; what is not UTF-8 is an InputError, or reported."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = error.start
    what = f"not {options.encoding or 'UTF-8'}"
    if options.on_error != "replace":
        raise InputError(
            f"{what}: byte 0x{data[at]:02x} at offset {offset + at:,}; take such bytes as U+FFFD"
            " with --on_error replace. Only where all files are in another encoding, name it:"
            " --encoding cp1252 or utf-16"
        )
    text = data.decode("utf-8", "replace")
    before = len(data[:at].decode())
    shown = text[max(0, before - EXAMPLE_BEFORE) : before + EXAMPLE_BEFORE]
    size = len(data) - len(data.decode("utf-8", "ignore").encode())
    example = f"{Path(chunk.path).name}: {shown}"
    report.add(f"{what}: taken with U+FFFD", int(not chunk.start.inside), size, [example])
    return text


def _valid(options, decoded, text, report):
    """The text in Unicode that can be encoded.

    A byte of a table that is not UTF-8 is a lone surrogate here, as are those that JSON can hold.
    """
    try:
        text.encode()
        return text
    except UnicodeEncodeError:
        pass
    try:
        return decoded(text.encode("utf-8", "surrogateescape"), 0, report=report)
    except UnicodeEncodeError:
        if options.on_error != "replace":
            raise InputError(
                "a lone surrogate (as \\ud83d) is not Unicode (--on_error replace takes it)"
            ) from None
        whole, count = SURROGATE.subn("\ufffd", text)
        report.add("lone surrogates: taken as U+FFFD", 1, 3 * count, [whole])
        return whole
