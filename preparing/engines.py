"""Worker processes of this machine that apply a function to items, in order.

ray_engine.py has the same for a cluster. Neither multiprocessing.Pool nor ProcessPoolExecutor:
their workers outlive a main process that was killed, they cannot be stopped in the middle of an
item, and a kill leaks the semaphores of both. Independent of the work, but for the errors that a
user can mend: these are handed on.
"""

import contextlib
import functools
import itertools
import os
import queue
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import get_context, resource_tracker

from preparing import InputError, PrepareError
from tokenizer_bpe import TokenizerError

AHEAD = 4  # items that a worker may have before their turn: it never waits for the next


def workers(count: int, function: Callable) -> contextlib.AbstractContextManager:
    """A context manager that gives a `map` of the function over items, in `count` processes.

    count: 0 for none but this one, for text that is not worth starting any.
    """
    if count:
        return Pool(count, function)
    return contextlib.nullcontext(functools.partial(map, function))


class Pool:
    """A context manager, which gives `map`. The workers end with this process, however it ends."""

    def __init__(self, count: int, function: Callable):
        """Start `count` processes, and wait until each has its copy of the function."""
        context = get_context("spawn")
        self.processes = []
        self.channels = []
        with signals_held_back():
            for _ in range(count):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.channels.append(ours)
        with reported_death():
            for channel in self.channels:
                channel.send(function)
            for channel in self.channels:
                channel.recv()

    def map(self, items: Iterable) -> Iterator:
        """Yield function(item) for each item, in order; the workers take turns.

        Raises what the function raises, and PrepareError when a worker dies.
        """
        under_way = deque()  # the channels from which results will come
        for item, channel in zip(items, itertools.cycle(self.channels)):
            with reported_death():
                channel.send(item)
            under_way.append(channel)
            if len(under_way) == AHEAD * len(self.channels):
                yield self._result(under_way.popleft())
        while under_way:
            yield self._result(under_way.popleft())

    def _result(self, channel):
        with reported_death():
            result = channel.recv()
        return value_of(result)

    def __enter__(self):
        return self.map

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def reported_death():
    """Raise PrepareError where the connection to a worker breaks."""
    try:
        yield
    except (EOFError, ConnectionError):
        raise PrepareError(
            "a worker process died, most likely for lack of memory: try fewer --workers; the same"
            " command continues"
        ) from None


def _work(channel):
    """The life of a worker process, which begins with the function and ends with its channel.

    Receiving and sending each have a thread: a worker ends as soon as the main process does, and
    goes on while its results wait to be read.
    """
    tasks = queue.SimpleQueue()  # after the function
    results = queue.SimpleQueue()

    def receive():
        with contextlib.suppress(EOFError, OSError):
            while True:
                tasks.put(channel.recv())
        os._exit(0)

    def send():
        with contextlib.suppress(OSError):
            while True:
                channel.send(results.get())

    threading.Thread(target=receive, daemon=True).start()
    threading.Thread(target=send, daemon=True).start()
    function = tasks.get()
    results.put("ready")
    while True:
        results.put(attempt(function, tasks.get()))


@contextlib.contextmanager
def signals_held_back():
    """Hold Ctrl-C and SIGTERM back while processes start; half started they would complain.

    The processes inherit that Ctrl-C is not for them.
    """
    received = []
    handlers = {
        signum: signal.signal(signum, lambda signum, _: received.append(signum))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    can_block = hasattr(signal, "pthread_sigmask")  # not on Windows
    if can_block:
        resource_tracker.ensure_running()  # which lets Ctrl-C through as it starts
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if can_block:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
        if received:
            signal.raise_signal(received[0])


def attempt(function: Callable, item: object) -> object:
    """function(item) in a worker process, or the exception to raise for it, to be sent."""
    try:
        return function(item)
    except (InputError, PrepareError, TokenizerError, OSError) as error:
        return error
    except Exception as error:
        kind = type(error).__name__
        return PrepareError(f"{kind} in a worker process on {socket.gethostname()}: {error}")


def value_of(result: object) -> object:
    """The value that attempt() returned. Raises it when it is an exception."""
    if isinstance(result, Exception):
        raise result
    return result


def usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
