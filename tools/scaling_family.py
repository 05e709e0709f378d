"""A preset's family: the same recipe at other widths and depths, and the learning rates for them.

Takes settings, returns settings; trains nothing.
"""

import copy
import math
from dataclasses import dataclass

import torch

from config import Config
from formats.data_folder import Meta
from model import GPT
from training.setup import model_config

WIDTHS = [32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048]
LEAST_LAYERS = 4  # with three, one came to copy from its context far later (benchmarks/README.md)
# The power of the width that the best learning rate follows, measured by
# benchmarks/learning_rates.py: depth and steps hardly move it. Of Muon the AdamW beside it too.
WIDTH_POWER = {"adamw": -0.5, "muon": -0.6}
WARMUP = 0.1  # of the steps, at most: a preset's warm-up is that of a long run


@dataclass(frozen=True)
class Size:
    """One width and depth of a family.

    weights: parameters that multiply, those of the blocks and the head, which the law calls N.
    parameters: all. flops: operations to train on a token.
    """

    n_layer: int
    n_head: int
    n_embd: int
    weights: int
    parameters: int
    flops: int

    def __str__(self) -> str:
        return f"{self.n_layer} x {self.n_embd}"


def size_of(config: Config, meta: Meta, n_layer: int, n_embd: int) -> Size:
    """A width and depth of a recipe, counted. Heads stay as wide as they can."""
    c = copy.copy(config)
    c.n_layer, c.n_embd = n_layer, n_embd
    wanted = max(1, n_embd * config.n_head / config.n_embd)
    heads = [h for h in range(1, n_embd + 1) if n_embd % (2 * h) == 0]
    c.n_head = min(heads, key=lambda h: abs(h - wanted))
    with torch.device("meta"):  # no memory
        model = GPT(model_config(c, meta))
    weights = sum(p.numel() for p in model.h.parameters()) + model.lm_head.weight.numel()
    return Size(
        n_layer=n_layer,
        n_head=c.n_head,
        n_embd=n_embd,
        weights=weights,
        parameters=model.num_parameters(),
        flops=model.flops_per_token(),
    )


def family(config: Config, meta: Meta) -> list[Size]:
    """The sizes of a recipe, smallest first, as deep for their width as the preset."""
    aspect = config.n_embd / config.n_layer
    return [
        size_of(config, meta, max(LEAST_LAYERS, round(width / aspect)), width) for width in WIDTHS
    ]


def settings_of(config: Config, size: Size, steps: int, factor: float = 1.0) -> dict:
    """What differs from the preset in a run of so many steps of a size, by name.

    Learning rates follow by WIDTH_POWER from those of the preset, at its own width, times `factor`.
    """
    scale = factor * (size.n_embd / config.n_embd) ** WIDTH_POWER[config.optimizer]
    values = {
        "n_layer": size.n_layer,
        "n_head": size.n_head,
        "n_embd": size.n_embd,
        "max_steps": steps,
        "warmup_steps": min(config.warmup_steps, math.ceil(WARMUP * steps)),
        "learning_rate": rounded(config.learning_rate * scale),
    }
    if config.min_lr:
        values["min_lr"] = rounded(config.min_lr * scale)
    if config.optimizer == "muon":
        values["muon_lr"] = rounded(config.muon_lr * scale)
    return values


def rounded(value: float) -> float:
    """A learning rate in three digits."""
    return float(f"{value:.3g}")
