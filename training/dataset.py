"""A prepared folder, data/<name>/ -> batches on the device.

Knows token ids, not text and not models. formats/data_folder.py reads and checks the folder.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import hardware
from formats.data_folder import DataError, Meta, Split, unpacked
from model import IGNORE
from tokenizer_bpe import Tokenizer

# uint16 is held as the same bits in int16 and masked once it is widened: PyTorch indexes no uint16
# on some devices.
HELD_AS = {"uint16": torch.int16, "int32": torch.int32, "uint8": torch.uint8}
RAM_UNKNOWN = 8 << 30  # bytes to count on where the system does not say what is free


class Dataset:
    """The tokens of one split, and its batches.

    tokens: [length], int16 (uint16's bits) or int32, on the GPU, in RAM, or memory-mapped, as
    `location` says. windows: how many sequences of block_size tokens fit into it, from whatever
    offset below block_size.
    """

    mask_bytes = 0  # of each token

    def __init__(
        self,
        folder: str | Path,
        meta: Meta,
        split: str,
        block_size: int,
        device: torch.device,
        location: str = "auto",
    ):
        """Raises DataError when the split is too short or holds an id beyond the vocabulary."""
        self.folder = Path(folder)
        self.meta = meta
        self.block_size = block_size
        self.device = device
        self.path = self.folder / meta.splits[split].file
        self.length = meta.splits[split].tokens
        self.bytes = self.length * (np.dtype(meta.dtype).itemsize + self.mask_bytes)
        self.windows = (self.length - block_size) // block_size
        if self.windows < 1:
            more = "with a larger --val_fraction" if split == "val" else "from more text"
            raise DataError(
                f"{self.path} holds {self.length:,} tokens, too few for block_size = {block_size}:"
                f" lower it to {max(1, self.length // 2)} or less, or prepare the data {more}"
            )
        if location == "gpu" and device.type == "cpu":
            raise DataError("data_location = gpu, but training runs on the cpu; use auto or ram")
        self.location = find_location(self.bytes, device) if location == "auto" else location
        self.tokens = self._load(meta.splits[split], meta.dtype)
        self._orders = {}  # epoch -> (offset, order of its windows)

    def _load(self, file: Split, dtype: str) -> torch.Tensor:
        """The numbers of a file, [length], at `location`."""
        path = unpacked(self.folder, file, self.length * np.dtype(dtype).itemsize)
        if self.location == "mmap":
            held_as = HELD_AS[dtype]
            return torch.from_file(str(path), shared=False, size=self.length, dtype=held_as)
        numbers = np.fromfile(path, dtype)
        if dtype == self.meta.dtype:  # not of a mask
            self._check_ids(numbers)
        held = torch.from_numpy(numbers).view(HELD_AS[dtype])
        return held.to(self.device) if self.location == "gpu" else held

    def _check_ids(self, ids: np.ndarray):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.meta.vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"{self.path} holds token id {bad}, beyond the vocabulary of {self.meta.vocab_size}"
                " in meta.json: it is damaged or of another tokenizer; prepare the data again"
            )

    def batch(self, first: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the sequences number `first` and on of a run.

        Each is int64 [batch_size, block_size] on the device. Without replacement: an epoch visits
        every window once, in an order and from an offset that follow from (seed, epoch) alone. So
        with first = step x batch_size a batch follows from (seed, step), and a run resumes anywhere
        at no cost.
        """
        starts = self._starts(first, batch_size, seed)
        T = self.block_size
        windows = self.tokens.as_strided((self.length - T, T + 1), (1, 1))
        chunk = self._widen(windows.index_select(0, starts))
        return chunk[:, :-1], chunk[:, 1:]

    def _starts(self, first, batch_size, seed):
        """Where the sequences number `first` and on of a run start, int64 [batch_size]."""
        parts = []
        while batch_size:  # once, or twice where an epoch ends inside the batch
            epoch, at = divmod(first, self.windows)
            count = min(batch_size, self.windows - at)
            offset, order = self._order(epoch, seed)
            parts.append(offset + order[at : at + count] * self.block_size)
            first += count
            batch_size -= count
        return torch.cat(parts)

    def _order(self, epoch, seed):
        """The offset of an epoch's windows, and their order, int64 [windows]."""
        if epoch not in self._orders:
            # NumPy guarantees Philox's raw stream in all its versions, which it does not for
            # permutation() (NEP 19).
            random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
            offset = int(random.random_raw() % self.block_size)
            order = torch.from_numpy(np.argsort(random.random_raw(self.windows), kind="stable"))
            # The epoch before is kept: a batch may begin in it.
            self._orders = {e: known for e, known in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = (offset, order.to(self.tokens.device))
        return self._orders[epoch]

    def evaluation(
        self, windows: int, micro_batch: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets of fixed windows, spread evenly.

        Both are int64 [micro_batch, block_size]. windows: how many; 0 for all, with the last,
        partial one. Rows that fill up the last micro-batch have only IGNORE as targets, so every
        forward has one shape and the mean does not depend on micro_batch. Of `ranks` processes each
        takes every ranks-th window, and all yield as many micro-batches: with a sharded model they
        need each other in each forward.
        """
        T = self.block_size
        whole, rest = divmod(self.length - 1, T)  # targets: each token but the first
        if windows and windows < whole:
            starts = [i * whole // windows * T for i in range(windows)]
        else:
            starts = [row * T for row in range(whole)]
        if rest and not windows:
            starts.append(whole * T)
        share = math.ceil(len(starts) / ranks)
        starts = starts[rank::ranks]
        for at in range(0, share, micro_batch):
            part = starts[at : at + micro_batch]
            rows = torch.tensor(part + [0] * (micro_batch - len(part)))
            index = rows[:, None] + torch.arange(T + 1)
            index = index.clamp(max=self.length - 1)
            x, y = self._at(self._send(index) if self.location == "gpu" else index)
            y[len(part) :] = IGNORE
            if part and part[-1] == whole * T:  # the partial window, which is the last
                y[len(part) - 1, rest:] = IGNORE
            yield x, y

    def _at(self, index):
        """Inputs and targets from the tokens at `index`, int64 [B, T + 1]; they share no memory."""
        chunk = self._widen(self.tokens[index])
        # The strides of training's targets: a compiled model would be compiled again for others.
        return chunk[:, :-1], chunk.clone()[:, 1:]

    def _widen(self, chunk):
        """Gathered tokens as int64 on the device; they travel there in their 16 or 32 bits."""
        if self.location == "mmap":  # elsewhere they were checked when they were read
            self._check_ids(chunk.numpy().view(self.meta.dtype))
        chunk = self._send(chunk).long()
        return chunk.bitwise_and_(0xFFFF) if self.meta.dtype == "uint16" else chunk

    def _send(self, chunk):
        """Gathered values, on the device."""
        cuda = self.device.type == "cuda"
        if cuda and chunk.device.type == "cpu":
            chunk = chunk.pin_memory()
        return chunk.to(self.device, non_blocking=cuda)


@dataclass
class Data:
    """What a run trains on. val: None where there is nothing to validate on."""

    meta: Meta
    tokenizer: Tokenizer
    train: Dataset
    val: Dataset | None


def read_tokens(folder: str | Path, meta: Meta, split: str) -> np.ndarray:
    """All tokens of a split in memory, [tokens] of meta.dtype."""
    file = meta.splits[split]
    size = file.tokens * np.dtype(meta.dtype).itemsize
    return np.fromfile(unpacked(Path(folder), file, size), meta.dtype)


def find_location(size: int, device: torch.device) -> str:
    """Where `size` bytes of tokens go: "gpu", "ram" or "mmap".

    To the GPU while they take at most a quarter of its free memory and fit through the RAM; into
    RAM while they take at most half of what is free there, divided among the processes that
    torchrun started here.
    """
    free = (hardware.free_ram() or RAM_UNKNOWN) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda" and size <= min(free, torch.cuda.mem_get_info(device)[0] // 4):
        return "gpu"
    return "ram" if size <= free // 2 else "mmap"
