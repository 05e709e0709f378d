"""The processes that train one run together, one per GPU, as torchrun starts them.

All take the same steps on different sequences. DistributedDataParallel averages their gradients;
the rest that they agree on is here. Only the first process writes and prints. Knows no model and no
run.
"""

import contextlib
import math
import os
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist

import hardware

# Set by init() alone.
rank = 0  # this process among all
world_size = 1
local_rank = 0  # this process among those of its machine: the number of its GPU
is_main = True
_store = None  # what torchrun's processes share


def init() -> None:
    """Join the other processes, if torchrun started several.

    All but the first print nothing from here on, but for errors.
    """
    global rank, world_size, local_rank, is_main, _store
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    _store, rank, world_size = next(dist.rendezvous("env://"))
    local_rank = int(os.environ["LOCAL_RANK"])
    is_main = rank == 0
    # Plain numbers are sent over gloo, between the CPUs: agreeing on them never waits for a GPU.
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=_store, rank=rank, world_size=world_size)
    if not is_main:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends


def gather(value: float) -> list[float]:
    """The values of all processes, by rank."""
    if world_size == 1:
        return [value]
    values = torch.zeros(world_size, dtype=torch.float64)
    values[rank] = value
    dist.all_reduce(values)
    return values.tolist()


def all_reduce_max(*values: float) -> list[float]:
    """The largest of each value over all processes: one message, whatever their number."""
    if world_size == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def all_reduce_mean(value: torch.Tensor) -> torch.Tensor:
    """The mean of the scalars of all processes, on their device."""
    if world_size == 1:
        return value
    total = value / world_size
    dist.all_reduce(total)
    return total


def split_across_ranks(work: Callable, stack: torch.Tensor) -> torch.Tensor:
    """work(stack), computed in parts by the processes and gathered by all of them.

    work: acts on each stack[i] alone and returns as many, of the same shape and dtype.
    """
    if world_size == 1:
        return work(stack)
    each = math.ceil(len(stack) / world_size)
    mine = stack[rank * each : (rank + 1) * each]
    done = stack.new_zeros(each, *stack.shape[1:])
    if len(mine):
        done[: len(mine)] = work(mine)
    whole = stack.new_empty(world_size * each, *stack.shape[1:])
    dist.all_gather(list(whole.chunk(world_size)), done)
    return whole[: len(stack)]


def connection_lost(error: BaseException) -> bool:
    """True for an error that means that another process has ended or cannot be reached."""
    if world_size == 1 or hardware.out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def print_error(message: str) -> None:
    """Write an error to stderr, from the first process that has one."""
    if world_size > 1:
        with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
            if _store.add("failed", 1) > 1:
                return
    print(message, file=sys.stderr)


def exit_process(status: int) -> None:
    """End the process with an exit status, once its output is written.

    At once: Python's own end waits for compilers that still run, and gloo's threads sometimes abort
    the process in it, as in destroy_process_group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
