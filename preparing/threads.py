"""Work in threads of this process. The encoders release Python's lock, so threads use all cores."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future


def map_in_order(submit: Callable[..., Future], items: Iterable, most: int) -> Iterator:
    """Yield the result of submit(item) for each item, in order. Raises what the work raises.

    most: items to have under way, or waiting for an earlier one.
    """
    under_way = deque()
    for item in items:
        under_way.append(submit(item))
        if len(under_way) == most:
            yield under_way.popleft().result()
    while under_way:
        yield under_way.popleft().result()


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
