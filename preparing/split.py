"""Which text is for validation: its share of the bytes, the same for equal documents.

Documents are hashes and sizes here, and token ids if one is cut.
"""

import functools
from dataclasses import dataclass

import numpy as np

from formats.data_folder import TURN_BEGINS
from preparing.encoder import token_lengths
from tokenizer_bpe import Tokenizer

# Documents of at most this share of validation's bytes are drawn whole: of a text of which all is
# known, and of a longer one, where chance has to draw enough of them.
WHOLE = 1 / 8
WHOLE_BY_CHANCE = 1 / 32
SHORT_BYTES = 4096  # Up to this size documents are drawn whole if the share allows it,
LONG_BYTES = 1 << 20  # and above this one never.
BLOCK = 1 << 20  # tokens to look at together
LOOK = 1 << 14  # tokens around a place in which to look for a better one to cut at


@dataclass
class Draw:
    """How much of each document is for validation; nothing else decides it.

    fraction: of the bytes, for validation. whole: bytes up to which a document is drawn whole; of a
    longer one the end is. known: the share of each document by its hash, if they are all known.
    """

    fraction: float
    whole: float
    known: dict[int, float] | None = None

    def shares(self, hashes: np.ndarray, sizes: np.ndarray, uncut: np.ndarray) -> np.ndarray:
        """The share of each document, from its end, that is for validation, float64 [documents].

        hashes: uint64 [documents]; sizes: bytes; uncut: whether it is drawn whole at any size.
        """
        if self.known is not None:
            return np.array([self.known.get(value, 0) for value in hashes.tolist()])
        shares, ranks = self._ranked(hashes, sizes, uncut)
        return np.where(ranks < 1, shares, 0)

    def _ranked(self, hashes, sizes, uncut):
        """The share of each document if it is drawn, and its rank: drawn are those up to a limit.

        With hashes that come evenly spread, those below 1 have `fraction` of the bytes.
        """
        shares = np.maximum(self.whole / 2 / np.maximum(sizes, 1), self.fraction)
        shares = np.where(uncut | (sizes <= self.whole), 1, shares)
        return shares, hashes / 2.0**64 * shares / self.fraction

    def fitted(
        self, hashes: np.ndarray, sizes: np.ndarray, uncut: np.ndarray, copies: np.ndarray
    ) -> np.ndarray:
        """The shares with which validation comes closest to its fraction of these documents.

        Each once; sizes: of all its copies; copies: how many there are. Those that are together
        too long to be drawn whole stay for training: each would be cut.
        """
        shares, ranks = self._ranked(hashes, sizes, uncut)
        shares[(copies > 1) & (sizes > self.whole)] = 0
        order = np.argsort(ranks)
        drawn = np.append(0, np.cumsum((shares * sizes)[order]))
        count = np.argmin(np.abs(drawn - self.fraction * sizes.sum()))
        shares[order[count:]] = 0
        return shares


def draw_by_chance(fraction: float, text_bytes: float) -> Draw:
    """The draw for a text that is too long to know it first. text_bytes: about its size."""
    share = min(fraction, 1 - fraction) * text_bytes
    return Draw(fraction, min(max(SHORT_BYTES, WHOLE_BY_CHANCE * share), LONG_BYTES))


def draw_of(fraction: float, hashes: np.ndarray, sizes: np.ndarray, uncut: np.ndarray) -> Draw:
    """The draw for a text all documents of which are known."""
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
    """True if both get bytes, and validation its fraction up to a share of it."""
    return train > 0 and abs(val / (train + val) - fraction) <= slack * fraction


@functools.cache
def _edges(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Mark the ids that end a line, and those that begin with a whole character."""
    ends_line = np.zeros(tokenizer.vocab_size, bool)
    begins = np.zeros(tokenizer.vocab_size, bool)
    for n in np.flatnonzero(token_lengths(tokenizer)).tolist():
        text = tokenizer.decode_bytes([n])
        ends_line[n] = text.endswith(b"\n")
        begins[n] = text[0] & 0xC0 != 0x80
    return ends_line, begins


def find_cut(
    tokenizer: Tokenizer, ids: np.ndarray, end_bytes: float, mask: np.ndarray | None = None
) -> int:
    """Where the last `end_bytes` of tokens begin, about; 0 if they cannot be cut.

    At the best kind of place near it: where a document begins, a turn, a line, a character. ids,
    mask: may be on the disk.
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
    if high <= low:
        return 0
    before = np.array(ids[low - 1 : high - 1])
    ends_line, begins = _edges(tokenizer)
    kinds = [before == tokenizer.eot_id, ends_line[before], begins[ids[low:high]]]
    if mask is not None:
        kinds.insert(1, mask[low:high] & TURN_BEGINS > 0)
    for found in map(np.flatnonzero, kinds):
        if len(found):
            return low + int(found[np.argmin(np.abs(found + low - at))])
    return 0
