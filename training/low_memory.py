"""The same model in less memory: layers computed twice, and a loss without all the logits.

Each function changes a model in place, and none changes its parameters, losses or checkpoints.
model.py knows nothing of it.
"""

from functools import partial

import torch
import torch.nn.functional as F
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
    options = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}

    def checkpointed(plain, *inputs):
        if not torch.is_grad_enabled():  # generation
            return plain(*inputs)
        return checkpoint(plain, *inputs, **options)

    for block in model.h:
        block.forward = partial(checkpointed, block.forward)


def use_chunked_loss(model: GPT, chunks: int) -> None:
    """Compute head and loss in this many chunks of the tokens, and again for the backward pass.

    The logits of one chunk exist at a time.
    """
    plain = model.head

    def head(x, targets):
        if targets is None:
            return plain(x, targets)
        pairs = zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        total = sum(checkpoint(chunk_loss, x, y, use_reentrant=False) for x, y in pairs)
        return total / (targets != IGNORE).sum().clamp(min=1)

    def chunk_loss(x, targets):
        logits = plain(x, None).float()
        return F.cross_entropy(logits, targets, ignore_index=IGNORE, reduction="sum")

    model.head = head
