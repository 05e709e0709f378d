"""Weights to start from: a checkpoint of ours, or a local folder in Hugging Face's format.

What the folders look like is in formats/run_folder.py and formats/huggingface.py.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from formats import files, huggingface, run_folder
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
    format. Raises CheckpointError for what is missing, damaged or of another architecture, and for
    files that hold more than tensors.
    """
    path = Path(path)
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
