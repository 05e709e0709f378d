"""Text in other encodings than UTF-8: what some bytes seem to be, and reading what they are.

Knows bytes and Python's codecs; no files and no documents.
"""

import codecs
import re
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator

MARKS = {  # of byte order; that of UTF-32 begins with that of UTF-16
    codecs.BOM_UTF32_LE: "utf-32-le",
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
BROKEN = re.compile("[\udc80-\udcff]")  # bytes that are no UTF-8, as surrogateescape has them
MOST_BROKEN = 0.3  # of the bytes of a text in the Latin alphabet are no UTF-8


def seeming(data: bytes, offset: int = 0) -> str:
    """The encoding that bytes seem to have, as --encoding takes it; "" where nothing tells.

    By a byte order mark, by zero bytes at every other place, or by a few bytes that are no UTF-8 in
    text without any other special characters. offset: of the bytes in their file.
    """
    for mark, name in MARKS.items():
        if data.startswith(mark):
            return name
    zeros = [data[start::2].count(0) for start in (0, 1)] if b"\0" in data else [0, 0]
    if len(data) > 3 and max(zeros) > len(data) / 4 and min(zeros) < len(data) / 20:
        little_endian = zeros[1 - offset % 2] == max(zeros)
        return "utf-16-le" if little_endian else "utf-16-be"
    text = data.decode("utf-8", "surrogateescape")
    broken = len(BROKEN.findall(text))
    special = sum(character > "\x7f" for character in text) - broken
    if not special < broken < MOST_BROKEN * len(data) or b"\0" in data:
        return ""
    has_c1 = re.search(b"[\x80-\x9f]", data)  # quotes and dashes of Windows, in Latin-1 nothing
    return "cp1252" if has_c1 else "latin-1"


def broken_bytes(data: bytes) -> int:
    """How many bytes are no UTF-8."""
    return len(BROKEN.findall(data.decode("utf-8", "surrogateescape")))


def recoded(blocks: Iterable[bytes], encoding: str, skip: int) -> Iterator[bytes]:
    """The text of `blocks` in UTF-8, from byte `skip` of that on.

    What is broken in the encoding becomes a byte 0xff, which is broken in UTF-8 as well: so what is
    done about it, and said, is the same.
    """
    decoder = codecs.getincrementaldecoder(encoding)("prepare_data.broken")
    for text in _decoded(decoder, blocks):
        data = text.encode("utf-8", "surrogateescape")
        if data[skip:]:
            yield data[skip:]
        skip = max(0, skip - len(data))


def _decoded(decoder, blocks):
    """The text of the blocks, and of what is left at the end."""
    for block in blocks:
        yield decoder.decode(block)
    yield decoder.decode(b"", final=True)


def _broken(error):
    """An error handler for codecs: a broken place becomes byte 0xff."""
    return "\udcff", error.end


codecs.register_error("prepare_data.broken", _broken)


def encoding(name: str) -> str | None:
    """A type for argparse: an encoding by the name that Python gives it; None for UTF-8."""
    try:
        found = codecs.lookup(name)
        "".encode(name)  # refuses what is no encoding of text, as base64
    except (LookupError, ValueError):
        raise ArgumentTypeError(
            f"{name} is no encoding that Python knows; some are latin-1, cp1252, utf-16, gb18030,"
            " shift_jis, koi8-r"
        ) from None
    return None if found.name == "utf-8" else found.name
