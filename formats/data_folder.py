"""What a prepared folder, data/<name>/, says of itself: meta.json.

prepare_data.py writes it, training/dataset.py reads it, and every count in it is checked against
the files. Knows neither text nor tensors, so that preparing need not import torch.
"""

import dataclasses
import gzip
import hashlib
import json
import math
import re
import shlex
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from filelock import FileLock
from tqdm import tqdm

from formats.files import check_room, has_form, whole, write_json

FORMAT = 1
LARGEST_VOCABULARY = {"uint16": 1 << 16, "int32": 1 << 31}  # that a .bin of the dtype can hold
# What a mask says of a token, as bits.
IN_REPLY = 1  # the assistant says it, or it ends a reply
TURN_BEGINS = 2  # a turn begins with it that is not the assistant's
CHUNK = 1 << 24  # bytes unpacked at a time
# The form of what is read from meta.json.
_SPLIT = {"file": "", "tokens": 0, "documents": 0, "text_bytes": 0, "sha256": ""}
_SPLIT |= {"blocks_sha256": ""}
META = {
    "dtype": "",
    "vocab_size": 0,
    "eot_id": 0,
    "tokenizer": {"kind": "", "file": "", "sha256": ""},
    "splits": {"train": _SPLIT, "val": _SPLIT},
    "settings": {},
    "created": "",
}
BLOCKS, BLOCK = 32, 1 << 16  # of a file that are compared whenever it is opened, and their bytes


class DataError(ValueError):
    """A prepared folder that cannot be used, in a sentence for the user."""


@dataclass
class Split:
    """A .bin file and what is known of it. A copy of its name and .gz can take its place.

    text_bytes: UTF-8 bytes of the text of the tokens. blocks_sha256: as the function of
    that name has it. mask: where the data holds conversations, the file with a byte for each token,
    of the bits above; its tokens and text_bytes are those in replies, and it counts no documents.
    """

    file: str
    tokens: int
    documents: int | None = None
    text_bytes: int = 0
    sha256: str = ""
    blocks_sha256: str = ""
    mask: "Split | None" = None

    def counted(self, loss_on: str) -> "Split":
        """The tokens that a loss counts. loss_on: the setting of that name."""
        if loss_on == "all":
            return self
        return self.mask or Split(file="", tokens=0)


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
    return "uint16" if vocab_size <= LARGEST_VOCABULARY["uint16"] else "int32"


def write_meta(folder: str | Path, meta: Meta) -> None:
    """Write meta.json whole or not at all: its presence means that the folder is finished."""

    def without_none(fields):
        return {name: value for name, value in fields if value is not None}

    values = dataclasses.asdict(meta, dict_factory=without_none)
    write_json(Path(folder) / "meta.json", values)


def read_meta(folder: str | Path, weights: str | None = None) -> Meta:
    """Read meta.json and check it against the files next to it.

    weights: whose tokenizer the data is to have, for the command that prepares it. Raises DataError
    for all that does not fit together.
    """
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.exists():
        raise DataError(_what_to_run(folder, weights))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not has_form(values, META):
            raise ValueError("it is not as prepare_data.py writes it")
        splits = {name: _split(values["splits"][name]) for name in ("train", "val")}
        meta = Meta(**(values | {"splits": splits}))
        if meta.format != FORMAT:
            raise ValueError(f"it has format {meta.format}, this code reads {FORMAT}")
        if meta.vocab_size > LARGEST_VOCABULARY.get(meta.dtype, 0):
            raise ValueError(f"dtype {meta.dtype} cannot hold {meta.vocab_size:,} ids")
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(
            f"{path} cannot be used ({type(error).__name__}: {error}); prepare the data again, or"
            " restore the file from a copy"
        ) from None
    for split in meta.splits.values():
        _check_file(folder, split, split.tokens, meta.dtype)
        if split.mask:
            _check_file(folder, split.mask, split.tokens, "uint8")
    return meta


