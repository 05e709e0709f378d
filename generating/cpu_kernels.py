"""Linear layers as a CPU multiplies them fastest at one token a forward.

Knows modules and tensors; no text.
"""

import torch
from torch import nn

LARGEST_HALF = 65504  # float16 holds nothing beyond


class PackedLinear(nn.Module):
    """A Linear layer for generation on a CPU; no gradients. float32 in and out.

    Its weight lies as oneDNN likes it for a few rows. A bfloat16 weight is kept in float16 too,
    where float16 holds its values, for one row at a time: PyTorch's kernel for that reads 32 GB/s
    where oneDNN's reads 21, and the usual layout gives 15 (benchmarks/README.md).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.data
        self.dtype = weight.dtype
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.half = None
        if weight.dtype == torch.bfloat16:
            half = weight.half()
            if half.isfinite().all():
                self.half = half
        self.bias = None
        self.half_bias = None
        if linear.bias is not None:
            self.bias = linear.bias.data
            self.half_bias = self.bias.half()

    def forward(self, x):  # x: [..., in features]
        one_row = x.numel() == x.size(-1)
        if one_row and self.half is not None:
            x = x.half().clamp_(-LARGEST_HALF, LARGEST_HALF)
            return nn.functional.linear(x, self.half, self.half_bias).float()
        x = x.to(self.dtype)
        y = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return y.float()


def pack(model: nn.Module) -> None:
    """Make a model faster at one token a forward, where this machine can.

    On a CPU its Linear layers become PackedLinear, and what lies between them float32.
    """
    weight = model.wte.weight
    if weight.device.type != "cpu" or not multiplies(weight.dtype):
        return
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            model.set_submodule(name, PackedLinear(module))
    model.float()


def multiplies(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies matrices of this dtype on this machine."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if dtype == torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return True
