"""Chunks -> token ids, and which of them are replies, in a worker process.

Independent of processes, of files to write, and of what came before: the same chunk always gives
the same ids.
"""

import contextlib
import dataclasses
import functools
import unicodedata
from dataclasses import dataclass

import numpy as np

from formats.conversation import REPLY
from formats.data_folder import IN_REPLY, TURN_BEGINS
from preparing.arguments import Options
from preparing.chunks import CHUNK, Chunk
from preparing.cleaning import CleaningReport
from preparing.copies import band_keys, hash64
from preparing.fast_bpe import fast_bpe
from preparing.records import Document, documents_of
from tokenizer_bpe import Tokenizer, TokenizerError, safe_cut


@dataclass
class Encoded:
    """The documents of a chunk.

    ids: their tokens, each document ended by end-of-text; of a part of a long document, only its
    tokens. mask: of the ids, as mask_of gives it; None where no document is a conversation.
    tokens, text_bytes, hashes: one entry a document; a hash is 64 bits of BLAKE2b of the text,
    without the white space at its end. keys: those of near-copies, where they are looked for.
    chunk: where they are from, without its data.
    """

    ids: np.ndarray
    mask: np.ndarray | None
    tokens: np.ndarray
    text_bytes: np.ndarray
    hashes: np.ndarray
    keys: np.ndarray | None
    report: CleaningReport
    chunk: Chunk


def encode_chunk(tokenizer: Tokenizer, dtype: str, options: Options, chunk: Chunk) -> Encoded:
    """Encode the documents of a chunk as ids of type `dtype`.

    Raises InputError or TokenizerError, naming the file.
    """
    documents, report = documents_of(chunk, options)
    eot = np.array([tokenizer.eot_id] if chunk.whole else [], np.uint32)
    ids = [eot[:0]]
    masks = []
    tokens = []
    text_bytes = []
    hashes = []
    for document in documents:
        if tokenizer.composes:  # so that it counts the text of the ids
            document = document.corrected(_composed, report)
        try:
            found = encode(tokenizer, document.text)
        except TokenizerError as error:
            place = f"{chunk.path}, from offset {chunk.start.offset:,}"
            raise TokenizerError(f"{place}: {error}") from None
        ids += [found, eot]
        masks.append(mask_of(document, found, tokenizer, len(eot)))
        tokens.append(len(found) + len(eot))
        data = document.text.encode()
        text_bytes.append(len(data))
        hashes.append(hash64(data.rstrip() if chunk.ends else data))
    ids = np.concatenate(ids)
    looks_for_near_copies = options.dedupe == "near" and chunk.whole
    is_chat = any(document.turns for document in documents)
    return Encoded(
        ids=ids.astype(dtype),
        mask=np.concatenate(masks) if is_chat else None,
        tokens=np.array(tokens, np.int64),
        text_bytes=np.array(text_bytes, np.int64),
        hashes=np.array(hashes, np.uint64),
        keys=band_keys([d.text for d in documents]) if looks_for_near_copies else None,
        report=report,
        chunk=dataclasses.replace(chunk, data=b""),
    )


def _composed(text, _):
    return unicodedata.normalize("NFC", text)


def mask_of(document: Document, ids: np.ndarray, tokenizer: Tokenizer, ends: int) -> np.ndarray:
    """What each token of a document is in a conversation, uint8 [len(ids) + ends].

    ids: of its text. ends: how many end-of-text tokens follow. IN_REPLY: the assistant says it, or
    it is what ends a reply: the name of who speaks next, or end-of-text. TURN_BEGINS: the first
    token of a turn that is not the assistant's. Else 0.
    """
    mask = np.zeros(len(ids) + ends, np.uint8)
    if not document.turns:
        return mask
    turns = document.turns
    sizes = np.array([len(part.encode()) for part in turns])  # names and what they say, in turn
    begins = np.cumsum(sizes) - sizes
    replies = np.array([name == REPLY for name in turns[::2]])
    in_reply = np.concatenate(([False], np.repeat(replies, 2)[:-1]))  # a name ends the turn before
    lengths = token_lengths(tokenizer)[ids]
    first_bytes = np.cumsum(lengths) - lengths
    part_of = np.searchsorted(begins, first_bytes, side="right") - 1
    mask[: len(ids)] = np.where(in_reply[part_of], IN_REPLY, 0)
    mask[len(ids) :] = IN_REPLY if replies[-1] else 0
    mask[np.searchsorted(first_bytes, begins[::2][~replies])] |= TURN_BEGINS
    return mask


@functools.cache
def token_lengths(tokenizer: Tokenizer) -> np.ndarray:
    """UTF-8 bytes of each id's text, int64 [vocab_size]; 0 for end-of-text and for unused ids."""
    lengths = np.zeros(tokenizer.vocab_size, np.int64)
    for n in range(tokenizer.vocab_size):
        if n != tokenizer.eot_id:
            with contextlib.suppress(KeyError):
                lengths[n] = len(tokenizer.decode_bytes([n]))
    return lengths


def encode(tokenizer: Tokenizer, text: str) -> np.ndarray:
    """The ids of a text, uint32; in parts, because encoding takes many times its text in memory."""
    encoder = fast_bpe(tokenizer)
    parts = []
    while len(text) > 2 * CHUNK:
        cut = safe_cut(text, CHUNK)
        if not cut:
            break
        parts.append(encoder.encode(text[:cut]))
        text = text[cut:]
    return np.concatenate([*parts, encoder.encode(text)])
