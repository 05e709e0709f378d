"""What a text holds that was probably not meant: it is kept and counted, and the summary says so.

Knows single documents only. cleaning.py corrects and leaves out.
"""

import re

from preparing.chunks import Chunk, Options
from preparing.cleaning import CleaningReport
from preparing.tables import is_object

SHOWN_BEFORE = 30  # characters that the report shows before a place, and from it on
SHOWN_AFTER = 60
IN_LINES = "<|endoftext|> within lines, taken as the end of a document"
SPECIAL = "special tokens, as letters"
CONTROL = "control characters, such as NUL"
DAMAGED = "U+FFFD, for characters that another program could not read"
HTML = "HTML with its markup"
JSON = "JSON, as plain text"
NO_REPLY = "conversations in which the assistant says nothing"
# What to do about each.
ADVICE = {
    IN_LINES: "put it in quotes where it is part of the text",
    SPECIAL: "remove them, or write <|endoftext|> where a document ends",
    CONTROL: "--clean removes them",
    DAMAGED: "convert the original again; --clean removes them",
    HTML: "pandoc -t plain -o FILE.txt FILE.html converts a page",
    JSON: "let the name of the file end in .jsonl or .json, or give --stdin_format jsonl",
    NO_REPLY: "training with loss_on = assistant skips them",
}
# Of GPT, Llama, Qwen, Gemma, DeepSeek, BERT and others. Each expression begins with one character,
# which Python looks for fast. In code, (?P<s> and list<s> are none.
TOKENS = (
    re.compile(
        r"<(?:\|\w{2,40}\|>|｜[^｜<>]{2,40}｜>|/s>|(?<!\w<)s>|</?SYS>>|(?:pad|unk|bos|eos)>"
        r"|(?:start|end)_of_turn>)"
    ),
    re.compile(r"\[(?:/?INST|BOS|EOS|PAD|UNK|CLS|SEP|MASK)\]"),
)
PAGE = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*|<!--.*?-->\s*)*<(?:!doctype html|html|head)\b",
    re.IGNORECASE | re.DOTALL,
)
CONTROL_BYTES = bytes({*range(0x20), 0x7F} - set(b"\t\n\v\f\r"))
CONTROL_CHARACTER = re.compile(f"[{re.escape(CONTROL_BYTES.decode())}]")


def notice(text: str, chunk: Chunk, options: Options, report: CleaningReport) -> None:
    """Count what is in the text of a document, or of a part of one, of a chunk."""
    for what, at, size in _found(text, chunk.kind):
        if what == DAMAGED and options.on_error == "replace":
            continue  # that is reported as what it was before
        shown = text[max(0, at - SHOWN_BEFORE) : at + SHOWN_AFTER]
        report.add(what, int(not chunk.start.inside), size, [shown])


def _found(text, kind):
    """What was probably not meant, where it is first, and its bytes."""
    tokens = [found for pattern in TOKENS for found in pattern.finditer(text)]
    if tokens:
        yield SPECIAL, tokens[0].start(), sum(len(found[0].encode()) for found in tokens)
    data = text.encode()
    controls = len(data) - len(data.translate(None, CONTROL_BYTES))
    if controls:
        yield CONTROL, CONTROL_CHARACTER.search(text).start(), controls
    if "\ufffd" in text:
        yield DAMAGED, text.index("\ufffd"), 3 * text.count("\ufffd")
    if PAGE.match(text):
        yield HTML, 0, len(data)
    if kind == "txt" and is_object(text.lstrip().partition("\n")[0]):
        yield JSON, 0, len(data)
