"""A model without its weights: their names and shapes, against which files are checked."""

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode

from model import GPT, GPTConfig


class Undrawn(TorchFunctionMode):
    """Modules draw no weights: what memory holds is to be replaced.

    On the device meta, a draw would take a second of imports.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


class ShapesAlone(Undrawn):
    """Modules make their weights, by torch.empty, on the device meta. All else is whole."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.empty:
            kwargs = (kwargs or {}) | {"device": "meta"}
        return super().__torch_function__(func, types, args, kwargs)


def without_weights(config: GPTConfig) -> GPT:
    """A model whose weights have shapes alone, on the device meta; its buffers are whole."""
    with ShapesAlone():
        return GPT(config)


def expected_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a model."""
    return {name: tuple(t.shape) for name, t in without_weights(config).state_dict().items()}
