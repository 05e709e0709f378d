"""The processes that train one run together, one a GPU.

torchrun starts them; a process that it did not start is alone.

All do the same steps on different sequences. What one finds out alone (memory that runs out, a
signal, the time) takes effect once all have heard of it, at the same point of the program. Only the
first, `main`, writes and prints. Knows no model, no run.
"""

import contextlib
import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

rank = 0  # this process among all
count = 1  # how many there are
local = 0  # this process among those of its machine, which is its GPU's number too
alone = True
main = True
_store = None
_stderr = sys.stderr


class Lost(Exception):
    """Another process of the run has ended, or answers no more."""


def join() -> None:
    """Meet the others, if torchrun started this process.

    All but the first are silent from here on.
    """
    global rank, count, local, alone, main, _store
    if "LOCAL_RANK" not in os.environ:
        return
    _store, rank, count = next(dist.rendezvous("env://"))
    local = int(os.environ["LOCAL_RANK"])
    alone = False
    main = rank == 0
    # Plain numbers go over gloo, between the CPUs, so that agreeing on them never waits for a GPU.
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=_store, rank=rank, world_size=count)
    if not main:
        nowhere = open(os.devnull, "w")  # noqa: SIM115 - open until the process ends
        sys.stdout = nowhere
        sys.stderr = nowhere


def connect(device: torch.device) -> None:
    """Have NCCL set itself up now, while the GPU has memory for it.

    Else that comes with the first sum of gradients, when the model may have taken the last of it.
    """
    if not alone and device.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=device))


def gather(value: float) -> list[float]:
    """The values that all processes bring here, by rank. Raises Lost."""
    if alone:
        return [value]
    values = torch.zeros(count, dtype=torch.float64)
    values[rank] = value
    try:
        dist.all_reduce(values)
    except RuntimeError as error:
        raise Lost(str(error)) from None
    return values.tolist()


def add_up_gradients(parameters, loss: torch.Tensor) -> torch.Tensor:
    """Sum the gradients of `parameters` over all processes; returns the sum of `loss`, a scalar.

    Raises Lost. One message after the last backward, and not DistributedDataParallel, whose
    messages begin within it: where one process runs out of memory there, the others wait for its
    messages until the time is out, and its own wrapper refuses another step.
    """
    if alone:
        return loss
    parameters = [p for p in parameters if p.grad is not None]
    flat = torch.cat([*(p.grad.view(-1) for p in parameters), loss.view(1)])
    try:
        dist.all_reduce(flat)
    except RuntimeError as error:
        raise Lost(str(error)) from None
    *gradients, total = flat.split([*(p.numel() for p in parameters), 1])
    for p, gradient in zip(parameters, gradients, strict=True):
        p.grad = gradient.view_as(p)
    return total[0]


def say_once(message: str) -> None:
    """Write an error to stderr, from the first process that has one.

    The others wait until it is written.
    """
    if alone:
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
    if alone:
        return
    for stream in (sys.stdout, _stderr):
        with contextlib.suppress(OSError, ValueError):  # the terminal may be what has gone
            stream.flush()
    os._exit(status)
