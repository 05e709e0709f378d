"""Chunks -> token ids, and which of them are replies.

Knows nothing of threads, output files or earlier chunks: the same chunk always gives the same ids.
gigatoken (Rust), if installed, computes the same ids as tiktoken many times faster. It is young, so
each run compares its first ids with tiktoken's, and tests/preparing/test_encoder.py more of them.
"""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import sys
import unicodedata
from dataclasses import dataclass

import numpy as np

from formats.conversation import ASSISTANT, Form, form_of
from formats.data_folder import IN_REPLY, TURN_BEGINS, dtype_for
from preparing import PrepareError
from preparing.chunks import Chunk, Options, Position
from preparing.cleaning import CleaningReport
from preparing.documents import UNUSABLE, Document, documents_of, hash64
from preparing.mistakes import ADDED, TOKENS, extent
from tokenizer_bpe import LONG_WORD, Tokenizer, TokenizerError, composed

COMPARED = 1 << 20  # characters at the beginning of a run that tiktoken encodes too
# An encoder caches every word that it meets, up to one byte per byte of text, so it is replaced by
# a new one every time that it has encoded this many characters.
RENEWED = 1 << 27
UNKNOWN = "characters that the tokenizer lacks: removed"  # the report's rule


@dataclass
class Encoded:
    """The documents of a chunk, or of several that go together, as tokens.

    ids: [tokens], each document followed by end-of-text, except for a part of a long document.
    mask: uint8 [tokens], as mask_of returns it; None if no document is a conversation. tokens,
    text_bytes, hashes: [documents], the hashes from hash64. whole: False for a part of a document.
    end: where the next chunk begins.
    """

    ids: np.ndarray
    mask: np.ndarray | None
    tokens: np.ndarray
    text_bytes: np.ndarray
    hashes: np.ndarray
    report: CleaningReport
    whole: bool
    end: Position

    @property
    def conversations(self) -> np.ndarray:
        """Which documents are conversations, bool [documents]."""
        if self.mask is None or not len(self.tokens):
            return np.zeros(len(self.tokens), bool)
        return np.logical_or.reduceat(self.mask > 0, np.cumsum(self.tokens) - self.tokens)

    def only(self, kept: np.ndarray) -> "Encoded":
        """The documents selected by kept, bool [documents]."""
        if kept.all():
            return self
        tokens = np.repeat(kept, self.tokens)
        return dataclasses.replace(
            self,
            ids=self.ids[tokens],
            mask=None if self.mask is None else self.mask[tokens],
            tokens=self.tokens[kept],
            text_bytes=self.text_bytes[kept],
            hashes=self.hashes[kept],
        )


def encode_chunks(tokenizer: Tokenizer, options: Options, chunks: list[Chunk]) -> Encoded:
    """Encode the documents of chunks from `together`, with ids in the dtype of the files.

    Raises InputError or TokenizerError, naming the file.
    """
    documents = []
    report = CleaningReport()
    for chunk in chunks:
        found, left_out = documents_of(chunk, options)
        report.merge(left_out)
        for document in found:
            notice_added(tokenizer, document.text, chunk, report)
        documents += found
    try:
        return _encoded(tokenizer, documents, chunks, report)
    except TokenizerError:  # rare, so documents are searched for it only now
        usable = list(_spelled(tokenizer, options, documents, report))
        return _encoded(tokenizer, usable, chunks, report)


def notice_added(tokenizer: Tokenizer, text: str, chunk: Chunk, report: CleaningReport) -> None:
    """Count what a text spells of the tokenizer's special tokens, such as SmolLM2's <filename>."""
    pattern = added_tokens(tokenizer)
    tokens = list(pattern.finditer(text)) if pattern else []
    if tokens:
        report.quote(ADDED, text, *extent(tokens), int(not chunk.start.inside))


@functools.cache
def added_tokens(tokenizer: Tokenizer) -> re.Pattern | None:
    """Matches the special tokens that documents.TOKENS does not find; None if there are none."""
    found = [pattern.fullmatch for pattern in TOKENS]
    special = tokenizer.specials.keys() - tokenizer.ordinary
    names = [name for name in special if not any(match(name) for match in found)]
    return re.compile("|".join(map(re.escape, names))) if names else None


