"""How many sequences one forward holds: halved when memory runs out, in all processes alike.

The batch of an optimiser step stays what it is, so the losses do too.
"""

import gc

import torch

import hardware
from config import Config
from hardware import out_of_memory
from training import distributed
from training.errors import RunError


class Memory:
    """The micro-batches of training and of evaluation.

    batch: sequences a step of this process, which both divide. known: what memory.json recorded.
    model: whose gradients are dropped when memory runs out.
    on_halved: called with {name: new size} after a halving, where one is set.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        batch: int,
        known: dict | None,
        model: torch.nn.Module,
    ):
        self.config, self.device, self.batch, self.model = config, device, batch, model
        self.on_halved = None
        size = largest_divisor(batch, config.micro_batch_size or batch)
        self.training = self.micro_batch("micro_batch", size)
        self.evaluation = self.micro_batch("eval_micro_batch", size)
        self.recall(known or {})
        self.agree()

    def micro_batch(self, name: str, size: int) -> "MicroBatch":
        """What holds one of the sizes and works with it."""
        return MicroBatch(name, size, self)

    def recall(self, known: dict) -> None:
        """Begin with what an earlier start here ended with, unless micro_batch_size is new."""
        now = self.to_json()
        if any(known.get(name) != now[name] for name in ("device", "micro_batch_size")):
            return
        for micro_batch in (self.training, self.evaluation):
            fitted = max(1, min(micro_batch.size, known[micro_batch.name]))
            micro_batch.size = largest_divisor(self.batch, fitted)

    def agree(self) -> None:
        """Take the smallest size of all processes: those with another GPU recall none."""
        for micro_batch in (self.training, self.evaluation):
            micro_batch.size = int(min(distributed.gather(micro_batch.size)))
        if self.one_shape:
            self.training.size = min(self.training.size, self.evaluation.size)
            self.evaluation.size = self.training.size

    @property
    def one_shape(self) -> bool:
        """Whether training takes no more than evaluation: a CUDA graph has one shape.

        At each change between two, all would be compiled anew.
        """
        return self.config.cuda_graphs and self.device.type == "cuda"

    def to_json(self) -> dict:
        """What memory.json records: the sequences at once that fitted, and where."""
        return {
            "device": hardware.describe(self.device),
            "micro_batch_size": self.config.micro_batch_size,
            "micro_batch": self.training.size,
            "eval_micro_batch": self.evaluation.size,
        }

    def halve(self, micro_batch: "MicroBatch") -> None:
        """Go on with half as many sequences at once. Raises RunError where it was one."""
        self.model.zero_grad(set_to_none=True)  # what the attempt that failed has left
        release(self.device)
        if self.one_shape:
            micro_batch = self.training
        before = micro_batch.size
        if before == 1:
            raise RunError(self.too_small())
        micro_batch.size = largest_divisor(self.batch, before // 2)
        # Evaluation has the same memory, and is compiled for the same shape.
        self.evaluation.size = min(self.evaluation.size, self.training.size)
        print(
            f"\nout of memory with {before} sequences at once; from here on {micro_batch.size}, "
            f"and the same {self.config.batch_size} a step",
            flush=True,
        )
        if self.on_halved:
            self.on_halved({micro_batch.name: micro_batch.size})

    def too_small(self) -> str:
        """What to say when one sequence is too much."""
        c = self.config
        dtype = hardware.find_dtype(self.device, c.dtype)
        precision = ", dtype = bfloat16" if dtype == torch.float32 else ""
        return (
            f"out of memory on {hardware.describe(self.device)} with a single sequence of "
            f"{c.block_size} tokens. What takes less: block_size = {c.block_size // 2}, a smaller "
            f"n_layer ({c.n_layer}) or n_embd ({c.n_embd}){precision}; or end what else uses the "
            "memory"
        )


class MicroBatch:
    """Sequences at once in one kind of work. name: as the log and memory.json call it."""

    def __init__(self, name: str, size: int, memory: Memory):
        self.name, self.size, self.memory = name, size, memory

    def run(self, work, buckets=None):
        """work(sequences at once), again with half as many wherever memory ran out in any process.

        buckets: buckets.Buckets that work() may have begun to send. Raises RunError when a single
        sequence is too much.
        """
        while True:
            result, fits = attempt(work, self.size)
            if buckets:
                buckets.send_promised()
            if all(distributed.gather(fits)):
                return result
            result = None  # before its memory is asked for back
            self.memory.halve(self)


def attempt(work, size: int):
    """(what work(size) returns, True), or (None, False) where memory ran out."""
    try:
        return work(size), True
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    return None, False  # out of the except clause: the error's traceback holds on to the tensors


def release(device: torch.device) -> None:
    """Give back the memory that nothing uses."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif device.type == "mps":
        torch.mps.empty_cache()


def largest_divisor(whole: int, limit: int) -> int:
    """The largest divisor of `whole` up to `limit`."""
    return max(n for n in range(1, min(whole, limit) + 1) if whole % n == 0)
