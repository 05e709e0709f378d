"""The parts of one training run, and the state.json of its checkpoints."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from config import Config
from hardware import Device
from training import distributed
from training.dataset import Data
from training.optimizer import parameter_names
from training.saver import Saver
from training.schedule import Clock, Schedule
from training.start import Start
from training.state import State
from training.trainer import Trainer


@dataclass
class Run:
    """Built by training/setup.py, used by train.py.

    id: by which it is known under any name; the same in all its checkpoints. compiles: whether the
    model is to be compiled. obstacle: why it cannot be, though it should, or "". log: the records
    up to this step.
    """

    id: str
    config: Config
    folder: Path
    device: Device
    data: Data
    start: Start
    state: State
    schedule: Schedule
    trainer: Trainer
    clock: Clock
    saver: Saver
    compiles: bool
    obstacle: str
    log: list[dict]

    @property
    def step(self) -> int:
        return self.state.counters.step

    @property
    def tokens(self) -> int:
        return self.state.counters.sequences * self.config.block_size

    @property
    def epoch(self) -> float:
        return self.state.counters.sequences / self.data.train.windows

    def versions(self) -> dict:
        """PyTorch, processes, device and precision, for log and checkpoints."""
        return {
            "torch": torch.__version__,
            "processes": distributed.world_size,
            "device": self.device.name,
            "dtype": str(self.device.dtype).removeprefix("torch."),
        }

    def snapshot(self) -> tuple[dict, dict, dict]:
        """This step for a checkpoint: the contents of state.json, model.pt and optimizer.pt.

        The tensors are those that training changes, not copies.
        """
        model, optimizer = self.state.model, self.state.optimizer
        progress = asdict(self.state.counters)
        progress |= {"sums": self.trainer.counts.tolist(), "running_s": self.clock.running_s}
        description = {
            "run": {"id": self.id},
            "step": self.step,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "best_val_loss": self.saver.best,
            "seed": self.config.seed,
            "progress": progress,
            "model": asdict(model.config),
            "data": self.data.meta.identity(),
            "settings": self.config.recorded(),
            "versions": self.versions(),
        }
        optimizer_state = {
            "optimizer": optimizer.state_dict(),
            "names": parameter_names(model, optimizer),
            "scaler": self.state.scaler.state_dict(),
        }
        return description, model.state_dict(), optimizer_state
