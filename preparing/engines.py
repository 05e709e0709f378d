"""Parallel work on chunks of text: in threads of this process, or on the cores of a Ray cluster.

The encoders release Python's GIL, so threads use all cores. On a cluster, this process reads the
text and sends it to tasks. Ray repeats the tasks of a node that dies, and copies our code to the
nodes; they need the same packages.
"""

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path

from formats.files import error_message
from preparing import InputError, PrepareError, need

ROOT = Path(__file__).parent.parent
# Copied to the nodes.
CODE = ("preparing", "formats", "tokenizer_bpe.py", "command_line.py", "processors.py")
ITEMS_A_CORE = 3  # in progress, or finished and waiting for an earlier one
RETRIES = 20  # of a task whose node dies
CONNECT_S = 10  # seconds until an address counts as wrong


def map_in_order(submit: Callable[..., Future], items: Iterable, most: int) -> Iterator:
    """Yield the result of submit(item) for each item, in order. Raises what the work raises.

    most: items in progress, or finished and waiting for an earlier one, at any time.
    """
    under_way = deque()
    for item in items:
        under_way.append(submit(item))
        if len(under_way) == most:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


def begin(function: Callable, *arguments) -> Future:
    """Run function(*arguments) in a daemon thread, which does not keep the process alive."""
    future = Future()

    def run():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def result_of(future: Future) -> object:
    """As future.result(). On Windows, Ctrl-C has no effect until a wait ends: these are short."""
    while not future.done():
        wait([future], 0.5)
    return future.result()


# -- a Ray cluster


def connect(address: str) -> None:
    """Connect to the cluster at HOST:PORT, or auto. Raises InputError if there is none."""
    need("--ray", "ray")
    import ray

    if address != "auto":  # Ray would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except (OSError, ValueError, OverflowError) as error:
            raise InputError(
                f"--ray {address}: no cluster answers there ({error}); give HOST:PORT of its head,"
                " or auto on a machine of it; `ray start --head` starts one"
            ) from None
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # of abandoned tasks
    terminate = signal.getsignal(signal.SIGTERM)  # which Ray replaces
    code = {"py_modules": [str(ROOT / name) for name in CODE], "excludes": ["__pycache__"]}
    try:
        ray.init(address, runtime_env=code, log_to_driver=False, logging_level="ERROR")
    except (Exception, SystemExit) as error:  # it raises many types
        raise InputError(f"--ray {address}: {error_message(error)}") from None
    finally:
        signal.signal(signal.SIGTERM, terminate)


def map_on_cluster(function: Callable, items: Iterable) -> Iterator:
    """Yield function(item) for each item, in order, from the cluster that connect() chose.

    Raises what the function raises, and PrepareError if Ray fails.
    """
    import ray

    most = ITEMS_A_CORE * max(1, int(ray.cluster_resources().get("CPU", 0)))
    # As a closure, `function` and what it holds are sent to each worker process only once.
    task = ray.remote(lambda item: function(item)).options(max_retries=RETRIES)
    try:
        yield from map_in_order(lambda item: task.remote(item).future(), items, most)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        why = str(error).strip().splitlines()[-1]  # the rest is a traceback
        raise PrepareError(f"Ray failed ({why}); the same command continues") from None
