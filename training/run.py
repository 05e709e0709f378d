"""A training run: its parts, its progress, and the content of its checkpoints.

train.py decides what happens with it.
"""

import functools
import math
import subprocess
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend

import hardware
from config import Config
from formats.fingerprint import fingerprint
from hardware import Device
from model import GPT
from training import RunError, distributed
from training.dataset import Data
from training.optimizer import parameter_names
from training.saver import Saver
from training.schedule import MAX_BAD_STEPS, Clock, Counters, Schedule

# Tokens whose gradients an M1 or M2 adds up correctly; PyTorch 2.14 may add what else is in memory
# to those of 32,767 or 32,768 (github.com/pytorch/pytorch/issues/195163), and is slow with more.
MOST_SUMMED = 32_766


@dataclass
class Progress:
    """A run's progress in a checkpoint: "progress" in state.json.

    step, sequences: as in Counters.
    elapsed_s: seconds of training, including compilation but not evaluation and saving.
    running_s: seconds in all, over all starts, which a rented machine bills.
    sums: of LossSums. micro_batch_limit: of Run; older checkpoints have none.
    """

    step: int = 0
    sequences: int = 0
    elapsed_s: float = 0.0
    running_s: float = 0.0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)
    micro_batch_limit: int | None = None


class LossSums:
    """Losses and bad steps, summed on the device, so that nothing waits for it.

    sums: loss_sum, good_steps, bad_in_a_row and bad_total, as a checkpoint stores them.
    loss_sum, good_steps: since pop(). bad_in_a_row: consecutive bad steps up to now. most_in_a_row:
    its maximum since this start of the run, so that no series is missed between two checks.
    bad_total: bad steps in all. grad_norm: of the last step.
    """

    def __init__(self, values: list[float], device: torch.device):
        self.sums = torch.tensor(values, device=device)
        self.loss_sum, self.good_steps, self.bad_in_a_row, self.bad_total = self.sums.unbind()
        self.most_in_a_row = torch.zeros_like(self.bad_in_a_row)
        self.grad_norm = torch.zeros_like(self.loss_sum)

    def add(self, loss: torch.Tensor, grad_norm: torch.Tensor, good: torch.Tensor) -> None:
        """Count a step. loss, grad_norm: scalars. good: bool; False if the update was skipped."""
        bad = (~good).float()
        self.loss_sum += torch.where(good, loss, 0.0)
        self.good_steps += 1 - bad
        self.bad_in_a_row += 1
        self.bad_in_a_row *= bad  # back to 0 after a good step
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.bad_in_a_row)
        self.bad_total += bad
        self.grad_norm = grad_norm

    def pop(self) -> dict:
        """For the log: mean loss since the last call, last gradient norm, bad steps in all.

        The loss is None if no step was good; the norm is None if it is not finite. Waits for the
        device.
        """
        loss_sum, good_steps, _, bad_total = self.sums.tolist()
        self.loss_sum.zero_()
        self.good_steps.zero_()
        norm = float(self.grad_norm)
        return {
            "loss": loss_sum / good_steps if good_steps else None,
            "grad_norm": norm if math.isfinite(norm) else None,
            "bad_steps": int(bad_total),
        }


