"""The loss that a run will end with, from its curve so far and the learning rates to come.

Two things lower a loss: how far the weights have come, which is the sum of the learning rates so
far, and a low learning rate now (Tissue et al., 2024, "Scaling Law with Learning Rate Annealing").
So, at a point of the run,

    loss = floor + fall * (way / way so far)^-power + height * rate^1.1

where rate is a share of the peak, and way its sum up to there. For each power that is a linear
model: what is known of it after some losses, given what runs usually do, is a formula, and so is
the forecast with its spread. Knows numbers only; points of a run are shares of its steps.
"""

import math
from typing import NamedTuple

import numpy as np

POWERS = np.array([0.15, 0.25, 0.35, 0.5, 0.7, 1.0, 1.4])
RATE_POWER = 1.1  # of the learning rate, in the formula above
# What floor, fall and height usually are as shares of the last loss, and by how much that varies:
# these and the next three were chosen on the runs of benchmarks/forecast.py.
USUAL = np.array([0.53, 0.28, 0.07])
SPREAD = np.array([0.2, 0.06, 0.04])
NOISE = 0.0055  # of a loss, as a share of it
TRUST = 10  # in all of these, counted in evaluations: more that fit badly widen what is expected
OLDER = 0.7  # the power of the way with which older losses count for less
FARTHER = 0.006  # of a forecast, for each power of e by which the way still grows
LEAST = 3  # losses without which nothing is said
MOST = 64  # losses that are used, evenly spread: of a thousand the matrices would take seconds
LEVEL = 1.645  # nine of ten lie within so many standard deviations
STRAYED = 3  # evaluations in a row above their intervals, which is no chance


class Forecast(NamedTuple):
    """A loss that is expected, and between which nine of ten lie. In nats a token."""

    loss: float
    low: float
    high: float


def forecast(shares, losses, rates, share: float = 1.0) -> Forecast | None:
    """The loss at one point of a run, from those at earlier ones.

    shares, losses: of the evaluations so far, in order. rates: learning rates at evenly spread
    points of the run, the first and the last step among them. None while there is too little to go
    by: before three losses that lie behind the warm-up.
    """
    shares, losses = np.asarray(shares, dtype=float), np.asarray(losses, dtype=float)
    rates = np.asarray(rates, dtype=float)
    if not rates.max() > 0:
        return None
    rates = rates / rates.max()
    points = np.linspace(0, 1, len(rates))
    shares, losses = usable(shares, losses, warm=points[np.argmax(rates > 0.999)])
    if len(losses) < LEAST:
        return None
    ways = np.cumsum(rates)
    so_far = np.interp(shares[-1], points, ways)
    came = np.interp(shares, points, ways) / so_far
    goes = np.interp(share, points, ways) / so_far
    here, there = np.interp(shares, points, rates), np.interp(share, points, rates)
    noise = NOISE * came**-OLDER
    found = []
    for power in POWERS:
        x = np.stack([np.ones(len(came)), came**-power, here**RATE_POWER], axis=1)
        at = np.array([1.0, goes**-power, there**RATE_POWER])
        found.append(regress(x, losses / losses[-1], at, noise, NOISE))
    evidence, means, variances = np.array(found).T
    weights = np.exp(evidence - evidence.max())
    weights /= weights.sum()
    mean = weights @ means
    variance = weights @ (variances + (means - mean) ** 2)
    spread = LEVEL * math.sqrt(variance + (FARTHER * math.log(goes)) ** 2)
    return Forecast(*(float(losses[-1] * value) for value in (mean, mean - spread, mean + spread)))


def usable(shares, losses, warm: float) -> tuple[np.ndarray, np.ndarray]:
    """The evaluations to go by: finite ones behind the warm-up, at most MOST, evenly spread.

    warm: the share of the run at which the warm-up ends.
    """
    good = (shares > 1.2 * warm) & np.isfinite(losses)
    shares, losses = shares[good], losses[good]
    if len(losses) > MOST:
        kept = np.unique(np.linspace(0, len(losses) - 1, MOST).astype(int))
        shares, losses = shares[kept], losses[kept]
    return shares, losses


def regress(x, y, at, noise, noise_there) -> tuple[float, float, float]:
    """Bayesian linear regression: the log evidence, and the prediction's mean and variance.

    x: [points, 3]. y, noise: [points]. at: [3], where to predict, with its own noise. The
    coefficients are normal with USUAL and SPREAD before anything is seen. All these variances are
    known up to a factor (inverse gamma with TRUST), which what fits badly raises: a model that
    comes to copy from its context leaves its curve. It is never taken to be below 1.
    """
    prior = np.diag(SPREAD**2)
    miss = y - x @ USUAL
    shared = x @ prior @ at
    covariance = x @ prior @ x.T + np.diag(noise**2)
    solved = np.linalg.solve(covariance, np.stack([miss, shared], axis=1))
    squares = miss @ solved[:, 0]
    factor = max(1.0, (TRUST + squares) / (TRUST + len(y)))
    evidence = -0.5 * (
        (TRUST + len(y)) * np.log1p(squares / TRUST) + np.linalg.slogdet(covariance)[1]
    )
    mean = at @ USUAL + shared @ solved[:, 0]
    variance = max(0.0, at @ prior @ at - shared @ solved[:, 1]) + noise_there**2
    return float(evidence), float(mean), float(factor * variance)


def strayed(shares, losses, rates) -> Forecast | None:
    """What the last of three losses was to be, where all three are above their intervals.

    The intervals are those that the losses before the three promised. None where all is well.
    """
    known = len(losses) - STRAYED
    if known < 2 * LEAST:
        return None  # of a curve that has hardly begun all is possible
    for share, loss in zip(shares[known:], losses[known:], strict=True):
        expected = forecast(shares[:known], losses[:known], rates, share)
        if not expected or loss <= expected.high:
            return None
    return expected


def usual_causes(training: list[float], epoch: float) -> str:
    """What usually makes a curve leave its interval, in a sentence.

    training: training losses at the evaluations, in order. epoch: passes over the text so far.
    """
    known = training[-STRAYED - 1 :]
    if epoch > 1 and len(known) > STRAYED and known[-1] < known[0]:
        return (
            "the training loss goes on falling, so the model learns the text by heart, which it has"
            f" seen {epoch:.1f} times: more text, dropout, or fewer epochs help"
        )
    return (
        "the usual causes are a learning rate that is too high, of which the gradient norm tells,"
        " and a stretch of text unlike the rest: go back to a step before it, with a lower one"
    )
