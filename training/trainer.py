"""Steps and evaluations of one run.

Knows the model, its data and the device; no log and no terminal.
"""

import math
from collections.abc import Callable
from functools import cached_property

import torch
from torch.profiler import record_function

import hardware
from config import Config
from hardware import Device
from model import IGNORE
from training import RunError, distributed, shard
from training.dataset import Data
from training.fp8 import FP8Head
from training.memory import MicroBatch, release
from training.optimizer import optimizer_step, reserve_state
from training.schedule import Schedule
from training.state import State, StepCounts
from training.step import (
    compile_layers,
    compile_whole,
    data_parallel,
    evaluate,
    forward_backward,
    why_it_fails,
)

# What `compile = "max"` asks of torch.compile: to time several kernels for each part.
TUNED = "max-autotune-no-cudagraphs"


class Trainer:
    """Changes `state`, a step at a time.

    forward: the model, compiled once compile() has succeeded. parallel: the same, made at the first
    step, where several processes average their gradients.
    counts: of losses and bad steps. lr: of the last step. norm: of its gradients, on the device.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        data: Data,
        state: State,
        schedule: Schedule,
        micro_batch: MicroBatch,
    ):
        self.config, self.device, self.data = config, device, data
        self.state, self.schedule, self.micro_batch = state, schedule, micro_batch
        self.counts = StepCounts(state.progress.sums, device.torch)
        self.norm = torch.zeros((), device=device.torch)
        self.sharded = shard.is_sharded(state.model)
        self.forward = state.model  # until compile()

    def cast(self):
        return hardware.autocast(self.device.torch, self.device.dtype)

    # -- compiling ---------------------------------------------------------------------------------

    def compile(self, how: bool | str = True) -> str | None:
        """Compile the model, as the setting has it; returns what failed, if anything did."""
        problem = None
        for mode in [TUNED, None] if how == "max" else [None]:
            failed = self.try_compiled(mode)
            if not failed:
                return problem
            problem = f"{mode or 'torch.compile'} failed: {failed}"
        if isinstance(self.state.model.lm_head, FP8Head):
            problem += "; the head's products stay in 16 bits"
        return problem

    def try_compiled(self, mode: str | None) -> str | None:
        """Compute with the compiled model from here on; returns why that fails, if it does."""
        model, scaler = self.state.model, self.state.scaler
        if self.sharded:
            forward = shard.compile_in_place(model, mode)
        elif self.device.type == "cpu" or distributed.world_size > 1:
            forward = compile_layers(model, mode)
        else:
            forward = compile_whole(model, mode)
        while True:
            try:
                reserve_state(self.state.optimizer)
                x, y = self.data.train.batch(0, self.micro_batch.size, self.config.seed)
                failed = why_it_fails(forward, x, y, self.cast, scaler)
                break
            except (RuntimeError, MemoryError) as error:
                self.halve(error)
        if failed and self.sharded:
            # The other processes may have compiled, and cannot be told to go on without.
            raise RunError(f"the model could not be compiled ({failed}); set compile = False")
        if not failed:
            self.forward = forward
        return failed

    @cached_property
    def parallel(self):
        """The model whose backward averages the gradients over all processes."""
        if distributed.world_size == 1 or self.sharded:  # fully_shard averages them itself
            return self.forward
        return data_parallel(self.forward, self.config.allreduce_dtype)

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimiser step without the loop around it, as tests and benchmarks take it."""
        loss, _ = self.gradients()
        self.update(loss)

    def gradients(self) -> tuple[torch.Tensor, bool]:
        """The gradients of the next batch. Returns its loss, a scalar on the device.

        Several processes each take their share of the sequences. Also returns whether memory ran
        out, so that the micro-batch is smaller now.
        """
        c, progress, batch = self.config, self.state.progress, self.micro_batch.batch
        with record_function("data"):
            first = progress.sequences + distributed.rank * batch
            x, y = self.data.train.batch(first, batch, c.seed)
        predictions = None
        if c.loss_on == "assistant":
            counted = (y != IGNORE).sum().float()
            predictions = distributed.all_reduce_mean(counted).clamp(min=1 / distributed.world_size)
        scaler, halved = self.state.scaler, False
        while True:
            try:
                reserve_state(self.state.optimizer)
                self.seed_dropout()
                size = self.micro_batch.size
                loss = forward_backward(self.parallel, x, y, size, self.cast, scaler, predictions)
                break
            except (RuntimeError, MemoryError) as error:
                self.halve(error)
                halved = True
        return distributed.all_reduce_mean(loss), halved

    def halve(self, error: Exception) -> None:
        """After an attempt that ran out of memory: free what it left, and halve the micro-batch.

        Raises any other error again.
        """
        if not hardware.out_of_memory(error):
            raise error
        error.__traceback__ = None  # its frames hold the attempt's tensors
        self.state.model.zero_grad(set_to_none=True)
        release(self.device.torch)
        self.micro_batch.halve()

    def update(self, loss: torch.Tensor) -> None:
        """Have the optimiser step on the gradients, and count the step. loss: the batch's."""
        config, state, progress = self.config, self.state, self.state.progress
        self.lr, clip = self.schedule.learning_rate, config.grad_clip
        self.norm = optimizer_step(state.model, state.optimizer, state.scaler, self.lr, clip)
        # A GradScaler skips steps until it has found its scale: these are not bad ones.
        deciding = loss if state.scaler.is_enabled() else self.norm
        self.counts.add(loss, deciding.isfinite())
        progress.step += 1
        progress.sequences += config.batch_size

    def seed_dropout(self) -> None:
        """Dropout follows from (seed, step), as the data does: resuming needs no random state."""
        if self.config.dropout:
            seed = self.config.seed * 0x9E3779B97F4A7C15 + self.state.progress.step
            torch.manual_seed((seed + (distributed.rank << 40)) % 2**63)

    def evaluate(self, check: Callable | None = None) -> tuple[float, bool]:
        """The validation loss in nats a token, and whether memory ran out on the way.

        NaN where nothing counts in the windows looked at. check: called between micro-batches.
        """
        windows = self.config.eval_batches * self.config.batch_size
        halved = False
        while True:
            try:
                size, data = self.micro_batch.size, self.data.val
                total, count = evaluate(self.forward, data, windows, size, self.cast, check)
                distributed.synchronize(self.device.torch)
                total, count = float(total), float(count)
                break
            except (RuntimeError, MemoryError) as error:
                self.halve(error)
                halved = True
        total, count = sum(distributed.gather(total)), sum(distributed.gather(count))
        return total / count if count else math.nan, halved

    # -- numbers -----------------------------------------------------------------------------------

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
        distributed.synchronize(self.device.torch)
        if scaler.is_enabled() and scaler.get_scale() < 1e-3:
            return (
                f"the gradients overflow float16 at any scale, up to step {step:,}; the weights "
                "took none of them. Try dtype = float32, or a lower learning_rate"
            )
        in_a_row = int(self.counts.most_in_a_row)
        if in_a_row < config.max_bad_steps:
            return None
        fp16 = ""
        if self.device.dtype == torch.float16:
            fp16 = ", dtype = bfloat16 instead of float16"
        return (
            f"{in_a_row} steps in a row, by step {step:,}, had NaN or infinite loss or gradients, "
            f"and max_bad_steps = {config.max_bad_steps}; the weights took none of them. Try "
            f"a lower learning_rate (now {config.learning_rate}), a longer "
            f"warmup_steps{fp16}, or another look at the data"
        )
