"""Forward and backward over a batch, the loss over a validation split, and compiling for both.

Functions of a model, tensors and plain values; they know no run, no files and no settings.
"""

import copy
from collections.abc import Callable

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from hardware import out_of_memory
from model import IGNORE
from training import distributed


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


def data_parallel(model, allreduce_dtype: str) -> DistributedDataParallel:
    """The model with its gradients averaged over all processes, in "float32" or "bfloat16"."""
    # Each process computes the same buffers: without this they were sent in every step.
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    parallel = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if allreduce_dtype == "bfloat16":
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        parallel.register_comm_hook(None, bf16_compress_hook)
    return parallel


def evaluate(model, data, windows: int, micro_batch: int, cast, check: Callable | None = None):
    """The summed loss in nats over a validation split, and how many predictions it is the sum of.

    Both are scalars on the device, so that nothing waits for it here; 0 where there is no window.
    data: a dataset.Dataset. windows: how many of its fixed windows; 0: all. Several processes each
    take their share. check: called between the micro-batches. Runs with gradients enabled but never
    uses them: so the compiled forward is the one of training, with its memory and no second
    compilation.
    """
    dropout = model.config.dropout
    if dropout:
        model.eval()
    total, count = 0, 0
    rank, world_size = distributed.rank, distributed.world_size
    for x, y in data.evaluation(windows, micro_batch, rank, world_size):
        if check:
            check()
        predictions = (y != IGNORE).sum()
        with cast():
            total = total + model(x, y).detach() * predictions
        count = count + predictions
    if dropout:
        model.train()
    return total, count


def compile_layers(model, mode: str | None = None):
    """A model with the weights of `model` whose layers, and head with the loss, are compiled.

    Layers of one kind compile once, so that the first step comes after half the time
    (docs/findings.md). Each layer's gradients are there as soon as its backward is done, so
    that several processes send them while the next layer's runs.
    """
    compiled = copy.copy(model)
    layers = [torch.compile(block, dynamic=False, mode=mode) for block in model.h]
    compiled._modules = model._modules | {"h": torch.nn.ModuleList(layers)}
    compiled.head = torch.compile(model.head, dynamic=False, mode=mode)
    return compiled


def compile_whole(model, mode: str | None = None):
    """The model compiled as one graph, the fastest on a GPU that trains alone."""
    return torch.compile(model, dynamic=False, mode=mode)


def why_it_fails(model, x, y, cast, scaler) -> str | None:
    """Why a forward and backward on x, y: int64 [B, T] fails, in one line; None where it does not.

    Tried once after compiling: a missing compiler, an old GPU or a bug are no reason not to train.
    """
    try:
        with cast():
            loss = model(x, y)
        scaler.scale(loss).backward()
        return None
    except Exception as error:
        if out_of_memory(error) or distributed.connection_lost(error):
            raise
        torch._dynamo.reset()
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return f"{type(error).__name__}: {lines[0]}"
    finally:
        model.zero_grad(set_to_none=True)
