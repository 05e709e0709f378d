"""Chooses the training sequences if only the assistant's replies count in the loss.

Knows only the mask of a split, as prepare_data.py wrote it.
"""

import numpy as np

from formats.data_folder import IN_REPLY, TURN_BEGINS

PART = 1 << 24  # tokens processed at a time, since a mask may be larger than the free memory


def reply_windows(mask: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """The windows of an epoch, in the order of the data.

    mask: uint8 [length], bits of formats/data_folder.py; longer than block_size. Returns two int64
    [windows]: a window's first input, and its first input whose target may count. Earlier targets
    already counted in the window before, so each token of a reply counts once.

    A window starts with the question, or with a later part of it if question and reply do not fit
    into one window. A longer reply continues where the window before ended. Every window contains a
    reply.
    """
    asked, first, end = find_replies(mask)
    starts, since = [], []
    seen = 0
    while (reply := np.searchsorted(end, seen, side="right")) < len(end):
        unseen = max(seen, first[reply])
        # Of a long question, keep the end: half a window, or more if the reply is shorter.
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

    Returns three int64 [replies]: the first token of the question, the first input of the reply,
    and the input after its last.
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
    # A question begins with the first turn after the previous reply began, not ended, since the
    # speaker's name may be what ends it. If the assistant speaks twice in a row, there is none
    # before this reply, and the question begins right after the previous one.
    next_turn = np.searchsorted(turns, np.append(-1, first[:-1]), side="right")
    asked = np.append(turns, len(mask))[next_turn]
    return np.where(asked <= first, asked, np.append(0, end[:-1] + 1)), first, end