def _split(values):
    mask = values.get("mask")
    return Split(**values | {"mask": Split(**mask) if mask else None})


def _check_file(folder, split, tokens, dtype):
    """Raises DataError unless a .bin has its size and some of its blocks, or its .gz is there."""
    path, expected = folder / split.file, tokens * np.dtype(dtype).itemsize
    if not path.exists() and gz_of(path).exists():
        return  # unpacked() checks what is in it
    if not path.exists():
        raise DataError(
            f"{path} is missing, though {folder / 'meta.json'} names it; copy it here or prepare"
            " the data again"
        )
    size = path.stat().st_size
    if size != expected:
        raise DataError(
            f"{path} has {size:,} bytes instead of {expected:,} ({tokens:,} {dtype} tokens): it is"
            " cut off, still being copied, or not the file that meta.json describes; copy both"
            " again, or prepare the data again"
        )
    if blocks_sha256(path) != split.blocks_sha256:
        raise DataError(
            f"{path} is damaged: its bytes are not those that meta.json describes; copy it here"
            " again, or prepare the data again"
        )


def blocks_sha256(path: Path) -> str:
    """Checksum of BLOCKS blocks of a file, evenly spread, the first and the last among them."""
    digest = hashlib.sha256()
    last = max(0, path.stat().st_size - BLOCK)
    with open(path, "rb") as file:
        for n in range(BLOCKS):
            file.seek(last * n // (BLOCKS - 1))
            digest.update(file.read(BLOCK))
    return digest.hexdigest()


def gz_of(path: Path) -> Path:
    """The compressed copy of a .bin."""
    return path.with_name(f"{path.name}.gz")


def unpacked(folder: Path, split: Split, size: int) -> Path:
    """The path of a .bin of `size` bytes; it is unpacked first, once, where only its .gz is there.

    Raises DataError for a damaged .gz, OSError where the disk has no room.
    """
    path = folder / split.file
    if path.exists():
        return path
    lock = folder / f".{path.name}.lock"
    with FileLock(lock):  # one of torchrun's processes unpacks, the others wait
        if not path.exists():
            _unpack(path, split, size)
    return path


def _unpack(path, split, size):
    """Write the content of its .gz to `path`, whole or not at all."""
    copy = gz_of(path)
    check_room(path.parent, size, f"move {path.parent} to a larger disk")
    try:
        with whole(path) as partial, gzip.open(copy) as source, open(partial, "wb") as file:
            text = f"unpacking {copy}"
            with tqdm.wrapattr(file, "write", total=size, desc=text, disable=None) as shown:
                shutil.copyfileobj(source, shown, CHUNK)
            file.flush()
            if file.tell() != size or blocks_sha256(partial) != split.blocks_sha256:
                raise EOFError("it holds other tokens than meta.json describes")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{copy} is damaged ({error}); copy it again") from None


def _what_to_run(folder, weights):
    """The command for a folder that holds no prepared data. weights: as in read_meta."""
    out = folder.as_posix()
    presets = sorted((Path(__file__).parent.parent / "config").glob("*.py"))
    comments = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in presets)
    found = re.search(rf"python prepare_data.py .*--out {re.escape(out)}$", comments, re.MULTILINE)
    quoted = "data/NAME" if folder.is_file() else shlex.quote(out)
    command = found[0] if found else f"python prepare_data.py YOUR_TEXT --out {quoted}"
    if weights:
        tokenizer = shlex.quote(weights)
        command = f"python prepare_data.py YOUR_TEXT --tokenizer {tokenizer} --out {quoted}"
    prepared = sorted(path.parent.as_posix() for path in Path("data").glob("*/meta.json"))
    here = Path("data").absolute()
    others = f"nothing is prepared in {here}"
    if prepared:
        others = f"or choose one that is prepared in {here}: {', '.join(prepared)}"
    return f"{out} holds no prepared data (no meta.json); run\n  {command}\n{others}"
