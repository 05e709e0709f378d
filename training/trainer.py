"""Steps and evaluations of one run.

Knows the model, its data and the device; no log and no terminal.
"""

import itertools
import traceback
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend
from torch.profiler import record_function

import hardware
from config import Config
from formats import files
from hardware import Device
from model import IGNORE
from training import RunError, distributed
from training.dataset import Data
from training.optimizer import optimizer_step, reserve_state
from training.schedule import MAX_BAD_STEPS, Schedule
from training.state import State, StepCounts
from training.step import (
    compile_layers,
    data_parallel,
    delete_empty_code,
    evaluate,
    forward_backward,
)


class Trainer:
    """Changes `state`, a step at a time.

    local_batch: sequences per step of this process. micro_batch: sequences in one forward, a
    divisor of it. forward: the model, compiled or not. parallel: where there are several processes,
    the model whose backward averages their gradients. counts: of losses and bad steps. lr: of the
    last step. norm: of its gradients, on the device.
    """

    def __init__(
        self, config: Config, device: Device, data: Data, state: State, schedule: Schedule
    ):
        self.config, self.device, self.data = config, device, data
        self.state, self.schedule = state, schedule
        self.local_batch = config.batch_size // distributed.world_size
        limit = config.micro_batch_size or self.local_batch
        self.micro_batch = largest_divisor(self.local_batch, limit)
        self.forward = self.parallel = state.model
        self.counts = StepCounts(state.counters.sums, device.torch)
        self.lr = 0.0
        self.norm = torch.zeros((), device=device.torch)

    def cast(self):
        return hardware.autocast(self.device.torch, self.device.dtype)

    def attention_backend(self) -> str:
        """PyTorch's choice of an attention kernel: cudnn, flash, efficient or math."""
        shape = self.state.model.config
        size = (1, shape.n_head, shape.block_size, shape.head_dim)
        q = torch.empty(size, dtype=self.device.dtype, device=self.device.torch, requires_grad=True)
        chosen = torch._fused_sdp_choice(q, q, q, dropout_p=shape.dropout, is_causal=True)
        return SDPBackend(chosen).name.removesuffix("_ATTENTION").lower()

    # -- before the first step ---------------------------------------------------------------------

    def prepare(self, compiles: bool) -> str | None:
        """Compile the model, and halve the micro-batch until a step fits the memory.

        The batch of an optimiser step stays the same, so the losses do too. Returns why the model
        is not compiled, where that failed. Raises RunError where one sequence is too much.
        """
        model, problem, retried = self.state.model, None, False
        if compiles:
            if self.device.type == "cpu" or distributed.world_size > 1:
                self.forward = compile_layers(model)
            else:  # one graph is the fastest on a GPU that trains alone
                self.forward = torch.compile(model, dynamic=False)
        while True:
            error = self.try_step()
            if error and not hardware.out_of_memory(error):
                if self.forward is model:
                    raise error
                torch._dynamo.reset()
                if not retried and delete_empty_code():
                    retried = True
                    continue
                problem = f"torch.compile failed: {files.error_message(error)}"
                self.forward = model
                continue
            (no_memory,) = distributed.all_reduce_max(error is not None)
            if not no_memory:
                break
            if self.micro_batch == 1:
                raise RunError(self.too_small())
            self.micro_batch = largest_divisor(self.local_batch, self.micro_batch // 2)
        if distributed.world_size > 1:
            self.parallel = data_parallel(self.forward)
        else:
            self.parallel = self.forward
        return problem

    def try_step(self) -> Exception | None:
        """Try a forward and backward of two micro-batches, or one; returns the error, if any.

        Changes no weights. With dropout, evaluations run another graph, which is tried too.
        """
        try:
            reserve_state(self.state.optimizer)
            if distributed.world_size > 1:  # DistributedDataParallel keeps the gradients' memory
                for p in self.state.model.parameters():
                    p.grad = torch.zeros_like(p)
            rows, size = min(self.local_batch, 2 * self.micro_batch), self.micro_batch
            x, y = self.data.train.batch(0, rows, self.config.seed)
            forward_backward(self.forward, x, y, size, self.cast, self.state.scaler)
            if self.config.dropout:
                evaluate(self.forward, [(x[:size], y[:size])], self.cast)
            hardware.synchronize(self.device.torch)
            return None
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # they hold the attempt's tensors
            return error
        finally:
            self.state.model.train()
            self.state.model.zero_grad(set_to_none=True)
            hardware.release_memory(self.device.torch)

    def too_small(self) -> str:
        """The message for one sequence that does not fit the memory."""
        c = self.config
        return (
            f"out of memory on {self.device.name} with a single sequence of {c.block_size} tokens."
            " End other programs that use the memory; or try activation_checkpointing = True; or"
            f" begin a run with block_size = {c.block_size // 2}, or with a smaller n_layer"
            f" ({c.n_layer}) or n_embd ({c.n_embd})"
        )

    # -- steps -------------------------------------------------------------------------------------

    def step(self) -> None:
        """One optimiser step: the gradients of the next batch, then the update.

        An error in the gradients leaves the weights of the step before. One in the update may leave
        them between two steps: it is no RuntimeError or MemoryError, after which a run saves.
        """
        loss = self.gradients()
        try:
            self.update(loss)
        except (RuntimeError, MemoryError) as error:
            if not (hardware.out_of_memory(error) or distributed.connection_lost(error)):
                raise
            raise RunError(
                f"step {self.state.counters.step + 1:,} could not be completed"
                f" ({files.error_message(error)}); the same command continues from the last"
                " checkpoint"
            ) from None

    def gradients(self) -> torch.Tensor:
        """The gradients of the next batch. Returns its loss, a scalar on the device.

        Several processes each take their share of the sequences.
        """
        c, counters, batch = self.config, self.state.counters, self.local_batch
        with record_function("data"):
            first = counters.sequences + distributed.rank * batch
            x, y = self.data.train.batch(first, batch, c.seed)
        predictions = None
        if c.loss_on == "assistant":
            predictions = distributed.all_reduce_mean((y != IGNORE).sum().float())
        self.seed_dropout()
        loss = forward_backward(
            self.parallel, x, y, self.micro_batch, self.cast, self.state.scaler, predictions
        )
        return distributed.all_reduce_mean(loss)

    def update(self, loss: torch.Tensor) -> None:
        """Step along the gradients, and count the step. loss: the batch's."""
        config, state = self.config, self.state
        self.lr, clip = self.schedule.learning_rate, config.grad_clip
        self.norm = optimizer_step(state.model, state.optimizer, state.scaler, self.lr, clip)
        # A GradScaler skips steps until it has found its scale: these are not bad ones.
        deciding = loss if state.scaler.is_enabled() else self.norm
        self.counts.add(loss, deciding.isfinite())
        state.counters.step += 1
        state.counters.sequences += config.batch_size

    def seed_dropout(self) -> None:
        """Dropout follows from (seed, step), as the data does: resuming needs no random state."""
        if self.config.dropout:
            # Odd multiples, as a CPU's generator takes the lower 32 bits alone.
            seed = self.config.seed * 0x9E3779B97F4A7C15 + self.state.counters.step
            torch.manual_seed((seed + distributed.rank * 0xBF58476D1CE4E5B9) % 2**63)

    def evaluate(self, interrupted: Callable[[], bool]) -> float | None:
        """The validation loss in nats per token.

        interrupted: asked between micro-batches; the loss is None once it says so.
        """
        windows = self.config.eval_batches * self.config.batch_size
        rank, ranks = distributed.rank, distributed.world_size
        batches = self.data.val.evaluation(windows, self.micro_batch, rank, ranks)
        batches = itertools.takewhile(lambda _: not interrupted(), batches)
        total, count = evaluate(self.forward, batches, self.cast)
        if interrupted():
            return None
        total = sum(distributed.gather(float(total)))
        count = sum(distributed.gather(float(count)))
        return total / count

    # -- numbers -----------------------------------------------------------------------------------

    def pop_loss(self) -> tuple[float | None, float, int]:
        """Mean loss since the last call, norm of the last gradients, bad steps in all.

        The loss is None where no step was good. Waits for the device.
        """
        loss_sum, good_steps, _, bad_total = self.counts.tolist()
        self.counts.restart()
        loss = loss_sum / good_steps if good_steps else None
        return loss, float(self.norm), int(bad_total)

    def check_finite(self) -> None:
        """Raises RunError after MAX_BAD_STEPS steps in a row with NaN or infinity."""
        step, scaler = self.state.counters.step, self.state.scaler
        if scaler.is_enabled() and scaler.get_scale() < 1e-3:
            raise RunError(
                f"the gradients overflow float16 at any scale, up to step {step:,}. Try dtype ="
                " float32, or a lower learning_rate"
            )
        in_a_row = int(self.counts.most_in_a_row)
        if in_a_row < MAX_BAD_STEPS:
            return
        advice = ""
        if self.attention_backend() == "cudnn":
            advice = (
                ". First run the same command with the environment variable"
                " TORCH_CUDNN_SDPA_DEPRIORITIZED=1: cuDNN's attention may be the cause"
            )
        raise RunError(
            f"{in_a_row} steps in a row, up to step {step:,}, had a NaN or infinite loss or"
            " gradient; all were skipped. Try a lower learning_rate (now"
            f" {self.config.learning_rate}) or a longer warmup_steps, and look at the data{advice}"
        )


def largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` up to `limit`; 1 at least."""
    return next(n for n in range(max(1, min(whole, limit)), 0, -1) if whole % n == 0)
