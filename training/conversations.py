"""Batches in which the assistant's tokens alone are targets (`loss_on = "assistant"`).

The mask that prepare_data.py writes beside the tokens says which these are: what the assistant says
and what ends it, so that a model learns to stop. A training sequence begins at a turn, as the
prompt does of a conversation that outgrew the context (generating/chat.py). Evaluations look at the
same windows as any other, so that each reply counts once.
"""

from pathlib import Path

import torch

from formats.data_folder import IN_REPLY, TURN_BEGINS, DataError, Meta
from training.dataset import IGNORE, Dataset, map_parts, parts_of, read_parts, take


class Conversations(Dataset):
    """The tokens of one split, its mask, and its batches.

    mask: uint8, where and in the form in which the tokens are.
    """

    def __init__(self, folder: str | Path, meta: Meta, split: str, *place):
        """Raises DataError as Dataset does. place: block size, device and location, as there."""
        super().__init__(folder, meta, split, *place)
        parts = [self._read_mask(part, length) for part, length in parts_of(meta, split)]
        self.mask = parts
        if len(parts) == 1:
            self.mask = parts[0]
        elif self.location != "mmap":
            self.mask = torch.cat(parts)
        if self.location == "gpu":
            self.mask = self.mask.to(self.device)

    def _read_mask(self, part, length):
        """The mask of one file; zeros, in no memory, where it holds no conversations."""
        if not part.mask:
            return torch.zeros(1, dtype=torch.uint8).expand(length)
        file = [(part.mask, length)]
        if self.location == "mmap":
            return map_parts(self.folder, file, torch.uint8)
        return torch.from_numpy(read_parts(self.folder, file, "uint8"))

    @staticmethod
    def bytes_a_token(meta: Meta) -> int:
        """Bytes of memory that a token takes with its mask."""
        return Dataset.bytes_a_token(meta) + 1

    def batch(self, first: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As of Dataset, but a sequence begins at the first turn within its window.

        A turn that is not the assistant's. Where none begins there, it begins with the window. So
        an epoch leaves out some tokens before such turns, and has some behind them twice.
        """
        starts = self._starts(first, batch_size, seed)
        window = starts[:, None] + torch.arange(self.block_size, device=starts.device)
        begins = take(self.mask, window) & TURN_BEGINS
        moved = starts + begins.argmax(dim=1)  # the first; 0 where none is
        starts = torch.where(moved < self.length - self.block_size, moved, starts)
        return self._at(starts[:, None] + torch.arange(self.block_size + 1, device=starts.device))

    def _at(self, index):
        x, y = super()._at(index)
        mask = self._sent(take(self.mask, index[:, 1:]))
        return x, y.masked_fill_(mask & IN_REPLY == 0, IGNORE)


def check_masked(folder: str, meta: Meta) -> None:
    """Raises DataError where the data has no replies to train on."""
    if meta.splits["train"].counted("assistant").tokens:
        return
    raise DataError(
        f"loss_on = assistant, but {folder} has no mask of the assistant's tokens: its text is no"
        " conversations, or was prepared by an older version. Prepare some, a list of messages a"
        f" line, with\n  python prepare_data.py CONVERSATIONS.jsonl --tokenizer {folder} --out"
        " data/chat\nor take loss_on = all"
    )


def check_validated(folder: str, meta: Meta, loss_on: str) -> None:
    """Raises DataError for text of which no validation loss can be told.

    loss_on: the setting of that name.
    """
    if loss_on == "assistant":
        check_masked(folder, meta)
    if not meta.splits["val"].counted(loss_on).tokens:
        raise DataError(
            f"{folder} has nothing to validate on; prepare it with a --val_fraction above 0"
        )
