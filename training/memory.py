"""The micro-batch: how many sequences one forward holds, halved when memory runs out.

The batch of an optimiser step stays the same, so the losses do too. Owns memory.json, with which
the next start begins. Knows no model and no data.
"""

import contextlib
import gc
from pathlib import Path

import torch

import hardware
from config import Config
from formats import files
from hardware import Device
from training import RunError, distributed


class MicroBatch:
    """The micro-batches of training and of evaluation, in sequences of one process.

    batch: sequences a step of this process, which both divide.
    """

    def __init__(self, config: Config, device: Device, folder: Path):
        self.config, self.device, self.path = config, device, folder / "memory.json"
        self.batch = config.batch_size // distributed.world_size
        self.training = largest_divisor(self.batch, config.micro_batch_size or self.batch)
        self.evaluation = self.training
        known = files.read_json(self.path, micro_batch=int, eval_micro_batch=int) or {}
        now = self.to_json()
        if all(known.get(name) == now[name] for name in ("device", "micro_batch_size")):
            self.training = self.fitting(min(self.training, known["micro_batch"]))
            self.evaluation = self.fitting(min(self.evaluation, known["eval_micro_batch"]))
        # Processes with another kind of GPU remember nothing: the smallest counts for all.
        self.training = int(min(distributed.gather(self.training)))
        self.evaluation = int(min(distributed.gather(self.evaluation)))

    def fitting(self, limit: int) -> int:
        """The largest micro-batch up to `limit` that divides the batch."""
        return largest_divisor(self.batch, max(1, limit))

    def to_json(self) -> dict:
        """The content of memory.json: what fitted, and where."""
        return {
            "device": self.device.name,
            "micro_batch_size": self.config.micro_batch_size,
            "micro_batch": self.training,
            "eval_micro_batch": self.evaluation,
        }

    def halve(self, kind: str) -> None:
        """Halve the micro-batch of `kind`, "training" or "evaluation", and remember it.

        Raises RunError where it was a single sequence. Also with several processes, which wait for
        each other in the middle of the same backward: the next start goes on with half.
        """
        before = getattr(self, kind)
        if before == 1:
            raise RunError(self.too_small())
        setattr(self, kind, self.fitting(before // 2))
        # Evaluation has the same memory, and is compiled for the same shape.
        self.evaluation = min(self.evaluation, self.training)
        if not self.config.dry_run:
            with contextlib.suppress(OSError):
                files.write_json(self.path, self.to_json())
        after = getattr(self, kind)
        what = f"out of memory with a micro-batch of {before} sequences"
        if distributed.world_size > 1:
            raise RunError(
                f"{what} in one of {distributed.world_size} processes; start the same command "
                f"again: it continues with {after}, and the same batch_size ("
                f"torchrun --max_restarts=3 does so unasked)"
            )
        print(f"\n{what}; continuing with {after}, and the same batch_size", flush=True)

    def too_small(self) -> str:
        """What to say when one sequence is too much."""
        c = self.config
        precision = ", dtype = bfloat16" if self.device.dtype == torch.float32 else ""
        return (
            f"out of memory on {self.device.name} with a single sequence of {c.block_size} tokens. "
            f"What takes less: block_size = {c.block_size // 2}, a smaller n_layer ({c.n_layer}) "
            f"or n_embd ({c.n_embd}){precision}; or end what else uses the memory"
        )


class catch_out_of_memory:
    """A context that swallows the error of memory that ran out; `caught` says whether it did.

    Once the context is left, the error has let go of the tensors that it held on to.
    """

    def __enter__(self):
        self.caught = False
        return self

    def __exit__(self, kind, error, traceback):
        self.caught = isinstance(error, RuntimeError | MemoryError) and hardware.out_of_memory(
            error
        )
        return self.caught


def release(device: torch.device) -> None:
    """Give back the memory that nothing uses."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` up to `limit`."""
    return next(n for n in range(min(whole, limit), 0, -1) if whole % n == 0)
