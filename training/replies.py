"""Where sequences begin in data of which only the assistant's replies count.

Knows the mask of a split alone, as prepare_data.py wrote it.
"""

import numpy as np

from formats.data_folder import IN_REPLY, TURN_BEGINS

PART = 1 << 24  # tokens looked at in one go: a mask may be larger than what is free in memory


def reply_windows(mask: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The sequences of an epoch, in the order of the data: where each starts, and what counts.

    mask: uint8 [length] of formats/data_folder.py, longer than block_size. Returns two of int64
    [windows]: the first input of a window, and the first of its inputs whose target counts. Those
    before it were targets of the window before, so each token of a reply counts once.

    A window starts with what was asked, or, if that and the reply do not fit into one, with a
    later part of it. A reply that fills more than one goes on where the window before ended. No
    window is without a reply.
    """
    asked, first, end = find_replies(mask)
    starts, since = [], []
    seen = 0
    while (reply := np.searchsorted(end, seen, side="right")) < len(end):
        unseen = max(seen, first[reply])
        # Of a long question the start is left out: the reply takes half of the window at most.
        start = max(asked[reply], min(first[reply] - block_size // 2, end[reply] - block_size))
        if unseen > first[reply] and end[reply] > start + block_size:
            start = unseen
        start = min(start, len(mask) - 1 - block_size)
        starts.append(start)
        since.append(unseen)
        seen = start + block_size
    return np.array(starts), np.array(since)


def find_replies(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The replies of a split, by their inputs: an input's target is the token after it.

    Returns three of int64 [replies]: the token with which begins what a reply answers, and a
    reply's first input and the one after its last.
    """
    edges, turns = [], []
    for at in range(0, len(mask), PART):
        part = mask[at : at + PART + 1]
        counts = part & IN_REPLY
        edges.append(at + np.flatnonzero(counts[1:] != counts[:-1]))
        turns.append(at + np.flatnonzero(part[:PART] & TURN_BEGINS))
    edges, turns = np.concatenate(edges), np.concatenate(turns)
    if mask[0] & IN_REPLY:
        edges = np.append(0, edges)
    if mask[-1] & IN_REPLY:
        edges = np.append(edges, len(mask) - 1)
    first, end = edges[::2], edges[1::2]
    # What a reply answers begins with the first turn after the reply before began, as the name of
    # that turn ends it; if the assistant speaks twice, after that reply.
    next_turn = np.searchsorted(turns, np.append(-1, first[:-1]), side="right")
    asked = np.append(turns, len(mask))[next_turn]
    return np.where(asked <= first, asked, np.append(0, end[:-1] + 1)), first, end
