"""The processes that train one run together, one per GPU, as torchrun starts them.

All take the same steps on different sequences. DistributedDataParallel averages their gradients;
everything else is here: how they connect, the lock against a second trainer of the same run, what
they exchange, signals, and how they exit. Only the first process writes and prints. Knows no model,
and of a run only its folder.
"""

import contextlib
import functools
import math
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from filelock import Timeout

import hardware
from config import ConfigError
from formats import files
from training import RunError

WAIT_S = 10  # seconds until a process prints what it is waiting for
# The first process alone saves, uploads and fetches. PyTorch would end the others when they have
# waited for it for 10 minutes (NCCL) or 30 (gloo). Without torchrun, which ends all when a process
# dies, GPUs wait for a dead one as long.
PATIENCE = timedelta(hours=3)
# {launcher that does not join its processes: its variable with their number}.
UNJOINED = {"srun": "SLURM_STEP_NUM_TASKS", "mpirun": "OMPI_COMM_WORLD_SIZE"}
# They end a run with a save. SIGUSR1: Slurm's --signal=USR1@60. SIGXCPU: the soft limit of CPU
# time, as in ulimit -St. SIGBREAK: Windows' Ctrl-Break, which a program can send to another there.
SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGXCPU", "SIGBREAK")
SIGNALS = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]

# Only init() and join() set these.
rank = 0  # of this process among all
world_size = 1
local_rank = 0  # of this process on its machine: the number of its GPU
local_world_size = 1
is_main = True
_store = None  # the key-value store that torchrun's processes share


# -- connecting ------------------------------------------------------------------------------------


def init() -> None:
    """Join the other processes, if torchrun started several.

    From here on, all but the first print errors only. Raises ConfigError for inconsistent
    environment variables, and RunError if the other processes cannot be reached.
    """
    global rank, world_size, local_rank, local_world_size, is_main
    world_size = read_number("WORLD_SIZE", 1, default="1")
    if world_size == 1:
        return
    rank = read_number("RANK", 0, world_size - 1)
    local_rank = read_number("LOCAL_RANK", 0, world_size - 1)
    local_world_size = read_number("LOCAL_WORLD_SIZE", 1, world_size, default="1")
    is_main = rank == 0
    port = read_number("MASTER_PORT", 1, 65535)
    address = f"{os.environ.get('MASTER_ADDR')}:{port}"
    waiting = f"waiting for {world_size} processes at {address} (MASTER_ADDR, MASTER_PORT) ..."
    reminder = threading.Timer(WAIT_S, print, [waiting], {"file": sys.stderr})
    reminder.start()
    try:
        with signals_restored():
            # The wait is in C++, where Python's signal handlers do not run.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            join()
    except (RuntimeError, ValueError) as error:
        raise RunError(
            f"the {world_size} processes of this run do not reach each other at {address}:"
            f" {files.error_message(error)}"
        ) from None
    finally:
        reminder.cancel()


def read_number(name: str, low: int, high: int = 10**6, default: str | None = None) -> int:
    """A number from an environment variable that torchrun sets. Raises ConfigError."""
    text = os.environ.get(name, default)
    if text is not None and re.fullmatch("[0-9]{1,7}", text) and low <= int(text) <= high:
        return int(text)
    problem = f"{name} = {text!r}, which must be a number from {low} to {high:,}"
    if text is None:
        problem = f"WORLD_SIZE = {world_size}, but no {name}"
    raise ConfigError(
        f"the environment has {problem}; torchrun --nproc_per_node=N train.py ... sets all that"
        " several processes need, and without WORLD_SIZE a single one trains"
    )


def join() -> None:
    """Connect to the other processes."""
    global _store
    _store, *_ = next(dist.rendezvous("env://"))
    # Plain numbers travel over gloo, between the CPUs, so that exchanging them never waits for a
    # GPU.
    backend = "gloo"
    if torch.cuda.is_available() and dist.is_nccl_available():
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=_store, rank=rank, world_size=world_size)
    # PyTorch 2.15 names it set_timeout. Not above: connecting has PyTorch's.
    (getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout)(PATIENCE)
    if not is_main:
        # Open until the process ends; it takes all text, as the first process's does.
        sys.stdout = open(os.devnull, "w", encoding="utf-8", errors="replace")  # noqa: SIM115


