"""Steps and evaluations of one run.

Knows the model, its data and the devices; no disk, no log and no terminal.
"""

import math

import torch
from torch.profiler import record_function

import hardware
from config import Config
from model import IGNORE
from training import distributed, shard
from training.buckets import Buckets
from training.dataset import Dataset
from training.memory import Memory
from training.optimizer import optimizer_step, reserve_state
from training.schedule import Schedule
from training.state import State, StepCounts
from training.step import compile_or_not, evaluate, forward_backward


class Trainer:
    """Changes `state`, a step at a time.

    counts: of losses and bad steps. norm: of the last gradients, on the device.
    """

    def __init__(
        self,
        config: Config,
        state: State,
        schedule: Schedule,
        memory: Memory,
        train_data: Dataset,
        val_data: Dataset | None,
        device: torch.device,
        dtype: torch.dtype,
    ):
        self.config, self.state, self.schedule, self.memory = config, state, schedule, memory
        self.train_data, self.val_data = train_data, val_data
        self.device, self.dtype = device, dtype
        self.forward = state.model  # until compile()
        self.sharded = shard.sharded(state.model)
        self.local_batch = (
            config.batch_size // distributed.world_size
        )  # sequences a step of this process
        self.counts = StepCounts(state.progress.sums, device)
        self.norm = torch.zeros((), device=device)
        self.buckets = None  # in which several processes sum their gradients
        if distributed.world_size > 1 and not self.sharded:
            dtype = hardware.DTYPES[config.allreduce_dtype]
            self.buckets = Buckets(state.model.parameters(), dtype)

    def cast(self):
        """Autocast to the run's dtype."""
        return hardware.autocast(self.device, self.dtype)

    def compile(self, how: bool | str = True) -> str | None:
        """Compile the model, as the setting has it; returns why it was not, if it was not."""

        def work(micro_batch):
            self.reserve()
            x, y = self.train_data.batch(0, micro_batch, self.config.seed)
            model, scaler = self.state.model, self.state.scaler
            if self.sharded:
                return shard.compile_or_end(model, x, y, self.cast, scaler)
            graphs = self.config.cuda_graphs and self.device.type == "cuda"
            return compile_or_not(model, x, y, self.cast, scaler, how == "max", graphs)

        self.forward, problem = self.memory.training.run(work)
        return problem

    def reserve(self) -> None:
        """Take the memory that stays taken, within the handling of memory that runs out."""
        if self.buckets:
            self.buckets.reserve()
        reserve_state(self.state.optimizer)

    def step(self) -> None:
        """One optimiser step, as the loop of train.py takes it."""
        self.update(self.gradients())

    def gradients(self) -> torch.Tensor:
        """The gradients of the next batch; returns its loss, a scalar on the device.

        Several processes each take their share of the sequences, and add their gradients up. Where
        memory runs out, all begin again with half as many sequences at once.
        """
        progress, scaler = self.state.progress, self.state.scaler
        with record_function("data"):
            first = progress.sequences + distributed.rank * self.local_batch
            x, y = self.train_data.batch(first, self.local_batch, self.config.seed)

        predictions = self.count_predictions(y)

        def work(micro_batch):
            self.reserve()
            self.seed_dropout()
            model, cast, buckets = self.forward, self.cast, self.buckets
            return forward_backward(model, x, y, micro_batch, cast, scaler, buckets, predictions)

        loss = self.memory.training.run(work, self.buckets)
        if self.buckets:
            loss = self.buckets.collect()
        elif self.sharded:
            loss = distributed.all_reduce_sum(loss)
        if scaler.is_enabled():
            distributed.synchronize(self.device)  # it reads from the device
        return loss

    def count_predictions(self, y: torch.Tensor) -> torch.Tensor | None:
        """How many targets count in the batch of all processes; None: all of them.

        y: this one's, int64 [B, T].
        """
        if self.config.loss_on == "all":
            return None
        return distributed.all_reduce_sum((y != IGNORE).sum()).clamp(min=1)

    def update(self, loss: torch.Tensor) -> None:
        """Have the optimiser step on the gradients, and count the step. loss: the batch's."""
        config, state, progress = self.config, self.state, self.state.progress
        lr = self.schedule.learning_rate
        with shard.messages():  # the norm's, and Muon's, where the model is shared out
            self.norm = optimizer_step(
                state.model, state.optimizer, state.scaler, lr, config.grad_clip
            )
        # The scaler skips steps of its own accord: those are no bad ones.
        deciding = loss if state.scaler.is_enabled() else self.norm
        self.counts.add(loss, deciding.isfinite())
        progress.step += 1
        progress.sequences += config.batch_size

    def evaluate(self) -> float:
        """The validation loss in nats a token: of all processes' shares together.

        NaN where nothing counts in the windows looked at.
        """
        windows = self.config.eval_batches * self.config.batch_size

        def work(micro_batch):
            sums = evaluate(self.forward, self.val_data, windows, micro_batch, self.cast)
            distributed.synchronize(self.device)
            return [float(value) for value in sums]

        total, count = (
            sum(distributed.gather(value)) for value in self.memory.evaluation.run(work)
        )
        return total / count if count else math.nan

    def seed_dropout(self) -> None:
        """Dropout follows from (seed, step), as the data does: resuming needs no random state."""
        if self.config.dropout:
            seed = self.config.seed * 0x9E3779B97F4A7C15 + self.state.progress.step
            torch.manual_seed((seed + (distributed.rank << 40)) % 2**63)

    def take_window(self) -> tuple[float | None, float, int]:
        """Mean loss since the last call, norm of the last gradients, bad steps in all.

        The loss is None where no step was good. Waits for the device.
        """
        loss_sum, good_steps, _, bad_total = self.counts.tolist()
        self.counts.restart()
        loss = loss_sum / good_steps if good_steps else None
        return loss, float(self.norm), int(bad_total)

    def bad_numbers(self) -> str | None:
        """Why the run must stop, in a sentence: NaN or infinity in too many steps in a row."""
        config, step = self.config, self.state.progress.step
        scaler = self.state.scaler
        if scaler.is_enabled() and scaler.get_scale() < 1e-3:
            return (
                f"the gradients overflow float16 at any scale, up to step {step:,}; the weights "
                "took none of them. What helps: dtype = float32, or a lower learning_rate"
            )
        distributed.synchronize(self.device)
        in_a_row = int(self.counts.most_in_a_row)
        if in_a_row < config.max_bad_steps:
            return None
        fp16 = ""
        if self.dtype == torch.float16:
            fp16 = ", dtype = bfloat16 instead of float16"
        return (
            f"{in_a_row} steps in a row, by step {step:,}, had NaN or infinite loss or "
            "gradients; the weights took none of them. What helps: a lower learning_rate (now "
            f"{config.learning_rate}), a longer warmup_steps{fp16}, or another look at the data"
        )
