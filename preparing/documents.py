"""Chunks of bytes or rows -> the texts of their documents, cleaned and deduplicated.

In a text file, documents are separated by end-of-text marks; in JSON lines and tables, each record
is one, a text or a conversation. Cleaning corrects or drops single documents. Text that looks like
a mistake, such as HTML, is kept and counted. Deduplication compares 64-bit hashes, so it finds
exact copies only, and takes about one document in a billion for a copy by mistake.
"""

import bisect
import functools
import hashlib
import itertools
import json
import os
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from formats.conversation import ASSISTANT, PLAIN, ConversationError, Turn, turns_of
from preparing import InputError
from preparing.chunks import Chunk, Options, split_documents
from preparing.records import OTHER_ENCODING, PARENT, SURROGATE, TEXT, fields_of, shown, text_of
from tokenizer_bpe import EOT

EXAMPLES = 3  # documents that the report quotes per rule
EXAMPLE_CHARS = 100  # characters quoted from each
EXAMPLE_BEFORE = 30  # characters quoted before a place
EXAMPLE_AFTER = 60  # and from it on
UNUSABLE = "unusable documents"  # the report's rule for documents that --on_error leaves out
EMPTY = "records whose text is null or empty"
# The most bytes that --on_error replace replaces, and the share of the text to add to them: text
# with more is in another encoding.
FEW_BROKEN = 10
MOST_BROKEN = 0.3
# Fields of a message that say whether it counts, for OpenAI, Axolotl, ms-swift and others.
WEIGHT = ("weight", "train", "loss", "loss_mask", "loss_weight")


@dataclass
class CleaningReport:
    """Counts and examples of the documents that were left out or corrected.

    rules: {rule: {"documents", "bytes", "examples"}}, the content of cleaning.json.
    """

    rules: dict[str, dict] = field(default_factory=dict)

    def add(self, rule: str, documents: int, size: int, examples: list[str]) -> None:
        """Count the documents and bytes that a rule left out or corrected."""
        counts = self.rules.setdefault(rule, {"documents": 0, "bytes": 0, "examples": []})
        counts["documents"] += documents
        counts["bytes"] += size
        for example in examples:
            example = example[:EXAMPLE_CHARS]
            if len(counts["examples"]) < EXAMPLES and example not in counts["examples"]:
                counts["examples"].append(example)

    def quote(self, rule: str, text: str, at: int, size: int, documents: int = 1) -> None:
        """As add(), with what a text has around character `at` as the example."""
        self.add(rule, documents, size, [text[max(0, at - EXAMPLE_BEFORE) : at + EXAMPLE_AFTER]])

    def merge(self, other: "CleaningReport") -> None:
        for rule, counts in other.rules.items():
            self.add(rule, counts["documents"], counts["bytes"], counts["examples"])


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
    if _is_sorted([document.text for document in documents]):
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


# -- cleaning


CONTROL = re.compile(
    r"\x1b\[[\d;?]*[A-Za-z]|"  # a terminal's colors, such as ESC [31m
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\ufdd0-\ufdef\ufeff\ufffe\uffff]"
)
# The limits of noise(). The shares are of all characters but white space.
MIN_BYTES = 20  # 20 letters of English, or 7 of Chinese
MAX_CHAR_SHARE = 0.5
MIN_LETTERS = 0.4
SAMPLE_CHARS = 500  # characters of a document in which letters and digits are counted
TYPESET = re.compile("[\ufb00-\ufb06]|\u00ad\n?")
RULES = {  # in the order in which they are applied
    "line ends other than \\n": lambda text: (  # \r\r\n is \r\n that Windows wrote as text
        text.replace("\r\r\n", "\n").replace("\r\n", "\n").replace("\r", "\n")
    ),
    "broken encoding": lambda text: text.replace("\ufffd", ""),  # undecodable bytes
    "not in NFC": lambda text: unicodedata.normalize("NFC", text),
    "ligatures and soft hyphens": lambda text: TYPESET.sub(_as_typed, text),
    "control characters": lambda text: CONTROL.sub("", text),  # all but tab and line feed
}


def _as_typed(found):
    """The letters of a ligature such as ﬁ; nothing for a soft hyphen, which may end a line."""
    return unicodedata.normalize("NFKC", found[0]) if found[0][0] != "\u00ad" else ""


def clean(text: str, report: CleaningReport) -> str:
    """Apply each of RULES to a text."""
    for rule, correct in RULES.items():
        corrected = correct(text)
        if corrected != text:
            removed = len(text.encode()) - len(corrected.encode())
            report.quote(rule, text, first_difference(text, corrected), removed)
        text = corrected
    return text


