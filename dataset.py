"""A prepared folder, data/<name>/ -> batches on the device.

Owner of the metadata format: prepare_data.py writes meta.json through this file, training reads it through this file, and
every count in it is checked against the files. Knows token ids, not text and not models.
"""
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

FORMAT = 1
IGNORE = -1  # the target where nothing is to be predicted; model.py's value


class DataError(ValueError):
    """A prepared folder that cannot be used, in a sentence for the user."""


@dataclass
class Split:
    """One .bin file and what is known of it. text_bytes: UTF-8 bytes of the text that the tokens stand for."""

    file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str


@dataclass
class Meta:
    """The content of meta.json."""

    dtype: str
    vocab_size: int
    eot_id: int
    tokenizer: dict  # {"kind", "file", "sha256"}
    splits: dict[str, Split]
    sources: list[dict]
    settings: dict
    created: str
    format: int = FORMAT

    def identity(self) -> dict:
        """What a checkpoint must agree on to continue on this data."""
        return {
            "tokenizer_sha256": self.tokenizer["sha256"],
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "tokens": {name: split.tokens for name, split in self.splits.items()},
            "text_bytes": {name: split.text_bytes for name, split in self.splits.items()},
            "sha256": {name: split.sha256 for name, split in self.splits.items()},
        }


def dtype_for(vocab_size: int) -> str:
    """The smallest of the two types on disk that holds every id: "uint16" or "int32"."""
    return "uint16" if vocab_size <= 65536 else "int32"


def write_meta(folder: str | Path, meta: Meta) -> None:
    """Write meta.json whole or not at all: its presence means that the folder is finished."""
    path = Path(folder) / "meta.json"
    partial = path.with_name(".meta.json.partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as f:
        json.dump(dataclasses.asdict(meta), f, indent=1, ensure_ascii=False)
        f.write("\n")
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)


def read_meta(folder: str | Path) -> Meta:
    """Read meta.json and check it against the files beside it. Raises DataError for all that does not fit together."""
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.exists():
        raise DataError(_what_to_run(folder))
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
        meta = Meta(**raw | {"splits": {name: Split(**split) for name, split in raw["splits"].items()}})
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); prepare the data again, or restore the file from a copy") from None
    if meta.format != FORMAT:
        raise DataError(f"{path} has format {meta.format}, this code reads format {FORMAT}; prepare the data again")
    if meta.dtype not in ("uint16", "int32"):
        raise DataError(f"{path}: dtype = {meta.dtype!r}, but a .bin holds uint16 or int32")
    if meta.vocab_size > 65536 and meta.dtype == "uint16":
        raise DataError(f"{path}: dtype uint16 cannot hold a vocabulary of {meta.vocab_size}; one of the two is wrong")
    for split in meta.splits.values():
        bin_path, expected = folder / split.file, split.tokens * np.dtype(meta.dtype).itemsize
        if not bin_path.exists():
            raise DataError(f"{bin_path} is missing, though {path} names it; copy it here or prepare the data again")
        size = bin_path.stat().st_size
        if size != expected:
            other = "int32" if meta.dtype == "uint16" else "uint16"
            hint = "it is cut off or still being copied" if size < expected else "it is longer than it should be"
            if size == split.tokens * np.dtype(other).itemsize:
                hint = f"the file fits dtype {other}, so {path.name} is wrong or belongs to another file"
            raise DataError(f"{bin_path} has {size:,} bytes, but {path} says {split.tokens:,} {meta.dtype} tokens = {expected:,} bytes: {hint}")
    return meta


def _what_to_run(folder):
    prepared = sorted(p.parent.as_posix() for p in Path("data").glob("*/meta.json"))
    there = "prepared here: " + ", ".join(prepared) if prepared else "nothing is prepared yet"
    if folder.name == "shakespeare_char":
        command = f"python prepare_data.py shakespeare --tokenizer char --out {folder}"
    elif folder.name == "python_stdlib":
        command = "python prepare_data.py"
    else:
        command = f"python prepare_data.py YOUR_TEXT --out {folder}"
    state = "is not a finished data set (no meta.json)" if folder.exists() else "does not exist"
    return f"data folder {folder} {state}; run\n  {command}\n({there})"


