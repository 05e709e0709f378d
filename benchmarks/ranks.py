"""One message after the backward (ranks.add_up_gradients) beside DistributedDataParallel: the
step's time, and out of memory in one process.

    torchrun --standalone --nproc_per_node=2 -m benchmarks.ranks [--n_embd 256] [--n_layer 4] [--batch 4] [--compiled]

Over NCCL where there are GPUs, over gloo elsewhere. Both take the same steps in turn, from the same
weights; the last part gives one process an error in the middle of DDP's backward, and looks how
long the others wait (their time-out is set to 15 s).
"""

import argparse
import datetime
import statistics
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import config
import hardware
from benchmarks import write
from model import GPT, GPTConfig
from training import ranks
from training.optimizer import make_optimizer


def steps(model, forward, optimizer, x, y, count, wrapped):
    """Seconds a step, of `count` steps of this process's batch x, y: int64 [B, T]."""
    ranks.gather(0)
    start = time.perf_counter()
    for _ in range(count):
        with hardware.autocast(x.device, hardware.find_dtype(x.device, "auto")):
            loss = forward(x, y) / (
                1 if wrapped else ranks.count
            )  # DDP averages, the sum is divided before
        loss.backward()
        if not wrapped:
            ranks.add_up_gradients(model.parameters(), loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    hardware.synchronize(x.device)
    return (time.perf_counter() - start) / count


def stuck(shape, x, y, group):
    """Seconds until the others notice that the last process had an error in the middle of DDP's
    backward.
    """
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
    return time.perf_counter() - start


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(
        prog="torchrun -m benchmarks.ranks", description=__doc__.splitlines()[0]
    )
    for name, default in (
        ("n_layer", 4),
        ("n_embd", 256),
        ("block_size", 256),
        ("batch", 4),
        ("rounds", 8),
        ("steps", 3),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compiled", action="store_true")
    args = parser.parse_args(argv)
    ranks.join()
    device = hardware.find_device("auto", ranks.local)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    shape = GPTConfig(4096, args.block_size, args.n_layer, args.n_embd // 64, args.n_embd)
    x, y = torch.randint(
        4096, (2, args.batch, args.block_size), generator=torch.Generator().manual_seed(ranks.rank)
    ).to(device)
    contenders, times = {}, {}
    for name in ("ddp", "ours"):
        torch.manual_seed(0)
        model = GPT(shape).to(device)
        forward = torch.compile(model, dynamic=False) if args.compiled else model
        contenders[name] = (
            model,
            DistributedDataParallel(forward) if name == "ddp" else forward,
            make_optimizer(model, config.Config(), device),
            x,
            y,
        )
        steps(*contenders[name], 3, name == "ddp")
        times[name] = []
    for _ in range(args.rounds):
        for name, contender in contenders.items():
            times[name].append(steps(*contender, args.steps, name == "ddp"))
    same = all(
        torch.allclose(p, q, atol=1e-3)
        for p, q in zip(
            contenders["ddp"][0].parameters(), contenders["ours"][0].parameters(), strict=True
        )
    )
    waited = (
        stuck(shape, x, y, dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=15)))
        if device.type == "cpu"
        else None
    )
    waited = waited and max(ranks.gather(waited))
    result = {
        "processes": ranks.count,
        "settings": vars(args),
        "parameters": contenders["ours"][0].num_parameters(),
        "same_weights": same,
        "seconds": times,
        "ddp_over_ours_median": round(
            statistics.median(d / o for d, o in zip(times["ddp"], times["ours"], strict=True)), 4
        ),
        "others_wait_s": waited,
    }
    if ranks.main:
        print({k: v for k, v in result.items() if k != "seconds"})
        write("ranks", device, result)


if __name__ == "__main__":
    main(sys.argv[1:])
