"""What a budget buys on your text: which size, how many tokens, which loss.

    python -m tools.scaling --data data/main --hours 2 [--preset config/laptop.py] [--key=value ...]
    python -m tools.scaling --data data/main --max_cost 50 --cost_per_hour 8
    python -m tools.scaling --data data/main --flops 1e18

Trains small models of the preset's family for some minutes (scaling_runs.py), fits a law to their
losses (scaling_fit.py), times larger models on this machine, and writes the best as a preset. The
same command continues what was interrupted. docs/scaling.md explains the table.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import importlib.util
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

import config as settings
import hardware
from config import Config, ConfigError
from formats import files, run_log
from tokenizer_bpe import TokenizerError
from tools import command
from tools.scaling_fit import Law, effective_tokens, fit
from tools.scaling_runs import (
    LEAST_STEPS,
    MOST_EPOCHS,
    Size,
    Study,
    converged,
    settings_of,
)
from training import RunError

TOO_SMALL = (
    f"the budget pays for fewer than {LEAST_STEPS} steps of the smallest model; raise the budget,"
    " or lower --batch_size or --block_size"
)
PRESETS = {"cuda": "config/gpt2_small_modern.py", "cpu": "config/laptop.py"}
FACTORS = (1.0, 2.0, 0.5)  # on the preset's learning rates: the sweep's
TRAINING = 0.95  # share of a run's hours; the rest is evaluations and saves


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and settings for train.py."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.scaling",
        description="Predict the model size, tokens and loss that a budget buys."
        " Settings of train.py may follow, as --key=value.",
        allow_abbrev=False,
    )
    parser.add_argument("--data", required=True, help="prepared folder, such as data/main")
    parser.add_argument(
        "--preset", help="recipe; default: config/laptop.py, on a GPU gpt2_small_modern.py"
    )
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--hours", type=command.positive, help="budget in hours of this machine")
    budget.add_argument("--max_cost", type=command.positive, help="budget in money")
    budget.add_argument("--flops", type=command.positive, help="budget in FLOPs")
    parser.add_argument("--cost_per_hour", type=command.positive, help="the price of this machine")
    parser.add_argument(
        "--minutes", type=command.positive, default=10.0, help="for the small runs; default 10"
    )
    parser.add_argument("--out", type=Path, help="folder; default: checkpoints/scaling/DATA_PRESET")
    args, extra = parser.parse_known_args(argv)
    if args.max_cost and not args.cost_per_hour:
        parser.error(f"--max_cost {args.max_cost} needs --cost_per_hour, the machine's price")
    if args.max_cost:
        args.hours = args.max_cost / args.cost_per_hour
    if args.hours and 60 * args.hours < args.minutes:
        parser.error(
            f"the budget is {60 * args.hours:.3g} minutes, less than the --minutes"
            f" {args.minutes:g} of the small runs; raise it, or lower --minutes"
        )
    if not args.preset:
        chosen = [word for word in extra if word.startswith("--device=")]
        kind = hardware.find_device(settings.load([PRESETS["cpu"], *chosen]).device).type
        args.preset = PRESETS["cuda" if kind == "cuda" else "cpu"]
    return args, extra


def main(argv: list[str]) -> None:
    args, extra = parse_args(argv)
    importlib.import_module("scipy")  # the fit comes last; better missed now than then
    study = Study(args.data, args.preset, extra, args.out)
    price = args.cost_per_hour or study.config.cost_per_hour
    if args.flops and args.flops < LEAST_STEPS * study.flops_a_step(study.sizes[0]):
        raise ConfigError(TOO_SMALL)

    plan = study.plan(args.minutes)
    sizes = ", ".join(str(size) for size in dict.fromkeys(size for size, _ in plan))
    print(f"{len(plan)} small runs of the sizes {sizes} (layers x width)", flush=True)
    smallest = [run for run in plan if run[0] == plan[0][0]]
    size, steps = smallest[len(smallest) // 2]  # the learning rates are chosen with it
    factor = min(FACTORS, key=lambda factor: study.train(size, steps, factor)["loss"])
    runs = converged([study.train(size, steps, factor) for size, steps in plan])
    law = fit(
        parameters=[run["weights"] for run in runs],
        tokens=[effective_tokens(run["tokens"], study.unique) for run in runs],
        losses=[run["loss"] for run in runs],
        computes=[run["compute"] for run in runs],
    )

    largest = max(runs, key=lambda run: run["compute"])
    found = offers(study, law, args, largest["compute"] / largest["seconds"])
    best = min(found, key=lambda offer: offer.loss)
    print_offers(study, found, best, price)
    for sentence in doubts(study, found, best, law):
        print(sentence)
    run = study.folder / f"run_{best.size.n_layer}x{best.size.n_embd}_{best.steps}_steps"
    path = write_preset(study, best, factor, price, run)
    recommended = asdict(best) | {"run": run.name}  # tools.report shows it with that run
    files.write_json(study.folder / "scaling.json", {"runs": runs, "recommended": recommended})
    if importlib.util.find_spec("matplotlib"):
        draw(study, law, runs, best, run)
    print(f"recommended: {best.size}, in {path}\n  python train.py {path}")


# -- what the budget buys --------------------------------------------------------------------------


@dataclass
class Offer:
    """What to expect of a size for the budget, in nats a token; infinite where it does not suffice.

    compute: floating-point operations.
    """

    size: Size
    steps: int
    tokens: int
    hours: float
    compute: float
    loss: float = math.inf
    low: float = math.inf
    high: float = math.inf


def offer(study: Study, law: Law, size: Size, budget: argparse.Namespace, seconds: float) -> Offer:
    """A size within the budget. seconds: of a step; infinite where it does not fit."""
    flops = study.flops_a_step(size)
    if math.isinf(seconds):
        steps = 0
    elif budget.flops:
        steps = round(budget.flops / flops)
    else:
        steps = int(budget.hours * 3600 * TRAINING / seconds)
    tokens = steps * study.tokens_a_step
    hours = steps * seconds / TRAINING / 3600
    found = Offer(size, steps, tokens, hours, steps * flops)
    if steps >= LEAST_STEPS:
        effective = effective_tokens(tokens, study.unique)
        found.loss = law.loss(size.weights, effective)
        found.low, found.high = law.interval(size.weights, effective, found.compute)
    return found


def offers(study: Study, law: Law, budget: argparse.Namespace, speed: float) -> list[Offer]:
    """The sizes around the best one that the budget pays for, timed here, smallest first.

    speed: operations a second of the largest small run, from which the search begins. It moves to
    the better neighbour until there is none.
    """
    sizes = study.sizes
    guesses = [offer(study, law, s, budget, study.flops_a_step(s) / speed) for s in sizes]
    best = min(range(len(sizes)), key=lambda n: guesses[n].loss)
    found, middle = {}, None
    while best != middle:
        middle = best
        for n in range(max(0, middle - 1), min(middle + 2, len(sizes))):
            if n not in found:
                print(f"measuring {sizes[n]} ...", flush=True)
                seconds = study.step_seconds(sizes[n], max(1, guesses[n].steps))
                found[n] = offer(study, law, sizes[n], budget, seconds)
        best = min(found, key=lambda n: (found[n].loss, n))
    affordable = [found[n] for n in sorted(found) if math.isfinite(found[n].loss)]
    if not affordable:
        raise ConfigError(TOO_SMALL)
    return affordable


# -- what the user sees ----------------------------------------------------------------------------


def print_offers(study: Study, found: list[Offer], best: Offer, price: float) -> None:
    """The table. price: of an hour; 0: not known."""
    rows = []
    for o in found:
        losses = (o.loss, o.low, o.high)
        bits = [study.meta.bits_per_byte(loss, study.config.loss_on) for loss in losses]
        rows.append(
            [
                f"{o.size}{' <<' if o is best else ''}",
                command.short(o.size.parameters),
                command.short(o.tokens),
                f"{o.tokens / study.unique:.2f}",
                f"{o.hours:.2f}",
                f"{o.hours * price:,.2f}" if price else "-",
                f"{o.loss:.3f} ({o.low:.3f} to {o.high:.3f})",
                f"{bits[0]:.3f} ({bits[1]:.3f} to {bits[2]:.3f})",
            ]
        )
    head = ["size", "parameters", "tokens", "epochs", "hours", "cost", "loss", "bits per byte"]
    print(command.table(head, rows))


def doubts(study: Study, found: list[Offer], best: Offer, law: Law) -> list[str]:
    """What the evidence does not show, a sentence each."""
    sentences = []
    if best.high - best.low > 0.12 * best.loss:
        times = f"{best.compute / law.compute:,.0f} times the largest small one"
        sentences.append(f"the interval is wide: the run is {times}; raise --minutes to narrow it")
    if not law.saw_copying:
        sentences.append(
            f"the small runs see {law.tokens:,.0f} tokens at most, too few to show whether a model"
            " learns to copy from its context: on text that repeats itself, such as sources, the"
            " loss may be far lower, and larger models gain more"
        )
    close = [str(o.size) for o in found if o is not best and o.loss < 1.01 * best.loss]
    if close:
        sentences.append(f"within 1% of it: {', '.join(close)}; choose by speed and memory")
    epochs = best.tokens / study.unique
    if epochs > MOST_EPOCHS:
        times = f"{epochs:.1f} times"
        sentences.append(f"it sees the text {times}: more text would help more than hours")
    return sentences


def write_preset(study: Study, best: Offer, factor: float, price: float, run: Path) -> Path:
    """Write the recommended run as a preset: the settings that differ from the defaults."""
    c = replace(
        study.config,
        **settings_of(study.config, best.size, best.steps, factor),
        eval_batches=study.eval_batches,
        eval_interval=max(1, best.steps // 40),
        checkpoint_dir=str(run),
        cost_per_hour=price,
    )
    lines = [
        f"# {best.size}, {best.steps:,} steps, about {best.hours:.2f} hours: expect a loss of"
        f" {best.loss:.3f},",
        f"# with a 90% interval from {best.low:.3f} to {best.high:.3f} (docs/scaling.md).",
    ]
    defaults = asdict(Config())
    lines += [f"{name} = {v!r}" for name, v in asdict(c).items() if v != defaults[name]]
    path = study.folder / "recommended.py"
    files.write_text(path, "\n".join(lines) + "\n")
    return path


def draw(study: Study, law: Law, runs: list[dict], best: Offer, run: Path) -> None:
    """scaling.png: small runs, the law, the prediction, and the run itself as far as it is."""
    from matplotlib.figure import Figure

    figure = Figure((9, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for size in study.sizes:
        points = [(r["compute"], r["loss"]) for r in runs if r["n_embd"] == size.n_embd]
        if points:
            computes = np.geomspace(min(points)[0], best.compute)
            tokens = [effective_tokens(compute / size.flops, study.unique) for compute in computes]
            expected = [law.loss(size.weights, t) for t in tokens]
            (line,) = axes.plot(computes, expected, "--", linewidth=1, label=str(size))
            axes.plot(*zip(*points, strict=True), "o", color=line.get_color(), markersize=4)
    reach = [[best.loss - best.low], [best.high - best.loss]]
    axes.errorbar(best.compute, best.loss, reach, fmt="D", capsize=4, label="predicted")
    a_step = study.flops_a_step(best.size)
    evaluated = [r for r in run_log.iterate(run) if r["step"] and r.get("val_loss")]
    if evaluated:
        computes = [r["step"] * a_step for r in evaluated]
        axes.plot(computes, [r["val_loss"] for r in evaluated], color="red", label="the run")
    axes.set_xscale("log")
    axes.set_xlabel("floating-point operations of training")
    axes.set_ylabel("loss, nats a token")
    axes.legend()
    figure.savefig(study.folder / "scaling.png", dpi=110)


if __name__ == "__main__":
    command.run(
        "tools.scaling",
        main,
        mistakes=(ConfigError, TokenizerError, hardware.DeviceError),
        failures=(RunError,),
        stopped="stopped; the same command continues",
    )
