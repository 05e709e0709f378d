"""What a prepared folder, data/<name>/, says of itself: meta.json.

prepare_data.py writes it, training/dataset.py reads it, and every count in it is checked against
the files. Knows neither text nor tensors, so that preparing need not import torch.
"""

import dataclasses
import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from formats.files import check_room, whole, write_json

FORMAT = 1
CHUNK = 1 << 24  # bytes unpacked at a time
# What a mask says of a token, as bits.
IN_REPLY = 1  # the assistant says it, or it ends a reply
TURN_BEGINS = 2  # a turn begins with it that is not the assistant's


class DataError(ValueError):
    """A prepared folder that cannot be used, in a sentence for the user."""


@dataclass
class Mask:
    """The file beside a .bin that holds conversations: a byte for each token, of the bits above.

    tokens, text_bytes: how many of the tokens are in replies, and their UTF-8 bytes of text.
    compressed: as of a Split.
    """

    file: str
    tokens: int
    text_bytes: int
    sha256: str
    compressed: dict | None = None


@dataclass
class Split:
    """One .bin file and what is known of it.

    text_bytes: UTF-8 bytes of the text that the tokens stand for. compressed: {"file", "bytes",
    "sha256"} of a .gz copy, which can stand in for the file. mask: where the data holds
    conversations.
    """

    file: str
    tokens: int
    documents: int
    text_bytes: int
    sha256: str
    compressed: dict | None = None
    mask: Mask | None = None

    def counted(self, loss_on: str) -> "Split | Mask":
        """What of the tokens a loss counts. loss_on: the setting of that name."""
        if loss_on == "all":
            return self
        return self.mask or Mask(file="", tokens=0, text_bytes=0, sha256="")


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
        values = {
            "tokenizer_sha256": self.tokenizer["sha256"],
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
            "tokens": {name: split.tokens for name, split in self.splits.items()},
            "text_bytes": {name: split.text_bytes for name, split in self.splits.items()},
            "sha256": {name: split.sha256 for name, split in self.splits.items()},
        }
        masks = {name: split.mask.sha256 for name, split in self.splits.items() if split.mask}
        return values | {"masks": masks} if masks else values

    def bits_per_byte(self, loss: float, loss_on: str) -> float:
        """A validation loss in nats a token as bits a byte of text.

        It compares across tokenizers. loss_on: the setting of that name.
        """
        val = self.splits["val"].counted(loss_on)
        return loss / math.log(2) * val.tokens / max(1, val.text_bytes)


def dtype_for(vocab_size: int) -> str:
    """The smallest of the two types on disk that holds every id: "uint16" or "int32"."""
    return "uint16" if vocab_size <= 65536 else "int32"


def write_meta(folder: str | Path, meta: Meta) -> None:
    """Write meta.json whole or not at all: its presence means that the folder is finished."""
    values = dataclasses.asdict(meta)
    for split in values["splits"].values():
        for described in (split, split["mask"] or {}):
            for name in ("compressed", "mask"):
                if not described.get(name, True):
                    del described[name]
    write_json(Path(folder) / "meta.json", values)


def read_meta(folder: str | Path, weights: str | None = None) -> Meta:
    """Read meta.json and check it against the files next to it.

    weights: whose tokenizer the data is to have, for what to type where there is none. Raises
    DataError for all that does not fit together.
    """
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.exists():
        raise DataError(_what_to_run(folder, weights))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        splits = {name: _split(values["splits"][name]) for name in ("train", "val")}
        meta = Meta(**(values | {"splits": splits}))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(
            f"{path} is damaged ({type(error).__name__}: {error}); prepare the data again, or"
            " restore the file from a copy"
        ) from None
    if meta.format != FORMAT:
        raise DataError(
            f"{path} has format {meta.format}, this code reads format {FORMAT}; prepare the data"
            " again"
        )
    if meta.dtype not in ("uint16", "int32"):
        raise DataError(f"{path}: dtype = {meta.dtype!r}, but a .bin holds uint16 or int32")
    if meta.vocab_size > 65536 and meta.dtype == "uint16":
        raise DataError(
            f"{path}: dtype uint16 cannot hold a vocabulary of {meta.vocab_size}; one of the two is"
            " wrong"
        )
    for split in meta.splits.values():
        _check_file(folder, split, split.tokens, meta.dtype)
        if split.mask:
            _check_file(folder, split.mask, split.tokens, "uint8")
    return meta


