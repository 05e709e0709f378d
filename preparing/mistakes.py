"""Likely mistakes in a text, such as HTML: how each is recognized, and what to do about it.

Such text is kept and counted, because it may be meant. Those of a record or of a conversation are
recognized in documents.py, and those of the whole text in summary.py.
"""

import itertools
import re
import unicodedata

from preparing.chunks import Chunk, Options
from preparing.cleaning import TYPESET, CleaningReport, first_difference

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


def is_sorted(texts: list[str]) -> bool:
    """True if these are many short texts, nearly all in alphabetical order."""
    if len(texts) < MANY or sum(map(len, texts)) > SHORT_CHARS * len(texts):
        return False
    start = max(0, len(texts) - 10 * MANY) // 2
    return _in_order(texts[start : start + 10 * MANY]) and _in_order(texts)  # the first is fast


def _in_order(texts):
    words = [re.sub(r"\d", "", text).lower() for text in texts]
    pairs = [(a, b) for a, b in itertools.pairwise(words) if a != b]
    return len(pairs) >= MANY / 2 and sum(a < b for a, b in pairs) >= IN_ORDER * len(pairs)
