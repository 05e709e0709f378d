"""Weights to start from: a checkpoint of ours, or a folder in Hugging Face's format.

formats/run_folder.py and formats/huggingface.py know these folders. An address is copied to this
disk first.
"""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from filelock import FileLock

from formats import files, huggingface, mirror, run_folder
from formats.address import AddressError, Folder, copy_of, protocol_of
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import Tokenizer


@dataclass
class Pretrained:
    """Weights to start from.

    config: their shape. tensors: float32, under the names of model.GPT. tokenizer: None where the
    folder has none.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a context of at most their own: of learned positions, the first."""
        tensors = dict(self.tensors)
        if "wpe.weight" in tensors:
            tensors["wpe.weight"] = tensors["wpe.weight"][:block_size]
        return tensors


def load(path: str | Path) -> Pretrained:
    """The weights at `path`.

    path: a run (its best step, else its newest), a step of one, or a folder in Hugging Face's
    format; also the address of one. Raises CheckpointError for what is missing, damaged or of
    another architecture, and for files that hold more than tensors.
    """
    path = Path(fetched(path) if protocol_of(str(path)) else path)
    if is_hf(path):
        config = huggingface.read_config(path)
        tensors = huggingface.from_hf(config, huggingface.read_tensors(path))
        has_tokenizer = (path / "tokenizer.json").exists() or (path / "vocab.json").exists()
    else:
        path = run_folder.find(path)
        state = run_folder.read_state(path, ("model.pt", "tokenizer.json"))
        config = run_folder.read_shape(path, state)
        tensors = run_folder.load_tensors(path / "model.pt")
        has_tokenizer = True
    huggingface.check_tensors(path, config, tensors)
    return Pretrained(path, config, tensors, Tokenizer.load(path) if has_tokenizer else None)


def is_hf(folder: Path) -> bool:
    """Whether the folder is in Hugging Face's format: its config.json names an architecture."""
    return "model_type" in (files.read_json(folder / "config.json") or {})


def fetched(address: str) -> Path:
    """A copy of what is at an address: a folder in Hugging Face's format, or a step of a run.

    Of several processes one fetches. Raises as `load` does.
    """
    asked = time.time()
    here = copy_of(address)
    here.mkdir(parents=True, exist_ok=True)
    try:
        there = Folder(address)
        with FileLock(here / ".lock"):
            there.get_small(("config.json",), here)
            if not is_hf(here):
                return mirror.find(address)
            finished = here / ".finished"
            if not finished.exists() or finished.stat().st_mtime < asked:
                _fetch(there, here)
                finished.touch()
    except (AddressError, OSError) as error:
        raise CheckpointError(files.in_words(error)) from None
    return here


def _fetch(there, here):
    """Copy what is needed of a folder in Hugging Face's format to this disk."""
    sizes = there.list()
    names = huggingface.needed(sizes)
    size = sum(sizes[name] for name in names)
    files.check_room(here, size, "choose another disk")
    how_much = f", {size / 1e6:,.1f} MB" if size else ""
    print(f"fetching {there.address}{how_much}", file=sys.stderr, flush=True)
    for name in names:
        with files.whole(here / name) as partial:
            there.get(name, partial)
