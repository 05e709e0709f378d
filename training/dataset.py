"""A prepared folder, data/<name>/ -> batches on the device.

Knows token ids, neither text nor models. formats/data_folder.py reads and checks the folder.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import hardware
from command_line import plural
from formats.data_folder import IN_REPLY, DataError, Meta, Split, check_tokens
from model import IGNORE
from tokenizer_bpe import Tokenizer
from training import distributed
from training.replies import reply_windows

# uint16 is stored as int16 with the same bits, and masked after widening, since PyTorch cannot
# index uint16 on some devices.
HELD_AS = {"uint16": torch.int16, "int32": torch.int32, "uint8": torch.uint8}
# Share of a GPU's memory that tokens may take. Reading them from RAM costs a copy of some 100 KB
# per step; a micro-batch that is halved for lack of memory costs far more.
GPU_SHARE = 0.05
RAM_UNKNOWN = 8 << 30  # bytes assumed to be free if unknown


class Dataset:
    """The tokens of one split, and its batches.

    tokens: int16 (uint16's bits) or int32 [length], on the GPU, in RAM, or memory-mapped, as
    `location` says. mask: uint8 [length], the bits that prepare_data.py wrote per token; None
    unless only replies count in the loss. windows: sequences of block_size tokens per epoch: as
    many as fit into the split at any offset below block_size, or, if only replies count, those that
    reply_windows finds.
    """

    def __init__(
        self,
        folder: str | Path,
        meta: Meta,
        split: str,
        block_size: int,
        device: torch.device,
        loss_on: str = "all",
    ):
        """loss_on: the setting of that name. Raises DataError if the split is short or damaged."""
        self.folder, self.block_size, self.device = Path(folder), block_size, device
        file = meta.splits[split]
        self.length = file.tokens
        self.windows = (self.length - block_size) // block_size
        longest, more = self.length // 2, "from more text"
        if split == "val":  # an evaluation draws no offset
            longest, more = self.length - 1, "with a larger --val_fraction"
        if block_size > longest:
            raise DataError(
                f"{self.folder / file.file} holds {plural(self.length, 'token')}, too few for"
                f" block_size = {block_size}: lower it to {max(1, longest)} or less, or prepare the"
                f" data {more}"
            )
        masked = loss_on == "assistant"
        self.bytes = self.length * (np.dtype(meta.dtype).itemsize + masked)
        self.location = find_location(self.bytes, device)
        self.tokens = self._load(file, meta.dtype)
        self.mask = self._load(file.mask, "uint8") if masked else None
        if masked:
            self._replies = torch.from_numpy(
                np.stack(reply_windows(self.mask.cpu().numpy(), block_size), axis=1)
            )
            self.windows = len(self._replies)
        # Two epochs, since a batch may begin in one and end in the next.
        self._epoch = functools.lru_cache(maxsize=2)(self._draw_epoch)

    def _load(self, file: Split, dtype: str) -> torch.Tensor:
        """Load a file to `location`, [length]; checks its checksum unless it is memory-mapped."""
        path = self.folder / file.file
        if self.location == "mmap":
            held_as = HELD_AS[dtype]
            return torch.from_file(str(path), shared=False, size=self.length, dtype=held_as)
        numbers = np.fromfile(path, dtype)
        check_tokens(path, numbers, file.sha256)
        held = torch.from_numpy(numbers).view(HELD_AS[dtype])
        return held.to(self.device) if self.location == "gpu" else held

    def batch(self, first: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the run's sequences number first .. first + batch_size - 1.

        Each is int64 [batch_size, block_size] on the device. An epoch visits every window once, in
        an order and at an offset that depend on (seed, epoch) alone; if only replies count, there
        is no offset. With first = step x batch_size, a batch thus depends on (seed, step), and a
        run resumes anywhere at no cost.
        """
        parts = []
        while batch_size:  # more than once if an epoch ends inside the batch
            epoch, at = divmod(first, self.windows)
            count = min(batch_size, self.windows - at)
            parts.append(self._epoch(epoch, seed)[at : at + count])
            first += count
            batch_size -= count
        windows = torch.cat(parts)
        steps = torch.arange(self.block_size + 1, device=windows.device)
        return self._at(windows[:, :1] + steps, windows[:, 1:])

    def _draw_epoch(self, epoch, seed):
        """An epoch's windows in random order, int64 [windows, 2]: start and `since` of each."""
        # NumPy guarantees that Philox's raw stream never changes, but not permutation() (NEP 19).
        random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
        offset = int(random.random_raw() % self.block_size)
        order = torch.from_numpy(np.argsort(random.random_raw(self.windows), kind="stable"))
        if self.mask is None:
            windows = (offset + order * self.block_size).unsqueeze(1).expand(-1, 2)
        else:
            windows = self._replies[order]
        return windows.to(self.tokens.device)

    def evaluation(
        self, windows: int, micro_batch: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets of fixed, evenly spread windows.

        Both are int64 [micro_batch, block_size]. windows: how many; 0 for all, including the last,
        partial one. If only replies count, the windows are those that training would use. Each of
        `ranks` processes takes every ranks-th window, and all yield equally many micro-batches.
        Targets beyond the split and in rows that pad a micro-batch are IGNORE, so every forward has
        the same shape and the mean does not depend on micro_batch.
        """
        T = self.block_size
        if self.mask is None:
            starts = torch.arange(0, self.length - 1, T)  # every token but the first is a target
            if windows:
                starts = starts[: (self.length - 1) // T]
            chosen = starts.unsqueeze(1).expand(-1, 2)
        else:
            chosen = self._replies
        if windows and windows < len(chosen):
            chosen = chosen[torch.arange(windows) * len(chosen) // windows]
        filling = -len(chosen) % (ranks * micro_batch)
        chosen = torch.cat((chosen, torch.full((filling, 2), self.length)))
        for part in chosen[rank::ranks].split(micro_batch):
            part = self._send(part) if self.location == "gpu" else part
            index = part[:, :1] + torch.arange(T + 1, device=part.device)
            x, y = self._at(index.clamp(max=self.length - 1), part[:, 1:])
            y.masked_fill_(self._send(index[:, 1:]) >= self.length, IGNORE)
            yield x, y

    def _at(self, index, since):
        """Inputs and targets, int64 [B, T] each, from the tokens at `index`, int64 [B, T + 1].

        They share no memory. since: int64 [B, 1]: if only replies count, the targets of inputs
        before it do not count.
        """
        chunk = self._send(self.tokens[index]).long()
        if self.tokens.dtype == torch.int16:  # uint16's bits
            chunk.bitwise_and_(0xFFFF)
        # Training and evaluation get the same strides; others would recompile the model.
        x, y = chunk[:, :-1], chunk.clone()[:, 1:]
        if self.mask is not None:
            counts = (self.mask[index[:, 1:]] & IN_REPLY > 0) & (index[:, :-1] >= since)
            y.masked_fill_(~self._send(counts), IGNORE)
        return x, y

    def _send(self, chunk):
        """Move gathered values to the device."""
        cuda = self.device.type == "cuda"
        if cuda and chunk.device.type == "cpu":
            chunk = chunk.pin_memory()
        return chunk.to(self.device, non_blocking=cuda)


@dataclass
class Data:
    """The data of a run. val: None if there is nothing to validate on."""

    meta: Meta
    tokenizer: Tokenizer
    train: Dataset
    val: Dataset | None


def find_location(size: int, device: torch.device) -> str:
    """Where to keep `size` bytes of tokens: "gpu", "ram" or "mmap".

    On the GPU if they take at most GPU_SHARE of its free memory and fit in RAM on the way; in RAM
    if they take at most half of the free memory, divided among the processes that torchrun started
    on this machine.
    """
    free = (hardware.free_ram() or RAM_UNKNOWN) // distributed.local_world_size
    of_gpu = torch.cuda.mem_get_info(device)[0] * GPU_SHARE if device.type == "cuda" else 0
    if size <= min(free, of_gpu):
        return "gpu"
    return "ram" if size <= free // 2 else "mmap"
