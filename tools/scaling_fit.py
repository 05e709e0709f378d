"""Loss as a function of parameters and tokens, fitted to finished runs.

Hoffmann et al., 2022, "Training Compute-Optimal Large Language Models", approach 3, on a user's own
text. Plain numbers in, plain numbers out; knows no model, no files and no machine.
"""

from dataclasses import dataclass

import numpy as np

# Muennighoff et al., 2023, "Scaling Data-Constrained Language Models", section 3: what further
# passes over the same text are worth wears off with this many of them.
REPEATS = 15.4
MILLION = 1e6
NOISE = 0.01  # of a run's log loss: between seeds, and by what the law is no law
BENDS = 0.02  # the same for each power of four by which a run's compute exceeds those fitted
# Downwards it is more where no run of the fit saw so many tokens: models that come to copy from
# their context then fall far below the law (docs/scaling.md: by up to 36%).
COPYING_TOKENS, COPYING_BENDS = 20e6, 0.1
# What is known before the first run, which is little. The exponents were 0.34 and 0.28 in the
# paper, 0.35 and 0.37 where its data were fitted again (Besiroglu et al., 2024, "Chinchilla
# Scaling: A replication attempt"); E lies far below the losses of small runs. A dozen of these
# alone settle neither. FLOOR and SPREAD are those that did best on the runs of docs/scaling.md.
EXPONENT, FLOOR = 0.3, 0.15  # FLOOR: E as a share of the lowest loss seen
SPREAD = 0.8  # of the logarithms of all three
DRAWS = 200  # of the bootstrap
NAMES = ("A", "B", "E", "alpha", "beta")  # in the order of Law.logs


@dataclass
class Law:
    """L(N, D) = E + A (10^6 / N)^alpha + B (10^6 / D)^beta, in nats a token.

    N: parameters that multiply, those of the blocks and the head. D: effective tokens. logs: the
    logarithms of A, B, E, alpha and beta, float [5]. draws: the same for each resample of the
    bootstrap, float [DRAWS, 5]. compute, tokens: the most that a run of the fit had, operations and
    effective tokens. A law from JSON has none of these three, and so no intervals.
    """

    logs: np.ndarray
    draws: np.ndarray | None = None
    compute: float | None = None
    tokens: float | None = None

    def loss(self, parameters: float, tokens: float) -> float:
        """The loss expected of so many parameters and effective tokens."""
        return float(np.exp(log_loss(self.logs, *logs_of(parameters, tokens))))

    def interval(
        self, parameters: float, tokens: float, compute: float, level: float = 1.645
    ) -> tuple[float, float]:
        """Between which losses nine of ten such runs end, at that level of a normal distribution.

        compute: the run's operations. That the law itself bends is seen by no bootstrap.
        """
        logs = log_loss(self.draws, *logs_of(parameters, tokens))
        powers = max(0.0, np.log(compute / self.compute) / np.log(4))
        bends = (BENDS if self.copies else COPYING_BENDS, BENDS)
        low, high = (
            level * np.sqrt(logs.var() + NOISE**2 + (bend * powers) ** 2) for bend in bends
        )
        middle = self.loss(parameters, tokens)
        return float(middle * np.exp(-low)), float(middle * np.exp(high))

    @property
    def copies(self) -> bool:
        """Whether a run of the fit was long enough to learn to copy from its context."""
        return self.tokens >= COPYING_TOKENS

    def to_json(self) -> dict[str, float]:
        """The law's five numbers by name."""
        return dict(zip(NAMES, np.exp(self.logs).tolist(), strict=True))

    @classmethod
    def from_json(cls, values: dict[str, float]) -> "Law":
        """The law of such five numbers."""
        return cls(np.log([values[name] for name in NAMES]))


def effective_tokens(tokens: float, unique: float) -> float:
    """What `tokens` are worth of a text that has `unique` of them: repeated ones count for less."""
    repeats = max(0.0, tokens / unique - 1)
    return min(tokens, unique) + unique * REPEATS * (1 - np.exp(-repeats / REPEATS))


def logs_of(parameters, tokens):
    """How many powers of e parameters and tokens lie above a million."""
    return np.log(np.asarray(parameters) / MILLION), np.log(np.asarray(tokens) / MILLION)


def log_loss(logs: np.ndarray, n: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The logarithm of the law. logs: [..., 5], as Law has them. n, d: as logs_of, [...]."""
    a, b, e, alpha, beta = np.moveaxis(np.asarray(logs), -1, 0)
    return np.logaddexp(np.logaddexp(a - np.exp(alpha) * n, b - np.exp(beta) * d), e)


def fit_runs(runs: list[dict], unique: int) -> Law:
    """The law of runs by name of weights, tokens, loss and compute. unique: tokens of the text."""
    effective = [effective_tokens(run["tokens"], unique) for run in runs]
    weights, losses, compute = ([run[n] for run in runs] for n in ("weights", "loss", "compute"))
    return fit(weights, effective, losses, compute)


def fit(parameters, tokens, losses, computes, seed: int = 0) -> Law:
    """The law that finished runs follow.

    Each argument has a number a run: parameters, effective tokens, final losses, operations.
    Least squares of the logarithms, with Huber's loss, from several starts. The bootstrap draws
    other residuals, and other prior knowledge, for each of its resamples.
    """
    n, d = logs_of(parameters, tokens)
    observed = np.log(np.asarray(losses, dtype=float))
    prior = np.log([FLOOR * min(losses), EXPONENT, EXPONENT])
    starts = [
        np.array([np.log(0.25 * min(losses)), np.log(0.25 * min(losses)), floor, alpha, beta])
        for floor in prior[0] + np.array([-1.0, 0.0, 0.5])
        for alpha in prior[1] + np.array([-0.7, 0.0, 0.7])
        for beta in prior[2] + np.array([-0.7, 0.0, 0.7])
    ]
    found = [solve(start, n, d, observed, prior) for start in starts]
    best = min(found, key=lambda result: result.cost).x
    residuals = observed - log_loss(best, n, d)
    spread = max(NOISE, np.sqrt((residuals**2).sum() / max(1, len(residuals) - 3)))
    random = np.random.default_rng(seed)
    draws = []
    for _ in range(DRAWS):
        noisy = log_loss(best, n, d) + spread * random.standard_normal(len(observed))
        other = prior + SPREAD * random.standard_normal(3)
        draws.append(solve(best, n, d, noisy, other).x)
    return Law(best, np.array(draws), float(max(computes)), float(max(tokens)))


def solve(start, n, d, observed, prior):
    """scipy's result for the fit from one start. prior: what logs[2:] are expected to be."""
    from scipy.optimize import least_squares  # no other part of the tools needs scipy

    def misses(logs):
        residuals = (log_loss(logs, n, d) - observed) / NOISE
        return np.concatenate((residuals, (logs[2:] - prior) / SPREAD))

    return least_squares(misses, start, loss="huber")
