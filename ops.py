"""Three operations of model.py, each in the form that is the fastest on a device.

The first line of each says what it computes; the rest is how. Functions of tensors alone, with the
measurement for each form.
"""

import math

import torch
import torch.nn.functional as F


def causal_attention(q, k, v, dropout):
    """softmax(q k^T / sqrt(D)) v, where no token sees a later one.

    q, k, v, and what it returns: [B, heads, T, D]. dropout: of the softmax's weights.
    """
    if v.device.type == "cpu" and v.dtype == torch.bfloat16:
        return blockwise_attention(q, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


def blockwise_attention(q, k, v, dropout):
    """causal_attention in plain products: a quarter of the queries with the keys up to their end.

    It takes 0.6 of the time of PyTorch's flash attention for CPUs, which leaves the bf16
    instructions idle.
    """
    T = q.size(2)
    q = q * q.size(-1) ** -0.5
    size = max(128, math.ceil(T / 4))
    blocks = []
    for begin in range(0, T, size):
        end = min(begin + size, T)
        scores = q[:, :, begin:end] @ k[:, :, :end].transpose(-2, -1)
        later = torch.ones(end - begin, end, dtype=torch.bool).triu(begin + 1)
        weights = scores.masked_fill_(later, -torch.inf).softmax(dim=-1)
        blocks.append(F.dropout(weights, dropout) @ v[:, :, :end])
    return torch.cat(blocks, dim=2)


def gelu(x):
    """GPT-2's tanh form of GELU.

    Compiled, by its identity 0.5 (1 + tanh u) = sigmoid(2 u), which a CPU computes faster.
    """
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


def stream_dtype(x):
    """The dtype of the residual stream: bfloat16 on a GPU with autocast to it, else that of x.

    Norms and additions then move half the bytes; all elementwise kernels together, a quarter fewer
    (benchmarks/lowering.py). On a CPU a step takes 3% longer with it, and float16 lacks the range.
    """
    device = x.device.type
    if device in ("cpu", "meta") or not torch.is_autocast_enabled(device):
        return x.dtype
    if torch.get_autocast_dtype(device) != torch.bfloat16:
        return x.dtype
    return torch.bfloat16
