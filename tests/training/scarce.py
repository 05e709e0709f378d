"""train.py in one of several processes, where memory runs out at a place of the test's choice.

    torchrun --nproc_per_node=2 scarce.py WHEN NOTES [settings of train.py]

WHEN: "backward" or "evaluation"; there the last process asks for more memory than any machine has,
once. "never": none does. NOTES: a file for what that process has seen: the messages that it had
sent until then, and those of the CPU's group before each step.
"""

import json
import sys

import torch
import torch.distributed as dist

import train
from training import buckets, distributed
from training.trainer import Trainer

buckets.SMALLEST = 10_000  # several, though the model is small
when, notes, *arguments = sys.argv[1:]
seen = {"sent": None, "messages": []}
messages = 0
gradients, evaluate, all_reduce = Trainer.gradients, Trainer.evaluate, dist.all_reduce


def ask_for_too_much(trainer):
    """Once, what the allocator cannot give."""
    if distributed.rank == distributed.world_size - 1 and seen["sent"] is None:
        seen["sent"] = trainer.buckets.count
        note()
        torch.empty(1 << 60, dtype=torch.uint8)


def note():
    """Write down what was seen."""
    if distributed.rank == distributed.world_size - 1:
        with open(notes, "w") as file:
            json.dump(seen, file)


def gradients_in_scarcity(trainer):
    """A step's gradients; the fourth's backward has too little memory in its middle."""
    handles = []
    if when == "backward" and trainer.state.progress.step == 3:
        weight = trainer.state.model.h[0].ln_2.weight
        handles.append(weight.register_hook(lambda gradient: ask_for_too_much(trainer)))
    seen["messages"].append(messages)
    note()
    loss = gradients(trainer)
    for handle in handles:
        handle.remove()
    return loss


def evaluate_in_scarcity(trainer):
    """An evaluation."""
    handles = []
    if when == "evaluation":
        block = trainer.state.model.h[0]
        handles.append(block.register_forward_pre_hook(lambda *_: ask_for_too_much(trainer)))
    loss = evaluate(trainer)
    for handle in handles:
        handle.remove()
    return loss


def counted(tensor, *others, **options):
    """all_reduce, where the messages that agree on plain numbers are counted."""
    global messages
    messages += tensor.dtype == torch.float64
    return all_reduce(tensor, *others, **options)


Trainer.gradients, Trainer.evaluate = gradients_in_scarcity, evaluate_in_scarcity
dist.all_reduce = counted
if __name__ == "__main__":
    train.main(arguments)
    distributed.end(0)
