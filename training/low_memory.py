"""The same model in less memory: layers computed twice, and a loss without all the logits.

Each function changes a model in place, and none changes its parameters, losses or checkpoints.
model.py knows nothing of it.
"""

import torch
from torch.utils.checkpoint import checkpoint

from config import Config
from hardware import Device
from model import GPT, IGNORE
from training import distributed


def apply_memory_options(model: GPT, config: Config, device: Device) -> None:
    """Checkpoint activations where the settings say so; chunk the loss where memory demands it."""
    if config.activation_checkpointing:
        use_activation_checkpointing(model)
    chunks = loss_chunks(config, model.config.vocab_size, device)
    if chunks > 1:
        use_chunked_loss(model, chunks)


def loss_chunks(config: Config, vocab_size: int, device: Device) -> int:
    """How many chunks head and loss are computed in: 8 where the logits fill a GPU, else 1."""
    if not device.memory:
        return 1
    sequences = config.micro_batch_size or config.batch_size // distributed.world_size
    logits = sequences * config.block_size * vocab_size
    gradients_too = 2 * logits * device.dtype.itemsize
    return 8 if gradients_too > device.memory / 6 else 1


def use_activation_checkpointing(model: GPT) -> None:
    """Keep each layer's input only, and compute the layer again for the backward pass.

    Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost". A step takes a third more
    products of the layers.
    """
    for block in model.h:
        block.forward = checkpointed(block)


def checkpointed(block):
    """The forward of a layer that keeps its input only while training."""
    plain, has_dropout = block.forward, block.attn.dropout > 0

    def forward(x, rotary=None, cache=None):
        if not (block.training and torch.is_grad_enabled()):
            return plain(x, rotary, cache)
        return checkpoint(plain, x, rotary, use_reentrant=False, preserve_rng_state=has_dropout)

    return forward


def use_chunked_loss(model: GPT, chunks: int) -> None:
    """Compute head and loss in this many chunks of the tokens, one after the other."""
    plain = model.head

    def head(x, targets):
        if targets is None:
            return plain(x, targets)
        y = model.ln_f(x).flatten(0, 1)
        return ChunkedLoss.apply(y, model.lm_head.weight, targets.flatten(), chunks)

    model.head = head


# A chunk's logits' gradients are made this much smaller, and the sums over its tokens larger in the
# end: float16 ends at 65,504.
SMALLER = 2**-4


class ChunkedLoss(torch.autograd.Function):
    """The mean cross-entropy of y w^T against targets, with the logits of one chunk at a time.

    The gradients of y and w are computed in the forward, while a chunk's logits exist: no product
    is computed twice (Hsu et al., 2024, "Liger Kernel").

    y: [N, C]. w: [V, C]. targets: int64 [N], IGNORE where there is nothing to predict.
    """

    @staticmethod
    def forward(ctx, y, w, targets, chunks):
        dtype = product_dtype(y)
        w_low = w.to(dtype)
        ids = torch.arange(w.size(0), device=w.device)
        total = torch.zeros((), device=y.device)
        y_gradients, w_gradient = [], torch.zeros_like(w)
        for y_chunk, target in zip(y.to(dtype).chunk(chunks), targets.chunk(chunks), strict=True):
            counts = target != IGNORE
            target = torch.where(counts, target, 0).unsqueeze(1)
            log_p = (y_chunk @ w_low.t()).float().log_softmax(dim=-1)  # [n, V], one fused kernel
            total = total - (log_p.gather(1, target).squeeze(1) * counts).sum()
            logits_gradient = log_p.exp() - (ids == target).float()
            logits_gradient = (logits_gradient * counts.unsqueeze(1) * SMALLER).to(dtype)
            y_gradients.append(logits_gradient @ w_low)
            w_gradient = w_gradient + logits_gradient.t() @ y_chunk
        count = (targets != IGNORE).sum().clamp(min=1)
        ctx.save_for_backward(torch.cat(y_gradients), w_gradient, count)
        ctx.dtypes = y.dtype, w.dtype
        return total / count

    @staticmethod
    def backward(ctx, upstream):
        y_gradient, w_gradient, count = ctx.saved_tensors
        y_dtype, w_dtype = ctx.dtypes
        scale = upstream / (count * SMALLER)
        y_gradient = (y_gradient.float() * scale).to(y_dtype)
        return y_gradient, (w_gradient * scale).to(w_dtype), None, None


def product_dtype(x) -> torch.dtype:
    """The dtype of matrix products with x: autocast's, or its own."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype
