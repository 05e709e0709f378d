"""Chunks of bytes or rows -> the texts of their documents, cleaned and deduplicated.

In a text file, documents are separated by end-of-text marks; in JSON lines and tables, each record
is one, a text or a conversation. cleaning.py corrects or drops single documents, and mistakes.py
counts what looks like a mistake. Deduplication compares 64-bit hashes, so it finds exact copies
only, and takes about one document in a billion for a copy by mistake.
"""

import functools
import hashlib
import itertools
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from formats.conversation import ASSISTANT, PLAIN, ConversationError, Turn, turns_of
from preparing import InputError
from preparing.chunks import Chunk, Options, split_documents
from preparing.cleaning import EXAMPLE_BEFORE, EXAMPLE_CHARS, CleaningReport, clean, noise
from preparing.mistakes import (
    ANSWERS,
    EMPTY_REPLY,
    IN_LINES,
    NO_REPLY,
    OBJECT,
    SORTED,
    UNREAD,
    WEIGHTS,
    WORDS,
    is_sorted,
    notice,
)
from preparing.records import OTHER_ENCODING, PARENT, SURROGATE, TEXT, fields_of, shown, text_of
from tokenizer_bpe import EOT

UNUSABLE = "unusable documents"  # the report's rule for documents that --on_error leaves out
EMPTY = "records whose text is null or empty"
# The most bytes that --on_error replace replaces, and the share of the text to add to them: text
# with more is in another encoding.
FEW_BROKEN = 10
MOST_BROKEN = 0.3
# Fields of a message that say whether it counts, for OpenAI, Axolotl, ms-swift and others.
WEIGHT = ("weight", "train", "loss", "loss_mask", "loss_weight")


@dataclass
class Document:
    """A document. text: of a conversation, its plain form. turns: of a conversation; else empty.

    place: where its record begins, for messages.
    """

    text: str
    turns: list[Turn] = field(default_factory=list)
    place: str = ""

    def corrected(
        self, correct: Callable[[str, CleaningReport], str], report: CleaningReport
    ) -> "Document":
        """The document with correct(text, report) applied to its text and to each message."""
        text = correct(self.text, report)
        if text == self.text:
            return self
        unreported = CleaningReport()
        turns = [Turn(turn.speaker, correct(turn.message, unreported)) for turn in self.turns]
        return Document(text, turns, self.place)


