"""Which small runs to make, and which large ones a budget pays for.

Functions of sizes, speeds and counts; trains nothing and measures nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from tools.scaling_family import Size
from tools.scaling_fit import Law, effective_tokens

SIZES, THIRDS = 4, 3  # of the small runs: so many sizes, each on C, C / 3 and C / 9
STRIDE = 2  # every second size of a family: a law needs them far apart
LEAST_STEPS = 50  # below, a run is all warm-up
LEAST_RUNS = 6  # fewer cannot tell the law's five numbers apart
MOST_EPOCHS = 4  # of a small run: up to here a repeated token is almost a new one
GRID = 0.6  # share of the minutes; the rest is starts, evaluations, the sweep, measuring
AIM = 1  # tokens a parameter that the largest of the small sizes sees at least
TRAINING = 0.95  # share of a run's hours; the rest is evaluations and saves


class PlanError(ValueError):
    """A budget or a text that no plan fits, in a sentence for the user."""


@dataclass(frozen=True)
class SmallRun:
    """A size, trained for so many steps."""

    size: Size
    steps: int


@dataclass(frozen=True)
class Offer:
    """One size that the budget pays for, and what is expected of it.

    epochs: passes over the text. loss, low, high: in nats a token. extrapolation: by which its
    operations exceed those of the largest small run.
    """

    size: Size
    steps: int
    tokens: int
    epochs: float
    hours: float
    loss: float
    low: float
    high: float
    extrapolation: float


def check_budget(steps: float) -> None:
    """Raises PlanError unless so many steps, the most that the budget pays for, are a run."""
    if steps < LEAST_STEPS:
        raise PlanError(
            f"the budget pays for fewer than {LEAST_STEPS} steps of the smallest model here, or it"
            " does not fit into memory; raise the budget, or lower --batch_size"
        )


def finite(runs: list[dict]) -> list[dict]:
    """The small runs that did not diverge. Raises PlanError where they are too few for a law."""
    found = [run for run in runs if math.isfinite(run["loss"])]
    if len(found) < LEAST_RUNS:
        raise PlanError(
            f"{len(runs) - len(found)} of {len(runs)} small runs diverged, and {LEAST_RUNS} are"
            " needed; lower --learning_rate, and --muon_lr where the preset has Muon"
        )
    return found


def small_runs(
    sizes: list[Size],
    step_seconds: Callable[[Size], float | None],
    seconds: float,
    tokens_a_step: int,
    unique: int,
) -> list[SmallRun]:
    """The small runs that fit into so many seconds, those of the smallest size first.

    The largest sizes are taken of which every one still learns something. step_seconds: of a size,
    None where it does not fit into memory. unique: tokens of the text. Raises PlanError.
    """
    smallest = LEAST_STEPS * tokens_a_step
    if unique * MOST_EPOCHS < smallest:
        raise PlanError(
            f"the text holds {unique:,} tokens, too few for the smallest run, {LEAST_STEPS} steps"
            f" of {tokens_a_step:,}; add text, or lower batch_size"
        )
    chosen = []
    for first in range(len(sizes) - STRIDE * (SIZES - 1)):
        of_time = sizes[first::STRIDE][:SIZES]
        speeds = [step_seconds(size) for size in of_time]
        if None in speeds and not first:
            raise PlanError(
                f"{of_time[speeds.index(None)]} (layers x width), one of the smallest of the"
                " family, does not fit into the memory here; lower --block_size"
            )
        if None in speeds:
            break
        runs = grid(of_time, speeds, GRID * seconds, tokens_a_step, unique)
        longest = max((run.steps for run in runs if run.size == of_time[-1]), default=0)
        enough = longest * tokens_a_step >= AIM * of_time[-1].weights
        if first and not (len(runs) >= LEAST_RUNS and enough):
            break
        chosen = runs
    if len(chosen) < LEAST_RUNS:
        raise PlanError(
            f"{seconds / 60:.3g} minutes and this text allow {len(chosen)} small runs of"
            f" {LEAST_STEPS} steps and more, and {LEAST_RUNS} are needed; raise --minutes, lower"
            " --batch_size, or add text"
        )
    return chosen


def grid(
    sizes: list[Size], speeds: list[float], seconds: float, tokens_a_step: int, unique: int
) -> list[SmallRun]:
    """Each size on C operations and thirds of it, C such that all together take so many seconds.

    speeds: seconds a step.
    """
    a_step = [size.flops * tokens_a_step for size in sizes]
    shares = sum(3.0**-n for n in range(THIRDS))
    compute = seconds / shares / sum(s / f for s, f in zip(speeds, a_step, strict=True))
    runs = []
    for size, operations in zip(sizes, a_step, strict=True):
        for n in reversed(range(THIRDS)):
            steps = round(compute / 3**n / operations)
            if LEAST_STEPS <= steps <= MOST_EPOCHS * unique / tokens_a_step:
                runs.append(SmallRun(size, steps))
    return runs


def offer(size: Size, steps: int, hours: float, tokens_a_step: int, unique: int, law: Law) -> Offer:
    """What is expected of a run of a size. unique: tokens of the text."""
    tokens = steps * tokens_a_step
    effective, compute = effective_tokens(tokens, unique), tokens * size.flops
    low, high = law.interval(size.weights, effective, compute)
    return Offer(
        size=size,
        steps=steps,
        tokens=tokens,
        epochs=tokens / unique,
        hours=hours,
        loss=law.loss(size.weights, effective),
        low=low,
        high=high,
        extrapolation=compute / law.compute,
    )


def offers(sizes: list[Size], make: Callable[[Size], Offer | None], start: int) -> list[Offer]:
    """The sizes around the best one, smallest first.

    make: the offer of a size, None where there is none; it may take a while, so few are asked for.
    start: the index of the size that the best is looked for from.
    """
    known = {}

    def loss(index):
        if not 0 <= index < len(sizes):
            return math.inf
        if index not in known:
            known[index] = make(sizes[index])
        return known[index].loss if known[index] else math.inf

    at = start
    while at and loss(at) == math.inf:
        at -= 1
    while True:
        best = min((at, at - 1, at + 1), key=loss)
        if best == at:
            break
        at = best
    return [known[index] for index in sorted(known) if known[index]]


def doubts(offered: list[Offer], best: Offer, law: Law, runs: int) -> list[str]:
    """Where the evidence does not suffice, and what would: a sentence each.

    runs: how many the law was fitted to.
    """
    found = []
    width = (best.high - best.low) / 2 / best.loss
    if width > 0.06:
        found.append(
            f"the interval is wide, for the run is {best.extrapolation:,.0f} times the largest of"
            f" {runs} small ones: more --minutes make it narrower"
        )
    if not law.copies:
        found.append(
            f"the small runs see {law.tokens:,.0f} tokens at most, too few to show whether a model"
            " comes to copy from its context: on text that repeats itself, such as sources, the"
            " loss may come out far lower, and larger models gain more"
        )
    close = [o for o in offered if o is not best and o.loss < 1.01 * best.loss]
    if close:
        names = ", ".join(str(o.size) for o in close)
        found.append(
            f"{names} would be within 1% of it: choose by speed and memory if these matter"
        )
    if best.epochs > MOST_EPOCHS:
        found.append(
            f"the text is seen {best.epochs:.1f} times: more text would be worth more than more"
            " hours"
        )
    if best is offered[-1]:
        found.append(
            f"{best.size} is the largest tried: what is larger exceeds the memory, the budget or"
            " the family"
        )
    return found
