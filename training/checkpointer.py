"""When this step goes to disk, what of the run goes with it, and which step is the best.

Knows the parts of a run; the thread that writes is saver.py's, the files are those of
formats/run_folder.py.
"""

import math
from dataclasses import asdict

import torch

from formats import files, run_folder
from training import distributed, shard
from training.mirror import Uploader, address_of
from training.saver import Saver
from training.setup import Run


class Checkpointer:
    """Saves a run. Only the first process writes."""

    def __init__(self, run: Run):
        best = run.best["val_loss"] if run.best else math.inf
        step = run.state.progress.step
        self.run = run
        self.sharded = shard.sharded(run.state.model)  # then all processes take part in a save
        keep_last = run.config.keep_last
        self.mirror = Uploader(address_of(run.config), run.folder, keep_last)
        self.saver = Saver(run.folder, keep_last, step, best, self.mirror)

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

    @property
    def due(self) -> bool:
        """Whether to save now."""
        return self.agreed(self.run.schedule.save_due(self.busy))

    def agreed(self, here: bool) -> bool:
        """What the first process says, where all take part in a save; else what this one does."""
        return bool(distributed.gather(here)[0]) if self.sharded else here

    def begin(self) -> None:
        """Make ready what earlier starts left, and take the memory for the copy of a save."""
        run = self.run
        run_folder.set_aside(run.folder, run.state.progress.step)
        if run.best:  # a crash may have come between a save and its evaluation's mark
            best = {name: run.best[name] for name in ("step", "val_loss")}
            files.write_json(run.folder / "best.json", best)
        self.saver.reserve(copied(run.state.optimizer))
        self.mirror.wake()  # a kill may have come before the last save was there

    def save(self) -> None:
        """Copy the state of this step and have it written."""
        run = self.run
        run.schedule.mark_saved()
        model = run.state.model.state_dict()
        optimizer = {
            "optimizer": run.state.optimizer.state_dict(),
            "scaler": run.state.scaler.state_dict(),
        }
        if self.sharded and not self.agreed(distributed.is_main and self.has_room()):
            return
        if not distributed.is_main:
            shard.gather_to_main(model, optimizer)
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
        self.saver.save(state, model, optimizer, run.tokenizer.to_json())

    def has_room(self) -> bool:
        """Whether there is memory for the copy that a save makes; says so if not."""
        state = self.run.state
        return self.saver.has_room(state.progress.step, copied(state.optimizer))

    def save_now(self) -> bool:
        """Have this step on the disk before returning; False if that failed."""
        step = self.run.state.progress.step
        self.saver.wait()
        if self.agreed(self.saver.saved < step):
            self.save()
            self.saver.wait()
        return not distributed.is_main or self.saver.saved == step

    def mark_best(self, val_loss: float) -> None:
        """This step is the best so far if its loss is lower than all before."""
        if val_loss < self.best and distributed.is_main:
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
        copies = 2 if group.get("num_fused") else 3
        for p in group["params"]:
            tensors += [p] * copies
    return tensors
