"""Byte-level BPE by gigatoken (Rust), where it is installed: many times as fast.

It gives the ids that tiktoken gives: whether it is there is no part of a dataset's identity. It is
young: each run compares its first ids with tiktoken's, and tests/preparing/test_fast_bpe.py
compares more.
"""

import contextlib
import functools
import itertools
import json
import sys
import unicodedata

import numpy as np

from preparing import PrepareError
from tokenizer_bpe import Tokenizer

COMPARED_BYTES = 1 << 20  # bytes of the first text that tiktoken encodes too
# An encoder keeps the words that it has met, up to a byte for each byte of text: after this many
# bytes a new one takes its place.
RENEWED_BYTES = 1 << 27


def new_encoder(tokenizer: Tokenizer):
    """gigatoken's encoder for a tokenizer; None where it has none for it, or is not installed."""
    if tokenizer.kind == "char":
        return None
    # Text that spells a special token is text: gigatoken knows of none.
    description = tokenizer.description | {"added_tokens": [], "normalizer": None}
    with contextlib.suppress(Exception):  # it has no errors of its own
        import gigatoken

        return gigatoken.Tokenizer.from_json(json.dumps(description))
    return None


class FastBPE:
    """Encodes as its tokenizer does, whose text is in NFC already where it composes.

    Threads may share it: gigatoken and tiktoken release Python's lock.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.encoder = new_encoder(tokenizer)
        self.compared = self.since_new = 0  # bytes

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The token ids of each text, uint32 [tokens]. The texts have no lone surrogates."""
        if not self.encoder or not texts or any(map(has_unassigned, texts)):
            return [self.tokenizer.encode(text) for text in texts]
        found = self.encoder.encode_batch(texts, parallel=False).layout
        ends = found.offsets.data.tolist()
        ids = [found.content.data[first:last] for first, last in itertools.pairwise(ends)]
        size = sum(map(len, texts))
        if self.compared < COMPARED_BYTES:
            self.compared += size
            if not all(map(np.array_equal, ids, map(self.tokenizer.encode, texts))):
                raise PrepareError(
                    "gigatoken gives this text other ids than tiktoken does; install its newest"
                    " version (python -m pip install -U gigatoken), and the same command continues"
                )
        self.since_new += size
        if self.since_new > RENEWED_BYTES:
            self.since_new = 0
            self.encoder = new_encoder(self.tokenizer)
        return ids


@functools.cache
def fast_bpe(tokenizer: Tokenizer) -> FastBPE:
    """The one encoder of a tokenizer, for all threads."""
    return FastBPE(tokenizer)


def encoder_name(tokenizer: Tokenizer) -> str:
    """Name what encodes text here."""
    if tokenizer.kind == "char":
        return "characters"
    return "gigatoken" if fast_bpe(tokenizer).encoder else "tiktoken"


def has_unassigned(text: str) -> bool:
    """True if Python's version of Unicode does not know a character of the text.

    gigatoken and tiktoken are of different versions, so that a word may end at one for the other.
    """
    if text.isascii():
        return False
    return bool(unassigned()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any())


@functools.cache
def unassigned() -> np.ndarray:
    """Mark the code points that are no characters, bool [0x110000]."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(sys.maxunicode + 1)])
