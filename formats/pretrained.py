"""Weights to start from: a checkpoint of ours, or a folder in Hugging Face's format.

What the folders look like is in formats/run_folder.py and formats/huggingface.py. Of what lies at
an address there will be a copy on this disk.
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
    """What can be started from.

    config: its shape. tensors: float32, under the names of model.GPT. tokenizer: None where the
    folder has none.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None

    def cut_to(self, block_size: int) -> dict[str, torch.Tensor]:
        """The tensors for a context of at most its own: of learned positions, the first."""
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
    if "model_type" in (files.read_json(path / "config.json") or {}):
        return load_hf(path)
    folder = run_folder.find(path)
    state = run_folder.read_state(folder, ("model.pt", "tokenizer.json"))
    config = run_folder.read_shape(folder, state)
    tensors = run_folder.load_tensors(folder / "model.pt")
    huggingface.check_tensors(folder, config, tensors)
    return Pretrained(folder, config, tensors, Tokenizer.load(folder / "tokenizer.json"))


def load_hf(folder: Path) -> Pretrained:
    """A folder in Hugging Face's format. Raises as `load` does."""
    config = huggingface.read_config(folder)
    tensors = huggingface.from_hf(config, huggingface.read_tensors(folder))
    huggingface.check_tensors(folder, config, tensors)
    has_tokenizer = (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists()
    return Pretrained(folder, config, tensors, Tokenizer.load(folder) if has_tokenizer else None)


def fetched(address: str) -> Path:
    """A copy of what lies at an address: a folder in Hugging Face's format, or a step of a run.

    Of several processes one fetches. Raises as `load` does.
    """
    asked = time.time()
    here = copy_of(address)
    here.mkdir(parents=True, exist_ok=True)
    try:
        there = Folder(address)
        with FileLock(here / ".lock"):
            there.get_small(("config.json",), here)
            if "model_type" not in (files.read_json(here / "config.json") or {}):
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