def _encoded(tokenizer, documents, chunks, report):
    """The documents of chunks as tokens. Raises TokenizerError for an unknown character."""
    if tokenizer.composes:  # here rather than in encode(), so that text_bytes fit the ids
        documents = [doc.corrected(lambda text, _: composed(text), report) for doc in documents]
    form = form_of(tokenizer)
    runs = [form.runs(document.turns) or [document.text] for document in documents]
    texts = [run for of_one in runs for run in of_one if isinstance(run, str)]
    found = iter(fast_encoder(tokenizer).encode(texts))
    encoded = [_with_markers(of_one, found) for of_one in runs]
    mask = None
    if any(document.turns for document in documents):
        both = zip(documents, encoded, strict=True)
        mask = np.concatenate([mask_of(tokenizer, form, document, ids) for document, ids in both])
    whole = all(chunk.whole for chunk in chunks)
    dtype = dtype_for(tokenizer.vocab_size)
    end = np.array([tokenizer.eot_id] if whole else [], dtype)
    none = np.array([], dtype)
    parts = [part for ids in encoded for part in (ids, end)]
    return Encoded(
        ids=np.concatenate([none, *parts], dtype=dtype, casting="unsafe"),
        mask=mask,
        tokens=np.fromiter(map(len, encoded), np.int64) + len(end),
        text_bytes=np.fromiter((token_lengths(tokenizer)[ids].sum() for ids in encoded), np.int64),
        hashes=np.fromiter((hash64(doc.text.encode()) for doc in documents), np.uint64),
        report=report,
        whole=whole,
        end=chunks[-1].end,
    )


def _with_markers(runs, found):
    """The ids of a document from its runs. found: iterates over the ids of the runs of text."""
    ids = [next(found) if isinstance(run, str) else np.array([run], np.uint32) for run in runs]
    return ids[0] if len(ids) == 1 else np.concatenate(ids)


def _spelled(tokenizer, options, documents, report):
    """The documents that the tokenizer can encode, after what options.on_error asks for.

    Raises TokenizerError for the first other document, leaves such documents out, or removes their
    unknown characters. U+FFFD does not replace these, since a tokenizer may lack it too.
    """
    remove = functools.partial(_without_unknown, tokenizer)
    for document in documents:
        if options.on_error == "replace":
            document = document.corrected(remove, report)
        try:
            tokenizer.encode(document.text)
        except TokenizerError as error:
            if options.on_error == "stop":
                raise TokenizerError(f"{document.place}: {error}; {_advice(tokenizer)}") from None
            example = f"{os.path.basename(document.place)}: {error}"
            report.add(UNUSABLE, 1, len(document.text.encode()), [example])
            continue
        if document.text.strip():
            yield document


def _without_unknown(tokenizer, text, report):
    """The text without the characters that the tokenizer cannot encode; reports them."""
    unknown = {char for char in set(text) if not _is_known(tokenizer, char)}
    if not unknown:
        return text
    known = "".join(char for char in text if char not in unknown)
    removed = len(text.encode()) - len(known.encode())
    report.quote(UNKNOWN, text, min(map(text.index, unknown)), removed)
    return known


@functools.cache
def _is_known(tokenizer, char):
    try:
        tokenizer.encode(char)
    except TokenizerError:
        return False
    return True


def _advice(tokenizer):
    other = "choose another --tokenizer"
    if tokenizer.kind == "char":
        other = "begin with new weights and --tokenizer char, which encodes all of a text"
    return (
        "--on_error replace removes such characters, --on_error skip leaves such documents out;"
        f" or {other}"
    )


def mask_of(tokenizer: Tokenizer, form: Form, document: Document, ids: np.ndarray) -> np.ndarray:
    """The role of each token in a conversation, uint8 [len(ids) + 1]; zeros for a plain document.

    ids: the document's tokens without end-of-text, which is the last entry of the mask. IN_REPLY:
    set for the assistant's message and for what ends it: <|im_end|>, or in the plain form the next
    speaker's name or end-of-text. TURN_BEGINS: set for the first token of any other speaker's turn.
    """
    mask = np.zeros(len(ids) + 1, np.uint8)
    if not document.turns:
        return mask
    parts = form.parts(document.turns)
    replies = np.array([turn.speaker == ASSISTANT for turn in document.turns])
    in_reply = np.zeros(len(parts) + 1, bool)  # per part, and for end-of-text
    messages = np.flatnonzero(replies) * len(form.turn) + form.opening
    in_reply[messages] = in_reply[messages + 1] = True
    # The byte where each part and each token begins, then where the last ends; a marker counts 1.
    sizes = [len(part.encode()) if isinstance(part, str) else 1 for part in parts]
    part_begins = np.cumsum([0, *sizes])
    begins = np.cumsum(np.append(0, np.maximum(token_lengths(tokenizer)[ids], 1)))
    part_of = np.searchsorted(part_begins, begins, side="right") - 1
    mask[in_reply[part_of]] = IN_REPLY
    turn_begins = part_begins[: -1 : len(form.turn)]
    mask[np.searchsorted(begins, turn_begins[~replies])] |= TURN_BEGINS
    return mask


