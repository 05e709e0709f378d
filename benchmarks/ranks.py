"""How gradients are summed: training/buckets.py, one message, and DistributedDataParallel.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.ranks [--n_embd 256] [--n_layer 4]
        [--batch 4] [--compiled]

Over NCCL where there are GPUs, over gloo elsewhere. All take the same steps in turn, from the same
weights, for the time of a step: DDP, one message after the backward as up to commit 57c6de2, our
buckets, and these sent in bfloat16. On CPUs one process then has an error in the middle of DDP's
backward, and it is seen how long the others wait (their time-out is set to 15 s). Between two
machines with a slow link: benchmarks/slow_link.py.
"""

import contextlib
import datetime
import functools
import os
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import config
import hardware
from benchmarks import argument_parser, in_turn, median_ratio, medians, write
from model import GPT, GPTConfig
from training import ranks
from training.buckets import Buckets
from training.optimizer import make_optimizer
from training.step import forward_backward

SIZES = {"n_layer": 4, "n_embd": 256, "block_size": 256, "batch": 4, "rounds": 8, "steps": 3}


WAYS = ("ddp", "one message", "buckets", "bfloat16")


@dataclass
class Contender:
    """A way to train. forward: the model, compiled or wrapped. buckets: where it has such."""

    way: str
    model: GPT
    forward: torch.nn.Module
    optimizer: torch.optim.Optimizer
    buckets: Buckets | None

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
        cast = functools.partial(hardware.autocast, x.device, hardware.find_dtype(x.device, "auto"))
        if self.way == "ddp":
            with cast():
                loss = self.forward(x, y)
            loss.backward()
        else:
            scaler = torch.amp.GradScaler(x.device.type, enabled=False)
            if self.buckets:
                self.buckets.begin(len(x))
            loss = forward_backward(self.forward, x, y, len(x), cast, scaler, self.buckets)
            if self.buckets:
                self.buckets.send_promised()
                ranks.gather(True)  # as the trainer asks whether it fitted
                self.buckets.collect()
            else:
                add_up_in_one_message(self.model, loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def add_up_in_one_message(model, loss):
    """Sum the gradients of all processes after the backward, as was done up to commit 57c6de2.

    With the three small messages that a step had then.
    """
    for _ in range(3):
        ranks.gather(True)
    parameters = [p for p in model.parameters() if p.grad is not None]
    flat = torch.cat([*(p.grad.view(-1) for p in parameters), loss.view(1)])
    dist.all_reduce(flat)
    pieces = flat.split([*(p.numel() for p in parameters), 1])
    for p, gradient in zip(parameters, pieces, strict=False):
        p.grad = gradient.view_as(p)


def make_contender(way, shape, device, compiled):
    """A contender; all begin with the same weights."""
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    forward = torch.compile(model, dynamic=False) if compiled else model
    buckets = None
    if way == "ddp":
        forward = DistributedDataParallel(forward)
    elif way != "one message":
        dtype = torch.bfloat16 if way == "bfloat16" else torch.float32
        buckets = Buckets(model.parameters(), dtype)
        buckets.reserve()
    optimizer = make_optimizer(model, config.Config(), device)
    return Contender(way, model, forward, optimizer, buckets)


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


def apart(one, other):
    """How far two models' weights are apart, at most."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((p - q).detach().abs().max()) for p, q in pairs)


def processors():
    """How many processors this machine has, and which, as Linux names them."""
    name = platform.machine()
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        line = next(line for line in lines if line.startswith("model name"))
        name = line.partition(":")[2].strip()
    return f"{os.cpu_count()} x {name}"


def parse_args(argv):
    """The command line."""
    parser = argument_parser("ranks", __doc__, launcher="torchrun")
    for name, default in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--name", default="ranks", help="of the result's file")
    parser.add_argument("--link", default=None, help="what the processes are connected by, if told")
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
    contenders = {way: make_contender(way, shape, device, args.compiled) for way in WAYS}
    turns = {}
    for way, contender in contenders.items():
        contender.steps(x, y, 2)  # warms up
        turns[way] = functools.partial(contender.steps, x, y, args.steps)
    rounds = in_turn(turns, args.rounds, show=None)
    ours = contenders["buckets"].model
    result = {
        "processors": processors(),
        "processes": ranks.count,
        "settings": vars(args),
        "gradient_megabytes": round(4 * ours.num_parameters() / 1e6, 1),
        "seconds_a_step": {way: round(s, 4) for way, s in medians(rounds).items()},
        "over_ddp_median": {way: round(median_ratio(rounds, way, "ddp"), 4) for way in WAYS},
        "weights_apart": {way: apart(c.model, ours) for way, c in contenders.items()},
    }
    if device.type == "cpu" and not args.link:
        result["others_wait_s"] = seconds_stuck(shape, x, y)
    if ranks.main:
        print(result)
        seconds = {way: [r[way] for r in rounds] for way in WAYS}
        write(args.name, device, result | {"seconds": seconds})


if __name__ == "__main__":
    main(sys.argv[1:])
