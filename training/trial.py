"""A few real steps of a run on the present device, to know how long its steps take.

They change no weights: their learning rate is 0.
"""

import contextlib
import statistics
import time
from dataclasses import dataclass

import torch
from tqdm import tqdm

import hardware
from hardware import out_of_memory
from training.memory import largest_divisor, release
from training.optimizer import optimizer_step
from training.setup import Run
from training.signals import Stop
from training.step import forward_backward

TOKENS = 4096  # at once on a CPU: from here on the time a token does not change
STEPS = 20  # at most


@dataclass
class Trial:
    """step_s: seconds of an optimiser step. micro_batch: the sequences at once that it took."""

    step_s: float
    micro_batch: int


def measure(run: Run, seconds: float = 20.0) -> Trial | None:
    """Time a few steps, for so many seconds or two steps, compilation not counted.

    None where a signal came before there was anything to tell. Raises what running out of memory
    does, with one sequence.
    """
    memory = run.memory.training
    if run.device.type == "cpu":
        memory.size = max(1, min(memory.size, TOKENS // run.config.block_size))
    with tqdm(
        desc="measuring here", bar_format="{desc}, {elapsed}", leave=False, disable=None
    ) as bar:
        while True:
            try:
                if run.compiles:
                    bar.set_description_str("compiling, to measure a few steps here")
                    run.trainer.compile()  # without tuning, which would take minutes
                x, y = run.trainer.train_data.batch(0, memory.size, run.config.seed)
                step_s = time_steps(run, x, y, seconds, bar)
                return Trial(step_s, memory.size) if step_s else None
            except Stop:
                return None
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) or memory.size == 1:
                    raise
            run.state.model.zero_grad(set_to_none=True)
            release(run.device)
            memory.size = largest_divisor(run.memory.batch, memory.size // 2)


def time_steps(run: Run, x, y, seconds: float, bar: tqdm) -> float | None:
    """Seconds of an optimiser step whose micro-batches are as large as x, y: int64 [B, T].

    A signal ends it early; None where that came before the second step.
    """
    c, state, trainer = run.config, run.state, run.trainer
    passes, updates = [], []
    begun = time.perf_counter()
    with contextlib.suppress(Stop):
        while len(updates) < 2 or time.perf_counter() - begun < seconds:
            if len(updates) == STEPS:
                break
            bar.set_description_str(f"measuring here, step {len(updates) + 1}; Ctrl-C ends it")
            with timed(run.device, passes):
                forward_backward(trainer.forward, x, y, len(x), trainer.cast, state.scaler)
            with timed(run.device, updates):
                optimizer_step(state.model, state.optimizer, state.scaler, 0.0, c.grad_clip)
    if len(updates) < 2:
        return None
    # The first of each warms up.
    micro_batches = c.batch_size / len(x)
    return statistics.median(passes[1:]) * micro_batches + statistics.median(updates[1:])


@contextlib.contextmanager
def timed(device: torch.device, seconds: list[float]):
    """Add to `seconds` how long the device takes for what is done under it."""
    hardware.synchronize(device)
    start = time.perf_counter()
    yield
    hardware.synchronize(device)
    seconds.append(time.perf_counter() - start)
