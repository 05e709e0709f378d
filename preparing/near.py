"""Documents -> keys by which near-copies are found: two that are much alike share one.

MinHash (Broder, 1997) over runs of five words, 112 minima in 14 bands of 8, as FineWeb has it
(Penedo et al., 2024, "The FineWeb Datasets"): of two documents that share three quarters of such
runs, 77 in 100 share a band, of those that share half of them, 5. Needs the package rensa. Knows
nothing of what came before (seen.py).
"""

import importlib.util

import numpy as np

from preparing.errors import InputError

RUN = 5  # words
BANDS, ROWS = 14, 8
SEED = 42
MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, made odd: spreads the bits
LONGEST_WORD = 40  # characters on average: a text of longer ones has no spaces between its words


def check_installed() -> None:
    """Raises InputError where the package is missing."""
    if not importlib.util.find_spec("rensa"):
        raise InputError(
            "--dedupe near needs a package that is not installed: pip install rensa==0.5.0"
        )


def band_keys(texts: list[str]) -> np.ndarray:
    """The keys of each text's bands, uint64 [texts, BANDS]."""
    from rensa import RMinHash

    if not texts:
        return np.zeros((0, BANDS), np.uint64)
    hashes = RMinHash.hash_token_sets([words_of(text) for text in texts])
    runs = [hashes_of_runs(np.array(words, np.uint64)) for words in hashes]
    ends = np.cumsum([0, *map(len, runs)]).tolist()
    matrix = RMinHash.digest_matrix_from_flat_token_hashes(
        np.concatenate(runs), ends, BANDS * ROWS, SEED
    )
    minima = np.array(matrix.to_rows(), np.uint64).reshape(len(texts), BANDS, ROWS)
    keys = np.broadcast_to(np.arange(1, BANDS + 1, dtype=np.uint64), minima.shape[:2])
    for row in range(ROWS):
        keys = keys * MIX + minima[:, :, row]
    return keys


def words_of(text: str) -> list[str]:
    """The words of a text in small letters; its characters, where it has no spaces."""
    words = text.lower().split()
    if len(text) > LONGEST_WORD * len(words):
        return list(text.lower())
    return words


def hashes_of_runs(words: np.ndarray) -> np.ndarray:
    """A hash of each run of RUN words, or of all where there are fewer.

    words: uint64 [n], their hashes. Returns uint64 [n - RUN + 1], or [1].
    """
    length = min(RUN, len(words))
    count = len(words) - length + 1
    runs = np.zeros(count, np.uint64)
    for n in range(length):
        runs = runs * MIX + words[n : n + count]
    return runs
