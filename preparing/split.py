"""Decides which text is for validation: a given share of the bytes, equal documents alike.

Knows documents by their hashes and sizes, and by their token ids where one is cut.
"""

import functools
from dataclasses import dataclass

import numpy as np

from formats.data_folder import TURN_BEGINS
from preparing.encoder import token_lengths
from tokenizer_bpe import Tokenizer

# Documents of at most this share of validation's bytes are drawn whole. The first holds for a text
# that is fully known, the second for a longer one, where enough of them must be drawn by chance.
WHOLE = 1 / 8
WHOLE_BY_CHANCE = 1 / 32
SHORT_BYTES = 4096  # documents up to this size are drawn whole if the share allows it
LONG_BYTES = 1 << 20  # documents above this size never are
BLOCK = 1 << 20  # tokens processed at a time
COMPARED = 100_000_000  # tokens of each split, at most, that are compared
SAMPLED = np.uint64(15)  # a hash without these bits is compared, one in 16
FEWEST_SAMPLED = 20  # sequences that say something about the text
CACHED = 1 << 15  # sequences hashed at a time, which fit in a processor's cache
MIXER = np.uint64(0x9E3779B97F4A7C15)  # an odd number without a pattern
LOOK = 1 << 14  # tokens on either side of a place that are searched for a better place to cut


@dataclass
class Draw:
    """How much of each document is for validation; nothing else decides it.

    fraction: validation's share of all bytes. whole: documents up to this many bytes are drawn
    whole; of a longer one, only the end is. known: {hash: share}, if all documents are known.
    """

    fraction: float
    whole: float
    known: dict[int, float] | None = None

    def shares(self, hashes: np.ndarray, sizes: np.ndarray, uncut: np.ndarray) -> np.ndarray:
        """The share of each document, at its end, that is for validation, float64 [documents].

        hashes: uint64 [documents]. sizes: bytes. uncut: bool, documents never to be cut.
        """
        if self.known is not None:
            return np.array([self.known.get(value, 0) for value in hashes.tolist()])
        shares, ranks = self._ranked(hashes, sizes, uncut)
        return np.where(ranks < 1, shares, 0)

    def _ranked(self, hashes, sizes, uncut):
        """The share of each document if it is drawn, and its rank; the lowest ranks are drawn.

        If the hashes are evenly distributed, ranks below 1 hold about `fraction` of the bytes.
        """
        shares = np.maximum(self.whole / 2 / np.maximum(sizes, 1), self.fraction)
        shares = np.where(uncut | (sizes <= self.whole), 1, shares)
        return shares, hashes / 2.0**64 * shares / self.fraction

    def fitted(
        self, hashes: np.ndarray, sizes: np.ndarray, uncut: np.ndarray, copies: np.ndarray
    ) -> np.ndarray:
        """The shares that bring validation closest to its fraction of these distinct documents.

        sizes: bytes of all copies of a document together. copies: how many there are. Copies of a
        short document that are together too long to be drawn whole stay in training.
        """
        shares, ranks = self._ranked(hashes, sizes, uncut)
        shares[(sizes > self.whole) & (sizes <= copies * self.whole)] = 0
        order = np.argsort(ranks)
        drawn = np.append(0, np.cumsum((shares * sizes)[order]))
        count = np.argmin(np.abs(drawn - self.fraction * sizes.sum()))
        shares[order[count:]] = 0
        return shares


def draw_by_chance(fraction: float, text_bytes: float) -> Draw:
    """The draw for a text that is too long to read first. text_bytes: roughly its size."""
    share = min(fraction, 1 - fraction) * text_bytes
    return Draw(fraction, min(max(SHORT_BYTES, WHOLE_BY_CHANCE * share), LONG_BYTES))


def draw_of(fraction: float, hashes: np.ndarray, sizes: np.ndarray, uncut: np.ndarray) -> Draw:
    """The draw for a text whose documents are all known. Arguments: as in Draw.shares."""
    hashes, place, copies = np.unique(hashes, return_inverse=True, return_counts=True)
    sizes = np.bincount(place, sizes)
    uncut = np.bincount(place, uncut) > 0
    whole = WHOLE * min(fraction, 1 - fraction) * sizes.sum()
    for most in (max(SHORT_BYTES, whole), whole):
        draw = Draw(fraction, most)
        shares = draw.fitted(hashes, sizes, uncut, copies)
        val = shares @ sizes
        if is_fair(fraction, sizes.sum() - val, val, 0.25):
            break
    draw.known = dict(zip(hashes.tolist(), shares.tolist(), strict=True))
    return draw


