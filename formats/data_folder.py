"""meta.json of a prepared folder, data/<name>/.

prepare_data.py writes it; training reads it and checks it against the files. Knows neither text nor
tensors, so that preparing need not import torch.
"""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from command_line import UserError, our_file, quote
from formats.files import few, fingerprint, write_checked
from formats.files import sha256 as file_sha256

FORMAT = 1
# The bits of a mask, which has one byte per token.
IN_REPLY = 1  # the token is part of an assistant's reply, or ends one
TURN_BEGINS = 2  # the token begins another speaker's turn
REMEDY = "copy the folder here again, or prepare the data again with --overwrite"


class DataError(UserError):
    """A prepared folder that cannot be used."""


@dataclass
class Split:
    """The description of a .bin file.

    text_bytes: UTF-8 bytes of the text that its tokens encode. mask: for conversations, the file
    with one byte per token, made of the bits above; its own tokens and text_bytes count replies
    alone, and documents is None.
    """

    file: str
    tokens: int
    documents: int | None = None
    text_bytes: int = 0
    sha256: str = ""
    mask: "Split | None" = None

    def counted(self, loss_on: str) -> "Split":
        """The counts for the tokens that enter the loss. loss_on: the setting of that name."""
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
        """The values that must equal a checkpoint's for it to continue on this data."""
        values = {
            "tokenizer_sha256": self.tokenizer["sha256"],
            "dtype": self.dtype,
            "vocab_size": self.vocab_size,
        }
        for field in ("tokens", "text_bytes", "sha256"):
            values[field] = {name: getattr(split, field) for name, split in self.splits.items()}
        masks = {name: split.mask.sha256 for name, split in self.splits.items() if split.mask}
        if masks:
            values["masks"] = masks
        return values

    def bits_per_byte(self, loss: float, loss_on: str) -> float:
        """Convert a validation loss from nats per token to bits per byte of text.

        Bits per byte are comparable across tokenizers. loss_on: the setting of that name.
        """
        val = self.splits["val"].counted(loss_on)
        return loss / math.log(2) * val.tokens / max(1, val.text_bytes)


def dtype_for(vocab_size: int) -> str:
    """The smaller of the two dtypes on disk that holds every id: "uint16" or "int32"."""
    return "uint16" if vocab_size <= 1 << 16 else "int32"


def write_meta(folder: str | Path, meta: Meta) -> None:
    """Write meta.json whole or not at all: its presence means that the folder is finished."""
    values = dataclasses.asdict(meta, dict_factory=_without_none)
    write_checked(Path(folder) / "meta.json", values)


def _without_none(fields):
    return {name: value for name, value in fields if value is not None}


def read_meta(folder: str | Path) -> Meta:
    """Read meta.json and check it against the files next to it.

    Raises DataError if anything is missing or does not match.
    """
    folder = Path(folder)
    path = folder / "meta.json"
    if not path.exists():
        raise DataError(_how_to_prepare(folder))
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        checksum = values.pop("sha256", None)
        if checksum not in (None, fingerprint(values)):  # older folders have none
            raise ValueError("its values are not those it was written with")
        splits = {name: _split(values["splits"][name]) for name in ("train", "val")}
        meta = Meta(**_known(Meta, values | {"splits": splits}))
        if meta.format != FORMAT:
            raise ValueError(f"it has format {meta.format}, this code reads {FORMAT}")
        if meta.dtype != dtype_for(meta.vocab_size):
            raise ValueError(f"a vocabulary of {meta.vocab_size} has no dtype {meta.dtype!r}")
        meta.tokenizer = {name: str(meta.tokenizer[name]) for name in ("kind", "file", "sha256")}
        for split in meta.splits.values():
            _check_size(folder, split, split.tokens, meta.dtype)
            if split.mask:
                _check_size(folder, split.mask, split.tokens, "uint8")
    except DataError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise DataError(
            f"{path} cannot be used ({type(error).__name__}: {error}); {REMEDY}"
        ) from None
    return meta


