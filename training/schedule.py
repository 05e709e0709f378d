"""The learning rate of each step, and when to evaluate, save, log and stop.

Depends on settings, counters and the clock. Knows neither model nor files.
"""

import contextlib
import math
import time
from dataclasses import dataclass

import torch

import hardware
from config import Config

DECAY_FRACTION = 0.5  # share of the steps during which wsd decays
DECAY_PER_REPEAT = 0.9  # 0.3 to 2.8 were tried, in two to sixteen epochs: docs/experiments.md
POINTS = 10_000  # of a schedule, to sum its rates
MAX_BAD_STEPS = 10  # a run stops after this many consecutive steps with NaN or infinity
LIMITS = ("", "max_hours", "max_cost")  # indexed by Clock.exceeded()


@dataclass
class Counters:
    """A run's progress.

    sequences: drawn from the training data so far, which is the position in the data order.
    """

    step: int = 0
    sequences: int = 0


def count_steps(config: Config, counters: Counters, windows: int) -> int:
    """The step at which the run ends. windows: sequences per epoch."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.epochs is not None:
        left = config.epochs * windows - counters.sequences
        ends.append(counters.step + max(0, math.ceil(left / config.batch_size)))
    return min(ends)


def lr_multiplier(step: int, total_steps: int, config) -> float:
    """The learning rate of step `step` (from 0) divided by the peak.

    After a linear warm-up it follows a cosine, or stays constant and falls linearly over the last
    half of the steps (wsd: warm-up, stable, decay). It would be min_lr one step after the last,
    which with 0 would train nothing. config: has learning_rate, min_lr (None: learning_rate / 10;
    0 for wsd), warmup_steps and lr_schedule.
    """
    low = final_multiplier(config)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "wsd":
        left = (total_steps - step) / max(1, DECAY_FRACTION * total_steps)
        return low + (1 - low) * min(1.0, left)
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def final_multiplier(config) -> float:
    """min_lr, or its default, divided by the peak. config: as in lr_multiplier."""
    if config.min_lr is None:
        return 0.0 if config.lr_schedule == "wsd" else 0.1
    return config.min_lr / config.learning_rate if config.min_lr else 0.0


def full_rate_steps(total_steps: int, config) -> float:
    """The sum of lr_multiplier over the run: its equivalent in steps at the peak.

    Over evenly spread steps, since a run may have 1e9: exact up to POINTS of them, to 1e-4 above.
    config: as in lr_multiplier.
    """
    points = min(total_steps, POINTS)
    apart = total_steps / points
    steps = (int((n + 0.5) * apart) for n in range(points))
    return apart * sum(lr_multiplier(step, total_steps, config) for step in steps)


def peak_decay(total_steps: int, epochs: float, config) -> float:
    """The fraction by which a step at the peak learning rate shrinks the matrices' weights.

    weight_decay times that learning rate. If the setting is None, it is chosen so that the sum over
    the run is DECAY_PER_REPEAT for each epoch after the first.
    """
    if config.weight_decay is not None:
        matrix_lr = config.muon_lr if config.optimizer == "muon" else config.learning_rate
        return config.weight_decay * matrix_lr
    in_all = DECAY_PER_REPEAT * max(0.0, epochs - 1)
    steps = max(full_rate_steps(total_steps, config), in_all)  # at most 1 per step
    return in_all / steps if in_all else 0.0


class Schedule:
    """Decides at each step whether to evaluate, save, log or stop.

    total_steps: the last step of the run. evaluated: the step of the last evaluation. validates:
    False if there is no validation data.
    """

    def __init__(
        self, config: Config, counters: Counters, total_steps: int, evaluated: int, validates: bool
    ):
        self.config, self.counters, self.total_steps = config, counters, total_steps
        self.evaluated, self.validates = evaluated, validates
        self.mark_saved()

    @property
    def done(self) -> bool:
        return self.counters.step >= self.total_steps

    @property
    def steps_left(self) -> int:
        return max(0, self.total_steps - self.counters.step)

    @property
    def lr_multiplier(self) -> float:
        return lr_multiplier(self.counters.step, self.total_steps, self.config)

    @property
    def evaluation_due(self) -> bool:
        """True if this step is to be evaluated and has not been yet."""
        step = self.counters.step
        due = step == self.total_steps or is_due(self.config.eval_interval, step)
        return self.validates and step > self.evaluated and due

    def save_due(self, busy: bool) -> bool:
        """True if this step is to be saved. busy: whether a save is still being written.

        A step is saved before it is evaluated, since it may be the best so far.
        """
        step, minutes = self.counters.step, self.config.save_minutes
        if step <= self.last_save_step:
            return False
        if self.evaluation_due or self.done or is_due(self.config.save_interval, step):
            return True
        return bool(minutes) and not busy and time.monotonic() > self.last_save_at + 60 * minutes

    def mark_saved(self) -> None:
        self.last_save_step, self.last_save_at = self.counters.step, time.monotonic()

    def mark_evaluated(self) -> None:
        self.evaluated = self.counters.step

    @property
    def log_due(self) -> bool:
        return is_due(self.config.log_interval, self.counters.step) or self.done

    @property
    def check_due(self) -> bool:
        """True at a step to check for NaN, which waits for the device."""
        return is_due(min(self.config.log_interval, MAX_BAD_STEPS), self.counters.step)


def is_due(interval: int, step: int) -> bool:
    """True every `interval` steps; never if it is 0."""
    return interval > 0 and step % interval == 0


class Clock:
    """Measures time and cost over all starts of the run.

    elapsed_s: seconds of training, without evaluation and saving. running_s: seconds in all, on
    which the cost is based. started: time.monotonic() at the beginning of this start.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        started: float,
        elapsed_s: float = 0.0,
        running_s: float = 0.0,
    ):
        self.config, self.device, self.started = config, device, started
        self.elapsed_s, self.before = elapsed_s, running_s
        self.unlogged = 0.0
        self.start()

    def start(self) -> None:
        self.mark = time.perf_counter()

    def stop(self) -> None:
        """Wait for the device, and count the time since start()."""
        hardware.synchronize(self.device)
        passed = time.perf_counter() - self.mark
        self.elapsed_s += passed
        self.unlogged += passed
        self.start()

    @contextlib.contextmanager
    def paused(self):
        """Do not count the time spent in this context."""
        self.stop()
        yield
        self.start()

    def since_log(self) -> float:
        """Seconds of training since the last call."""
        self.stop()
        seconds, self.unlogged = self.unlogged, 0.0
        return seconds

    @property
    def running_s(self) -> float:
        return self.before + time.monotonic() - self.started

    @property
    def cost(self) -> float | None:
        """The cost of the run so far; None if cost_per_hour is not set."""
        if not self.config.cost_per_hour:
            return None
        return self.running_s / 3600 * self.config.cost_per_hour

    def exceeded(self) -> int:
        """The index in LIMITS of the exceeded limit; 0 if there is none."""
        c = self.config
        if c.max_hours is not None and self.running_s > c.max_hours * 3600:
            return 1
        if c.max_cost is not None and self.cost > c.max_cost:
            return 2
        return 0
