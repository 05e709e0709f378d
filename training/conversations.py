"""Batches in which only the assistant's tokens are targets (`loss_on = "assistant"`).

The mask that prepare_data.py writes next to the tokens says which these are: what the assistant
says and what ends it, so that a model learns to stop. A training sequence starts at a turn, as does
the prompt of a conversation that outgrew the context (generating/chat.py). Evaluations use the same
windows as any other, so that each reply counts once.
"""

import torch

from formats.data_folder import IN_REPLY, TURN_BEGINS, DataError, Meta
from model import IGNORE
from training.dataset import Dataset


class Conversations(Dataset):
    """The tokens of one split, its mask, and its batches.

    mask: [length], uint8, where the tokens are.
    """

    mask_bytes = 1

    def __init__(self, folder, meta: Meta, split: str, *place):
        """Raises DataError as Dataset does. place: block size, device and location, as there."""
        super().__init__(folder, meta, split, *place)
        self.mask = self._load(meta.splits[split].mask, "uint8")

    def batch(self, first: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """As of Dataset, but a sequence starts at its window's first turn, if it has one.

        A turn that is not the assistant's. So an epoch leaves out some tokens before such turns,
        and has some after them twice.
        """
        starts = self._starts(first, batch_size, seed)
        window = starts[:, None] + torch.arange(self.block_size, device=starts.device)
        turns = self.mask[window] & TURN_BEGINS
        moved = starts + turns.argmax(dim=1)  # to the first; by 0 where there is none
        starts = torch.where(moved < self.length - self.block_size, moved, starts)
        return self._at(starts[:, None] + torch.arange(self.block_size + 1, device=starts.device))

    def _at(self, index):
        x, y = super()._at(index)
        mask = self._send(self.mask[index[:, 1:]])
        return x, y.masked_fill_(mask & IN_REPLY == 0, IGNORE)


def check_masked(folder: str, meta: Meta) -> None:
    """Raises DataError where the data has no replies to train on."""
    if not meta.splits["train"].counted("assistant").tokens:
        raise DataError(
            f"loss_on = assistant, but {folder} has no mask of the assistant's tokens: it holds no"
            " conversations. Prepare some, a list of messages a line:\n  python prepare_data.py"
            f" CONVERSATIONS.jsonl --tokenizer {folder} --out data/chat\nor use loss_on = all"
        )


def check_validated(folder: str, meta: Meta, loss_on: str) -> None:
    """Raises DataError where no validation loss can be computed. loss_on: the setting."""
    if loss_on == "assistant":
        check_masked(folder, meta)
    if not meta.splits["val"].counted(loss_on).tokens:
        raise DataError(
            f"{folder} has nothing to validate on; prepare it with a --val_fraction above 0"
        )
