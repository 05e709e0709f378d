"""Time a few real steps of a run on this machine.

They change no weights: their learning rate is 0.
"""

import contextlib
import statistics
import time

import torch

import hardware
from training import distributed
from training.optimizer import optimizer_step
from training.run import Run
from training.step import forward_backward

TOKENS = 4096  # per micro-batch on a CPU; with more, the time per token does not change
LONG_S = 0.5  # forward and backward on a CPU; above this, no larger micro-batch is timed
STEPS = 20  # the most that are timed


def measure(run: Run, seconds: float = 10.0) -> tuple[float, int]:
    """Time steps, two at least, while `seconds` last; compilation does not count.

    Not compiled on a CPU, which may take minutes. A CPU begins with one sequence, which may take
    all of the seconds, and doubles from there. Several processes take the same steps, by the clock
    of the first: Muon's update waits for all of them. Returns the seconds of an optimiser step, and
    the micro-batch with which it was timed. Raises RunError where one sequence is too much for the
    memory.
    """
    c, state, trainer = run.config, run.state, run.trainer
    if run.device.type == "cpu":
        limit, size = max(1, min(trainer.micro_batch, TOKENS // c.block_size)), 1
    else:
        trainer.prepare(run.compiles)
        size = limit = trainer.micro_batch
    forward_s, update_s = [], []
    begun = time.perf_counter()
    while len(update_s) < STEPS:
        x, y = run.data.train.batch(0, size, c.seed)
        with timed(run.device.torch, forward_s):
            forward_backward(trainer.forward, x, y, size, trainer.cast, state.scaler)
        with timed(run.device.torch, update_s):
            optimizer_step(state.model, state.optimizer, state.scaler, 0.0, c.grad_clip)
        if size < limit and distributed.gather(forward_s[-1])[0] < LONG_S:
            size, forward_s, update_s = min(2 * size, limit), [], []
            begun = time.perf_counter()
        elif len(update_s) > 1 and distributed.gather(time.perf_counter() - begun)[0] > seconds:
            break
    # The first of each warms up.
    forward, update = (statistics.median(s[1:]) for s in (forward_s, update_s))
    return forward * trainer.local_batch / size + update, size


@contextlib.contextmanager
def timed(device: torch.device, seconds: list[float]):
    """Append to `seconds` how long the device takes for what is done in this context."""
    hardware.synchronize(device)
    start = time.perf_counter()
    yield
    hardware.synchronize(device)
    seconds.append(time.perf_counter() - start)