def is_fair(fraction: float, train: float, val: float, slack: float = 0.5) -> bool:
    """True if training gets text and validation's share is within slack * fraction of `fraction`.

    train, val: bytes.
    """
    return train > 0 and abs(val / (train + val) - fraction) <= slack * fraction


@functools.cache
def _edges(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Which ids end a line, and which begin with a whole character: bool [vocab_size] each."""
    ends_line = np.zeros(tokenizer.vocab_size, bool)
    begins = np.zeros(tokenizer.vocab_size, bool)
    for n in np.flatnonzero(token_lengths(tokenizer)).tolist():
        text = tokenizer.texts[n]
        ends_line[n] = text.endswith(b"\n")
        begins[n] = text[0] & 0xC0 != 0x80
    return ends_line, begins


def find_cut(
    tokenizer: Tokenizer, ids: np.ndarray, end_bytes: float, mask: np.ndarray | None = None
) -> int:
    """Where to cut so that roughly the last `end_bytes` bytes follow; 0 if there is no such place.

    Cuts near there at the beginning of a document, else of a turn, a line or a character. ids,
    mask: [tokens], may be memory-mapped.
    """
    at = len(ids)
    left = end_bytes
    while at > 0 and left > 0:
        first = max(0, at - BLOCK)
        from_end = np.cumsum(token_lengths(tokenizer)[ids[first:at]][::-1])
        at -= min(int(np.searchsorted(from_end, left)) + 1, at - first)
        left -= from_end[-1]
    reach = min(LOOK, max(8, min(at, len(ids) - at) // 2))
    low = max(1, at - reach)
    high = min(len(ids) - 1, at + reach + 1)
    before = np.array(ids[low - 1 : high - 1])
    ends_line, begins = _edges(tokenizer)
    kinds = [before == tokenizer.eot_id, ends_line[before], begins[ids[low:high]]]
    if mask is not None:
        kinds.insert(1, mask[low:high] & TURN_BEGINS > 0)
    for found in map(np.flatnonzero, kinds):
        if len(found):
            return low + int(found[np.argmin(np.abs(found + low - at))])
    return 0


# -- what both splits have


def repeated(train: np.ndarray, val: np.ndarray, length: int) -> tuple[float, np.ndarray]:
    """The share of val in sequences that train has, too, and their places in val, commonest first.

    Estimated from a sample, which follows from the tokens. train, val: ids, may be memory-mapped.
    length: tokens of a sequence, a power of two.
    """
    val = val[:COMPARED]
    hashes, places = map(np.concatenate, zip(*_sampled(val, length), strict=True))
    if len(hashes) < FEWEST_SAMPLED:
        return 0, places[:0]
    known, index, counts = np.unique(hashes, return_inverse=True, return_counts=True)
    in_both = np.zeros(len(known), bool)
    for hashes, _ in _sampled(train[:COMPARED], length):
        at = np.searchsorted(known[:-1], hashes)
        in_both[at[known[at] == hashes]] = True
    is_known = in_both[index]
    places = places[is_known]
    covered = np.minimum(np.diff(places, append=len(val)), length).sum()
    return covered / len(val), places[np.argsort(-counts[index][is_known], kind="stable")]


def _sampled(ids, length):
    """The hashes of some sequences of tokens, and their places, a block at a time."""
    for at in range(0, max(1, len(ids) - length + 1), CACHED):
        hashes = ids[at : at + CACHED + length - 1].astype(np.uint64)
        step = 1
        while step < length:  # each becomes the hash of twice as many tokens
            hashes = hashes[:-step] * MIXER + hashes[step:]
            hashes ^= hashes >> np.uint64(29)
            step *= 2
        chosen = np.flatnonzero(hashes & SAMPLED == 0)
        yield hashes[chosen], chosen + at
