"""The micro-batch: how many sequences one forward holds, halved when memory runs out.

The batch of an optimiser step stays the same, so the losses do too. Owns memory.json, with which
the next start begins. Knows no model and no data.
"""

import contextlib
import gc
from pathlib import Path

import torch

from config import Config
from formats import files
from hardware import Device
from training import RunError, distributed


class OutOfMemory(RunError):
    """Memory ran out in a forward or backward; the weights are those of the last step."""


class MicroBatch:
    """How many sequences one forward of this process holds, in training and in evaluation.

    size: these. batch: sequences a step of this process, which `size` divides.
    """

    def __init__(self, config: Config, device: Device, folder: Path):
        self.config, self.device, self.path = config, device, folder / "memory.json"
        self.batch = config.batch_size // distributed.world_size
        self.size = largest_divisor(self.batch, config.micro_batch_size or self.batch)
        known, now = files.read_json(self.path, micro_batch=int) or {}, self.to_json()
        if all(known.get(name) == now[name] for name in ("device", "micro_batch_size")):
            self.size = largest_divisor(self.batch, min(self.size, known["micro_batch"]))
        # Processes with another kind of GPU remember nothing: the smallest counts for all.
        self.size = int(min(distributed.gather(self.size)))

    def to_json(self) -> dict:
        """The content of memory.json: what fitted, and where."""
        return {
            "device": self.device.name,
            "micro_batch_size": self.config.micro_batch_size,
            "micro_batch": self.size,
        }

    def halve(self) -> None:
        """Halve the micro-batch, and remember it.

        Raises OutOfMemory where it was a single sequence. Also with several processes, which wait
        for each other in the middle of the same backward: the next start goes on with half.
        """
        before = self.size
        if before == 1:
            raise OutOfMemory(self.too_small())
        self.size = largest_divisor(self.batch, before // 2)
        if not self.config.dry_run:
            with contextlib.suppress(OSError):
                files.write_json(self.path, self.to_json())
        what = f"out of memory with a micro-batch of {before} sequences"
        if distributed.world_size > 1:
            raise OutOfMemory(
                f"{what} in one of {distributed.world_size} processes; start the same command "
                f"again: it continues with {self.size}, and the same batch_size ("
                f"torchrun --max_restarts=3 does so automatically)"
            )
        print(f"\n{what}; continuing with {self.size}, and the same batch_size", flush=True)

    def too_small(self) -> str:
        """What to say when one sequence is too much."""
        c = self.config
        precision = ", dtype = bfloat16" if self.device.dtype == torch.float32 else ""
        return (
            f"out of memory on {self.device.name} with a single sequence of {c.block_size} tokens. "
            f"End other programs that use the memory; or try activation_checkpointing = True, "
            f"loss_chunks = 8{precision}; or begin a run with block_size = {c.block_size // 2}, or "
            f"with a smaller n_layer ({c.n_layer}) or n_embd ({c.n_embd})"
        )


def release(device: torch.device) -> None:
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` up to `limit`; 1 at least."""
    return next(n for n in range(max(1, min(whole, limit)), 0, -1) if whole % n == 0)
