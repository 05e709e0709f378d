"""Worker processes of this machine that apply a function to items, in order.

ray_engine.py has the same for a cluster. Neither multiprocessing.Pool nor ProcessPoolExecutor:
their workers outlive a main process that was killed, they cannot be stopped in the middle of an
item, and a kill leaks the semaphores of both. Independent of the work, but for the errors that a
user can mend: these are handed on.
"""

import contextlib
import functools
import os
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import connection, get_context, resource_tracker

from preparing import InputError, PrepareError
from tokenizer_bpe import TokenizerError

MOST_WORKERS = 61  # Windows cannot wait for more
QUEUED = 3  # items that a worker has at a time: it never waits for the next
AHEAD = 4  # items a worker that may be under way or wait for an earlier one


def workers(count: int, function: Callable) -> contextlib.AbstractContextManager:
    """A context manager that gives a `map` of the function over items, in `count` processes.

    count: 0 for none but this one, for text that is not worth starting any.
    """
    if count:
        return Pool(count, function)
    return contextlib.nullcontext(functools.partial(map, function))


class Pool:
    """Worker processes as a context manager, which gives `map`.

    They end with this process, however it ends.
    """

    def __init__(self, count: int, function: Callable):
        """Start `count` processes, and wait until each has its copy of the function."""
        context = get_context("spawn")
        self.load = {}  # items under way, for each worker's channel
        self.processes = []
        with signals_held_back():
            for _ in range(min(count, MOST_WORKERS)):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                self.processes.append(process)
                self.load[ours] = 0
        for worker in self.load:
            self._send(worker, function)
        for worker in self.load:
            self._receive(worker)

    def map(self, items: Iterable) -> Iterator:
        """Yield function(item) for each item, in order.

        Takes at most AHEAD items a worker before their turn. Raises what the function raises, and
        PrepareError when a worker dies.
        """
        numbered = enumerate(items)
        results = {}
        sent = 0
        done = 0
        more = True
        while more or done < sent:
            worker = min(self.load, key=self.load.get)
            if more and sent - done < AHEAD * len(self.load) and self.load[worker] < QUEUED:
                task = next(numbered, None)
                if task:
                    self._send(worker, task)
                    sent += 1
                more = task is not None
            elif done in results:
                yield value_of(results.pop(done))
                done += 1
            else:
                busy = [worker for worker, load in self.load.items() if load]
                for worker in connection.wait(busy):
                    number, value = self._receive(worker)
                    results[number] = value

    def _send(self, worker, message):
        self.load[worker] += 1
        with reported_death():
            worker.send(message)

    def _receive(self, worker):
        self.load[worker] -= 1
        with reported_death():
            return worker.recv()

    def __enter__(self):
        return self.map

    def __exit__(self, *error):
        for process in self.processes:
            process.kill()
            process.join()


@contextlib.contextmanager
def reported_death():
    """A connection that breaks as a PrepareError."""
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
        number, item = tasks.get()
        results.put((number, attempt(function, item)))


@contextlib.contextmanager
def signals_held_back():
    """Hold Ctrl-C and SIGTERM back while processes start; half started they would complain.

    The processes inherit that these are not for them: they end with this one.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # which lets signals through as it starts
    former = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


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
    """The cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()
