"""Forward and backward over a batch, the loss over a validation split, and compiling for both.

Functions of a model, tensors and plain values; they know no run, no files and no settings.
"""

import copy
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from model import IGNORE


def forward_backward(model, x, y, micro_batch: int, cast, scaler, predictions=None) -> torch.Tensor:
    """Gradients of the mean loss over a batch, `micro_batch` sequences at a time.

    x, y: int64 [B, T]. Returns that loss, a scalar on the device. predictions: how many targets
    count in the batch, where several processes share one the mean of theirs; None: all of them.
    """
    if predictions is None:
        predictions = y.numel()
    total = torch.zeros((), device=x.device)
    left = len(x) // micro_batch
    for chunk_x, chunk_y in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        left -= 1
        if isinstance(model, DistributedDataParallel):
            # It averages the gradients of all processes while the last backward runs.
            model.require_backward_grad_sync = left == 0
        share = (chunk_y != IGNORE).sum() / predictions
        with record_function("forward"), cast():
            loss = model(chunk_x, chunk_y) * share
        total += loss.detach()
        with record_function("backward"):
            scaler.scale(loss).backward()
    return total


def data_parallel(model) -> DistributedDataParallel:
    """The model with its gradients averaged over all processes."""
    # Each process computes the same buffers: without this they were sent in every step.
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def evaluate(model, batches, cast):
    """The summed loss in nats over batches, and how many predictions it is the sum of.

    Both are scalars on the device, so that nothing waits for it here; 0 where there is no batch.
    batches: pairs of inputs and targets, as Dataset.evaluation yields them. Runs with gradients
    enabled but never uses them, so that the compiled forward is the one of training, with its
    memory and no second compilation.
    """
    dropout = model.config.dropout
    if dropout:
        model.eval()
    total, count = 0, 0
    for x, y in batches:
        predictions = (y != IGNORE).sum()
        with cast():
            total = total + model(x, y).detach() * predictions
        count = count + predictions
    if dropout:
        model.train()
    return total, count


def compile_layers(model):
    """A model with the weights of `model` whose layers, and head with the loss, are compiled.

    Layers of one kind compile once, which halves the time to the first step. Each layer's gradients
    are ready as soon as its backward is done, so several processes send them while the next
    layer's runs.
    """
    compiled = copy.copy(model)
    layers = [torch.compile(block, dynamic=False) for block in model.h]
    compiled._modules = model._modules | {"h": torch.nn.ModuleList(layers)}
    compiled.head = torch.compile(model.head, dynamic=False)
    return compiled


def delete_empty_code() -> bool:
    """Delete the empty files in the cache of torch.compile; returns whether there were any.

    A kill leaves a library empty that is being linked, and a power cut any file. Each later
    compilation would load it, and fail.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # its import takes a second

    code = [path for kind in ("so", "py") for path in Path(cache_dir()).rglob(f"*.{kind}")]
    empty = [path for path in code if not path.stat().st_size]
    for path in empty:
        path.unlink(missing_ok=True)
    return bool(empty)