def _split(values):
    """A Split of its values in meta.json."""
    mask = values.get("mask")
    return Split(**values | {"mask": Mask(**mask) if mask else None})


def _check_file(folder, described, tokens, dtype):
    """Raises DataError unless a .bin, or a copy that stands in for it, is there in its size.

    described: a Split or its Mask.
    """
    if (folder / described.file).exists():
        _check_size(folder, described, tokens, dtype)
    else:
        _check_copy(folder, described)


def _check_size(folder, described, tokens, dtype):
    """Raises DataError unless the .bin has the size that it should have."""
    path, meta = folder / described.file, folder / "meta.json"
    size, expected = path.stat().st_size, tokens * np.dtype(dtype).itemsize
    if size == expected:
        return
    other = "int32" if dtype == "uint16" else "uint16"
    if dtype != "uint8" and size == tokens * np.dtype(other).itemsize:
        hint = f"the file fits dtype {other}, so meta.json is wrong or belongs to another file"
    elif size < expected:
        hint = "it is cut off or still being copied"
    else:
        hint = "it is longer than it should be"
    raise DataError(
        f"{path} has {size:,} bytes, but {meta} says {tokens:,} {dtype} tokens ="
        f" {expected:,} bytes: {hint}"
    )


def _check_copy(folder, described):
    """Raises DataError unless a whole compressed copy stands in for the missing .bin."""
    copy = folder / described.compressed["file"] if described.compressed else None
    if copy is None or not copy.exists():
        raise DataError(
            f"{folder / described.file} is missing, though {folder / 'meta.json'} names it; copy it"
            " here or prepare the data again"
        )
    size, expected = copy.stat().st_size, described.compressed["bytes"]
    if size != expected:
        raise DataError(
            f"{copy} has {size:,} bytes, but meta.json says {expected:,}: it is cut off or still"
            " being copied"
        )


def unpacked(folder: Path, described: Split | Mask, size: int) -> Path:
    """The path of a .bin of `size` bytes; it is unpacked first, once, where only its .gz is there.

    Raises DataError for a damaged .gz, OSError where the disk has no room.
    """
    path = folder / described.file
    if path.exists():
        return path
    lock = folder / f".{path.name}.lock"
    with FileLock(lock):  # one of torchrun's processes unpacks, the others wait
        if not path.exists():
            _unpack(folder / described.compressed["file"], path, size)
        lock.unlink(missing_ok=True)
    return path


def _unpack(copy, path, size):
    """Write the content of a .gz, whole or not at all."""
    check_room(path.parent, size, f"move {path.parent} to a larger disk")
    bar = tqdm(desc=f"unpacking {copy}", total=size, unit="B", unit_scale=True, disable=None)
    try:
        with whole(path) as partial, gzip.open(copy) as source, open(partial, "wb") as file, bar:
            while data := source.read(CHUNK):
                file.write(data)
                bar.update(len(data))
            if file.tell() != size:
                raise EOFError(f"{file.tell():,} bytes instead of {size:,}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{copy} is damaged ({error}); copy it again") from None


def _what_to_run(folder, weights):
    """What to type where a folder holds no prepared data. weights: as in read_meta."""
    prepared = sorted(p.parent.as_posix() for p in Path("data").glob("*/meta.json"))
    there = "prepared here: " + ", ".join(prepared) if prepared else "nothing is prepared yet"
    if weights:
        command = f"python prepare_data.py YOUR_TEXT --tokenizer {weights} --out {folder}"
    else:
        command = _of_a_preset(folder) or f"python prepare_data.py YOUR_TEXT --out {folder}"
    state = "is not a finished data set (no meta.json)" if folder.exists() else "does not exist"
    return f"data folder {folder} {state}; run\n  {command}\n({there})"


def _of_a_preset(folder):
    """The command that prepares a folder, from the first lines of the presets; None if of none."""
    out = f"--out {folder.as_posix()}"
    for preset in sorted((Path(__file__).parent.parent / "config").glob("*.py")):
        for line in preset.read_text(encoding="utf-8").splitlines():
            command = line.removeprefix("#").strip()
            if command.startswith("python prepare_data.py") and command.endswith(out):
                return command
    return None
