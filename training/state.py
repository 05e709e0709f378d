"""The state that each step changes and each checkpoint holds.

Plain data. Knows no settings, no devices and no files.
"""

from dataclasses import dataclass, field

import torch

from model import GPT


@dataclass
class Counters:
    """How far a run is; saved with every checkpoint, as "progress".

    sequences: drawn from the training data so far, which is the position in the data order.
    elapsed_s: seconds of training, compilation included, evaluation and saving not.
    running_s: seconds of everything over all starts, which a rented machine bills.
    sums: StepCounts.tolist(), the counts of losses and bad steps.
    """

    step: int = 0
    sequences: int = 0
    elapsed_s: float = 0.0
    running_s: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)


@dataclass
class State:
    """All that an optimiser step changes."""

    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    counters: Counters


class StepCounts:
    """Losses and bad steps, counted on the device, so that nothing waits for it.

    loss_sum and good_steps: since restart(). bad_in_a_row: bad steps up to now; most_in_a_row: the
    most there were in this start of the run, so that none is missed between two looks. bad_total:
    in all.
    """

    def __init__(self, values: list[float], device: torch.device):
        self.counts = torch.tensor(values, device=device)
        self.loss_sum, self.good_steps, self.bad_in_a_row, self.bad_total = self.counts.unbind()
        self.most_in_a_row = torch.zeros_like(self.bad_in_a_row)

    def add(self, loss: torch.Tensor, good: torch.Tensor) -> None:
        """Count a step. loss: a scalar. good: bool; a bad step has changed no weights."""
        bad = (~good).float()
        self.loss_sum += torch.where(good, loss, 0.0)
        self.good_steps += 1 - bad
        self.bad_in_a_row += 1
        self.bad_in_a_row *= bad
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.bad_in_a_row)
        self.bad_total += bad

    def restart(self) -> None:
        self.loss_sum.zero_()
        self.good_steps.zero_()

    def tolist(self) -> list[float]:
        """The four counts that a checkpoint keeps, in their order; waits for the device."""
        return self.counts.tolist()