# -- one trainer per run ---------------------------------------------------------------------------


@contextlib.contextmanager
def locked(folder: Path):
    """Hold the lock of a run's folder. Makes the folder, and removes it again if no run starts.

    Raises RunError, which names the process that holds it.
    """
    made = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    holder = folder / ".trainer"
    try:
        lock = files.take_lock(folder / ".lock", timeout=0)
    except Timeout:
        who = files.read_text(holder) or "another process"
        advice = "stop that one first, or choose another checkpoint_dir"
        for launcher, variable in UNJOINED.items():
            if world_size == 1 and os.environ.get(variable, "1") != "1":
                advice = f"{launcher} starts separate runs; torchrun starts the processes of one"
        raise RunError(f"{folder} is being trained by {who}; {advice}") from None
    with contextlib.suppress(OSError):  # on a full disk: whether it has room is seen later
        name = f"process {os.getpid()} on {socket.gethostname()}"
        holder.write_text(name, encoding="utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # the folder may have become read-only
            holder.unlink()
            if os.listdir(folder) == [".lock"]:
                (folder / ".lock").unlink()
        lock.release()
        if made:
            with contextlib.suppress(OSError):  # it is not empty if a run started
                folder.rmdir()


# -- communication ---------------------------------------------------------------------------------


def barrier() -> None:
    """Wait until all processes have called this."""
    gather(0)


def on_main(function: Callable) -> Callable:
    """A decorator: the first process runs the function; in the others it returns None."""

    @functools.wraps(function)
    def wrapped(*arguments):
        return function(*arguments) if is_main else None

    return wrapped


def gather(value: float) -> list[float]:
    """The values of all processes, by rank."""
    if world_size == 1:
        return [value]
    values = torch.zeros(world_size, dtype=torch.float64)
    values[rank] = value
    dist.all_reduce(values)
    return values.tolist()


def all_reduce_max(*values: float) -> list[float]:
    """The maximum of each value over all processes, in a single message."""
    if world_size == 1:
        return list(values)
    largest = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.tolist()


def all_reduce_mean(value: torch.Tensor) -> torch.Tensor:
    """The mean of a scalar over all processes, on its device."""
    if world_size == 1:
        return value
    total = value / world_size
    dist.all_reduce(total)
    return total


def split_across_ranks(work: Callable, stack: torch.Tensor) -> torch.Tensor:
    """work(stack), of which each process computes a part; all get the whole result.

    work: maps each stack[i] independently, and keeps shape and dtype.
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


# -- signals ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def signals_restored():
    """Give SIGNALS back to the handlers before, as a notebook or a search goes on after a run."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) != handler:  # only the main thread may set one
                signal.signal(number, handler)


class StopFlag:
    """Records the signals that this process receives after its construction.

    signum: number of the last signal; 0: none. A second Ctrl-C ends the process at once.
    """

    def __init__(self):
        self.signum = 0
        for number in SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets SIGHUP
                signal.signal(number, self.set)

    def set(self, signum, frame):
        if self.signum and signum == signal.SIGINT:
            os.write(2, b"\nexited immediately; the last checkpoint is intact\n")
            os._exit(130)
        self.signum = signum

    def set_anywhere(self) -> bool:
        """True if any process of the run has received a signal. All processes must call it."""
        (signum,) = all_reduce_max(self.signum)
        return signum > 0


# -- errors and exit -------------------------------------------------------------------------------


def connection_lost(error: BaseException) -> bool:
    """True if an error means that another process has ended or cannot be reached."""
    if world_size == 1 or hardware.out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def print_error(message: str) -> None:
    """Print an error to stderr, in the first process that reports one."""
    if _store is not None:
        with contextlib.suppress(RuntimeError):  # the process that hosts the store may have ended
            if _store.add("failed", 1) > 1:
                return
    print(message, file=sys.stderr)


def exit_process(status: int) -> None:
    """Flush the output and end the process at once.

    A regular exit waits for compilers that still run, and gloo's threads sometimes abort the
    process during it, as in destroy_process_group.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