class Dataset:
    """The tokens of one split, and its batches.

    tokens: one flat tensor, int16 (uint16's bits) or int32, on the GPU, in RAM, or memory-mapped. `windows` sequences of
    block_size tokens fit into it side by side, from whatever offset below block_size.
    """

    def __init__(self, folder: str | Path, meta: Meta, split: str, block_size: int, device: torch.device, location: str = "auto"):
        """Raises DataError when the split is shorter than one window or holds an id beyond the vocabulary."""
        self.path, self.meta, self.block_size, self.device = Path(folder) / meta.splits[split].file, meta, block_size, device
        self.length = meta.splits[split].tokens
        self.windows = (self.length - block_size) // block_size
        if self.windows < 1:
            more = "with a larger --val_fraction" if split == "val" else "from more text"
            raise DataError(f"{self.path} holds {self.length:,} tokens, too few for block_size = {block_size}: lower it to {max(1, self.length // 2)} or less, or prepare the data {more}")
        self.location = location if location != "auto" else find_location(self.path, device)
        self.tokens = self._load()
        self._order = {}  # epoch -> (offset, order of its windows)

    def _load(self):
        kind = torch.int16 if self.meta.dtype == "uint16" else torch.int32
        if self.location == "mmap":
            return torch.from_file(str(self.path), shared=False, size=self.length, dtype=kind)
        tokens = np.fromfile(self.path, dtype=self.meta.dtype)
        self._check_ids(tokens)
        tokens = torch.from_numpy(tokens.view(np.int16) if kind == torch.int16 else tokens)
        return tokens.to(self.device) if self.location == "gpu" else tokens

    def _check_ids(self, ids):
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.meta.vocab_size:
            bad = low if low < 0 else high
            raise DataError(f"{self.path} holds token id {bad}, beyond the vocabulary of {self.meta.vocab_size} in meta.json: the file is damaged or of another tokenizer; prepare the data again")

    def batch(self, first: int, batch_size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of the sequences number `first` and on of a run, each int64 [batch_size, block_size] on the device.

        Without replacement: an epoch visits every window once, in an order and from an offset that follow from (seed, epoch)
        alone. So with first = step x batch_size a batch follows from (seed, step), and a run resumes anywhere at no cost.
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
            # NumPy guarantees Philox's raw stream in all its versions, which it does not for permutation() (NEP 19).
            random = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64))
            offset = int(random.random_raw() % self.block_size)
            order = torch.from_numpy(np.argsort(random.random_raw(self.windows), kind="stable"))
            keep = {e: o for e, o in self._order.items() if e == epoch - 1}
            self._order = keep | {epoch: (offset, order.to(self.tokens.device))}
        return self._order[epoch]

    def _gather(self, offset, rows):
        """Tokens of the windows `rows`, int64 [len(rows), block_size + 1] on the device: one indexing operation."""
        T = self.block_size
        return self._to_device(self.tokens.as_strided((self.windows, T + 1), (T, 1), offset)[rows])

    def _to_device(self, chunk):
        """Gathered tokens as int64 on the device; they travel in their 16 or 32 bits, and are widened there."""
        if self.location == "mmap":  # the other places were checked when they were filled
            self._check_ids(chunk.numpy().view(self.meta.dtype))
        if self.device.type == "cuda" and chunk.device.type == "cpu":
            chunk = chunk.pin_memory()
        chunk = chunk.to(self.device, non_blocking=True).long()
        return chunk & 0xFFFF if self.meta.dtype == "uint16" else chunk

    def evaluation(self, windows: int, micro_batch: int):
        """Yield inputs, targets and the number of predictions of fixed windows spread evenly over the split, `micro_batch` a time.

        windows: how many, 0 for all, the last, partial one included. Each yield is int64 [micro_batch, block_size] twice; rows that
        fill up the last one have only IGNORE as targets, so every forward has one shape and the mean does not depend on micro_batch.
        """
        T, whole = self.block_size, (self.length - 1) // self.block_size
        rest = self.length - 1 - whole * T
        rows = range(whole) if not windows or windows >= whole else [i * whole // windows for i in range(windows)]
        starts = [row * T for row in rows] + ([whole * T] if rest and not windows else [])
        for at in range(0, len(starts), micro_batch):
            part = starts[at : at + micro_batch]
            index = torch.tensor(part + [0] * (micro_batch - len(part)))[:, None] + torch.arange(T + 1)
            chunk = self._to_device(self.tokens[index.clamp(max=self.length - 1).to(self.tokens.device)])
            x, y = chunk[:, :-1], chunk[:, 1:].clone()
            y[len(part) :] = IGNORE
            if part[-1] == whole * T:
                y[len(part) - 1, rest:] = IGNORE
            yield x, y, int((y != IGNORE).sum())


def find_location(path: Path, device: torch.device) -> str:
    """Where the tokens of a file go: "gpu" while they take at most a quarter of its free memory, "ram" while they take at most
    half of what is free, else "mmap"."""
    size = path.stat().st_size
    if device.type == "cuda" and size <= torch.cuda.mem_get_info(device)[0] // 4:
        return "gpu"
    return "ram" if size <= free_ram() // 2 else "mmap"


def free_ram() -> int:
    """Bytes of memory that can be had without swapping; a large guess where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        for limit, used in (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")):
            files = Path("/sys/fs/cgroup", limit), Path("/sys/fs/cgroup", used)
            if all(f.exists() for f in files) and files[0].read_text().strip() != "max":
                free = min(free, int(files[0].read_text()) - int(files[1].read_text()))
        return free
    except (OSError, StopIteration, ValueError):
        return 8 << 30
