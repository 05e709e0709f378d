"""When this step goes to disk, what of the run goes with it, and which step is the best.

Knows the parts of a run; the thread that writes is saver.py's, the files are those of
formats/run_folder.py.
"""

import math
from dataclasses import asdict

import torch

from training import ranks
from training.saver import Saver
from training.setup import Run


class Checkpointer:
    """Saves a run. Only the first process writes."""

    def __init__(self, run: Run):
        best = run.best["val_loss"] if run.best else math.inf
        step = run.state.progress.step
        self.run = run
        self.saver = Saver(run.folder, run.config.keep_last, step, best)

    @property
    def best(self) -> float:
        """The lowest validation loss of a step that is kept; infinite if there is none."""
        return self.saver.best

    @property
    def saved_step(self) -> int:
        """The last step that is on the disk whole; 0 if there is none."""
        return self.saver.saved

    @property
    def busy(self) -> bool:
        """Whether a save is being written."""
        return self.saver.busy

    def reserve(self) -> None:
        """Have memory at hand for the copy that a save makes."""
        self.saver.reserve(copied(self.run.state.optimizer))

    def save(self) -> None:
        """Copy the state of this step and have it written."""
        run = self.run
        run.schedule.saved()
        if not ranks.main:
            return
        self.saver.wait()  # the copy would; it also says what the best is
        run.state.progress.sums = run.trainer.counts.tolist()
        run.state.progress.running_s = run.clock.running_s
        state = {
            "step": run.state.progress.step,
            "tokens": run.tokens,
            "epoch": run.epoch,
            "best_val_loss": None if self.best == math.inf else self.best,
            "seed": run.config.seed,
            "progress": asdict(run.state.progress),
            "model": asdict(run.state.model.config),
            "data": run.meta.identity(),
            "settings": asdict(run.config),
            "versions": run.versions(),
        }
        optimizer = {
            "optimizer": run.state.optimizer.state_dict(),
            "scaler": run.state.scaler.state_dict(),
        }
        self.saver.save(state, run.state.model.state_dict(), optimizer, run.tokenizer.to_json())

    def save_now(self) -> bool:
        """Have this step on the disk before returning; False if that failed."""
        step = self.run.state.progress.step
        self.saver.wait()
        if self.saver.saved < step:
            self.save()
            self.saver.wait()
        return not ranks.main or self.saver.saved == step

    def mark_best(self, val_loss: float) -> None:
        """This step is the best so far if its loss is lower than all before."""
        if val_loss < self.best and ranks.main:
            self.saver.mark_best(self.run.state.progress.step, val_loss)

    def wait(self) -> None:
        """Until what was begun is written."""
        self.saver.wait()


def copied(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """What a save copies, as parameters of the same sizes.

    Each parameter for itself and for its moments: AdamW's two, or Muon's one.
    """
    tensors = []
    for group in optimizer.param_groups:
        copies = 2 if group.get("muon") else 3
        for p in group["params"]:
            tensors += [p] * copies
    return tensors