def _known(table, values):
    """The fields of a dataclass in `values`; another version of this program may have more."""
    names = {field.name for field in dataclasses.fields(table)}
    return {name: values[name] for name in values.keys() & names}


def _split(values):
    split = Split(**_known(Split, values))
    if split.mask:
        split.mask = _split(split.mask)
    return split


def _check_size(folder, split, tokens, dtype):
    """Raises DataError unless a .bin exists and has the right size."""
    path, expected = folder / split.file, tokens * np.dtype(dtype).itemsize
    if not path.exists():
        raise DataError(f"{path} is missing, though {folder / 'meta.json'} names it; {REMEDY}")
    size = path.stat().st_size
    if size != expected:
        raise DataError(
            f"{path} has {size:,} bytes instead of {expected:,} ({tokens:,} {dtype} tokens): it is"
            f" cut off, still being copied, or not the file that meta.json describes; {REMEDY}"
        )


def tokenizer_file(folder: str | Path, meta: Meta) -> Path:
    """The path of a prepared folder's tokenizer. Raises DataError if it is not the data's."""
    path = Path(folder) / meta.tokenizer["file"]
    if not path.exists():
        raise DataError(f"{path} is missing, though meta.json names it; {REMEDY}")
    if file_sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(
            f"{path} is not the tokenizer that made {folder}: its checksum is not the one in"
            " meta.json; copy the right one there, or prepare the data again"
        )
    return path


def check_tokens(path: Path, numbers: np.ndarray, sha256: str) -> None:
    """Raises DataError unless the content of a .bin has the given checksum."""
    if hashlib.sha256(numbers).hexdigest() != sha256:
        raise DataError(
            f"{path} is damaged: its bytes are not those that meta.json describes; {REMEDY}"
        )


def read_tokens(folder: str | Path, meta: Meta, split: str) -> np.ndarray:
    """All tokens of a split in memory, [tokens] of meta.dtype. Raises DataError if damaged."""
    file = meta.splits[split]
    path = Path(folder) / file.file
    tokens = np.fromfile(path, meta.dtype)
    check_tokens(path, tokens, file.sha256)
    return tokens


def check_masked(folder: str | Path, meta: Meta) -> None:
    """Raises DataError if the data has no replies to train on."""
    if not meta.splits["train"].counted("assistant").tokens:
        tokenizer = quote(str(folder))
        raise DataError(
            f"loss_on = assistant, but {folder} has no mask of the assistant's tokens: it holds no"
            " conversations. Prepare some, a list of messages a line:\n"
            f"  python {our_file('prepare_data.py')} CONVERSATIONS.jsonl --tokenizer {tokenizer}"
            " --out data/chat\n(with init_from, give --tokenizer its path) and train with"
            " --data_dir=data/chat, or use loss_on = all"
        )


def check_validated(folder: str | Path, meta: Meta, loss_on: str) -> None:
    """Raises DataError if no validation loss can be computed. loss_on: the setting of that name."""
    if loss_on == "assistant":
        check_masked(folder, meta)
    if not meta.splits["val"].counted(loss_on).tokens:
        raise DataError(
            f"{folder} has nothing to validate on; prepare it with a --val_fraction above 0"
        )


def _how_to_prepare(folder):
    """The message for a folder without prepared data: what to type, and which folders have some."""
    text, out = "YOUR_TEXT", quote(folder.as_posix())
    if (folder / ".partial").exists():
        return f"{folder.as_posix()} is not finished; repeat the command that prepares it"
    if folder.exists():
        if folder.resolve() != Path("data").resolve():  # data/ holds prepared data, not text
            text = out
        out = "data/NAME"
    prepared = sorted(path.parent.as_posix() for path in Path("data").glob("*/meta.json"))
    return (
        f"{folder.as_posix()} holds no prepared data (no meta.json); run\n"
        f"  python {our_file('prepare_data.py')} {text} --out {out}\n"
        "(the first lines of a preset have its own command), or name the folder where it is now.\n"
        f"Now prepared in {Path('data').absolute()}: {few(prepared) or 'nothing yet'}"
    )
