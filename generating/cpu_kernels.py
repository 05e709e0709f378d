"""Linear layers for generation on a CPU, in the fastest format for that CPU.

The fastest format on one kind of CPU is slow on another, so `pack` times the formats on the model's
first layers rather than look up the processor's name.
"""

import contextlib
import time
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from hardware import DTYPES

LARGEST_HALF = 65504  # the largest float16
SMALL = 2**23  # weights; fewer fit in cache, where float32 is fast enough
TIMED = 12  # layers: three blocks, more weights than a core's own caches hold
SEVERAL = 32  # rows timed for prompts and batches
CLEARLY = 0.85  # of the usual format's time; a smaller gain may be chance

# A format takes a weight, float32 [out, in], and a bias, float32 [out] or None, and returns a
# function from float32 [..., in] to float32 [..., out].


def by_onednn(dtype, weight, bias):
    """float32 or bfloat16, in oneDNN's layout.

    The layout for several rows is faster for a single row, too.
    """
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(dtype), SEVERAL)
    bias = None if bias is None else bias.to(dtype)

    def multiply(x):
        x = x.to(dtype)
        return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "").float()

    return multiply


def in_float32(weight, bias):
    """float32, in oneDNN's layout if available: takes half the time of the usual one."""
    if torch.backends.mkldnn.is_available():
        return by_onednn(torch.float32, weight, bias)
    return lambda x: F.linear(x, weight, bias)


def in_float16(weight, bias):
    """float16, by PyTorch's own kernel, which is fast only for a single row."""
    weight = weight.half()
    bias = None if bias is None else bias.half()

    def multiply(x):
        x = x.half().clamp_(-LARGEST_HALF, LARGEST_HALF)
        return F.linear(x, weight, bias).float()

    return multiply


FORMATS = {  # the least precise first
    "bfloat16": partial(by_onednn, torch.bfloat16),
    "float16": in_float16,
    "float32": in_float32,
}


class PackedLinear(nn.Module):
    """A Linear layer with one format for a single row and one for several; without gradients.

    rounded_to: the dtype to which the weight is first rounded, so that both formats hold the same
    values.
    """

    def __init__(self, linear: nn.Linear, one_row: str, several: str, rounded_to: str = "float32"):
        super().__init__()
        weight = linear.weight.detach().to(DTYPES[rounded_to]).float()
        bias = None if linear.bias is None else linear.bias.detach()
        self.one_row = FORMATS[one_row](weight, bias)
        self.several = self.one_row
        if several != one_row:
            self.several = FORMATS[several](weight, bias)

    def forward(self, x):  # x: [..., in features]
        if x.numel() == x.size(-1):
            return self.one_row(x)
        return self.several(x)


def pack(model: nn.Module, dtype: str = "auto") -> tuple[str, str]:
    """Replace the Linear layers of a float32 model by PackedLinear in this CPU's fastest formats.

    dtype: of the weights: float32, bfloat16, float16, or auto for 16 bits if that is clearly
    faster. Activations between the layers stay float32. Returns the formats for one row and for
    several.
    """
    # A subclass may compute something else.
    sizes = {n: m.weight.numel() for n, m in model.named_modules() if type(m) is nn.Linear}
    one_row = several = "float32"
    if dtype != "float32" and sum(sizes.values()) >= SMALL:
        timed = [model.get_submodule(name) for name in list(sizes)[:TIMED]]
        formats = ["float32"] if dtype == "float16" else ["float32", "bfloat16"]
        several = fastest(formats, "float32", timed, rows=SEVERAL)
        # The same format if possible, as two take twice the memory.
        one_row = fastest([*formats, "float16"], several, timed, rows=1)
        del timed  # a layer's weights must go when it is packed, or both models are in memory
    if dtype == "auto":
        dtype = min(one_row, several, key=list(FORMATS).index)
    for name in sizes:
        packed = PackedLinear(model.get_submodule(name), one_row, several, dtype)
        model.set_submodule(name, packed)
    return one_row, several


def fastest(formats: list[str], usual: str, layers: list[nn.Linear], rows: int) -> str:
    """The fastest format for `rows` rows of input; the usual one unless another is clearly faster.

    Skips formats that this PyTorch or this machine does not support. Times them in turn, so that
    the caches hold another format's weights each time, and takes the best of four rounds.
    """
    inputs = [torch.ones(rows, layer.in_features) for layer in layers]
    packed, seconds = {}, {}
    for name in formats:
        with contextlib.suppress(RuntimeError, AttributeError):
            packed[name] = [PackedLinear(layer, name, name) for layer in layers]
            packed[name][0](inputs[0])
            seconds[name] = float("inf")
    for _ in range(4):
        for name in seconds:
            start = time.perf_counter()
            for layer, x in zip(packed[name], inputs, strict=True):
                layer(x)
            seconds[name] = min(seconds[name], time.perf_counter() - start)
    seconds[usual] *= CLEARLY
    return min(seconds, key=seconds.get)
