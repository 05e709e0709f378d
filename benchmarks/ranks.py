"""One message after the backward (ranks.add_up_gradients) beside DistributedDataParallel.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.ranks [--n_embd 256] [--n_layer 4]
        [--batch 4] [--compiled]

Over NCCL where there are GPUs, over gloo elsewhere. Both take the same steps in turn, from the same
weights, for the time of a step. On CPUs one process then has an error in the middle of DDP's
backward, and it is seen how long the others wait (their time-out is set to 15 s).
"""

import datetime
import functools
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import config
import hardware
from benchmarks import argument_parser, in_turn, median_ratio, write
from model import GPT, GPTConfig
from training import ranks
from training.optimizer import make_optimizer

SIZES = {"n_layer": 4, "n_embd": 256, "block_size": 256, "batch": 4, "rounds": 8, "steps": 3}


@dataclass
class Contender:
    """A way to train. forward: the model, compiled or wrapped; averages: it is DDP, which does."""

    model: GPT
    forward: torch.nn.Module
    optimizer: torch.optim.Optimizer
    averages: bool

    def steps(self, x, y, count):
        """Seconds a step, of `count` steps of this process's batch x, y: int64 [B, T]."""
        ranks.gather(0)  # all begin together
        start = time.perf_counter()
        for _ in range(count):
            self.step(x, y)
        hardware.synchronize(x.device)
        return (time.perf_counter() - start) / count

    def step(self, x, y):
        """One optimiser step. DDP averages gradients; in ours a sum is divided before."""
        with hardware.autocast(x.device, hardware.find_dtype(x.device, "auto")):
            loss = self.forward(x, y)
            if not self.averages:
                loss = loss / ranks.count
        loss.backward()
        if not self.averages:
            ranks.add_up_gradients(self.model.parameters(), loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def make_contender(shape, device, compiled, averages):
    """A contender; all begin with the same weights."""
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    forward = torch.compile(model, dynamic=False) if compiled else model
    if averages:
        forward = DistributedDataParallel(forward)
    return Contender(model, forward, make_optimizer(model, config.Config(), device), averages)


def seconds_stuck(shape, x, y):
    """Seconds until the others notice an error of the last process in the middle of its backward.

    The error comes in DDP's; the longest wait of all processes.
    """
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=15))
    model = GPT(shape).to(x.device)
    wrapped = DistributedDataParallel(model, process_group=group, bucket_cap_mb=1)
    wrapped(x, y).backward()

    def fail(gradient):
        raise MemoryError("out of memory")

    if ranks.rank == ranks.count - 1:
        model.h[shape.n_layer // 2].ln_1.weight.register_hook(fail)
    start = time.perf_counter()
    try:
        wrapped(x, y).backward()
        hardware.synchronize(x.device)
    except (RuntimeError, MemoryError):
        pass
    return max(ranks.gather(time.perf_counter() - start))


def same_weights(one, other):
    """Whether two models have the same weights, up to rounding."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.allclose(p, q, atol=1e-3) for p, q in pairs)


def parse_args(argv):
    """The command line."""
    parser = argument_parser("ranks", __doc__, launcher="torchrun")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compiled", action="store_true")
    return parser.parse_args(argv)


def main(argv):
    """The command line's work, in each process."""
    args = parse_args(argv)
    ranks.join()
    device = hardware.find_device("auto", ranks.local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = GPTConfig(
        vocab_size=4096,
        block_size=args.block_size,
        n_layer=args.n_layer,
        n_head=args.n_embd // 64,
        n_embd=args.n_embd,
    )
    own = torch.Generator().manual_seed(ranks.rank)
    ids = torch.randint(4096, (2, args.batch, args.block_size), generator=own)
    x, y = ids.to(device)
    ddp = make_contender(shape, device, args.compiled, averages=True)
    ddp.steps(x, y, 3)  # warms up
    ours = make_contender(shape, device, args.compiled, averages=False)
    ours.steps(x, y, 3)
    turns = {
        "ddp": functools.partial(ddp.steps, x, y, args.steps),
        "ours": functools.partial(ours.steps, x, y, args.steps),
    }
    rounds = in_turn(turns, args.rounds, show=None)
    result = {
        "processes": ranks.count,
        "settings": vars(args),
        "parameters": ours.model.num_parameters(),
        "same_weights": same_weights(ddp.model, ours.model),
        "ddp_over_ours_median": round(median_ratio(rounds, "ddp", "ours"), 4),
        "others_wait_s": seconds_stuck(shape, x, y) if device.type == "cpu" else None,
    }
    if ranks.main:
        print(result)
        seconds = {name: [r[name] for r in rounds] for name in turns}
        write("ranks", device, result | {"seconds": seconds})


if __name__ == "__main__":
    main(sys.argv[1:])
