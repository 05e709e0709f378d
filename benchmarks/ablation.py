"""Train a preset with each of several settings and several seeds, and compare the losses.

    python -m benchmarks.ablation PRESET --set NAME=VALUE,VALUE [--set ...] [--seeds 3] [--key=V]

Several --set are combined. Each run is one of train.py that ends with the loss on the whole
validation split. The table has each setting's mean loss, in nats a token and in bits per byte, the
spread of its seeds, and how far it is from the first setting's: a difference that is not larger
than the spread may be chance.
"""

import itertools
import statistics
import sys

import config as settings
import hardware
from benchmarks import argument_parser, run_main, train, write
from command_line import count
from formats.data_folder import read_meta
from tools import command


def variants(choices: list[str]) -> list[str]:
    """The arguments of each setting: ["a=1,2", "b=3"] is ["--a=1 --b=3", "--a=2 --b=3"]."""
    parts = []
    for choice in choices:
        name, _, values = choice.partition("=")
        parts.append([f"--{name}={value}" for value in values.split(",")])
    return list(map(" ".join, itertools.product(*parts)))


def rows(losses: dict[str, list[float]], bits_a_nat: float) -> list[list[str]]:
    """The table's rows: runs, mean, spread, bits per byte, and the difference from the first row.

    losses: of each setting, one a seed, in nats a token. Spread: the largest minus the smallest.
    """
    spreads = {name: max(values) - min(values) for name, values in losses.items()}
    base = statistics.mean(next(iter(losses.values())))
    found = []
    for name, values in losses.items():
        mean = statistics.mean(values)
        row = [name, str(len(values)), f"{mean:.4f}", f"{spreads[name]:.4f}"]
        row += [f"{mean * bits_a_nat:.4f}", f"{mean - base:+.4f}"]
        is_clear = abs(mean - base) > max(spreads.values())
        found.append([*row, "yes" if is_clear else "no"])
    found[0][-2:] = ["", ""]
    return found


HEAD = ["", "runs", "loss", "spread", "bits per byte", "difference", "larger than spread"]


def main(argv: list[str]) -> None:
    parser = argument_parser("ablation", __doc__)
    parser.add_argument("preset")
    text = "a setting and the values to try; several are combined"
    parser.add_argument(
        "--set", action="append", required=True, metavar="NAME=VALUE,...", help=text
    )
    parser.add_argument("--seeds", type=count, default=3)
    args, extra = parser.parse_known_args(argv)
    losses = {name: [] for name in variants(args.set)}
    for name in losses:  # a mistyped setting ends all before the first run
        c = settings.load([args.preset, *name.split(), *extra])
    bits_a_nat = read_meta(c.data_dir).bits_per_byte(1.0, c.loss_on)
    for seed, name in itertools.product(range(1, args.seeds + 1), losses):
        log = train(args.preset, *name.split(), *extra, "--eval_batches=0", f"--seed={seed}")
        loss = [record["val_loss"] for record in log if "val_loss" in record][-1]
        losses[name].append(loss)
        print(f"seed {seed}, {name}: {loss:.4f}", file=sys.stderr, flush=True)
        result = {"command": [args.preset, *extra], "losses": losses}
        path = write("ablation", result, hardware.find_device(c.device))
    print(command.table(HEAD, rows(losses, bits_a_nat)))
    print(f"written to {path}")


if __name__ == "__main__":
    run_main("ablation", main)
