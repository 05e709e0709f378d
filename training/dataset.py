"""A prepared folder, data/<name>/ -> batches on the device.

Knows token ids, not text and not models. What the folder holds is read, and checked, through
formats/data_folder.py.
"""

import gzip
import math
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from formats.data_folder import DataError, Mask, Meta, Split, read_meta
from model import IGNORE

__all__ = ["IGNORE", "DataError", "Dataset", "Meta", "read_meta", "read_tokens"]

PIECE = 1 << 26  # bytes that one thread reads of a large file
CHUNK = 1 << 24  # bytes of one read


class Dataset:
    """The tokens of one split, and its batches.

    tokens: one flat tensor, int16 (uint16's bits) or int32, on the GPU, in RAM, or memory-mapped;
    a list of them where several shards are memory-mapped. windows: so many sequences of block_size
    tokens fit into it side by side, from whatever offset below block_size.
    """

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
        self.split = split
        self.block_size = block_size
        self.device = device
        self.path = self.folder / meta.splits[split].file
        self.length = meta.splits[split].tokens
        self.bytes = self.length * self.bytes_a_token(meta)
        self.windows = (self.length - block_size) // block_size
        if self.windows < 1:
            more = "with a larger --val_fraction" if split == "val" else "from more text"
            raise DataError(
                f"{self.path} holds {self.length:,} tokens, too few for block_size = {block_size}:"
                f" lower it to {max(1, self.length // 2)} or less, or prepare the data {more}"
            )
        if location == "gpu" and device.type == "cpu":
            raise DataError(
                "data_location = gpu, but training runs on the cpu; set data_location = auto or ram"
            )
        self.location = find_location(self.bytes, device) if location == "auto" else location
        self.tokens = self._map() if self.location == "mmap" else self._read()
        self._orders = {}  # epoch -> (offset, order of its windows)

    @staticmethod
    def bytes_a_token(meta: Meta) -> int:
        """Bytes of memory that a token takes where the data lies."""
        return np.dtype(meta.dtype).itemsize

    def _read(self):
        tokens = read_tokens(self.folder, self.meta, self.split)
        self._check_ids(tokens)
        if self.meta.dtype == "uint16":
            tokens = tokens.view(np.int16)
        tokens = torch.from_numpy(tokens)
        return tokens.to(self.device) if self.location == "gpu" else tokens

    def _map(self):
        kind = torch.int16 if self.meta.dtype == "uint16" else torch.int32
        return map_parts(self.folder, parts_of(self.meta, self.split), kind)

    def _check_ids(self, ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.meta.vocab_size:
            bad = low if low < 0 else high
            raise DataError(
                f"{self.path} holds token id {bad}, beyond the vocabulary of {self.meta.vocab_size}"
                " in meta.json: the file is damaged or of another tokenizer; prepare the data"
                " again"
            )

    def batch(self, first: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the sequences number `first` and on of a run.

        Each is int64 [batch_size, block_size] on the device. Without replacement: an epoch visits
        every window once, in an order and from an offset that follow from (seed, epoch) alone. So
        with first = step x batch_size a batch follows from (seed, step), and a run resumes anywhere
        at no cost.
        """
        chunk = self._to_device(self._gather(self._starts(first, batch_size, seed)))
        return chunk[:, :-1], chunk[:, 1:]

    def _starts(self, first, batch_size, seed):
        """Where the sequences number `first` and on of a run begin, int64 [batch_size]."""
        parts = []
        while batch_size:  # once, or twice where an epoch ends inside the batch
            epoch, at = divmod(first, self.windows)
            count = min(batch_size, self.windows - at)
            offset, order = self._order(epoch, seed)
            parts.append(offset + order[at : at + count] * self.block_size)
            first += count
            batch_size -= count
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _order(self, epoch, seed):
        """The offset of an epoch's windows, and their order, int64 [windows]."""
        if epoch not in self._orders:
            # NumPy guarantees Philox's raw stream in all its versions, which it does not for
            # permutation() (NEP 19).
            random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
            offset = int(random.random_raw() % self.block_size)
            order = torch.from_numpy(np.argsort(random.random_raw(self.windows), kind="stable"))
            if self.location == "gpu":
                order = order.to(self.device)
            # The epoch before is kept: a batch may begin in it.
            self._orders = {e: known for e, known in self._orders.items() if e == epoch - 1}
            self._orders[epoch] = (offset, order)
        return self._orders[epoch]

    def _gather(self, starts):
        """The tokens of windows, [len(starts), block_size + 1], where the tokens lie."""
        T = self.block_size
        if isinstance(self.tokens, list):
            return take(self.tokens, starts[:, None] + torch.arange(T + 1))
        windows = self.tokens.as_strided((self.length - T, T + 1), (1, 1))
        return windows.index_select(0, starts)

    def _to_device(self, chunk):
        """Gathered tokens as int64 on the device.

        They travel in their 16 or 32 bits, and are widened there.
        """
        if self.location == "mmap":  # elsewhere they were checked when they were read
            self._check_ids(chunk.numpy().view(self.meta.dtype))
        chunk = self._sent(chunk).long()
        return chunk.bitwise_and_(0xFFFF) if self.meta.dtype == "uint16" else chunk

    def _sent(self, chunk):
        """What was gathered, on the device."""
        cuda = self.device.type == "cuda"
        if cuda and chunk.device.type == "cpu":
            chunk = chunk.pin_memory()
        return chunk.to(self.device, non_blocking=cuda)

    def evaluation(
        self, windows: int, micro_batch: int, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield inputs and targets of fixed windows, spread evenly.

        windows: how many, 0 for all, the last, partial one included. Inputs and targets are int64
        [micro_batch, block_size]; rows that fill up the last micro-batch have only IGNORE as
        targets, so every forward has one shape and the mean does not depend on micro_batch. rank,
        ranks: of so many processes that evaluate together, which one this is; it takes every
        so-many-th window. All have as many micro-batches, if with no predictions of their own in
        the last: where they share out a model, they need each other for each.
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
            x, y = self._at(index.clamp(max=self.length - 1))
            y[len(part) :] = IGNORE
            if part and part[-1] == whole * T:  # the partial window, which is the last
                y[len(part) - 1, rest:] = IGNORE
            yield x, y

    def _at(self, index):
        """Inputs and targets from the tokens at `index`, int64 [B, T + 1]; they share no memory."""
        chunk = self._to_device(take(self.tokens, index))
        # Targets lie in memory as in training: else they are compiled for anew.
        return chunk[:, :-1], chunk.clone()[:, 1:]


def take(values: torch.Tensor | list[torch.Tensor], index: torch.Tensor) -> torch.Tensor:
    """The values at `index`, from mapped shards too, on their device."""
    if not isinstance(values, list):
        return values[index.to(values.device)]
    taken = torch.empty(index.shape, dtype=values[0].dtype)
    first = 0
    for part in values:
        here = (index >= first) & (index < first + len(part))
        taken[here] = part[index[here] - first]
        first += len(part)
    return taken


def read_tokens(folder: str | Path, meta: Meta, split: str) -> np.ndarray:
    """All tokens of a split in memory, [tokens] of meta.dtype.

    From one file, from its compressed copy where only that is there, or from shards in their order.
    Raises DataError for a file that is cut off or damaged.
    """
    return read_parts(folder, parts_of(meta, split), meta.dtype)


def parts_of(meta: Meta, split: str) -> list[tuple[Split, int]]:
    """The files that make up a split, each with how many tokens it has; empty ones left out."""
    return [(part, part.tokens) for part in meta.splits[split].files() if part.tokens]


def map_parts(
    folder: Path, parts: list[tuple[Split | Mask, int]], dtype: torch.dtype
) -> torch.Tensor | list[torch.Tensor]:
    """Files mapped into memory: a flat tensor, or a list of them where they are several.

    parts: each with how many numbers it has. Raises DataError where one is there only compressed.
    """
    mapped = []
    for part, length in parts:
        path = folder / part.file
        if not path.exists():
            raise DataError(
                f"{path} is there only compressed, and can be read so only into memory: unpack"
                f" it with gunzip -k {folder / part.compressed['file']}, or use"
                " --data_location=ram"
            )
        mapped.append(torch.from_file(str(path), shared=False, size=length, dtype=dtype))
    return mapped[0] if len(mapped) == 1 else mapped


def read_parts(folder: str | Path, parts: list[tuple[Split | Mask, int]], dtype: str) -> np.ndarray:
    """The numbers of several files in memory, one after the other. parts: as of map_parts."""
    numbers = np.empty(sum(length for _, length in parts), dtype)
    start = 0
    for part, length in parts:
        target = memoryview(numbers[start : start + length]).cast("B")
        start += length
        path = Path(folder) / part.file
        if path.exists():
            fits = _read_file(target, path)
        else:
            path = Path(folder) / part.compressed["file"]
            fits = _unpack(target, path)
        if not fits:
            raise DataError(
                f"{path} does not hold the {length:,} tokens that meta.json speaks of; copy it"
                " again"
            )
    return numbers


def _read_file(target, path):
    """Fill a buffer from a file. Returns whether the file has its length.

    A large file is read in pieces by several threads: filling new memory needs them to keep up with
    a fast disk.
    """

    def read(start):
        end = min(start + PIECE, len(target))
        with open(path, "rb") as file:
            file.seek(start)
            return _fill(target[start:end], file, last=end == len(target))

    starts = range(0, len(target), PIECE)
    if len(starts) == 1:
        return read(0)  # a thread takes address space, which may be limited
    with ThreadPoolExecutor(4) as threads:
        return all(threads.map(read, starts))


def _unpack(target, path):
    """Fill a buffer from a gzip file. Returns whether it holds as much."""
    try:
        with gzip.open(path) as file:
            return _fill(target, file, last=True)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again") from None


def _fill(target, file, last):
    """Fill a buffer from an open file. Returns whether it held enough and, if `last`, no more."""
    at = 0
    while at < len(target):
        count = file.readinto(target[at : at + CHUNK])
        if not count:
            return False
        at += count
    return not (last and file.read(1))


def find_location(size: int, device: torch.device) -> str:
    """Where `size` bytes of tokens go: "gpu", "ram" or "mmap".

    To the GPU while they take at most a quarter of its free memory and fit through the RAM; into
    RAM while they take at most half of what is free there, divided among the processes that
    torchrun started here.
    """
    free = free_ram() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda" and size <= min(free, torch.cuda.mem_get_info(device)[0] // 4):
        return "gpu"
    return "ram" if size <= free // 2 else "mmap"


def free_ram() -> int:
    """Bytes of memory that can be had without swapping.

    8 GiB, a guess, where the system does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable"))
        free = int(available.split()[1]) * 1024
        # The limit of a container, in the two versions of Linux's control groups.
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            limit, used = Path("/sys/fs/cgroup", limit), Path("/sys/fs/cgroup", used)
            if limit.exists() and used.exists() and limit.read_text().strip() != "max":
                free = min(free, int(limit.read_text()) - int(used.read_text()))
        return free
    except (OSError, StopIteration, ValueError):
        return 8 << 30
