"""A few real steps of a run on this machine, to know how long its steps take.

They change no weights: their learning rate is 0.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

import hardware
from training.memory import catch_out_of_memory
from training.optimizer import optimizer_step
from training.setup import Run
from training.signals import Stop
from training.step import forward_backward

TOKENS = 4096  # of a micro-batch on a CPU: from here on the time a token does not change
STEPS = 20  # at most


@dataclass
class Trial:
    """step_s: seconds of an optimiser step. micro_batch: the sequences with which it was timed."""

    step_s: float
    micro_batch: int


def measure(run: Run, seconds: float = 20.0) -> Trial | None:
    """Time a few steps, for `seconds` or two steps, compilation not counted.

    None where a signal came before two steps were done. Raises RunError where one sequence is too
    much for the memory.
    """
    micro_batch, trainer = run.micro_batch, run.trainer
    if run.device.type == "cpu":
        limit = min(micro_batch.training, TOKENS // run.config.block_size)
        micro_batch.training = micro_batch.fitting(limit)
    step_s = None
    bar_format = "{desc}, {elapsed}"
    with (
        contextlib.suppress(Stop),
        tqdm(desc="measuring here", bar_format=bar_format, leave=False, disable=None) as bar,
    ):
        if run.compiles:
            bar.set_description_str("compiling, to measure a few steps here")
            trainer.compile()  # without tuning, which would take minutes
        while True:
            with catch_out_of_memory() as memory:
                step_s = time_steps(run, seconds, bar)
            if not memory.caught:
                break
            trainer.halve("training")
    return Trial(step_s, micro_batch.training) if step_s else None


def time_steps(run: Run, seconds: float, bar: tqdm) -> float | None:
    """Seconds of an optimiser step. A signal ends it early; None where that came too early."""
    c, state, trainer, size = run.config, run.state, run.trainer, run.micro_batch.training
    x, y = run.data.train.batch(0, size, c.seed)
    forward_s, update_s = [], []
    begun = time.perf_counter()
    with contextlib.suppress(Stop):
        while len(update_s) < 2 or time.perf_counter() - begun < seconds:
            if len(update_s) == STEPS:
                break
            bar.set_description_str(f"measuring here, step {len(update_s) + 1}; Ctrl-C ends it")
            with timed(run.device.torch, forward_s):
                forward_backward(trainer.forward, x, y, size, trainer.cast, state.scaler)
            with timed(run.device.torch, update_s):
                optimizer_step(state.model, state.optimizer, state.scaler, 0.0, c.grad_clip)
    if len(update_s) < 2:
        return None
    # The first of each warms up.
    micro_batches = run.micro_batch.batch / size
    return statistics.median(forward_s[1:]) * micro_batches + statistics.median(update_s[1:])


@contextlib.contextmanager
def timed(device: torch.device, seconds: list[float]):
    """Append to `seconds` how long the device takes for what is done in this context."""
    hardware.synchronize(device)
    start = time.perf_counter()
    yield
    hardware.synchronize(device)
    seconds.append(time.perf_counter() - start)
