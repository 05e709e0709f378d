"""A step folder -> a model ready to generate, with its tokenizer.

Knows checkpoints and devices; it generates nothing.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

import hardware
from formats import pretrained, run_folder
from formats.conversation import Form
from generating.cpu_kernels import pack
from model import GPT
from tokenizer_bpe import Tokenizer


@dataclass
class LoadedModel:
    """A model that is ready to generate.

    name: its step folder, with slashes on every system. form: how conversations read for it.
    summary: a line about it. state: its state.json.
    """

    name: str
    model: GPT
    tokenizer: Tokenizer
    form: Form
    summary: str
    state: dict


def open_checkpoint(
    path: str | Path | None, device: torch.device, dtype: str = "auto"
) -> LoadedModel:
    """The model of a run or step, at its fastest on this machine.

    path: as in pretrained.load_run. dtype: of the weights, as --dtype of generate.py takes it.
    Raises CheckpointError where there is no checkpoint, or none that is whole.
    """
    on_cpu = device.type == "cpu"
    weights_in = torch.float32 if on_cpu else hardware.find_dtype(device, dtype)
    found = pretrained.load_run(path)
    folder, tokenizer, state = found.path, found.tokenizer, found.state
    model = found.model().to(device, weights_in).eval()
    summary = f"{folder}: {model.num_parameters():,} parameters, {state['tokens']:,} tokens seen"
    best = run_folder.read_best(folder.parent)
    if best and best["step"] == state["step"]:
        summary += f", validation loss {best['val_loss']:.4f}"
    if on_cpu:
        pack(model, dtype)
    return LoadedModel(folder.as_posix(), model, tokenizer, found.form, summary, state)


def load_model(folder: Path, device: torch.device) -> tuple[GPT, Tokenizer, dict]:
    """Model (evaluation mode, weights in float32), tokenizer and state of a step folder.

    Raises CheckpointError for a folder that is not whole.
    """
    found = pretrained.load_run(folder)
    return found.model().to(device, torch.float32).eval(), found.tokenizer, found.state
