"""A prepared folder, data/<name>/ -> batches on the device.

Knows token ids, not text and not models. What the folder holds is read, and checked, through
formats/data_folder.py.
"""

import contextlib
import gzip
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch

from formats.data_folder import DataError, Meta, Split, dtype_for, read_meta, write_meta

__all__ = [
    "IGNORE",
    "DataError",
    "Dataset",
    "Meta",
    "Split",
    "dtype_for",
    "read_meta",
    "read_tokens",
    "write_meta",
]

IGNORE = -1  # the target where nothing is to be predicted; model.py's value


class Dataset:
    """The tokens of one split, and its batches.

    tokens: one flat tensor, int16 (uint16's bits) or int32, on the GPU, in RAM, or memory-mapped
    (one a shard). `windows` sequences of block_size tokens fit into it side by side, from whatever
    offset below block_size.
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
        """Raises DataError when the split is shorter than one window or holds an id beyond the
        vocabulary.
        """
        self.folder, self.meta, self.block_size, self.device = (
            Path(folder),
            meta,
            block_size,
            device,
        )
        self.split, self.parts = split, meta.splits[split].files()
        self.path, self.length = self.folder / meta.splits[split].file, meta.splits[split].tokens
        self.bytes = self.length * np.dtype(meta.dtype).itemsize
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
        self.location = location if location != "auto" else find_location(self.bytes, device)
        self.tokens = self._load()
        self._order = {}  # epoch -> (offset, order of its windows)

    def _load(self):
        kind = torch.int16 if self.meta.dtype == "uint16" else torch.int32
        if self.location == "mmap":
            mapped = [self._map(part, kind) for part in self.parts if part.tokens]
            return mapped[0] if len(mapped) == 1 else mapped
        tokens = read_tokens(self.folder, self.meta, self.split)
        self._check_ids(tokens)
        tokens = torch.from_numpy(tokens.view(np.int16) if kind == torch.int16 else tokens)
        return tokens.to(self.device) if self.location == "gpu" else tokens

    def _map(self, part, kind):
        path = self.folder / part.file
        if not path.exists():
            raise DataError(
                f"{path} is there only compressed, and can be read so only into memory: unpack it"
                f" with gunzip -k {self.folder / part.compressed['file']}, or use"
                " --data_location=ram"
            )
        return torch.from_file(str(path), shared=False, size=part.tokens, dtype=kind)

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
        """Inputs and targets of the sequences number `first` and on of a run, each int64
        [batch_size, block_size] on the device.

        Without replacement: an epoch visits every window once, in an order and from an offset that
        follow from (seed, epoch) alone. So with first = step x batch_size a batch follows from
        (seed, step), and a run resumes anywhere at no cost.
        """
        parts = []
        while batch_size:  # once, or twice where an epoch ends inside the batch
            epoch, at = divmod(first, self.windows)
            count = min(batch_size, self.windows - at)
            offset, order = self._epoch(epoch, seed)
            parts.append(self._gather(offset, order[at : at + count]))
            first, batch_size = first + count, batch_size - count
        chunk = parts[0] if len(parts) == 1 else torch.cat(parts)
        return chunk[:, :-1], chunk[:, 1:]

    def _epoch(self, epoch, seed):
        if epoch not in self._order:
            # NumPy guarantees Philox's raw stream in all its versions, which it does not for
            # permutation() (NEP 19).
            random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
            offset = int(random.random_raw() % self.block_size)
            order = torch.from_numpy(np.argsort(random.random_raw(self.windows), kind="stable"))
            keep = {e: o for e, o in self._order.items() if e == epoch - 1}
            self._order = keep | {
                epoch: (offset, order.to(self.device if self.location == "gpu" else "cpu"))
            }
        return self._order[epoch]

    def _gather(self, offset, rows):
        """Tokens of the windows `rows`, int64 [len(rows), block_size + 1] on the device: one
        indexing operation.
        """
        T = self.block_size
        if isinstance(self.tokens, list):
            return self._to_device(self._take(offset + rows[:, None] * T + torch.arange(T + 1)))
        return self._to_device(
            self.tokens.as_strided((self.windows, T + 1), (T, 1), offset).index_select(0, rows)
        )

    def _take(self, index):
        """The tokens at `index`, from mapped shards too."""
        if not isinstance(self.tokens, list):
            return self.tokens[index.to(self.tokens.device)]
        taken, first = torch.empty(index.shape, dtype=self.tokens[0].dtype), 0
        for tokens in self.tokens:
            here = (index >= first) & (index < first + len(tokens))
            taken[here] = tokens[index[here] - first]
            first += len(tokens)
        return taken

    def _to_device(self, chunk):
        """Gathered tokens as int64 on the device; they travel in their 16 or 32 bits, and are
        widened there.
        """
        if self.location == "mmap":  # the other places were checked when they were filled
            self._check_ids(chunk.numpy().view(self.meta.dtype))
        if self.device.type == "cuda" and chunk.device.type == "cpu":
            chunk = chunk.pin_memory()
        chunk = chunk.to(self.device, non_blocking=self.device.type == "cuda").long()
        return chunk.bitwise_and_(0xFFFF) if self.meta.dtype == "uint16" else chunk

    def evaluation(self, windows: int, micro_batch: int, share: int = 0, shares: int = 1):
        """Yield inputs, targets and the number of predictions of fixed windows spread evenly over
        the split, `micro_batch` a time.

        windows: how many, 0 for all, the last, partial one included. Each yield is int64
        [micro_batch, block_size] twice; rows that fill up the last one have only IGNORE as targets,
        so every forward has one shape and the mean does not depend on micro_batch. share, shares:
        of so many processes that evaluate together, the number of this one, which takes every
        so-many-th window.
        """
        T, whole = self.block_size, (self.length - 1) // self.block_size
        rest = self.length - 1 - whole * T
        rows = (
            range(whole)
            if not windows or windows >= whole
            else [i * whole // windows for i in range(windows)]
        )
        starts = ([row * T for row in rows] + ([whole * T] if rest and not windows else []))[
            share::shares
        ]
        for at in range(0, len(starts), micro_batch):
            part = starts[at : at + micro_batch]
            index = torch.tensor(part + [0] * (micro_batch - len(part)))[:, None] + torch.arange(
                T + 1
            )
            chunk = self._to_device(self._take(index.clamp(max=self.length - 1)))
            x, y = (
                chunk[:, :-1],
                chunk.clone()[:, 1:],
            )  # in memory as a training batch lies: another layout would be compiled anew
            y[len(part) :] = IGNORE
            cut = T - rest if part[-1] == whole * T else 0
            if cut:
                y[len(part) - 1, rest:] = IGNORE
            yield x, y, len(part) * T - cut


def read_tokens(folder: str | Path, meta: Meta, split: str) -> np.ndarray:
    """All tokens of a split in memory, [tokens] of meta.dtype: from one file, from its compressed
    copy where only that is there, or from shards in their order. Raises DataError for a file
    that is cut off or damaged.
    """
    tokens, start = np.empty(meta.splits[split].tokens, meta.dtype), 0
    for part in meta.splits[split].files():
        _fill(tokens[start : start + part.tokens], Path(folder), part)
        start += part.tokens
    return tokens


def _fill(target, folder, part):
    """Read one file into its place: in pieces by several threads, which new memory needs to take
    what a fast disk gives.
    """
    path, view, size = folder / part.file, memoryview(target).cast("B"), 1 << 26
    packed = not path.exists()
    if packed:
        path, size = folder / part.compressed["file"], max(1, len(view))

    def read(begin):
        with gzip.open(path) if packed else open(path, "rb") as file:
            file.seek(begin)
            at, end = begin, min(begin + size, len(view))
            while at < end and (count := file.readinto(view[at : min(end, at + (1 << 24))])):
                at += count
            if at < end or end == len(view) and file.read(1):
                raise DataError(
                    f"{path} does not hold the {part.tokens:,} tokens that meta.json speaks of;"
                    " copy it again"
                )

    try:
        pieces = range(0, max(1, len(view)), size)
        with (
            ThreadPoolExecutor(4) if len(pieces) > 1 else contextlib.nullcontext()
        ) as threads:  # a thread takes address space, which may be limited
            list((threads.map if threads else map)(read, pieces))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}); copy it again") from None


def find_location(size: int, device: torch.device) -> str:
    """Where `size` bytes of tokens go: "gpu" while they take at most a quarter of its free memory
    and fit through the RAM, "ram" while they take at most half of what is free there, divided
    among the processes that torchrun started here, else "mmap".
    """
    free = free_ram() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if device.type == "cuda" and size <= min(free, torch.cuda.mem_get_info(device)[0] // 4):
        return "gpu"
    return "ram" if size <= free // 2 else "mmap"


def free_ram() -> int:
    """Bytes of memory that can be had without swapping; a large guess where the system does not
    say.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(
            int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")
        )
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            files = Path("/sys/fs/cgroup", limit), Path("/sys/fs/cgroup", used)
            if all(f.exists() for f in files) and files[0].read_text().strip() != "max":
                free = min(free, int(files[0].read_text()) - int(files[1].read_text()))
        return free
    except (OSError, StopIteration, ValueError):
        return 8 << 30
