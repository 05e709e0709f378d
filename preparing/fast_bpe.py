"""Byte-level BPE by gigatoken (Rust), where it is installed: many times as fast.

It trains the tokenizer that `tokenizers` trains, and gives the ids that tiktoken gives: whether it
is there is no part of a dataset's identity. It is young: each run compares its first ids with
tiktoken's, and tests/preparing/test_fast_bpe.py compares both.
"""

import contextlib
import functools
import itertools
import json
import os
import sys
import unicodedata
from collections.abc import Iterable

import numpy as np

from preparing import PrepareError
from tokenizer_bpe import Tokenizer

COMPARED_BYTES = 1 << 20  # bytes of the first text that tiktoken encodes too
# An encoder keeps the words that it has met, up to a byte for each byte of text: after this many
# bytes a new one takes its place.
RENEWED_BYTES = 1 << 27
SEPARATOR = b"\xff"  # of texts: no byte of UTF-8


# -- training --------------------------------------------------------------------------------------


def train(texts: Iterable[str], vocab_size: int) -> Tokenizer | None:
    """Train the tokenizer that Tokenizer.train does; None where that has to do it itself.

    That is without gigatoken, and for too little text. texts: as without_unassigned returns them.
    """
    try:
        import gigatoken
    except ImportError:
        return None
    texts = [text.encode() for text in texts]
    with silenced():
        _, merges = gigatoken.train_bpe(
            SEPARATOR.join(texts), vocab_size - 1, [], separator=SEPARATOR
        )
    # It continues when no pair occurs any more: some then come twice, or the last is in no text.
    if len({first + second for first, second in merges}) < vocab_size - 257:
        return None
    tokenizer = Tokenizer.from_merges(merges)
    encoder, last = new_encoder(tokenizer), vocab_size - 1
    if not any(last in encoder.encode(text) for text in texts):
        return None
    return tokenizer


@contextlib.contextmanager
def silenced():
    """Take what Rust prints off the terminal: it writes to the descriptors.

    Python's own errors still reach it: Ctrl-C ends the command meanwhile, with a sentence.
    """
    kept = {descriptor: os.dup(descriptor) for descriptor in (1, 2)}
    try:
        with open(os.devnull, "w") as nowhere:
            for descriptor in kept:
                os.dup2(nowhere.fileno(), descriptor)
        errors = open(kept[2], "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
        with contextlib.redirect_stderr(errors):
            yield
    finally:
        for descriptor, was in kept.items():
            os.dup2(was, descriptor)
            os.close(was)


# -- encoding --------------------------------------------------------------------------------------


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


# -- characters ------------------------------------------------------------------------------------


def has_unassigned(text: str) -> bool:
    """True if Python's version of Unicode does not know a character of the text.

    gigatoken and tiktoken are of different versions, so that a word may end at one for the other.
    """
    if text.isascii():
        return False
    return bool(unassigned()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any())


def without_unassigned(text: str) -> str:
    """A text with a line break for each such character."""
    if not has_unassigned(text):
        return text
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32).copy()
    codes[unassigned()[codes]] = ord("\n")
    return codes.tobytes().decode("utf-32-le")


@functools.cache
def unassigned() -> np.ndarray:
    """Mark the code points that are no characters, bool [0x110000]."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(sys.maxunicode + 1)])