@dataclass
class Run:
    """The parts of a run.

    id: identifies the run even if its folder is renamed; the same in all its checkpoints. log: the
    records up to this step. compiles: whether to compile the model. obstacle: why it cannot be
    compiled although it should be; else "". learning_rate: of the last step.

    context: of the model, if it may exceed the sequences that the run trains on. micro_batch_limit:
    the micro-batch that was lowered to fit in memory; None if none was.

    micro_batch: sequences per forward, a divisor of local_batch. compiled: the model, which
    fit_in_memory() compiles. ddp: the same, wrapped in DistributedDataParallel if there are several
    processes.
    """

    id: str
    config: Config
    folder: Path
    device: Device
    data: Data
    model: GPT
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    counters: Counters
    loss_sums: LossSums
    schedule: Schedule
    clock: Clock
    saver: Saver
    log: list[dict]
    compiles: bool
    obstacle: str
    context: int | None = None
    micro_batch_limit: int | None = None
    learning_rate: float = 0.0

    def __post_init__(self):
        limits = [self.local_batch, self.config.micro_batch_size, self.micro_batch_limit]
        if self.device.type == "mps":
            limits.append(max(1, MOST_SUMMED // self.config.block_size))
        self.micro_batch = largest_divisor(self.local_batch, min(filter(None, limits)))
        self.compiled = self.ddp = self.model  # until fit_in_memory()

    @property
    def step(self) -> int:
        return self.counters.step

    @property
    def tokens(self) -> int:
        return self.counters.sequences * self.config.block_size

    @property
    def epoch(self) -> float:
        return self.counters.sequences / self.data.train.windows

    @functools.cached_property
    def fingerprint(self) -> float:
        """What this model.py computes, which a changed one would not."""
        return fingerprint(self.model.config)

    @property
    def finished(self) -> bool:
        return self.schedule.done and not self.schedule.evaluation_due

    @property
    def local_batch(self) -> int:
        """Sequences per step of this process."""
        return self.config.batch_size // distributed.world_size

    def cast(self):
        """An autocast context in the run's precision."""
        return hardware.autocast(self.device.torch, self.device.dtype)

    def attention_backend(self) -> str:
        """The attention kernel that PyTorch chooses: cudnn, flash, efficient or math.

        Not on an Apple GPU, where PyTorch does not tell.
        """
        shape = self.model.config
        size = (1, shape.n_head, shape.block_size, shape.head_dim)
        q = torch.empty(size, dtype=self.device.dtype, device=self.device.torch, requires_grad=True)
        chosen = torch._fused_sdp_choice(q, q, q, dropout_p=shape.dropout, is_causal=True)
        return SDPBackend(chosen).name.removesuffix("_ATTENTION").lower()

    def check_finite(self) -> None:
        """Raises RunError after MAX_BAD_STEPS steps in a row with NaN or infinity."""
        if self.scaler.is_enabled() and self.scaler.get_scale() < 1e-3:
            raise RunError(
                f"the gradients overflow float16 at any scale, up to step {self.step:,}. Try dtype"
                " = float32, or a lower learning_rate"
            )
        in_a_row = int(self.loss_sums.most_in_a_row)
        if in_a_row < MAX_BAD_STEPS:
            return
        advice = ""
        if self.device.type == "cuda" and self.attention_backend() == "cudnn":
            advice = (
                ". First run the same command with the environment variable"
                " TORCH_CUDNN_SDPA_DEPRIORITIZED=1: cuDNN's attention may be the cause"
            )
        raise RunError(
            f"{in_a_row} steps in a row, up to step {self.step:,}, had a NaN or infinite loss or"
            " gradient; all were skipped. Try a lower learning_rate (now"
            f" {self.config.learning_rate}) or a longer warmup_steps, and look at the data{advice}"
        )

    def versions(self) -> dict:
        """Of the code, with device and precision, for log and checkpoints."""
        return code_versions() | {
            "device": self.device.name,
            "dtype": str(self.device.dtype).removeprefix("torch."),
        }

    def snapshot(self) -> tuple[dict, dict, dict]:
        """The content of a checkpoint's state.json, model.pt and optimizer.pt at this step.

        The tensors are not copies; training goes on changing them.
        """
        progress = Progress(
            step=self.step,
            sequences=self.counters.sequences,
            elapsed_s=self.clock.elapsed_s,
            running_s=self.clock.running_s,
            sums=self.loss_sums.sums.tolist(),
            micro_batch_limit=self.micro_batch_limit,
        )
        description = {
            "run": {"id": self.id},
            "step": self.step,
            "tokens": self.tokens,
            "epoch": self.epoch,
            "best_val_loss": self.saver.best,
            "seed": self.config.seed,
            "progress": asdict(progress),
            "model": asdict(self.model.config),
            "fingerprint": self.fingerprint,
            "context": self.context,
            "data": self.data.meta.identity(),
            "settings": self.config.recorded(),
            "versions": self.versions(),
        }
        optimizer_state = {
            "optimizer": self.optimizer.state_dict(),
            "names": parameter_names(self.model, self.optimizer),
            "scaler": self.scaler.state_dict(),
        }
        return description, self.model.state_dict(), optimizer_state


def code_versions() -> dict:
    """What computes a run, besides its device: PyTorch, how many processes, and this code."""
    return {"torch": torch.__version__, "processes": distributed.world_size, "commit": commit()}


@functools.cache  # at the start: a git pull changes only the files
def commit() -> str | None:
    """The git commit of this code, "-dirty" if files were changed; None without git."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    git += ["--exclude=*", "--abbrev=12"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` that is at most `limit`; at least 1."""
    return next(n for n in range(max(1, min(whole, limit)), 0, -1) if whole % n == 0)
