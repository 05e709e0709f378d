"""The computations of a training step and of an evaluation.

Functions of a model, tensors and plain values; they know neither run, files nor settings.
"""

import contextlib

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

import hardware
from formats import files
from model import IGNORE
from training import RunError, distributed


def seed_random(seed: int, step: int) -> None:
    """Make dropout, and whatever else a model draws, depend on (seed, step), as data does.

    Resuming then needs no random state.
    """
    # Odd multipliers, since a CPU's generator uses only the lower 32 bits.
    number = seed * 0x9E3779B97F4A7C15 + step + distributed.rank * 0xBF58476D1CE4E5B9
    torch.manual_seed(number % 2**63)


def forward_backward(model, x, y, micro_batch: int, cast, scaler, predictions=None) -> torch.Tensor:
    """Accumulate gradients of a batch's mean loss, `micro_batch` sequences at a time.

    x, y: int64 [B, T]. predictions: the divisor of the summed loss, or None for all targets. With
    several processes, the mean of their counts, since their gradients are averaged. Returns the
    loss, a scalar on the device.
    """
    if predictions is None:
        predictions = y.numel()
    total = torch.zeros((), device=x.device)
    left = len(x) // micro_batch
    for chunk_x, chunk_y in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        left -= 1
        if isinstance(model, DistributedDataParallel):
            # Average the gradients of all processes during the last backward pass only.
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
    """A context for the weight update that completes `step`, which an error may leave half done.

    If memory runs out or another process ends, a run normally saves its last step. In this context
    these errors become a RunError, after which nothing is saved.
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
    """The summed loss over batches, in nats, and the number of predictions in it.

    Both are scalars on the device, so that nothing waits for it here; 0 without batches. batches:
    pairs of inputs and targets from Dataset.evaluation. Keeps gradients enabled, though it never
    uses them, so that it runs the compiled forward of training, in the same memory, without a
    second compilation.
    """
    model.eval()
    total, count = 0, 0
    for x, y in batches:
        predictions = (y != IGNORE).sum()
        with cast():
            total = total + model(x, y).detach() * predictions
        count = count + predictions
    model.train()
    return total, count
