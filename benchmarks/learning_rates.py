"""Learning rates that carry over to larger models: a fitted rule against mu-parametrisation.

    python prepare_data.py --vocab_size 1024 --out data/stdlib_1024
    python -m benchmarks.learning_rates --data data/stdlib_1024 [--key=value ...]

Two recipes, GPT-2 with AdamW and the modern one with Muon, at three widths, each with learning
rates a factor of two apart. Swept twice: as train.py has it, and in mu-parametrisation (Yang et
al., 2022, "Tensor Programs V"), where initial weights and the learning rates of matrices follow
from the width, so that one learning rate does for all. GPT-2 is also swept over depth, batch and
steps. What is predicted for the largest width from the smaller ones is compared with the best of
the sweep there. A run that is done is not done again: runs.jsonl in --work keeps them.

mu-parametrisation is no setting: the lines below change a model and its optimiser in place.
"""

import json
import math
import sys
import time
from pathlib import Path

import numpy as np

import config as settings
import hardware
from benchmarks import argument_parser, print_table, write
from tools.scaling_family import WIDTH_POWER
from training.setup import build

BASE = 64  # the width from which the others follow
WIDTHS = [64, 128, 256]
FACTORS = [0.25, 0.5, 1.0, 2.0, 4.0]  # times the preset's learning rates
# The first of each is the usual one.
LAYERS, BATCHES, STEPS = [2, 6], [8, 2, 32], [200, 50, 800]
HEAD = 32
RECIPES = {
    "GPT-2": ["config/shakespeare_char.py", "--learning_rate=4e-3"],
    "modern": ["config/demo.py"],
}
SHARED = [
    "--block_size=128",
    "--tie_weights=False",
    "--compile=False",
    "--eval_batches=64",
    "--sample_prompts=[]",
]


def cases():
    """What is trained: each a recipe, a parametrisation, a shape, a batch and a factor."""
    found = []
    for recipe in RECIPES:
        for width in WIDTHS:
            found += sweep(recipe, width=width)
    for steps in STEPS[1:]:
        found += sweep("GPT-2", steps=steps)
    for layers in LAYERS[1:]:
        found += sweep("GPT-2", layers=layers)
    for batch in BATCHES[1:]:
        found += sweep("GPT-2", batch=batch)
    for recipe in RECIPES:
        for width in WIDTHS[1:]:  # at BASE both are one
            found += sweep(recipe, mu=True, width=width)
    return found


def sweep(recipe, mu=False, width=BASE, layers=LAYERS[0], batch=BATCHES[0], steps=STEPS[0]):
    """The runs of one sweep."""
    shape = {"recipe": recipe, "mu": mu, "width": width, "layers": layers}
    return [shape | {"batch": batch, "steps": steps, "factor": factor} for factor in FACTORS]


def use_mu_parametrisation(run, width):
    """Initial weights and learning rates of Yang et al.'s table 8, relative to BASE, in place.

    Heads are equally wide in all models, so attention's scale stays. Muon's own scale is left: the
    size of its steps follows from the matrices' shapes already.
    """
    ratio = BASE / width
    model, optimizer = run.state.model, run.state.optimizer
    names = {p: name for name, p in model.named_parameters()}
    groups = []
    for group in optimizer.param_groups:
        if group.get("muon"):
            groups.append(group)
            continue
        options = {k: v for k, v in group.items() if k not in ("params", "scale")}
        narrower = [p for p in group["params"] if p.dim() == 2 and scales(names[p])]
        others = [p for p in group["params"] if p not in set(narrower)]
        if narrower:
            scale = group["scale"] * ratio
            groups.append(options | {"params": narrower, "scale": scale})
        if others:
            groups.append(options | {"params": others, "scale": group["scale"]})
    optimizer.param_groups[:] = groups
    if not run.config.zero_init:
        for name, p in model.named_parameters():
            if p.dim() == 2 and scales(name):
                p.data *= ratio if name == "lm_head.weight" else ratio**0.5


def scales(name):
    """Whether a matrix's learning rate follows the width: its input is as wide as the model."""
    return name.startswith("h.") or name == "lm_head.weight"


def train(case, data, extra):
    """The validation loss in nats a token at the end of a run, and its seconds."""
    arguments = [*RECIPES[case["recipe"]], *SHARED, f"--data_dir={data}", *extra]
    arguments += [f"--n_embd={case['width']}", f"--n_head={case['width'] // HEAD}"]
    arguments += [f"--n_layer={case['layers']}", f"--batch_size={case['batch']}"]
    arguments += [f"--max_steps={case['steps']}", "--checkpoint_dir=checkpoints/none"]
    if case["recipe"] == "GPT-2":
        arguments += [f"--warmup_steps={case['steps'] // 10}"]
    c = settings.load(arguments)
    c.learning_rate *= case["factor"]
    c.muon_lr *= case["factor"]
    c.eval_batches = c.eval_batches * BATCHES[0] // case["batch"]  # the same windows
    run = build(c)
    if case["mu"]:
        use_mu_parametrisation(run, case["width"])
    began = time.perf_counter()
    while not run.schedule.done:
        run.trainer.step()
    loss = run.trainer.evaluate()
    return {"loss": round(loss, 4), "seconds": round(time.perf_counter() - began, 1)}


