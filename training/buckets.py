"""Gradients summed over all processes, in buckets that are sent while the backward still runs.

A bucket holds the gradients of parameters that lie side by side. Each goes as soon as the step's
last backward has added to all of its gradients, the last layers' first. The first step of each
micro-batch size sends all after the backward, once all processes have agreed that it fitted.

A process that later runs out of memory in the middle of its backward sends its other buckets all
the same, with whatever they hold: so none waits for it, and all hear of it before a sum is used and
repeat the step (memory.py). Knows parameters; no model and no run.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from training import distributed

# Bytes of a bucket, of float32: a sixteenth of all within these. Small ones begin to go early, and
# leave little to wait for in the end; below a megabyte each takes longer than its bytes.
SMALLEST, LARGEST = 2**20, 25 * 2**20
ALIGNED = 8  # numbers: 16 bytes in bfloat16 too; elsewhere AdamW reads no vectors


@dataclass
class Bucket:
    """One message. sent: what is added up, `values` themselves or a copy in fewer bits."""

    values: torch.Tensor  # float32, of one dimension
    sent: torch.Tensor
    parts: int  # gradients that it holds
    missing: int = 0  # of them, in this step


class Buckets:
    """The gradients of some parameters, in one piece of memory; each p.grad is a view into it.

    dtype: in which they are sent and added up.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], dtype: torch.dtype):
        # Backward comes to the last layers first. Tied weights are complete with the embedding.
        self.parameters = [p for p in reversed(list(parameters)) if p.requires_grad]
        self.dtype = dtype
        self.buckets = []  # the loss, then the gradients, in the order in which they are sent
        self.place = {}  # parameter: (its bucket, its part of that)
        self.works = []  # messages on their way
        self.early = False  # whether a bucket goes as soon as it is complete
        self.last = False  # whether the next backward completes the gradients
        self.count = 0  # buckets sent
        self.fitted = None  # the micro-batch size that all processes had memory for

    def reserve(self) -> None:
        """Take the memory, once and before it is scarce, and watch the gradients from here on."""
        if self.buckets:
            return
        device = self.parameters[0].device
        groups = side_by_side(self.parameters)
        values = torch.zeros(sum(map(padded, self.parameters)), device=device)
        sent = values
        if self.dtype != values.dtype:
            sent = torch.zeros_like(values, dtype=self.dtype)
        loss = torch.zeros(1, device=device)
        buckets, begin = [Bucket(loss, loss, parts=1)], 0
        for group in groups:
            end = begin + sum(map(padded, group))
            buckets.append(Bucket(values[begin:end], sent[begin:end], parts=len(group)))
            for p in group:
                self.place[p] = buckets[-1], values[begin : begin + p.numel()].view_as(p)
                begin += padded(p)
        self.buckets = buckets
        for p in self.parameters:
            p.register_post_accumulate_grad_hook(self.arrived)

    def begin(self, size: int) -> None:
        """A step begins, or is repeated with another size of its micro-batches. Raises Lost."""
        self.wait()  # for what was sent before memory ran out
        self.size = size
        self.early = size == self.fitted
        self.last = False
        self.count = 0
        for bucket in self.buckets:
            bucket.missing = bucket.parts

    def before_last_backward(self, loss: torch.Tensor) -> None:
        """The next backward completes the gradients. loss: of the step, a scalar."""
        self.last = True
        self.buckets[0].values.copy_(loss)
        self.complete(self.buckets[0])

    def arrived(self, p: torch.nn.Parameter) -> None:
        """A backward has added to p.grad."""
        bucket, view = self.place[p]
        if p.grad is not view:  # the step's first
            view.copy_(p.grad)
            p.grad = view
        if self.last:
            self.complete(bucket)

    def complete(self, bucket: Bucket) -> None:
        """One part of a bucket is complete. All processes send in the same order."""
        bucket.missing -= 1
        while self.early and self.count < len(self.buckets):
            if self.buckets[self.count].missing:
                return
            self.send_next()

    def send_next(self) -> None:
        """Send one more bucket. Raises Lost."""
        bucket = self.buckets[self.count]
        if bucket.sent is not bucket.values:
            bucket.sent.copy_(bucket.values)
        with distributed.losing():
            self.works.append(dist.all_reduce(bucket.sent, async_op=True))
        self.count += 1

    def send_promised(self) -> None:
        """Send what the others may wait for, after a backward that memory may have cut off."""
        if self.early:
            self.send_rest()

    def send_rest(self) -> None:
        """Send all that has not gone."""
        while self.count < len(self.buckets):
            self.send_next()

    def collect(self) -> torch.Tensor:
        """The sum of the loss, a scalar; the gradients become their sums. Raises Lost.

        To be called once all have agreed that the step fitted.
        """
        self.fitted = self.size
        self.send_rest()
        self.wait()
        for bucket in self.buckets:
            if bucket.sent is not bucket.values:
                bucket.values.copy_(bucket.sent)
        return self.buckets[0].values[0].clone()

    def wait(self) -> None:
        """Until what was sent has come back; on a GPU, its next work will. Raises Lost."""
        while self.works:
            with distributed.losing():
                self.works.pop(0).wait()


def padded(p: torch.Tensor) -> int:
    """The numbers that a parameter's gradient takes in its bucket."""
    return ALIGNED * math.ceil(p.numel() / ALIGNED)


def side_by_side(parameters: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The parameters in groups, one for each bucket; a large one is alone."""
    limit = 4 * sum(map(padded, parameters)) // 16
    limit = min(max(limit, SMALLEST), LARGEST)
    groups, size = [], math.inf
    for p in parameters:
        if size + 4 * padded(p) > limit:
            groups.append([])
            size = 0
        groups[-1].append(p)
        size += 4 * padded(p)
    return groups
