"""A function over items in threads of this process, in order; ray_engine.py has it for a cluster.

The encoders release Python's lock, so that threads use all cores. Knows nothing of the work.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

ITEMS_A_THREAD = 2  # at work or waiting for their turn: no thread waits for the next


class Threads:
    """A context manager, which gives `map`."""

    def __init__(self, count: int, function: Callable):
        self.executor = ThreadPoolExecutor(count)
        self.most = ITEMS_A_THREAD * count
        self.function = function

    def map(self, items: Iterable) -> Iterator:
        """Yield function(item) for each item, in order. Raises what the function raises."""
        under_way = deque()
        for item in items:
            under_way.append(self.executor.submit(self.function, item))
            if len(under_way) == self.most:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def __enter__(self):
        return self.map

    def __exit__(self, *error):
        self.executor.shutdown(cancel_futures=True)


def begin(function: Callable, *arguments) -> Future:
    """The result of function(*arguments), from a thread that keeps no process from ending."""
    future = Future()

    def run():
        try:
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
