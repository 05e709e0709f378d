"""Linear layers as a CPU multiplies them fastest at one token a forward.

Knows modules and tensors; no text.
"""

import torch
from torch import nn


class PackedLinear(nn.Module):
    """A Linear layer for generation on a CPU; no gradients. float32 in and out.

    Its weight lies as oneDNN likes it for a few rows. A bfloat16 weight is kept in float16 too,
    which holds its values, for one row at a time: PyTorch's kernel for that reads 32 GB/s where
    oneDNN's reads 21, and the usual layout gives 15 (benchmarks/README.md).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, bias = linear.weight.data, None if linear.bias is None else linear.bias.data
        self.dtype, self.bias = weight.dtype, bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.half = weight.half() if weight.dtype == torch.bfloat16 else None
        if self.half is not None and not self.half.isfinite().all():
            self.half = None
        self.half_bias = bias.half() if bias is not None else None

    def forward(self, x):
        if self.half is not None and x.numel() == x.size(-1):
            return nn.functional.linear(
                x.half().clamp_(-65504, 65504), self.half, self.half_bias
            ).float()
        return torch.ops.mkldnn._linear_pointwise(
            x.to(self.dtype), self.packed, self.bias, "none", [], ""
        ).float()


def pack(model) -> None:
    """Make a model faster at one token a forward, where this machine can: on a CPU, its Linear
    layers become PackedLinear, and what lies between them float32.
    """
    weight = model.wte.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return
    if (
        weight.dtype == torch.bfloat16
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        or weight.dtype == torch.float16
        and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    ):
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
    model.float()
