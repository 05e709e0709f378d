"""Linear layers as this CPU multiplies them fastest, found by trying.

What is fast on one kind of CPU falls back on another, so nothing here asks for the processor's
name: the ways that PyTorch offers take turns on the model's first layers (benchmarks/README.md has
their times on each kind). Knows modules and tensors; no text.
"""

import functools
import time
import warnings

import torch
import torch.nn.functional as F
from torch import nn

from hardware import DTYPES, DeviceError

LARGEST_HALF = 65504  # float16 holds nothing beyond
SMALL = 2**23  # weights; fewer are not worth a trial
TRIED = 2**24  # weights of a trial: more than the caches next to a core hold
SEVERAL = 32  # rows, in the trial for prompts and batches
CLEARLY = 0.85  # of another's time: what is less may be chance


# -- ways to keep a weight and to multiply by it ---------------------------------------------------
# Made of a weight, float32 [out, in], and a bias, float32 [out] or None. Called with x,
# float32 [..., in], they return float32 [..., out].


class Plain:
    """float32, as PyTorch multiplies it everywhere."""

    def __init__(self, weight, bias):
        self.weight = weight
        self.bias = bias

    def __call__(self, x):
        return F.linear(x, self.weight, self.bias)


class OneDnn:
    """float32 in the layout that oneDNN likes for a few rows."""

    dtype = torch.float32

    def __init__(self, weight, bias):
        if not multiplies(self.dtype):
            raise RuntimeError(f"oneDNN multiplies no {self.dtype} on this machine")
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self.dtype), 1)
        self.bias = None if bias is None else bias.to(self.dtype)

    def __call__(self, x):
        x = x.to(self.dtype)
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y.float()


class OneDnnBfloat16(OneDnn):
    """The same in bfloat16."""

    dtype = torch.bfloat16


class OneDnnHalf(OneDnn):
    """The same in float16."""

    dtype = torch.float16


class Half:
    """float16, by PyTorch's own kernel for one row. The weight must fit."""

    def __init__(self, weight, bias):
        self.weight = weight.half()
        self.bias = None if bias is None else bias.half()

    def __call__(self, x):
        x = x.half().clamp_(-LARGEST_HALF, LARGEST_HALF)
        return F.linear(x, self.weight, self.bias).float()


class Fbgemm:
    """float16, but what it is multiplied with stays in float32. The weight must fit."""

    def __init__(self, weight, bias):
        self.packed = torch.fbgemm_pack_gemm_matrix_fp16(weight)
        self.bias = torch.zeros(weight.size(0)) if bias is None else bias

    def __call__(self, x):
        return torch.fbgemm_linear_fp16_weight_fp32_activation(x, self.packed, self.bias)


class Int8:
    """8 bits: the weight with a scale for each output, x with one scale for all its rows."""

    def __init__(self, weight, bias):
        scales = weight.abs().amax(1).clamp(min=1e-12) / 127
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        quantised = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantised, bias)

    def __call__(self, x):
        return torch.ops.quantized.linear_dynamic(x, self.packed, int8_overflows())