def valley(points):
    """Where a parabola through a sweep has its lowest point, as (log2 of the factor, its loss).

    points: [(factor, loss)]. Through the best and its neighbours; at an edge the edge itself.
    """
    points = sorted((math.log2(f), loss) for f, loss in points if math.isfinite(loss))
    best = min(range(len(points)), key=lambda n: points[n][1])
    if best in (0, len(points) - 1):
        return points[best]
    (x, y) = zip(*points[best - 1 : best + 2], strict=True)
    a, b, c = np.polyfit(x, y, 2)
    return -b / (2 * a), c - b * b / (4 * a)


def loss_at(points, log_factor):
    """A sweep's loss at a learning rate between those tried, along straight lines; clipped."""
    points = sorted((math.log2(f), loss) for f, loss in points)
    return float(np.interp(log_factor, *zip(*points, strict=True)))


def compare(runs, recipe):
    """What rules and mu-parametrisation choose for the largest width, from the smaller ones.

    A rule fitted at two of them; the one that tools.scaling has, whose powers are fitted to all
    three; the same learning rate as at the smallest. Each beside the best of the sweeps.
    """
    plain = {w: points_of(runs, recipe, mu=False, width=w) for w in WIDTHS}
    mu = {w: points_of(runs, recipe, mu=True, width=w) for w in WIDTHS[1:]}
    best = {w: valley(plain[w]) for w in WIDTHS}
    valleys = [best[w][0] for w in WIDTHS]
    small, middle, large = WIDTHS
    slope = (best[middle][0] - best[small][0]) / math.log2(middle / small)
    ruled = best[middle][0] + slope * math.log2(large / middle)
    power = WIDTH_POWER[settings.load(RECIPES[recipe]).optimizer]
    shipped = best[small][0] + power * math.log2(large / small)
    chosen = {
        "fitted rule": (ruled, loss_at(plain[large], ruled)),
        "tools.scaling's rule": (shipped, loss_at(plain[large], shipped)),
        "mu-parametrisation": (best[small][0], loss_at(mu[large], best[small][0])),
        "the same": (best[small][0], loss_at(plain[large], best[small][0])),
    }
    lowest = min(loss for _, loss in plain[large] + mu[large])
    return {
        "best_factor": {str(w): round(2 ** best[w][0], 3) for w in WIDTHS},
        "best_factor_mu": {str(w): round(2 ** valley(mu[w])[0], 3) for w in WIDTHS[1:]},
        "exponent_of_two_widths": round(slope, 3),
        "exponent_of_width": round(np.polyfit(np.log2(WIDTHS), valleys, 1)[0], 3),
        "best_of_the_sweeps": lowest,
        "chosen": {
            name: {"factor": round(2**x, 3), "loss": round(loss, 4), "off": loss / lowest - 1}
            for name, (x, loss) in chosen.items()
        },
    }


def points_of(runs, recipe, **shape):
    """[(factor, loss)] of a sweep."""
    wanted = {"recipe": recipe, "mu": False, "width": BASE, "layers": LAYERS[0]}
    wanted |= {"batch": BATCHES[0], "steps": STEPS[0]} | shape
    return [
        (run["factor"], run["loss"])
        for run in runs
        if all(run[name] == value for name, value in wanted.items())
    ]


def exponents(runs):
    """The powers of depth, batch and steps that GPT-2's best learning rate follows."""
    found = {}
    for name, values in (("layers", LAYERS), ("batch", BATCHES), ("steps", STEPS)):
        valleys = [valley(points_of(runs, "GPT-2", **{name: value}))[0] for value in values]
        slope, _ = np.polyfit(np.log2(values), valleys, 1)
        found[name] = {
            "best_factor": {str(v): round(2**x, 3) for v, x in zip(values, valleys, strict=True)},
            "exponent": round(float(slope), 3),
        }
    return found


def main(argv):
    parser = argument_parser("learning_rates", __doc__)
    parser.add_argument("--data", default="data/stdlib_1024")
    parser.add_argument("--work", type=Path, default=Path("checkpoints/learning_rates"))
    args, extra = parser.parse_known_args(argv)
    args.work.mkdir(parents=True, exist_ok=True)
    kept = args.work / "runs.jsonl"
    known = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    runs = []
    for case in cases():
        case |= {"data": args.data, "extra": extra}
        run = next((run for run in known if case.items() <= run.items()), None)
        if not run:
            run = case | train(case, args.data, extra)
            print(json.dumps(run), flush=True)
            with open(kept, "a", encoding="utf-8") as file:
                file.write(json.dumps(run) + "\n")
        runs.append(run)
    result = {recipe: compare(runs, recipe) for recipe in RECIPES}
    result["GPT-2"]["exponents"] = exponents(runs)
    for recipe in RECIPES:
        rows = [
            [name, f"{c['factor']:.2f}", f"{c['loss']:.4f}", f"{c['off']:+.1%}"]
            for name, c in result[recipe]["chosen"].items()
        ]
        print_table([f"{recipe} at width {WIDTHS[-1]}", "factor", "loss", "off the best"], rows)
    device = hardware.find_device(settings.load([*RECIPES["GPT-2"], *SHARED, *extra]).device)
    write("learning_rates", device, {"result": result, "runs": runs})


if __name__ == "__main__":
    main(sys.argv[1:])