@functools.cache
def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of each id's text, int64 [vocab_size].

    0 for end-of-text, for the markers of conversations and for unused ids.
    """
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    no_text = {tokenizer.eot_id, *form_of(tokenizer).markers.values()}
    for n in tokenizer.texts.keys() - no_text:
        lengths[n] = len(tokenizer.texts[n])
    return lengths


# -- gigatoken, if it is installed


def new_encoder(tokenizer: Tokenizer):
    """gigatoken's encoder for a tokenizer; None if it is not installed, or does not support it."""
    if tokenizer.kind == "char" or tokenizer.is_for_library:
        return None
    # Without added tokens: it is not given texts that spell ordinary ones; special ones are text.
    description = tokenizer.description | {"added_tokens": [], "normalizer": None}
    with contextlib.suppress(Exception):  # it defines no exception types
        import awkward  # noqa: F401 - gigatoken returns lists without it
        import gigatoken

        return gigatoken.Tokenizer.from_json(json.dumps(description))
    return None


class FastEncoder:
    """Gives the same ids as its tokenizer, with gigatoken where possible.

    If the tokenizer composes, the text must be in NFC already. Threads may share an instance:
    gigatoken and tiktoken release Python's GIL.
    """

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.encoder = new_encoder(tokenizer)
        self.encoded = 0  # characters

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """The token ids of each text, uint32 [tokens]. The texts must have no lone surrogates."""
        others = map(self.tokenizer.spells_ordinary, texts)
        if not self.encoder or not texts or any(others) or any(map(is_for_tiktoken, texts)):
            return [self.tokenizer.encode(text) for text in texts]
        found = self.encoder.encode_batch(texts, parallel=False).layout
        ends = found.offsets.data.tolist()
        ids = [found.content.data[first:last] for first, last in itertools.pairwise(ends)]
        compared = ids if self.encoded < COMPARED else []
        if not all(map(np.array_equal, compared, map(self.tokenizer.encode, texts))):
            raise PrepareError(
                "gigatoken gives this text other ids than tiktoken does; install its newest"
                " version (python -m pip install -U gigatoken), and the same command continues"
            )
        before = self.encoded // RENEWED
        self.encoded += sum(map(len, texts))
        if self.encoded // RENEWED > before:
            self.encoder = new_encoder(self.tokenizer)
        return ids


@functools.cache
def fast_encoder(tokenizer: Tokenizer) -> FastEncoder:
    """The encoder of a tokenizer, shared by all threads."""
    return FastEncoder(tokenizer)


def encoder_name(tokenizer: Tokenizer) -> str:
    """The name of the package that encodes, or "characters"."""
    if tokenizer.kind == "char":
        return "characters"
    if tokenizer.is_for_library:
        return "tokenizers"
    return "gigatoken" if fast_encoder(tokenizer).encoder else "tiktoken"


def is_for_tiktoken(text: str) -> bool:
    """True for a text to which gigatoken and tiktoken may give different ids.

    Either it has a character that Python's Unicode version does not know: the two packages are
    built on different versions and may split words there differently. Or it has so much white space
    in a row that tiktoken encodes it in parts.
    """
    blocks = range(0, len(text) - LONG_WORD + 1, LONG_WORD)
    if any(text[at : at + LONG_WORD].isspace() for at in blocks):
        return True
    if text.isascii():
        return False
    return bool(unassigned()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].any())


@functools.cache
def unassigned() -> np.ndarray:
    """Which code points are unassigned in Python's Unicode version, bool [0x110000]."""
    return np.array([unicodedata.category(chr(code)) == "Cn" for code in range(sys.maxunicode + 1)])
