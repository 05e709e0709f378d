"""A step folder -> a model ready to generate, with its tokenizer."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

import hardware
from formats import files, mirror, pretrained
from generating.cpu_kernels import pack
from model import GPT, GPTConfig, rotary_table
from tokenizer_bpe import Tokenizer


@dataclass
class Checkpoint:
    """A model that is ready to generate.

    name: its step folder, with slashes on every system. summary: a line about it. state: its
    state.json.
    """

    name: str
    model: GPT
    tokenizer: Tokenizer
    summary: str
    state: dict = field(default_factory=dict)


def open_checkpoint(
    path: str | Path | None, device: torch.device, dtype: str = "auto"
) -> Checkpoint:
    """The model of a run or step, at its fastest on this machine.

    path: as in mirror.find. dtype: of the weights, as --dtype of generate.py takes it. Raises
    CheckpointError where there is no checkpoint, or none that is whole.
    """
    folder = mirror.find(path)
    on_cpu = device.type == "cpu"
    loaded_as = torch.float32 if on_cpu else hardware.find_dtype(device, dtype)
    model, tokenizer, state = load_model(folder, device, loaded_as)
    summary = f"{folder}: {model.num_parameters():,} parameters, {state['tokens']:,} tokens seen"
    best = files.read_json(folder.parent / "best.json", step=int, val_loss=float)
    if best and best["step"] == state["step"]:
        summary += f", validation loss {best['val_loss']:.4f}"
    if on_cpu:
        pack(model, dtype)
    return Checkpoint(folder.as_posix(), model, tokenizer, summary, state)


def load_model(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[GPT, Tokenizer, dict]:
    """Model (evaluation mode, weights in `dtype`), tokenizer and state of a step folder.

    Raises CheckpointError for a folder that is not whole.
    """
    weights = pretrained.load(folder)
    model = model_of(weights.config, weights.tensors).to(device, dtype).eval()
    return model, weights.tokenizer, weights.state


def model_of(config: GPTConfig, tensors: dict[str, torch.Tensor]) -> GPT:
    """A model that holds these tensors, on the CPU. Its own are not made: that would take 3 s."""
    with torch.device("meta"):
        model = GPT(config)
    model.load_state_dict(tensors, assign=True)
    if config.tie_weights:
        model.lm_head.weight = model.wte.weight
    if model.rotary is not None:
        model.rotary = rotary_table(config)
    return model
