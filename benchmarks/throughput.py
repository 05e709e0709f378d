"""Training speed of train.py and of nanoGPT's, whole scripts both, at the shape of a preset.

    python -m benchmarks.throughput [--preset config/gpt2_small.py] [--nanogpt PATH] [--rounds 3]
        [--steps 8] [--key=value ...]

Each round starts every contender once, on the same tokens. A contender's time is the median of its
steps in a round without the first ones (compilation, warm-up); ratios are taken round by round.
PATH is a checkout of nanoGPT; it runs unchanged, and on a CPU also with the bf16 autocast that it
lacks there. Ours runs once more with --profile for the share of a step outside forward, backward
and optimiser.
"""

import itertools
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import argument_parser, compare, in_turn, nanogpt, report, run_main, train
from config import Config
from tools.command import count

SKIPPED = 3  # measurements at the start of a round, while a run warms up
PLAIN_ON_A_CPU = "nullcontext() if device_type == 'cpu' else "  # in nanoGPT's train.py
QUIET = ["--eval_interval=0", "--save_interval=0", "--eval_batches=1", "--sample_prompts=[]"]


def our_speed(arguments: list[str], steps: int, every: int) -> float:
    """Tokens/s of one run of train.py. every: steps between two log lines."""
    log = train(*arguments, *QUIET, f"--max_steps={steps}", f"--log_interval={every}")
    speeds = [record["tokens_per_second"] for record in log if "loss" in record]
    return statistics.median(speeds[SKIPPED:])


def nanogpt_speed(copy: Path, arguments: list[str], tokens: int) -> float:
    """Tokens/s of one run of nanoGPT's train.py, from when its lines came. tokens: of a step."""
    stamps = nanogpt.train(copy, arguments)
    speeds = [tokens * (n - m) / (b - a) for (m, a), (n, b) in itertools.pairwise(stamps)]
    return statistics.median(speeds[SKIPPED:])


def nanogpt_arguments(c: Config, device: torch.device, steps: int, every: int) -> list[str]:
    """The settings of a run as nanoGPT's train.py takes them."""
    micro = c.micro_batch_size or c.batch_size
    # What nanoGPT itself chooses; its float16 would scale gradients on a CPU too.
    dtype = "bfloat16" if device.type == "cpu" else str(hardware.find_dtype(device, c.dtype))
    return [
        *nanogpt.shape_arguments(c),
        f"--device={device.type}",
        f"--batch_size={micro}",
        f"--gradient_accumulation_steps={c.batch_size // micro}",
        f"--dropout={c.dropout}",
        f"--dtype={dtype.removeprefix('torch.')}",
        "--eval_iters=1",
        "--eval_interval=1000000",
        f"--log_interval={every}",
        "--always_save_checkpoint=False",
        f"--max_iters={steps}",
    ]


def measure(arguments: list[str], c: Config, device: torch.device, args) -> list[dict]:
    """Tokens/s of each contender, by name, in each round."""
    every, steps = 1, args.steps or 8
    if device.type == "cuda":  # each log line makes it wait
        every, steps = 10, args.steps or 100
    contenders = {"ours": partial(our_speed, arguments, steps, every)}
    edits = {}
    if args.nanogpt:
        edits["nanoGPT"] = {}
    if args.nanogpt and device.type == "cpu":
        edits["nanoGPT with bf16 autocast"] = {PLAIN_ON_A_CPU: ""}
    theirs = nanogpt_arguments(c, device, steps, every)
    tokens = c.batch_size * c.block_size
    with tempfile.TemporaryDirectory() as folder:
        for name, edit in edits.items():
            copy = nanogpt.copy_checkout(args.nanogpt, Path(folder) / name, c.data_dir, edit)
            contenders[name] = partial(nanogpt_speed, copy, theirs, tokens)
        return in_turn(contenders, args.rounds)


def share_outside(arguments: list[str]) -> float:
    """The share of a step of ours outside forward, backward and optimiser."""
    log = train(*arguments, *QUIET, "--max_steps=10", "--profile=True")
    parts = next(r["seconds_a_step"] for r in log if r.get("event") == "profile")
    return (parts["data"] + parts["other"]) / sum(parts.values())


def main(argv):
    parser = argument_parser("throughput", __doc__)
    parser.add_argument("--preset", default="config/gpt2_small.py")
    nanogpt.add_option(parser)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, help="steps in a round; default: 8, on a GPU 100")
    parser.add_argument("--name", help="of the result file; default: throughput_ and the preset's")
    args, extra = parser.parse_known_args(argv)
    arguments = [args.preset, *extra]
    c = settings.load(arguments)
    device = hardware.open_device(c.device, c.dtype)
    if c.compile is None:  # train.py would not compile for so few steps
        arguments.append("--compile=True")
    rounds = measure(arguments, c, device.torch, args)

    figures = compare(rounds, "ours")
    figures["ours, ms per step"] = 1e3 * c.batch_size * c.block_size / figures["ours"]
    figures["ours, outside forward, backward and optimiser"] = share_outside(arguments)
    name = args.name or f"throughput_{Path(args.preset).stem}"
    report(name, figures, device.torch, settings=arguments, tokens_per_second_by_round=rounds)


if __name__ == "__main__":
    run_main("throughput", main)
