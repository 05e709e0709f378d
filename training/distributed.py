"""The processes that train one run together, one a GPU.

torchrun starts them; a process that it did not start is alone.

All do the same steps on different sequences. What one finds out alone (memory that runs out, a
signal, the time) takes effect once all have heard of it, at the same point of the program. Only the
first, `main`, writes and prints. Knows no model, no run. How gradients are summed: buckets.py.
"""

import contextlib
import math
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

import hardware

rank = 0  # this process among all
world_size = 1  # how many there are
local_rank = 0  # this process among those of its machine, which is its GPU's number too
is_main = True
# What this process has to tell the others (the number of a signal, whether its budget is used up),
# and the largest that any has told: it goes along with every gather(), so needs no message.
told = {"signal": 0, "budget": 0}
heard = dict(told)
_store = None
_stderr = sys.stderr


class Lost(Exception):
    """Another process of the run has ended, or answers no more."""


def init() -> None:
    """Meet the others, if torchrun started this process.

    All but the first are silent from here on.
    """
    global rank, world_size, local_rank, is_main, _store
    if "LOCAL_RANK" not in os.environ:
        return
    _store, rank, world_size = next(dist.rendezvous("env://"))
    local_rank = int(os.environ["LOCAL_RANK"])
    is_main = rank == 0
    # NCCL's watchdog would end this process for the loss of another, before it has saved. torchrun
    # sets this to 1 for each process it starts, so no default of ours would hold.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    # Plain numbers go over gloo, between the CPUs, so that agreeing on them never waits for a GPU.
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=_store, rank=rank, world_size=world_size)
    if not is_main:
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
        sys.stdout = nowhere
        sys.stderr = nowhere


def init_nccl(device: torch.device) -> None:
    """Have NCCL set itself up now, while the GPU has memory for it.

    Else that comes with the first sum of gradients, when the model may have taken the last of it.
    Raises DeviceError where two processes have the same GPU.
    """
    if world_size == 1 or device.type != "cuda":
        return
    name = str(torch.cuda.get_device_properties(device).uuid).encode()
    if len(set(gather(zlib.crc32(name)))) < world_size:
        raise hardware.DeviceError(
            f"some of the {world_size} processes see the same GPU; torchrun takes "
            f"--nproc_per_node, the number of GPUs of this machine: {torch.cuda.device_count()}"
        )
    dist.all_reduce(torch.zeros(1, device=device))


def gather(value: float) -> list[float]:
    """The values that all processes bring here, by rank; `told` goes along. Raises Lost."""
    if world_size == 1:
        heard.update(told)
        return [value]
    rows = torch.zeros(world_size, 1 + len(told), dtype=torch.float64)
    rows[rank] = torch.tensor([value, *told.values()], dtype=torch.float64)
    with losing():
        dist.all_reduce(rows)
    values, *news = rows.T.tolist()
    heard.update({name: max(of_all) for name, of_all in zip(told, news, strict=True)})
    return values


def all_reduce_sum(value: torch.Tensor) -> torch.Tensor:
    """The sum of the scalars that all processes bring here, on the device. Raises Lost."""
    total = value.clone()
    if world_size > 1:
        with losing():
            dist.all_reduce(total)
    return total


def same_on_all_ranks(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether all processes bring the same numbers, float32, by a checksum. Raises Lost."""
    if world_size == 1:
        return True
    sums = torch.stack([tensor.detach().view(torch.int32).sum() for tensor in tensors])
    places = torch.arange(1, len(sums) + 1, device=sums.device)
    checksum = int((sums * places).sum()) % 2**48
    return len(set(gather(checksum))) == 1


@contextlib.contextmanager
def losing():
    """Messages between the processes: one that fails raises Lost."""
    try:
        yield
    except RuntimeError as error:
        if hardware.out_of_memory(error):
            raise
        raise Lost(str(error)) from None


def split_across_ranks(work: Callable, stack: torch.Tensor) -> torch.Tensor:
    """work(stack), of which each process does a part, and all have the whole.

    work: acts on each stack[i] alone and returns as many, of the same shape and dtype. Raises Lost.
    """
    if world_size == 1:
        return work(stack)
    each = math.ceil(len(stack) / world_size)
    mine = stack[rank * each : (rank + 1) * each]
    done = stack.new_zeros(each, *stack.shape[1:])
    if len(mine):
        done[: len(mine)] = work(mine)
    whole = stack.new_empty(world_size * each, *stack.shape[1:])
    with losing():
        dist.all_gather(list(whole.chunk(world_size)), done)
    return whole[: len(stack)]


def synchronize(device: torch.device) -> None:
    """Wait until a GPU has done what it was given, in a way in which signals are heard.

    To be called before reading from it: the read would wait too, but deaf to torchrun's signal that
    another process has ended, whose part of a sum then never comes. Raises Lost 10 s after a signal
    has come, and 10 minutes after none.
    """
    if world_size == 1:
        return
    deadline = time.monotonic() + 600
    while not hardware.catches_up(device, 1):
        if told["signal"]:
            deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            raise Lost("the GPU waits for a sum that does not come")


def say_once(message: str) -> None:
    """Write an error to stderr, from the first process that has one.

    The others wait until it is written.
    """
    if world_size == 1:
        print(message, file=_stderr, flush=True)
        return
    with contextlib.suppress(RuntimeError):  # the store's keeper has ended: something was said
        if _store.add("failed", 1) == 1:
            print(message, file=_stderr, flush=True)
            _store.set("said", "")
        else:
            _store.wait(["said"], timedelta(seconds=10))


def end(status: int) -> None:
    """End one of several processes with an exit status, once its output is written.

    At once: in Python's own end, and in destroy_process_group, gloo's threads now and then abort
    the process.
    """
    if world_size == 1:
        return
    for stream in (sys.stdout, _stderr):
        with contextlib.suppress(OSError, ValueError):  # the terminal may be what has gone
            stream.flush()
    os._exit(status)
