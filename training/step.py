"""Forward and backward over a batch, the loss over a validation split, and compiling for both.

Functions of a model, tensors and plain values; they know no run, no files and no settings.
"""

import copy

import torch
from torch.profiler import record_function

from hardware import out_of_memory
from model import IGNORE
from training import distributed
from training.graphs import Graphed


def forward_backward(
    model, x, y, micro_batch: int, cast, scaler, buckets=None, predictions=None
) -> torch.Tensor:
    """Gradients of the mean loss over a batch, `micro_batch` sequences at a time.

    x, y: int64 [B, T]. Returns that loss, a scalar on the device. Where several processes share a
    batch, each brings its part of it, and gradients and loss are its part of the mean; buckets: the
    buckets.Buckets that add them up. predictions: how many targets count in the batch of all
    processes, a scalar on the device; None: all of them.
    """
    if predictions is None:
        predictions = y.numel() * distributed.world_size
    if buckets:
        buckets.begin(micro_batch)
    total = torch.zeros((), device=x.device)
    left = len(x) // micro_batch
    for part_x, part_y in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        share = (part_y != IGNORE).sum() / predictions
        with record_function("forward"), cast():
            loss = model(part_x, part_y) * share
        total += loss.detach()
        left -= 1
        if buckets and not left:
            buckets.before_last_backward(total)
        with record_function("backward"):
            scaler.scale(loss).backward()
    return total


def evaluate(
    model, data, windows: int, micro_batch: int, cast
) -> tuple[torch.Tensor | int, torch.Tensor | int]:
    """The summed loss in nats over a validation split, and how many predictions it is the sum of.

    Both are scalars on the device, so that nothing waits for it here; 0 where there is no window.
    data: a dataset.Dataset. windows: how many of its fixed windows; 0: all. Several processes each
    take their share. Runs with gradients enabled but never uses them: so the compiled forward is
    the one of training, with its memory and no second compilation.
    """
    dropout = model.config.dropout
    if dropout:
        model.eval()
    total, count = 0, 0
    for x, y in data.evaluation(windows, micro_batch, distributed.rank, distributed.world_size):
        predictions = (y != IGNORE).sum()
        with cast():
            total = total + model(x, y).detach() * predictions
        count = count + predictions
    if dropout:
        model.train()
    return total, count


# torch.compile's modes by (tuned, graphs).
MODES = {
    (False, False): None,
    (True, False): "max-autotune-no-cudagraphs",
    (False, True): "reduce-overhead",
    (True, True): "max-autotune",
}


def compile_layers(model, mode=None):
    """A model with the weights of `model` whose layers, and head with the loss, are compiled.

    Layers of one kind compile once, so that the first step comes after half the time
    (benchmarks/README.md).
    """
    layered = copy.copy(model)
    layered._modules = model._modules | {
        "h": torch.nn.ModuleList(
            torch.compile(block, dynamic=False, mode=mode) for block in model.h
        )
    }
    layered.head = torch.compile(model.head, dynamic=False, mode=mode)
    return layered


def compile_or_not(model, x, y, cast, scaler, tuned: bool = False, graphs: bool = False):
    """(the compiled model, None) after one trial forward and backward on x, y: int64 [B, T].

    tuned: try several kernels for each part, which takes minutes. graphs: replay CUDA graphs.

    Where that fails, (the model as it is, why): a missing compiler, an old GPU, a bug are no reason
    not to train.
    """
    mode = MODES[tuned, graphs]
    try:
        if graphs:  # those of a micro-batch that was too large, here or in another process
            torch._dynamo.reset()
        # Compiled as a whole, a model has all its gradients at once, at the end of the backward:
        # several processes could send none before (buckets.py).
        if x.device.type == "cpu" or distributed.world_size > 1:
            compiled = compile_layers(model, mode)
        else:
            compiled = torch.compile(model, dynamic=False, mode=mode)
        if graphs:
            compiled = Graphed(compiled, model)
        with cast():
            loss = compiled(x, y)
        scaler.scale(loss).backward()
        return compiled, None
    except Exception as error:
        if out_of_memory(error):
            raise
        torch._dynamo.reset()
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        problem = f"{type(error).__name__}: {lines[0]}"
    finally:
        model.zero_grad(set_to_none=True)
    if mode is None:
        return model, problem
    if distributed.is_main:
        print(f"{mode} failed, so without it. {problem} ...", end=" ", flush=True)
    return compile_or_not(model, x, y, cast, scaler)