@functools.cache
def int8_overflows() -> bool:
    """Whether x must do with 7 bits: CPUs without VNNI add pairs of products in 16 bits."""
    weight = torch.quantize_per_tensor(torch.ones(64, 64), 1 / 127, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(weight, None)
    row = torch.ones(1, 64)
    row[0, 0] = 0  # the range of x begins at 0, and all others stand at its end
    product = torch.ops.quantized.linear_dynamic(row, packed, False)
    return bool((product - 63).abs().max() > 0.5)


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True


EXACT = [OneDnn, Plain]  # each list in the order of preference
HALF = [Half, Fbgemm]


# -- the choice ------------------------------------------------------------------------------------


class PackedLinear(nn.Module):
    """A Linear layer for generation on a CPU; no gradients. float32 in and out.

    one_row, several: the ways to multiply one row and more. rounded_to: 16 bits to which the weight
    is rounded first, so that both ways have the same; a weight that they cannot hold stays as it
    is, and one_row is not taken.
    """

    def __init__(self, linear: nn.Linear, one_row, several, rounded_to=None):
        super().__init__()
        weight = linear.weight.data.float()
        bias = None if linear.bias is None else linear.bias.data.float()
        if rounded_to is not None:
            if weight.abs().max() > LARGEST_HALF:
                one_row = several
            else:
                weight = weight.to(rounded_to).float()
        self.several = several(weight, bias)
        self.one_row = self.several if one_row is several else one_row(weight, bias)

    def forward(self, x):  # x: [..., in features]
        if x.numel() == x.size(-1):
            return self.one_row(x)
        return self.several(x)


def pack(model: nn.Module, dtype: str = "auto") -> None:
    """Make a float32 model on a CPU as fast at generating as this machine can.

    Its Linear layers become PackedLinear. dtype: of their weights, float32, bfloat16, float16, int8
    or auto: 16 bits where a trial of half a second shows that they are clearly faster, else
    float32; what lies between the layers is float32. Raises DeviceError for int8 where PyTorch
    lacks its products.
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", message=".*deprecated and will be removed")
        make = choose(layers, dtype)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear):
                model.set_submodule(name, make(module))


def choose(layers: list[nn.Linear], dtype: str):
    """How PackedLinear is made for a dtype as in `pack`. layers: the model's.

    auto rounds to bfloat16, which has 3 bits less than float16, only where its products are faster.
    """
    if dtype == "int8":
        if not works(Int8, layers[0]):
            raise DeviceError(
                "dtype int8: this PyTorch has no int8 products for this processor; use --dtype auto"
            )
        return functools.partial(PackedLinear, one_row=Int8, several=Int8)
    exact_row = fastest(EXACT, layers, rows=1)
    exact = fastest(EXACT, layers, rows=SEVERAL)
    if dtype == "float32" or (dtype == "auto" and number_of_weights(layers) < SMALL):
        return functools.partial(PackedLinear, one_row=exact_row, several=exact)
    if dtype == "auto":
        several = fastest([exact, OneDnnHalf, OneDnnBfloat16], layers, rows=SEVERAL)
        one_row = fastest([exact_row, *HALF, several], layers, rows=1)
        if one_row is exact_row:
            return functools.partial(PackedLinear, one_row=exact_row, several=exact)
        dtype = "bfloat16" if several is OneDnnBfloat16 else "float16"
    else:
        rounded = OneDnnBfloat16 if dtype == "bfloat16" else OneDnnHalf
        several = fastest([rounded, exact], layers, rows=SEVERAL)
        one_row = fastest([*HALF, several], layers, rows=1)
    return functools.partial(
        PackedLinear, one_row=one_row, several=several, rounded_to=DTYPES[dtype]
    )


def first_layers(layers: list[nn.Linear], weights: int) -> list[nn.Linear]:
    """The first of these layers that have so many weights together, or all of them."""
    taken = []
    for layer in layers:
        if number_of_weights(taken) >= weights:
            break
        taken.append(layer)
    return taken


def number_of_weights(layers: list[nn.Linear]) -> int:
    """How many they have together."""
    return sum(layer.weight.numel() for layer in layers)


def works(way, layer: nn.Linear) -> bool:
    """Whether this PyTorch can do it on this machine."""
    try:
        PackedLinear(layer, way, way)(torch.zeros(1, layer.in_features))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return True


def fastest(ways: list, layers: list[nn.Linear], rows: int):
    """The fastest way to multiply so many rows: an earlier one unless a later is clearly faster.

    layers: the model's. Of few the first way that works.
    """
    ways = [way for way in ways if works(way, layers[0])]
    if len(ways) == 1 or number_of_weights(layers) < SMALL:
        return ways[0]
    times = time_in_turn(ways, layers, rows)
    best = ways[0]
    for way in ways[1:]:
        if times[way] < CLEARLY * times[best]:
            best = way
    return best


def time_in_turn(ways: list, layers: list[nn.Linear], rows: int) -> dict:
    """Seconds of each way for the products of the first layers, the best of four rounds.

    They take turns, so that each finds the caches full of the others' weights.
    """
    tried = first_layers(layers, TRIED)
    packed = {way: [PackedLinear(layer, way, way) for layer in tried] for way in ways}
    inputs = [torch.ones(rows, layer.in_features) for layer in tried]
    times = dict.fromkeys(ways, float("inf"))
    for _ in range(4):
        for way in ways:
            start = time.perf_counter()
            for layer, x in zip(packed[way], inputs, strict=True):
                layer(x)
            times[way] = min(times[way], time.perf_counter() - start)
    return times
