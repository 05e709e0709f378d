"""The head's matrix products in 8 bits: twice as fast as in 16 on GPUs from sm_89 (Ada, Hopper).

Micikevicius et al., 2022, "FP8 Formats for Deep Learning". The weight itself, its gradient and the
checkpoint stay float32, and generation multiplies as ever. Knows a linear layer and tensors.
"""

import torch
from torch import nn
from torch.nn import functional as F

NUMBERS = torch.float8_e4m3fn  # of inputs and weights: 3 bits of fraction, up to 448
GRADIENTS = torch.float8_e5m2  # of gradients: 2 bits of fraction, up to 57,344


def why_not(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, tokens: int
) -> str | None:
    """Why this device cannot multiply a head of rows x columns in 8 bits; None where it can.

    tokens: of a sequence; the head sees any number of them.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return "it takes a GPU of sm_89 or later: L4, RTX 4090, H100 and newer"
    if dtype != torch.bfloat16:
        return "it takes dtype = bfloat16"
    if rows % 16 or columns % 16:
        return f"the head is {rows:,} x {columns:,}, and both must be multiples of 16"
    if tokens % 16:
        return f"block_size = {tokens} is no multiple of 16"
    return None


class FP8Head(nn.Module):
    """x w^T, where forward and backward round x, w and the gradient to 8 bits while training.

    Without dropout the evaluations of a run round as well: they are computed in training mode, by
    the forward that is compiled already (step.evaluate).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):  # x: [..., C]
        if not self.training:
            return F.linear(x, self.weight)
        y = FP8Linear.apply(x.flatten(0, -2), self.weight)
        return y.view(*x.shape[:-1], -1)


class FP8Linear(torch.autograd.Function):
    """x w^T in bfloat16. x: [N, C]. w: [V, C]."""

    @staticmethod
    def forward(ctx, x, w):
        low_x, x_scale = rounded(x, NUMBERS)
        low_w, w_scale = rounded(w, NUMBERS)
        ctx.save_for_backward(low_x, x_scale, low_w, w_scale)
        ctx.dtypes = x.dtype, w.dtype
        return product(low_x, x_scale, low_w, w_scale)

    @staticmethod
    def backward(ctx, gradient):
        """The gradients of x and w, from that of the product: [N, V]."""
        low_x, x_scale, low_w, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        low, scale = rounded(gradient, GRADIENTS)
        of_x = product(low, scale, low_w.t().contiguous(), w_scale)
        of_w = product(low.t().contiguous(), scale, low_x.t().contiguous(), x_scale)
        return of_x.to(x_dtype), of_w.to(w_dtype)


def rounded(x, dtype: torch.dtype):
    """x in 8 bits, and the scale to multiply it with again: its largest value is the dtype's."""
    scale = x.abs().amax().float().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def product(a, a_scale, b, b_scale):
    """a b^T in bfloat16, of what `rounded` gave. a: [M, K]. b: [N, K]."""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16)
