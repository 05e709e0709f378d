"""What brings the text to a function in worker processes, and back what it makes of it, in order.

Here the main process reads, and the workers are of this machine; ray_engine.py has the same for a
Ray cluster. Knows neither what the function does nor what becomes of it.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator

from preparing.errors import InputError
from preparing.fetching import Fetcher
from preparing.options import Options
from preparing.pieces import Position, batches
from preparing.pool import Pool
from preparing.readers import read_pieces


class Engine:
    """A function of batches of pieces, and worker processes of this machine that call it.

    Used as a context manager, in which the workers are up.
    """

    def __init__(
        self, function: Callable, start: Position, options: Options, files: Fetcher, workers: int
    ):
        """start: of the first piece. files: opens the sources. workers: how many processes."""
        self.function = function
        self.start = start
        self.options = options
        self.files = files
        self.workers = workers

    def __enter__(self):
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.files)
            self.pool = stack.enter_context(Pool(self.workers, self.function))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error):
        self.stack.__exit__(*error)

    def results(self) -> Iterator:
        """What the function makes of each batch, in order. Raises what it raises."""
        pieces = read_pieces(self.files.sources, self.start, self.options, self.files.open)
        batches_without_data = ([p.without_data() for p in batch] for batch in batches(pieces))
        yield from self.pool.map(batches_without_data)

    def release(self, source: int) -> None:
        """Take note that the tokens of the sources before number `source` are safe."""
        self.files.release(source)

    def status(self) -> str:
        """How it goes, in a few words for the progress bar."""
        return self.files.status()


def connect_to_ray(address: str) -> None:
    """Connect to the cluster at an address, for RayEngine.

    Raises InputError where there is none, and where the package is missing.
    """
    if not importlib.util.find_spec("ray"):
        raise InputError(
            "--ray needs a package that is not installed; run\n  python -m pip install ray"
        )
    from preparing import ray_engine

    ray_engine.connect(address)
