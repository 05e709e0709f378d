"""The processes that train one run together, one a GPU, as torchrun starts them.

All take the same steps on different sequences. DistributedDataParallel, or fully_shard (shard.py),
adds up their gradients; here is what else they agree on. Only the first process writes and prints.
Knows no model and no run.
"""

import contextlib
import json
import math
import os
import sys
import time
import zlib
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

import hardware

rank = 0  # this process among all
world_size = 1
local_rank = 0  # this process among those of its machine, which is its GPU's number too
is_main = True
stop_flag = 0  # the number of the signal that this process has received
_store = None
_stderr = None  # the process's own, also where sys.stderr is silent


class Lost(RuntimeError):
    """Another process of the run has ended or no longer answers."""


def init() -> None:
    """Join the other processes, if torchrun started several.

    All but the first are silent from here on.
    """
    global rank, world_size, local_rank, is_main, _store, _stderr
    _stderr = sys.stderr
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return
    torchrun_sets = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in torchrun_sets if name not in os.environ]
    if missing:
        raise hardware.DeviceError(
            f"WORLD_SIZE is set, but not {', '.join(missing)}: start several processes with"
            " torchrun, or one without WORLD_SIZE"
        )
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
    """work(stack), of which each process does a part and all have the whole.

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


def synchronize(device: torch.device) -> None:
    """Wait for a GPU while Python still handles signals. Call it before reading from the GPU.

    A plain read waits too, but then Python never sees the SIGTERM with which torchrun reports that
    another process has ended, whose part of a sum will not come. Raises Lost 10 s after a signal,
    and after 10 minutes without one.
    """
    if world_size == 1:
        return
    deadline = time.monotonic() + 600
    while not hardware.synchronize(device, timeout=1):
        if stop_flag:
            deadline = min(deadline, time.monotonic() + 10)
        if time.monotonic() > deadline:
            raise Lost("the GPU waits for a sum that does not come")


def connection_lost(error: BaseException) -> bool:
    """Whether an error means that another process has ended, or cannot be reached."""
    if world_size == 1 or hardware.out_of_memory(error):
        return False
    return isinstance(error, Lost | dist.DistError) or "/gloo/" in str(error)


def print_error(message: str) -> None:
    """Write an error to stderr, from the first process that has one.

    The others wait until it is written. torchrun repeats it at the end of its own report.
    """
    if world_size == 1:
        print(message, file=_stderr, flush=True)
        return
    with contextlib.suppress(RuntimeError):  # the process that keeps the store has ended
        if _store.add("failed", 1) == 1:
            print(message, file=_stderr, flush=True)
            report_to_torchrun(message)
            _store.set("said", "")
        else:
            _store.wait(["said"], timedelta(seconds=10))


def report_to_torchrun(message: str) -> None:
    """Have torchrun name this process as the first that failed, with `message` as its traceback."""
    more = {"py_callstack": message, "timestamp": int(time.time()) - 1}
    if report := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        with contextlib.suppress(OSError), open(report, "w") as file:
            json.dump({"message": {"message": message, "extraInfo": more}}, file)


def exit_process(status: int) -> None:
    """End the process with an exit status, once its output is written.

    At once: Python's own end waits for compilers that still run, and in it, as in
    destroy_process_group, gloo's threads now and then abort the process.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
