"""Worker processes of a Ray cluster: the pool of engines.py, for more than one machine.

This process reads the text and sends it; tasks on the cluster call the function. A task whose node
dies is done again elsewhere, which is Ray's work. Needs the package ray, and the same packages on
all nodes; the code goes to them with the connection.
"""

import functools
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from formats.files import in_words
from preparing import InputError, PrepareError, need
from preparing.engines import attempt, value_of

ROOT = Path(__file__).parent.parent
CODE = ("preparing", "formats", "tokenizer_bpe.py")  # what the nodes get
AHEAD = 3  # items a core that are under way or wait for an earlier one
RETRIES = 20  # of a task whose node dies
CONNECTING = 10  # seconds until an address counts as wrong
SILENCE = 60  # seconds without a result until a message says so


def connect(address: str) -> None:
    """Connect to a cluster, at HOST:PORT or auto. Raises InputError where there is none."""
    need("--ray", "ray")
    import ray

    if address == "auto":
        address = os.environ.get("RAY_ADDRESS", address)
    if address != "auto":  # Ray would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECTING).close()
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(
                f"--ray {address}: no cluster answers there ({error}); give HOST:PORT of its head,"
                " or auto on a machine of it; `ray start --head` starts one"
            ) from None
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of tasks that are given up
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    code = {"py_modules": [str(ROOT / name) for name in CODE], "excludes": ["__pycache__"]}
    try:
        ray.init(address, runtime_env=code, log_to_driver=False, logging_level="ERROR")
    except (Exception, SystemExit) as error:  # whatever it raises
        raise InputError(f"--ray {address}: {in_words(error)}") from None
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


class RayPool:
    """The cores of the cluster that this process is connected to, as a Pool."""

    def __init__(self, function: Callable):
        import ray

        self.ray = ray
        self.tasks = deque()  # the references to their results, in order
        self.task = ray.remote(_call).options(max_retries=RETRIES)
        # In a list, for a reference alone is replaced by its value, in each task.
        self.function = [ray.put(function)]

    def map(self, items: Iterable) -> Iterator:
        """Yield function(item) for each item, in order. Raises what the function raises."""
        for item in items:
            self.tasks.append(self.task.remote(self.function, item))
            while len(self.tasks) >= AHEAD * self._cores():
                yield self._first_result()
        while self.tasks:
            yield self._first_result()

    def _cores(self):
        return max(1, int(self.ray.cluster_resources().get("CPU", 0)))

    def _first_result(self):
        """The result of the first task, waited for."""
        while not self.ray.wait([self.tasks[0]], timeout=SILENCE)[0]:
            print("waiting for the Ray cluster; see `ray status`", file=sys.stderr, flush=True)
        try:
            return value_of(self.ray.get(self.tasks.popleft()))
        except self.ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[-1]  # before it comes a traceback
            raise PrepareError(
                f"the Ray cluster failed ({why}); the same command goes on"
            ) from None

    def __enter__(self):
        return self.map

    def __exit__(self, *error):
        for task in self.tasks:
            self.ray.cancel(task)


def _call(references, item):
    """The function's value for an item, or the exception to raise for it. Runs on the cluster."""
    return attempt(_received(references[0]), item)


@functools.cache
def _received(reference):
    """The function of a reference, fetched once a process."""
    import ray

    return ray.get(reference)