def documents_of(chunk: Chunk, options: Options) -> tuple[list[Document], CleaningReport]:
    """The documents of a chunk as valid Unicode, and a report of the rest. Raises InputError."""
    report = CleaningReport()
    documents = []
    unread = defaultdict(set)
    for document in _readable(chunk, options, report, unread):
        if document.text and options.clean:
            document = document.corrected(clean, report)
            rule = noise(document.text) if chunk.whole else ""
            if rule:
                report.add(rule, 1, len(document.text.encode()), [document.text])
                continue
        if document.text.strip():
            notice(document.text, chunk, options, report)
            replies = [turn.message for turn in document.turns if turn.speaker == ASSISTANT]
            if document.turns and not all(replies or [""]):
                rule = EMPTY_REPLY if replies else NO_REPLY
                report.add(rule, 1, len(document.text.encode()), [document.text])
            documents.append(document)
    if is_sorted([document.text for document in documents]):
        size = sum(len(document.text.encode()) for document in documents)
        report.add(SORTED, len(documents), size, [documents[len(documents) // 2].text])
    _notice_unread(unread, documents, report)
    return documents, report


def _readable(chunk, options, report, unread) -> Iterator[Document]:
    """The documents. Skips broken ones, or raises InputError, as options.on_error says."""
    for place, offset, record in _records_of(chunk, report):
        try:
            for document in _documents_in(record, offset, chunk, options, report, unread):
                document.place = place
                if chunk.kind == "txt":
                    document.place += f", from offset {offset:,}"
                yield document
        except InputError as error:
            problem = f"{place}: {error}"
            if options.on_error == "stop":
                advice = "--on_error skip leaves such documents out"
                raise InputError(f"{problem}. {advice}") from None
            size = len(record) if isinstance(record, bytes) else 0
            example = problem.replace(chunk.path, Path(chunk.path).name, 1)
            report.add(UNUSABLE, 1, size, [example])


def _records_of(chunk, report) -> Iterator[tuple[str, int, bytes | dict]]:
    """Each record as (place, byte offset in the file, record); 0 if the place is exact enough."""
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


def _documents_in(record, offset, chunk, options, report, unread) -> Iterator[Document]:
    """The documents of a record; none if its text is empty. Raises InputError if it is unusable."""
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
            record = json.loads(record.removeprefix("\ufeff"))  # of concatenated files
        except (ValueError, RecursionError) as error:
            found = f"not valid JSON ({error}); a record takes one line, as jq -c . makes it"
            raise InputError(found) from None
    if isinstance(record, str) and not OBJECT.match(record):  # of an array or lines of texts
        record = {options.text_field or TEXT: record}
    if not isinstance(record, dict):
        raise InputError(f"{record!r:.40} is not an object with a text")
    name, value = text_of(record, options.text_field)
    if not options.text_field and len(record) > 1:
        read = fields_of(record, None)
        for other, text in record.items():
            if isinstance(text, str) and other not in read:
                unread[other].add(text)
    if value is None or value == "":
        report.add(EMPTY, 1, 0, [f"{record!r:.{EXAMPLE_CHARS}}"])
        return
    if name == TEXT and record.get(PARENT) and not options.text_field:
        report.add(ANSWERS, 1, len(str(value).encode()), [str(value)])
    turns = []
    if isinstance(value, list):
        try:
            turns = turns_of(value)
        except ConversationError as error:
            raise InputError(f"{name!r} {error}") from None
        _notice_weights(value, turns, report)
        value = "".join(PLAIN.parts(turns))
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


def _notice_unread(unread, documents, report):
    """Count the documents of a chunk if fields that are not read hold more text than they.

    unread: {name of a field: its different texts}; so a speaker or a category counts once.
    """
    read = sum(len(document.text) for document in documents)
    if sum(map(len, itertools.chain(*unread.values()))) <= read:  # fast, and usual
        return
    texts = {name: "".join(filter(WORDS.search, found)) for name, found in unread.items()}
    if sum(map(len, texts.values())) > read:
        size = len("".join(texts.values()).encode("utf-8", "replace"))
        report.add(UNREAD, len(documents), size, [shown([n for n, text in texts.items() if text])])


def _notice_weights(messages, turns, report):
    """Count the replies that a field of WEIGHT excludes from training."""
    both = zip(messages, turns, strict=True)
    replies = [
        turn.message
        for message, turn in both
        if turn.speaker == ASSISTANT and any(message.get(name) == 0 for name in WEIGHT)
    ]
    if replies:
        report.add(WEIGHTS, 1, sum(len(reply.encode()) for reply in replies), replies[:1])


def _split(data, report):
    """Each document of a text, with the byte where it begins."""
    for start, document, within_line in split_documents(data):
        if within_line:
            shown = document[-EXAMPLE_BEFORE:].decode("utf-8", "replace") + EOT
            report.add(IN_LINES, 1, len(EOT), [shown])
        yield start, document


def _decoded(data, offset, *, chunk, options, report):
    """Decode UTF-8 that begins at byte `offset`.

    Where it is broken, raises InputError, or replaces it and reports it (--on_error replace) unless
    that would leave little of it.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        at = error.start
    what = f"not {chunk.encoding or 'UTF-8'}"
    size = len(data) - len(data.decode("utf-8", "ignore").encode())
    is_other = size > FEW_BROKEN + MOST_BROKEN * len(data)
    if options.on_error != "replace" or is_other:
        found = f"byte 0x{data[at]:02x} at offset {offset + at:,}"
        if chunk.encoding:  # the reader has replaced the byte
            before = data[max(0, at - 20) : at].decode("utf-8", "ignore")
            found = f"a byte at offset {offset + at:,}, counted in UTF-8, after {before!r}"
        problem = f"{what}: {found}; --on_error replace turns such bytes into U+FFFD"
        if is_other:
            problem = f"{size / len(data):.0%} of its bytes are {what}"
        raise InputError(f"{problem}. {OTHER_ENCODING}")
    text = data.decode("utf-8", "replace")
    before = len(data[:at].decode())
    shown = text[max(0, before - EXAMPLE_BEFORE) : before + EXAMPLE_BEFORE]
    example = f"{Path(chunk.path).name}: {shown}"
    report.add(f"{what}: taken with U+FFFD", int(not chunk.start.inside), size, [example])
    return text


def _valid(options, decoded, text, report):
    """The text without lone surrogates, so that it can be encoded.

    They come from JSON, and from bytes of a table that are not UTF-8. Raises InputError unless
    --on_error replace was given.
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


# -- copies


def hash64(text: bytes) -> int:
    """A 64-bit hash of a text, without the white space at its end."""
    return int.from_bytes(hashlib.blake2b(text.rstrip(), digest_size=8).digest(), "little")


class Seen:
    """The hashes of all documents so far, about 70 bytes of memory each.

    A log on disk keeps them in order, so that a resumed run knows those of before.
    """

    def __init__(self, path: Path, count: int):
        """Load the first `count` hashes of the log at `path`, and drop the others."""
        self.log = open(path, "r+b" if count else "w+b")  # noqa: SIM115 - used until the end
        self.log.truncate(8 * count)
        self.hashes = set(np.fromfile(self.log, np.uint64).tolist())

    def first(self, hashes: np.ndarray) -> np.ndarray:
        """Which documents are new, bool [documents]; then remember all of them.

        hashes: uint64 [documents].
        """
        new = np.zeros(len(hashes), bool)
        for n, value in enumerate(hashes.tolist()):
            new[n] = value not in self.hashes
            self.hashes.add(value)
        self.log.write(hashes[new].tobytes())
        return new

    def save(self) -> int:
        """Flush the log to disk; returns how many hashes it holds."""
        self.log.flush()
        os.fsync(self.log.fileno())
        return len(self.hashes)
