"""Loads a model and its tokenizer for generation, from a run or a folder in Hugging Face's format.

Knows checkpoints and devices; generates nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

import hardware
from formats import pretrained, run_folder
from formats.pretrained import Pretrained
from generating.cpu_kernels import pack
from model import GPT
from tokenizer_bpe import Tokenizer


@dataclass
class LoadedModel:
    """A model that is ready to generate.

    source: where it was loaded from; its tensors are cleared. summary: a line about it.
    """

    model: GPT
    tokenizer: Tokenizer
    source: Pretrained
    summary: str


def open_checkpoint(
    path: str | Path | None, device: torch.device, dtype: str = "auto"
) -> LoadedModel:
    """Load a checkpoint in the fastest format for this machine.

    path: as in pretrained.load. dtype: of the weights, a value of generate.py's --dtype. Raises
    CheckpointError if there is no checkpoint, or if it is damaged.
    """
    on_cpu = device.type == "cpu"
    weights_in = torch.float32 if on_cpu else hardware.find_dtype(device, dtype)
    found = pretrained.load_with_tokenizer(path)
    model = found.model()
    found.tensors.clear()  # or the weights stay in memory when the model has them in another form
    model = model.to(device, weights_in).eval()
    summary = f"{found.path}: {model.num_parameters():,} parameters, {describe(found)}"
    if on_cpu:
        pack(model, dtype)
    return LoadedModel(model, found.tokenizer, found, summary)


def describe(found: Pretrained) -> str:
    """A model's training in words; for a model that was trained elsewhere, its architecture."""
    if not found.state:
        return found.config.arch
    words = f"{found.state['tokens']:,} tokens seen"
    best = run_folder.read_best(found.path.parent)
    if best and best["step"] == found.state["step"]:
        words += f", validation loss {best['val_loss']:.4f}"
    return words


def load_model(folder: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict]:
    """The model (evaluation mode, float32), tokenizer and state of a folder.

    Raises CheckpointError if the folder is damaged.
    """
    found = pretrained.load_with_tokenizer(folder)
    return found.model().to(device, torch.float32).eval(), found.tokenizer, found.state
