"""Recognizes files that are not text, and knows what converts them to text."""

import codecs
import re

HEAD_CHARS = 1 << 13  # characters at the beginning of a file that are examined
CONTROL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
# The largest share of control characters in a text: in valid UTF-8, and in other bytes.
MOST_CONTROL = 0.3
MOST_CONTROL_BROKEN = 0.02
PANDOC = "pandoc -t plain --wrap=none -o FILE.txt FILE converts it"
OFFICE = "soffice --headless --convert-to txt FILE converts it"
# Name, suffixes, pattern of the first bytes, remedy.
FORMATS = (
    ("a PDF", (".pdf",), rb"%PDF-", "pdftotext FILE FILE.txt converts it"),
    ("a Word document", (".docx", ".docm"), rb"PK\x03\x04.*word/", PANDOC),
    ("an OpenDocument text", (".odt",), rb"PK\x03\x04.*opendocument\.text", PANDOC),
    ("an e-book", (".epub",), rb"PK\x03\x04.*epub\+zip", PANDOC),
    ("an e-book", (".mobi", ".azw", ".azw3"), rb".{60}BOOKMOBI", "Calibre's ebook-convert does it"),
    ("an RTF document", (".rtf",), rb"\{\\rtf", PANDOC),
    (
        "a spreadsheet",
        (".xlsx", ".xlsm", ".xls", ".ods"),
        rb"PK\x03\x04.*(?:xl/|opendocument\.spreadsheet)",
        "save it as CSV in UTF-8",
    ),
    ("a presentation", (".pptx", ".ppt", ".odp"), rb"PK\x03\x04.*ppt/", OFFICE),
    ("a document of an older Office", (".doc",), rb"\xd0\xcf\x11\xe0", OFFICE),
    (
        "an archive",
        (".zip", ".tar", ".tgz", ".7z", ".rar", ".bz2", ".xz"),
        rb"PK\x03\x04|7z\xbc\xaf|Rar!\x1a|BZh\d1AY|\xfd7zXZ|.{257}ustar(?:\0|  \0)",
        "unpack it, and give its files or their folder",
    ),
    (
        "compressed",
        (),
        rb"\x1f\x8b\x08|\x28\xb5\x2f\xfd",
        "unpack it, or let its name end in .gz or .zst",
    ),
    ("a Parquet file", (), rb"PAR1", "let its name end in .parquet"),
    (
        "an Arrow file",
        (".arrow", ".feather"),
        rb"ARROW1\0|\xff{4}",
        "save it as Parquet: datasets.Dataset.from_file(FILE).to_parquet('FILE.parquet')",
    ),
    (
        "a notebook",
        (".ipynb",),
        rb'\{\s*"cells": \[\s*\{\s*"cell_type"',
        "jupyter nbconvert --to markdown FILE converts it",
    ),
    ("a MIDI file", (".mid", ".midi"), rb"MThd", "midi2abc FILE -o FILE.abc makes text of it"),
    ("a pointer to a file in Git LFS", (), rb"version https://git-lfs", "git lfs pull fetches it"),
)
BY_ENDING = {ending: row for row in FORMATS for ending in row[1]}
# One group per format; the patterns have no groups of their own.
BEGINNINGS = re.compile(b"|".join(b"(%s)" % row[2] for row in FORMATS), re.DOTALL)


def foreign(ending: str, head: bytes = b"") -> str:
    """Names the format of a file that is not text, and the remedy; "" if it looks like text.

    ending: suffix of the file's name, in lower case, after removing .gz or .zst. head: its first
    bytes.
    """
    found = BY_ENDING.get(ending)
    if beginning := BEGINNINGS.match(head):
        found = found or FORMATS[beginning.lastindex - 1]
    return f"{found[0]}; {found[3]}" if found else ""


def binary(head: bytes, text: str) -> str:
    """As foreign(), for binary data. head: a file's first bytes. text: what they decode to."""
    text = text[:HEAD_CHARS]
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
        most = MOST_CONTROL
    except UnicodeDecodeError:
        most = MOST_CONTROL_BROKEN
    controls = len(CONTROL.findall(text))
    if controls <= most * len(text):
        return ""
    return (
        f"binary data, not text: {controls / len(text):.0%} of it are control characters. If it is"
        " UTF-16, give --encoding utf-16-le or utf-16-be"
    )
