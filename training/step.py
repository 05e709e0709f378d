"""What a training step and an evaluation compute.

Functions of a model, tensors and plain values; they know no run, no files and no settings.
"""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import hardware
from formats import files
from model import IGNORE
from training import RunError, distributed


def seed_dropout(seed: int, step: int) -> None:
    """Dropout follows from (seed, step), as the data does: resuming needs no random state."""
    # Odd multiples, as a CPU's generator takes the lower 32 bits alone.
    number = seed * 0x9E3779B97F4A7C15 + step + distributed.rank * 0xBF58476D1CE4E5B9
    torch.manual_seed(number % 2**63)


def forward_backward(model, x, y, micro_batch: int, cast, scaler, predictions=None) -> torch.Tensor:
    """Gradients of the mean loss over a batch, `micro_batch` sequences at a time.

    x, y: int64 [B, T]. Returns that loss, a scalar on the device. predictions: the number by which
    the summed loss is divided. Of several processes it is the mean of their numbers, as their
    gradients are averaged. None: every target counts.
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


@contextlib.contextmanager
def unsaved_if_it_fails(step: int):
    """Around the update of the weights that completes `step`.

    An error in it may leave them between two steps. Where memory runs out or another process ends,
    a run saves the step before: here that error becomes a RunError, after which nothing is saved.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not (hardware.out_of_memory(error) or distributed.connection_lost(error)):
            raise
        raise RunError(
            f"step {step:,} could not be completed ({files.error_message(error)}); the same command"
            " continues from the last checkpoint"
        ) from None


def evaluate(model, batches, cast):
    """The summed loss in nats over batches, and how many predictions it is the sum of.

    Both are scalars on the device, so that nothing waits for it here; without a batch, 0.
    batches: pairs of inputs and targets, as Dataset.evaluation yields them. Runs with gradients
    enabled but never uses them, so that the compiled forward is the one of training, with its
    memory and no second compilation.
    """
    trains_otherwise = model.config.trains_otherwise
    if trains_otherwise:
        model.eval()
    total, count = 0, 0
    for x, y in batches:
        predictions = (y != IGNORE).sum()
        with cast():
            total = total + model(x, y).detach() * predictions
        count = count + predictions
    if trains_otherwise:
        model.train()
    return total, count