def first_difference(old: str, new: str) -> int:
    """How many characters two texts have in common at their beginning."""
    return bisect.bisect(range(len(new)), False, key=lambda n: not old.startswith(new[: n + 1]))


def noise(text: str) -> str:
    """Why a document counts as noise, or "" if it does not.

    Letters and digits are counted among about SAMPLE_CHARS evenly spaced characters.
    """
    if len(text.encode()) < MIN_BYTES:
        return f"shorter than {MIN_BYTES} bytes"
    too_few_letters = f"fewer than {MIN_LETTERS:.0%} letters and digits"
    stride = max(1, len(text) // SAMPLE_CHARS)
    sample = "".join(text[::stride].split())
    if not sample:
        return too_few_letters
    commonest, _ = Counter(sample).most_common(1)[0]
    visible = len("".join(text.split()))
    if text.count(commonest) > MAX_CHAR_SHARE * visible:
        return f"one character is more than {MAX_CHAR_SHARE:.0%}"
    if sum(map(_is_letter, sample)) < MIN_LETTERS * len(sample):
        return too_few_letters
    return ""


def _is_letter(char):
    """True for letters, digits and combining marks, such as the vowels of Burmese and Hindi."""
    return char.isalnum() or unicodedata.category(char)[0] == "M"


def _is_sorted(texts):
    """True if these are many short texts, nearly all in alphabetical order."""
    if len(texts) < MANY or sum(map(len, texts)) > SHORT_CHARS * len(texts):
        return False
    start = max(0, len(texts) - 10 * MANY) // 2
    return _in_order(texts[start : start + 10 * MANY]) and _in_order(texts)  # the first is fast


def _in_order(texts):
    words = [re.sub(r"\d", "", text).lower() for text in texts]
    pairs = [(a, b) for a, b in itertools.pairwise(words) if a != b]
    return len(pairs) >= MANY / 2 and sum(a < b for a, b in pairs) >= IN_ORDER * len(pairs)


# -- likely mistakes in the text


IN_LINES = "<|endoftext|> within lines, taken as the end of a document"
SPECIAL = "special tokens, as letters"
ADDED = "added tokens of this tokenizer, as letters"
WINDOWS = "\\r, as in the line ends of Windows"
CONTROLS = "control characters, such as NUL"
DAMAGED = "U+FFFD, for characters that another program could not read"
APART = "letters and accents apart (NFD)"
LIGATURES = "ligatures such as ﬁ in one character, or soft hyphens, as PDFs have them"
MARKS = "byte order marks within the text, as of joined files"
TWICE = "UTF-8 that was read as another encoding, such as Ã© for é"
HTML = "HTML or XML with its markup"
HTML_CODES = "codes of HTML, such as &amp; or <br /><br />"
JSON = "JSON, as plain text"
TIMES = "times of subtitles, or of the lines of a chat or a log"
BASE64 = "pictures or other files in base64, as converters to Markdown embed them"
LIST = "nothing but short lines, such as a list of names"
SORTED = "short texts in alphabetical order"
COLUMNS = "columns with tabs between them, such as numbers before the lines"
GUTENBERG = "Project Gutenberg's notes before and after a book"
HEADING = "headings alone, as in WikiText, whose records are the lines of articles"
ANSWERS = "messages that answer another record, its parent_id, as documents of their own"
UNREAD = "fields that are not read and hold more than the text"
REPEATED = "text of validation that training has, too, word for word"
NO_REPLY = "conversations in which the assistant says nothing"
EMPTY_REPLY = "conversations with an empty reply"
WEIGHTS = "replies that are marked as not to be trained on, which count like others"
# The remedy for each.
ADVICE = {
    IN_LINES: "put it in quotes if it is part of the text",
    SPECIAL: "remove them, or write <|endoftext|> where a document ends, and conversations as"
    " messages",
    ADDED: "transformers reads each as one id, and the model may know it as that",
    WINDOWS: "--clean turns \\r\\n into \\n, which is what prompts have",
    CONTROLS: "--clean removes them",
    DAMAGED: "convert the original again; --clean removes them",
    APART: "--clean joins them, as keyboards type them",
    LIGATURES: "--clean writes the letters, as keyboards type them, and removes the hyphens",
    MARKS: "--clean removes them",
    TWICE: "ftfy -o FIXED.txt FILE.txt repairs it (pip install ftfy)",
    HTML: "pandoc -t plain --wrap=none -o FILE.txt FILE.html converts a page; for a table and for"
    " Wikipedia, see docs/other-programs.md",
    HTML_CODES: r"""sed -E "s/&lt;/</g; s/&gt;/>/g; s/&(apos|#0?39|#x27);/'/g; s/<br ?\/?>/ /g;"""
    r' s/&amp;/\&/g" FILE > FIXED writes the commonest characters; for all, use'
    " Python's html.unescape. In code, they may be meant",
    GUTENBERG: r"sed -n '/^\*\*\* *START OF/,/^\*\*\* *END OF/{/^\*\*\* *START OF/d;"
    r"/^\*\*\* *END OF/!p;}' FILE.txt > BOOK.txt keeps the books alone",
    HEADING: "docs/other-programs.md has a command that joins the lines of each article",
    JSON: "let the name of the file end in .jsonl (compressed: .jsonl.gz, .jsonl.zst) or .json, or"
    " give --stdin_format jsonl; of another program's export, docs/other-programs.md makes text",
    LIST: "if each line is a text, docs/other-programs.md has a command that makes it a document",
    SORTED: "a model learns the order; docs/other-programs.md has commands that shuffle",
    COLUMNS: "cut -f 2 FILE > FIXED keeps the second column alone; for a question and its answer in"
    " each line, docs/other-programs.md has a command",
    TIMES: "the model learns them, too; docs/other-programs.md has commands that remove them",
    BASE64: r"sed -E 's/data:[^ <>(),]*;base64,[A-Za-z0-9+\/=]*//g' FILE > FIXED removes them",
    ANSWERS: "docs/other-programs.md has a command that makes conversations of OpenAssistant's",
    UNREAD: "--text_field reads another one; docs/other-programs.md has commands for several",
    REPEATED: "the validation loss will be too low; --dedupe drops copies of documents, and"
    " awk 'length < 40 || !seen[$0]++' FILE > FIXED copies of lines",
    NO_REPLY: "training with loss_on = assistant skips them",
    EMPTY_REPLY: "remove such replies, or the model learns to say nothing",
    WEIGHTS: "the marks are not supported; end the conversation before such a reply, or drop it",
}
# Special tokens of GPT, Llama, Qwen, Gemma, DeepSeek, BERT and others. Each expression begins with
# a fixed character, which makes the search fast. (?P<s> and list<s>, from code, do not match.
TOKENS = (
    re.compile(
        r"<(?:\|\w{2,40}\|>|｜[^｜<>]{2,40}｜>|/s>|(?<!\w<)s>|</?SYS>>|(?i:pad|unk|[bes]o[sd])>"
        r"|(?:start|end)_of_turn>)"
    ),
    re.compile(r"\[(?:/?INST|BOS|EOS|PAD|UNK|CLS|SEP|MASK)\]"),
)
# Western letters, dashes and quotes; for Cyrillic, three letters in a row.
MISREAD = re.compile(
    "Ã[\x80-\xbf]|Â[\xa0-\xbf]|â€[\x80-\xbf™œ“”˜]|(?:[ÐÑ][\x80-\xbf€-™ŒœŠšŽžŸƒˆ˜‚„†‡‰‹›]){3}"
)
PAGE = re.compile(
    r"\s*(?:(?><!--.*?-->)\s*)*<(?:(?:\?xml|!doctype|html|head|doc\sid|\w[^<>]*\sxmlns)\b"
    r"|(?P<post>(?:a|b|blockquote|div|em|h[1-6]|i|ol|p|pre|span|strong|table|ul)\b))",
    re.IGNORECASE | re.DOTALL,
)
# Not in quotes. Both expressions begin with a fixed character, which makes the search fast.
CODES = (
    re.compile(
        r"&(?<![\"'`(]&)(?:amp|lt|gt|quot|apos|nbsp|[aeiouAEIOU](?:uml|acute|grave|circ)|szlig"
        r"|[lr][ds]quo|[mn]dash|#\d{2,5}|#x\w{2,4});(?![\"'`),])"
    ),
    re.compile(r"<br ?/?>\s*<br ?/?>"),
)
BOOK = re.compile(
    r"^\*\*\* ?START OF TH\w+ PROJECT GUTENBERG.*?(?:^\*\*\* ?END OF|\Z)", re.DOTALL | re.MULTILINE
)
TITLE = re.compile(r"\s*= [^\n]* =\s*\Z")  # " = Robert = " or " = = Career = = "
OBJECT = re.compile(r'\s*(?:window\.YTD[\w.]+ = )?(?:\[\s*)?\{\s*"[^"\n]*"\s*:')  # as X writes it
TIME = re.compile(
    r"^(?:"
    r"(?:\W{0,3}|[^\n\[]{1,40}\[)\d{1,4}[-./]\d{1,2}[-./]\d{2,4},? \d{1,2}[:.]\d\d"
    r"|\d{4}[년年.] ?\d{1,2}[월月.] ?\d{1,2}[일日.]\D{0,8}\d{1,2}:\d\d"  # as in KakaoTalk
    r"|[\d:]{5,12}[,.]\d{3} --> .*"
    r"|(?:\[[^\]\n]{1,30}\] )?\[\D{0,4}\d{1,2}:\d\d[^\]\n]{0,24}\]"  # transcripts, lyrics, IRC
    r"|\d{1,2}:\d\d(?:\t| <|\s*$)"  # LINE, IRC, YouTube
    r"|[^\n\d]{0,16}\b\d{1,2}(?:,? \d{4})?[^\n\d]{1,2}\d{1,2}:\d\d:\d\d\b"  # logs, ASS, iMessage
    r")",
    re.MULTILINE,
)
EMBEDDED = re.compile(r";base64,[A-Za-z0-9+/=]{200,}")
MANY = 100  # texts or lines, from which they are a list
SHORT_CHARS = 200  # most characters of its texts, on average
IN_ORDER = 0.95  # smallest share of neighbors in order
SHORT_LINES = re.compile(r"(?:(?!\s*\n)[^\n]{1,40}\n){100,}+[^\n]{0,40}\s*+\Z")
TAB_LINES = re.compile(r"(?:[^\t\n]+\t[^\n]*\n){20}")
WORDS = re.compile(r"[^\W\d_]{2} [^\W\d_]|[^\x00-\x7f]")  # not in numbers, dates and addresses
HEAD_CHARS = 500  # the first time is within these
FEWEST_TIMES = 3
# Of Latin, Greek and Cyrillic, of Arabic, a Korean vowel, and what makes a Japanese kana voiced.
ACCENTS = "\u0300\u0301\u0302\u0303\u0306\u0308\u030a\u030c\u0327\u0653\u0654\u1161\u3099"
CONTROL_BYTES = bytes({*range(0x20), 0x7F} - set(b"\t\n\v\f\r"))
CONTROL_CHARACTER = re.compile(f"[{re.escape(CONTROL_BYTES.decode())}]")


def notice(text: str, chunk: Chunk, options: Options, report: CleaningReport) -> None:
    """Count likely mistakes in the text of a document, or of a part of one."""
    for what, at, size in _found(text, chunk.kind):
        if what == DAMAGED and options.on_error == "replace":
            continue  # reported when it was replaced
        report.quote(what, text, at, size, int(not chunk.start.inside))


def _found(text, kind):
    """Each likely mistake in a text, where it first occurs, and how many bytes it takes in all."""
    tokens = [found for pattern in TOKENS for found in pattern.finditer(text)]
    if tokens:
        yield SPECIAL, *extent(tokens)
    data = text.encode()
    controls = len(data) - len(data.translate(None, CONTROL_BYTES))
    if controls:
        yield CONTROLS, CONTROL_CHARACTER.search(text).start(), controls
    for what, char in ((WINDOWS, "\r"), (DAMAGED, "\ufffd"), (MARKS, "\ufeff")):
        if char in text:
            yield what, text.index(char), text.count(char) * len(char.encode())
    if any(accent in text for accent in ACCENTS):
        joined = unicodedata.normalize("NFC", text)
        if joined != text:
            yield APART, first_difference(text, joined), len(data) - len(joined.encode())
    if any(char in text for char in "ﬀﬁﬂﬃﬄ\u00ad"):
        yield LIGATURES, *extent(list(TYPESET.finditer(text)))
    if any(sign in text for sign in ("Ã", "Â", "â€", "Ð")):  # faster than the expression
        misread = list(MISREAD.finditer(text))
        if misread:
            yield TWICE, *extent(misread)
    page = PAGE.match(text)
    if page and (not page["post"] or text.rstrip().endswith(">")):
        yield HTML, 0, len(data)
    elif "</" not in text:
        codes = [found for pattern in CODES for found in pattern.finditer(text)]
        if codes:
            yield HTML_CODES, *extent(codes)
    books = list(BOOK.finditer(text)) if "PROJECT GUTENBERG" in text else []
    if books:
        at, size = extent(books)
        yield GUTENBERG, at, len(data) - size
    if ";base64," in text:
        embedded = list(EMBEDDED.finditer(text))
        if embedded:
            yield BASE64, *extent(embedded)
    wholes = ((HEADING, TITLE),)
    if kind == "txt":
        wholes = ((JSON, OBJECT), (LIST, SHORT_LINES), (COLUMNS, TAB_LINES))
    for what, whole in wholes:
        if whole.match(text):
            yield what, 0, len(data)
    times = list(TIME.finditer(text)) if TIME.search(text, 0, HEAD_CHARS) else []
    if len(times) >= FEWEST_TIMES:
        yield TIMES, *extent(times)


def extent(matches: list[re.Match]) -> tuple[int, int]:
    """Where the first of some matches begins, and how many bytes all of them take."""
    return matches[0].start(), sum(len(found[0].encode()) for found in matches)


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
