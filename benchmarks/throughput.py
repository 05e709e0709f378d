"""Training speed of train.py and of nanoGPT's, whole scripts both, at the shape of a preset.

    python -m benchmarks.throughput [--preset config/gpt2_small.py] [--nanogpt PATH] [--rounds 3]
        [--steps 8] [--key=value ...]

Each round starts every contender once, on the same tokens. A contender's time is the median of its
steps in a round without the first ones (compilation, warm-up); ratios are taken round by round.
PATH is a checkout of nanoGPT; it runs as it comes, and on a CPU also with the bf16 autocast that it
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
from benchmarks import (
    argument_parser,
    in_turn,
    median_ratio,
    medians,
    nanogpt,
    run_main,
    train,
    write,
)
from config import Config
from tools.command import count, table

PLAIN_ON_A_CPU = "nullcontext() if device_type == 'cpu' else "  # in nanoGPT's train.py
QUIET = ["--eval_interval=0", "--save_interval=0", "--eval_batches=1"]


def parse_args(argv):
    """The command line: our own options, and the settings of the run."""
    parser = argument_parser("throughput", __doc__)
    parser.add_argument("--preset", default="config/gpt2_small.py")
    nanogpt.add_option(parser)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, help="steps in a round; default: 8, on a GPU 100")
    parser.add_argument(
        "--skip",
        type=int,
        default=3,
        help="first measurements of a round that do not count; one is a step, on a GPU ten, since"
        " each makes it wait",
    )
    parser.add_argument("--name", help="of the result file; default: throughput_ and the preset's")
    return parser.parse_known_args(argv)


def our_run(arguments: list[str], steps: int, every: int, skip: int) -> dict:
    """One run of train.py: its seconds a step, and its MFU where the device's peak is known."""
    log = train(*arguments, *QUIET, f"--max_steps={steps}", f"--log_interval={every}")
    measured = [record for record in log if "loss" in record][skip:]
    speed = statistics.median(record["tokens_per_second"] for record in measured)
    c = settings.load(arguments)
    mfu = None
    if measured[0]["mfu"]:
        mfu = statistics.median(record["mfu"] for record in measured)
    return {"step_s": c.batch_size * c.block_size / speed, "mfu": mfu}


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


def nanogpt_run(copy: Path, arguments: list[str], skip: int) -> dict:
    """One run of nanoGPT's train.py: its seconds a step, from when its lines came."""
    stamps = nanogpt.iterations(nanogpt.train(copy, arguments))
    seconds = [(b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(stamps)]
    return {"step_s": statistics.median(seconds[skip:])}


def main(argv):
    args, extra = parse_args(argv)
    arguments = [args.preset, *extra]
    c = settings.load(arguments)
    device = hardware.find_device(c.device)
    if c.compile is None:  # train.py would not compile for so few steps
        arguments.append("--compile=True")
    every, steps = 1, args.steps or 8
    if device.type == "cuda":
        every, steps = 10, args.steps or 100
    with tempfile.TemporaryDirectory() as folder:
        contenders = {"ours": partial(our_run, arguments, steps, every, args.skip)}
        edits = {}
        if args.nanogpt:
            edits["nanoGPT"] = {}
        if args.nanogpt and device.type == "cpu":
            edits["nanoGPT with bf16 autocast"] = {PLAIN_ON_A_CPU: ""}
        theirs = nanogpt_arguments(c, device, steps, every)
        for name, edit in edits.items():
            copy = nanogpt.copy_checkout(args.nanogpt, Path(folder) / name, c.data_dir, edit)
            contenders[name] = partial(nanogpt_run, copy, theirs, args.skip)
        tokens = c.batch_size * c.block_size
        runs = in_turn(contenders, args.rounds, lambda r: f"{tokens / r['step_s']:,.0f} tokens/s")
    log = train(*arguments, *QUIET, "--max_steps=10", "--profile=True")
    parts = next(r["seconds_a_step"] for r in log if r.get("event") == "profile")

    rounds = [{name: result["step_s"] for name, result in r.items()} for r in runs]
    speeds = {name: round(tokens / seconds, 1) for name, seconds in medians(rounds).items()}
    over = {name: round(median_ratio(rounds, name, "ours"), 3) for name in edits}
    outside = (parts["data"] + parts["other"]) / sum(parts.values())
    figures = {
        "ms a step": 1e3 * tokens / speeds["ours"],
        "MFU": runs[-1]["ours"]["mfu"],
        "share outside the three parts": outside,
        "times nanoGPT's speed": over.get("nanoGPT"),
    }
    result = {
        "figures": {name: value for name, value in figures.items() if value is not None},
        "settings": arguments,
        "tokens_a_step": tokens,
        "seconds_a_step_by_round": rounds,
        "tokens_per_second_median": speeds,
        "ours_mfu": runs[-1]["ours"]["mfu"],
        "ours_profile_seconds_a_step": parts,
        "ours_share_outside_forward_backward_optimizer": round(outside, 5),
        "ours_over": over,
    }
    rows = []
    for name, speed in speeds.items():
        ratio = f"{over[name]:.2f}x" if name in over else ""
        rows.append([name, f"{speed:,.0f}", ratio])
    print(table(["", "tokens/s", "ours is"], rows))
    print(f"outside forward, backward and optimiser: {outside:.2%} of a step of ours")
    write(args.name or f"throughput_{Path(args.preset).stem}", result, device)


if __name__ == "__main__":
    run_main(main)
