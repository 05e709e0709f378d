"""The head's matrix products in 8 bits: twice as fast as in 16 on GPUs from sm_89 (Ada, Hopper).

Micikevicius et al., 2022, "FP8 Formats for Deep Learning". The weight, its gradient and the
checkpoint stay float32. Knows a linear layer and tensors.
"""

import torch
from torch import nn
from torch.nn import functional as F

E4M3 = torch.float8_e4m3fn  # inputs and weights: 3 bits of fraction, up to 448
E5M2 = torch.float8_e5m2  # gradients: 2 bits of fraction, up to 57,344


def why_not(
    device: torch.device, dtype: torch.dtype, rows: int, columns: int, tokens: int
) -> str | None:
    """Why a head of rows x columns cannot multiply in 8 bits here; None where it can.

    tokens: of a sequence.
    """
    nvidia = device.type == "cuda" and not torch.version.hip  # AMD's 8 bits are others
    if not nvidia or torch.cuda.get_device_capability(device) < (8, 9):
        return "it takes a GPU of sm_89 or later: L4, RTX 4090, H100 and newer"
    if dtype != torch.bfloat16:
        return "it takes dtype = bfloat16"
    if rows % 16 or columns % 16:
        return f"the head is {rows:,} x {columns:,}, and both must be multiples of 16"
    if tokens % 16:
        return f"block_size = {tokens} is no multiple of 16"
    return None


def trial(device: torch.device) -> str | None:
    """What small products like those of the head fail with on a device; None where they work."""
    try:
        b8, scale = to_float8(torch.ones(16, 16, device=device), E4M3)
        for dtype in (E4M3, E5M2):
            scaled_product(*to_float8(torch.ones(16, 16, device=device), dtype), b8, scale)
    except (RuntimeError, ValueError) as error:
        return f"a trial of its products failed: {str(error).splitlines()[0]}"


class FP8Head(nn.Module):
    """x w^T, which rounds x, w and the gradient to 8 bits in training mode, in compiled code.

    Uncompiled, rounding the logits' gradient would take twice their memory. Without dropout the
    evaluations of a run are in training mode too (step.evaluate).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight

    def forward(self, x):  # x: [..., C]
        if not (self.training and torch.compiler.is_compiling()):
            return F.linear(x, self.weight)
        y = FP8Linear.apply(x.flatten(0, -2), self.weight)
        return y.view(*x.shape[:-1], -1)


class FP8Linear(torch.autograd.Function):
    """x w^T in bfloat16. x: [N, C]. w: [V, C]."""

    @staticmethod
    def forward(ctx, x, w):
        x8, x_scale = to_float8(x, E4M3)
        w8, w_scale = to_float8(w, E4M3)
        ctx.save_for_backward(x8, x_scale, w8, w_scale)
        ctx.dtypes = x.dtype, w.dtype
        return scaled_product(x8, x_scale, w8, w_scale)

    @staticmethod
    def backward(ctx, gradient):  # [N, V]
        x8, x_scale, w8, w_scale = ctx.saved_tensors
        x_dtype, w_dtype = ctx.dtypes
        # The gradient of a mean over N tokens is at most 1 / N; 16 leaves room for targets that do
        # not count. To look for the largest would be another pass.
        largest = torch.full((), 16 / len(gradient), device=gradient.device)
        g8, g_scale = to_float8(gradient, E5M2, largest)
        x_gradient = scaled_product(g8, g_scale, w8.t().contiguous(), w_scale)
        w_gradient = scaled_product(g8.t().contiguous(), g_scale, x8.t().contiguous(), x_scale)
        return x_gradient.to(x_dtype), w_gradient.to(w_dtype)


def to_float8(x, dtype: torch.dtype, largest=None):
    """x in 8 bits with its largest value at the dtype's, and the scale that undoes this.

    largest: a bound for x where one is known, a scalar; values beyond it are cut to it.
    """
    if largest is None:
        largest = x.abs().amax().float().clamp(min=1e-30)
    limit = torch.finfo(dtype).max
    scale = largest / limit
    return (x.float() / scale).clamp(-limit, limit).to(dtype), scale


def scaled_product(a, a_scale, b, b_scale):
    """a b^T in bfloat16. a: [M, K] and b: [N, K], each with its scale, as from to_float8."""
    return torch._scaled_mm(a, b.t(), a_scale, b_scale, out_dtype=torch.bfloat16)
