"""Trained weights with what belongs to them: a checkpoint of ours, or a Hugging Face folder.

formats/run_folder.py and formats/huggingface.py know these folders. An address is copied to this
disk first.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from formats import files, huggingface, mirror, run_folder
from formats.address import Folder, copy_of, protocol_of
from model import GPTConfig
from tokenizer_bpe import Tokenizer


@dataclass
class Pretrained:
    """The weights in a folder.

    config: their shape. tensors: on the CPU, under the names of model.GPT. tokenizer: None where
    the folder has none. state: of a step folder, its state.json; else empty.
    """

    path: Path
    config: GPTConfig
    tensors: dict[str, torch.Tensor]
    tokenizer: Tokenizer | None
    state: dict

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
    another architecture, and for files that hold more than tensors; AddressError, and OSError
    where the disk does not take the copy of an address.
    """
    folder = fetched(path) if protocol_of(str(path)) else Path(path)
    if is_hf(folder):
        config, state, tokenizer = huggingface.read_config(folder), {}, None
        tensors = huggingface.from_hf(config, huggingface.read_tensors(folder))
        if (folder / "tokenizer.json").exists() or (folder / "vocab.json").exists():
            tokenizer = Tokenizer.load(folder)
    else:
        folder = run_folder.find(folder)
        state = run_folder.read_state(folder, ("model.pt", "tokenizer.json"))
        config = run_folder.read_shape(folder, state)
        tensors = run_folder.load_tensors(folder / "model.pt")
        tokenizer = Tokenizer.load(folder)
    huggingface.check_tensors(folder, config, tensors)
    return Pretrained(folder, config, tensors, tokenizer, state)


def is_hf(folder: Path) -> bool:
    """Whether the folder is in Hugging Face's format: its config.json names an architecture."""
    return "model_type" in (files.read_json(folder / "config.json") or {})


def fetched(address: str) -> Path:
    """A copy of what is at an address: a folder in Hugging Face's format, or a step of a run.

    Of several processes one fetches. Raises as `load` does.
    """
    asked = time.time()
    there = Folder(address)
    with copy_of(there) as here:
        there.get_small(("config.json",), here)
        finished = here / ".finished"
        new = finished.exists() and finished.stat().st_mtime >= asked
        if is_hf(here) and not new:
            sizes = there.list()
            wanted = huggingface.needed(sizes)
            for name in huggingface.needed(path.name for path in here.iterdir()):
                if name not in wanted:  # of an earlier state of the address
                    (here / name).unlink()
            there.get({name: sizes[name] for name in wanted}, here)
            finished.touch()
    return here if is_hf(here) else mirror.find(address)
