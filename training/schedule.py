"""The learning rate of each step, and when to evaluate, save, log and end.

Functions of settings, counters and the clock. Knows no model and no files.
"""

import contextlib
import math
import time
from dataclasses import dataclass

import torch

import hardware
from config import Config

DECAY_FRACTION = 0.5  # share of the steps in which wsd decays
DECAY_PER_REPEAT = 0.9  # 0.3 to 2.8 were tried, in two to sixteen epochs: docs/experiments.md
MAX_BAD_STEPS = 10  # steps in a row with NaN or infinity that end a run
LIMITS = ("", "max_hours", "max_cost")  # Clock.exceeded() is an index of it


@dataclass
class Counters:
    """How far a run is: its step, and the sequences drawn from the training data so far.

    The latter is the position in the data order.
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

    After a linear warm-up it falls along a cosine, or along a straight line over the last half of
    the steps (wsd: warm-up, stable, decay); the last step has min_lr. config: anything with
    learning_rate, min_lr (None: a tenth of that; 0 for wsd), warmup_steps and lr_schedule.
    """
    low = final_multiplier(config)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.lr_schedule == "wsd":
        left = (total_steps - 1 - step) / max(1, DECAY_FRACTION * total_steps)
        return low + (1 - low) * min(1.0, left)
    done = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def final_multiplier(config) -> float:
    """The learning rate of the last step divided by the peak. config: as in lr_multiplier."""
    if config.min_lr is None:
        return 0.0 if config.lr_schedule == "wsd" else 0.1
    return config.min_lr / config.learning_rate if config.min_lr else 0.0


def full_rate_steps(total_steps: int, config) -> float:
    """The run's sum of learning rates, in steps at the peak.

    In closed form, as a run may have 1e9 steps. config: as in lr_multiplier.
    """
    warmup = min(config.warmup_steps, total_steps)
    rising = warmup * (warmup + 1) / 2 / max(1, config.warmup_steps)
    later = total_steps - warmup
    if config.lr_schedule == "wsd":
        decay = max(1, DECAY_FRACTION * total_steps)
        falling = min(later, math.ceil(decay))
        above = later - falling + falling * (falling - 1) / 2 / decay
    else:
        above = later / 2 if later > 1 else later  # a cosine's mean is 0
    low = final_multiplier(config)
    return rising + low * later + (1 - low) * above


def matrix_lr(config) -> float:
    """The peak learning rate of the blocks' matrices."""
    return config.muon_lr if config.optimizer == "muon" else config.learning_rate


def peak_decay(total_steps: int, epochs: float, config) -> float:
    """The share of the matrices' weights that decays in a step at the peak learning rate.

    weight_decay times that rate; if the setting is None, what suits a run of so many epochs:
    summed over the run, DECAY_PER_REPEAT for each epoch after the first.
    """
    if config.weight_decay is not None:
        return config.weight_decay * matrix_lr(config)
    in_all = DECAY_PER_REPEAT * max(0.0, epochs - 1)
    steps = max(full_rate_steps(total_steps, config), in_all)  # a step decays all at most
    return in_all / steps if in_all else 0.0


class Schedule:
    """Decides at each step whether to evaluate, save, log or end.

    total_steps: where the run ends. evaluated: the step of the last evaluation. validates: whether
    there is anything to validate on.
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
        """True at a step to evaluate that has not been evaluated yet."""
        step = self.counters.step
        due = step == self.total_steps or is_due(self.config.eval_interval, step)
        return self.validates and step > self.evaluated and due

    def save_due(self, busy: bool) -> bool:
        """True if this step is to be saved. busy: a save is still being written.

        A save precedes each evaluation, as the step may be the best so far.
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
        """True at a step to look for NaN, which waits for the device."""
        return is_due(min(self.config.log_interval, MAX_BAD_STEPS), self.counters.step)


def is_due(interval: int, step: int) -> bool:
    """True every `interval` steps; 0: never."""
    return interval > 0 and step % interval == 0


class Clock:
    """Seconds of training, without evaluation and saving; seconds of everything, and their cost.

    elapsed_s: the former, running_s: the latter, over all starts of the run. started:
    time.monotonic() when this one began.
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
        """Count what has passed since start(), once the device has done its work."""
        hardware.synchronize(self.device)
        passed = time.perf_counter() - self.mark
        self.elapsed_s += passed
        self.unlogged += passed
        self.start()

    @contextlib.contextmanager
    def paused(self):
        """Do not count what happens in this context."""
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
        """The cost of the run so far; None without a price."""
        if not self.config.cost_per_hour:
            return None
        return self.running_s / 3600 * self.config.cost_per_hour

    def exceeded(self) -> int:
        """The index in LIMITS of the limit that is exceeded; 0: none."""
        c = self.config
        if c.max_hours is not None and self.running_s > c.max_hours * 3600:
            return 1
        if c.max_cost is not None and self.cost > c.max_cost:
            return 2
        return 0
