"""Loss as a function of parameters and tokens, fitted to finished runs.

Hoffmann et al., 2022, "Training Compute-Optimal Large Language Models", approach 3. Plain numbers
in, plain numbers out; knows no model, no files and no machine. Needs scipy.
"""

import itertools
from dataclasses import dataclass

import numpy as np

# Muennighoff et al., 2023, "Scaling Data-Constrained Language Models", section 3: what another pass
# over the same text is worth wears off with this many of them.
REPEATS = 15.4
MILLION = 1e6
NOISE = 0.01  # of a run's log loss: between seeds, and where the law does not hold exactly
BENDS = 0.02  # the same for each power of four by which a run's compute exceeds those fitted
# Downwards it is more where no run of the fit saw that many tokens: models that learn to copy from
# their context then end far below the law, by up to 36% (docs/scaling.md).
COPYING_TOKENS, COPYING_BENDS = 20e6, 0.1
# The prior, as a dozen small runs do not determine five numbers. The exponents were 0.34 and 0.28
# in the paper, 0.35 and 0.37 in Besiroglu et al., 2024, "Chinchilla Scaling: A replication
# attempt". FLOOR and SPREAD did best on the runs of docs/scaling.md.
EXPONENT, FLOOR = 0.3, 0.15  # FLOOR: E as a share of the lowest loss seen
SPREAD = 0.8  # of the logarithms of all three
DRAWS = 200  # of the bootstrap
LEVEL = 1.645  # standard deviations: nine of ten runs


@dataclass
class Law:
    """L(N, D) = E + A (10^6 / N)^alpha + B (10^6 / D)^beta, in nats a token.

    N: parameters that multiply, those of the blocks and the head. D: effective tokens. logs: the
    logarithms of A, B, E, alpha and beta, float [5]. draws: the same for each resample of the
    bootstrap, float [DRAWS, 5]. compute, tokens: the most operations and effective tokens that a
    run of the fit had.
    """

    logs: np.ndarray
    draws: np.ndarray
    compute: float
    tokens: float

    def loss(self, parameters: float, tokens: float) -> float:
        return float(np.exp(log_loss(self.logs, parameters, tokens)))

    def interval(self, parameters: float, tokens: float, compute: float) -> tuple[float, float]:
        """The losses between which nine of ten such runs end. compute: the run's operations."""
        spread = log_loss(self.draws, parameters, tokens).var() + NOISE**2
        powers = max(0.0, np.log(compute / self.compute) / np.log(4))
        bends_down = BENDS if self.saw_copying else COPYING_BENDS
        down = LEVEL * np.sqrt(spread + (bends_down * powers) ** 2)
        up = LEVEL * np.sqrt(spread + (BENDS * powers) ** 2)
        middle = self.loss(parameters, tokens)
        return float(middle * np.exp(-down)), float(middle * np.exp(up))

    @property
    def saw_copying(self) -> bool:
        """Whether a run of the fit was long enough to learn to copy from its context."""
        return self.tokens >= COPYING_TOKENS


def effective_tokens(tokens: float, unique: float) -> float:
    """What `tokens` of a text with `unique` of them are worth: repeated ones count for less."""
    repeats = max(0.0, tokens / unique - 1)
    return min(tokens, unique) + unique * REPEATS * (1 - np.exp(-repeats / REPEATS))


def log_loss(logs: np.ndarray, parameters, tokens) -> np.ndarray:
    """The logarithm of the law. logs: [..., 5], as Law has them; parameters, tokens: [...]."""
    a, b, e, alpha, beta = np.moveaxis(np.asarray(logs), -1, 0)
    of_size = a - np.exp(alpha) * np.log(np.asarray(parameters) / MILLION)
    of_tokens = b - np.exp(beta) * np.log(np.asarray(tokens) / MILLION)
    return np.logaddexp(np.logaddexp(of_size, of_tokens), e)


def fit(parameters, tokens, losses, computes) -> Law:
    """The law that finished runs follow. Each argument has a number a run, as Law names them.

    Least squares of the logarithms with Huber's loss, from several starts. Each resample of the
    bootstrap draws residuals and prior again.
    """
    observed = np.log(np.asarray(losses, dtype=float))
    prior = np.log([FLOOR * min(losses), EXPONENT, EXPONENT])
    share = np.log(0.25 * min(losses))  # of A and B, to begin with
    found = []
    for of_three in itertools.product((-1.0, 0.0, 0.5), (-0.7, 0.0, 0.7), (-0.7, 0.0, 0.7)):
        start = [share, share, *(prior + of_three)]
        found.append(solve(start, parameters, tokens, observed, prior))
    best = min(found, key=lambda result: result.cost).x

    expected = log_loss(best, parameters, tokens)
    misses = ((observed - expected) ** 2).sum()
    spread = max(NOISE, np.sqrt(misses / max(1, len(observed) - 3)))
    random = np.random.default_rng(0)
    draws = []
    for _ in range(DRAWS):
        noisy = expected + spread * random.standard_normal(len(observed))
        other = prior + SPREAD * random.standard_normal(3)
        draws.append(solve(best, parameters, tokens, noisy, other).x)
    return Law(best, np.array(draws), float(max(computes)), float(max(tokens)))


def solve(start, parameters, tokens, observed, prior):
    """scipy's result for the fit from one start. prior: of logs[2:]."""
    from scipy.optimize import least_squares

    def misses(logs):
        residuals = (log_loss(logs, parameters, tokens) - observed) / NOISE
        return np.concatenate((residuals, (logs[2:] - prior) / SPREAD))

    return least_squares(misses, start, loss="huber")
