"""Training speed of train.py and of nanoGPT's, whole scripts both, at the shape of a preset.

    python -m benchmarks.throughput [--preset config/gpt2_small.py] [--nanogpt PATH] [--rounds 3]
        [--steps 8] [--key=value ...]

Each round starts every contender once, on the same tokens. A contender's speed is the median of ten
measurements or fewer in a round, without the first ones (compilation, warm-up); ratios are taken
round by round. PATH is a checkout of nanoGPT; it runs unchanged, and on a CPU also with the bf16
autocast that it lacks there. Ours runs once more with --profile for the share of a step outside
forward, backward and optimizer.
"""

import itertools
import statistics
import tempfile
from functools import partial
from pathlib import Path

import config as settings
import hardware
from benchmarks import argument_parser, compare, in_turn, nanogpt, report, run_main, train
from command_line import count

SKIPPED = 3  # measurements at the start of a round, while a run warms up
PLAIN_ON_A_CPU = "nullcontext() if device_type == 'cpu' else "  # in nanoGPT's train.py
# Settings of a run that is to be timed; train.py would not compile for so few steps.
TIMED = ["--eval_interval=0", "--save_interval=0", "--eval_batches=1", "--sample_prompts=[]"]
TIMED += ["--compile=True"]


def our_speed(arguments: list[str], steps: int) -> float:
    """Tokens/s of one run of train.py, by its log."""
    log = train(*arguments, f"--max_steps={steps}", f"--log_interval={interval(steps)}")
    speeds = [record["tokens_per_second"] for record in log if "loss" in record]
    return statistics.median(speeds[SKIPPED:])


def interval(steps: int) -> int:
    """Steps between log lines, at each of which a GPU waits."""
    return max(1, steps // 10)


def nanogpt_speed(copy: Path, arguments: list[str], tokens: int) -> float:
    """Tokens/s of one run of nanoGPT's train.py, from when its lines came. tokens: of a step."""
    stamps = nanogpt.train(copy, arguments)
    speeds = [tokens * (n - m) / (b - a) for (m, a), (n, b) in itertools.pairwise(stamps)]
    return statistics.median(speeds[SKIPPED:])


def share_outside(arguments: list[str]) -> float:
    """The share of a step of ours outside forward, backward and optimizer."""
    log = train(*arguments, "--max_steps=10", "--profile=True")
    parts = next(r["seconds_a_step"] for r in log if r.get("event") == "profile")
    return (parts["data"] + parts["other"]) / sum(parts.values())


def main(argv):
    parser = argument_parser("throughput", __doc__)
    parser.add_argument("--preset", default="config/gpt2_small.py")
    nanogpt.add_option(parser)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--steps", type=count, default=8, help="in a round; default %(default)s")
    parser.add_argument("--name", help="of the result file; default: throughput_ and the preset's")
    args, extra = parser.parse_known_args(argv)
    arguments = [args.preset, *TIMED, *extra]
    c = settings.load(arguments)
    device, tokens = hardware.find_device(c.device), c.batch_size * c.block_size
    contenders = {"ours": partial(our_speed, arguments, args.steps)}
    theirs = [*nanogpt.arguments(c), f"--max_iters={args.steps}"]
    theirs += [f"--log_interval={interval(args.steps)}"]
    theirs += ["--eval_iters=1", "--eval_interval=1000000", "--always_save_checkpoint=False"]
    edits = {"nanoGPT": {}}
    if device.type == "cpu":
        edits["nanoGPT with bf16 autocast"] = {PLAIN_ON_A_CPU: ""}
    with tempfile.TemporaryDirectory() as folder:
        for name, edit in edits.items() if args.nanogpt else ():
            copy = nanogpt.copy_checkout(args.nanogpt, Path(folder) / name, c.data_dir, edit)
            contenders[name] = partial(nanogpt_speed, copy, theirs, tokens)
        rounds = in_turn(contenders, args.rounds)

    figures = compare(rounds, "ours")
    figures["ours, ms per step"] = 1e3 * tokens / figures["ours"]
    figures["ours, outside forward, backward and optimizer"] = share_outside(arguments)
    name = args.name or f"throughput_{Path(args.preset).stem}"
    report(name, figures, device, settings=arguments, tokens_per_second_by_round=rounds)


if __name__ == "__main__":
    run_main("throughput", main)
