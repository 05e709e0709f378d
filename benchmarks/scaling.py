"""Losses predicted from small runs beside those of larger ones: is tools.scaling to be believed?

    python prepare_data.py --vocab_size 1024 --out data/stdlib_1024
    python prepare_data.py '.venv/lib/python3*/site-packages/torch/include/**/*.h' --clean \\
        --dedupe near --vocab_size 1024 --out data/headers_1024
    python -m benchmarks.scaling [--tasks stdlib_1024:gpt2 ...] [--compute 2e11]

For each text and recipe: small runs of at most C operations are fitted, and runs of 4 C and 16 C,
of other shapes and tokens, are predicted. Each of them is train.py in a process of its own, in
--work; those that are finished are not trained again. Writes results/scaling_cpu.json, where the
tasks of earlier calls stay, and a picture.
"""

import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np

import config as settings
import hardware
from benchmarks import RESULTS, argument_parser, can_draw, print_table, write
from formats.data_folder import read_meta
from tools.scaling_family import settings_of, size_of
from tools.scaling_fit import effective_tokens, fit_runs
from tools.scaling_runs import evaluations, seconds_of, train

RECIPES = {
    "gpt2": ["config/shakespeare_char.py", "--learning_rate=1.6e-3"],
    "modern": ["config/demo.py", "--learning_rate=4e-3", "--muon_lr=0.03"],
}
SHARED = [
    "--block_size=128",
    "--batch_size=4",
    "--tie_weights=False",
    "--compile=False",
    "--eval_batches=64",
    "--sample_prompts=[]",
    "--report_minutes=0",
    "--save_interval=0",
    "--keep_last=1",
    "--n_head=4",  # heads of 32 at all widths, and
    "--n_embd=128",  # the width whose learning rates those of the recipes are
]
TASKS = [f"{text}:{recipe}" for text in ("stdlib_1024", "headers_1024") for recipe in RECIPES]
# Layers and widths. Each of those fitted is trained on C, C / 2, C / 4 and C / 8, as far as that
# makes LEAST_STEPS.
FITTED = [(2, 32), (2, 64), (3, 96), (3, 128)]
PREDICTED = {4: [(2, 96), (4, 96), (4, 128)], 16: [(2, 128), (4, 128), (4, 192)]}
LEAST_STEPS = 40
EVALUATIONS = 12  # of a predicted run: its curve is one that training/forecast.py is tried on
AIMS = {4: 0.02, 16: 0.04}


def runs_of(c, meta, compute):
    """All runs of a task: what is fitted first, then the predicted ones; (size, plain values)."""
    wanted = [(shape, compute / 2**n, 1) for shape in FITTED for n in range(4)]
    wanted += [(shape, compute * times, times) for times in PREDICTED for shape in PREDICTED[times]]
    found = []
    for (layers, width), operations, times in wanted:
        size = size_of(c, meta, layers, width)
        tokens_a_step = c.batch_size * c.block_size
        steps = round(operations / size.flops / tokens_a_step)
        if steps < LEAST_STEPS:
            continue
        tokens = steps * tokens_a_step
        values = {"times": times, "steps": steps, "tokens": tokens}
        found.append((size, asdict(size) | values | {"compute": tokens * size.flops}))
    return found


def train_all(recipe, data, compute, work):
    """The runs of a task, trained: plain values, with the final loss and the seconds of each."""
    arguments = [*RECIPES[recipe], *SHARED, f"--data_dir={data}"]
    c = settings.load(arguments)
    runs = []
    for size, run in runs_of(c, read_meta(data), compute):
        values = settings_of(c, size, run["steps"])
        values["eval_interval"] = 0
        if run["times"] > 1:
            values["eval_interval"] = run["steps"] // EVALUATIONS
        name = f"{run['times']}C_{run['n_layer']}x{run['n_embd']}_{run['steps']}"
        run["loss"] = round(train(work / name, arguments, values), 4)
        run["seconds"] = round(seconds_of(work / name), 1)
        run["warmup_steps"] = values["warmup_steps"]
        if run["times"] > 1:
            run["curve"] = [[step, round(loss, 4)] for step, loss in evaluations(work / name)]
        print(f"{name}: {run['loss']} after {run['seconds']} s", flush=True)
        runs.append(run)
    return runs


def judge(runs, unique):
    """The law of the small runs, and what it says of the others, in place. unique: tokens."""
    for run in runs:
        run["effective"] = effective_tokens(run["tokens"], unique)
    small = [run for run in runs if run["times"] == 1 and math.isfinite(run["loss"])]
    law = fit_runs(small, unique)
    for run in runs:
        run["predicted"] = law.loss(run["weights"], run["effective"])
        run["low"], run["high"] = law.interval(run["weights"], run["effective"], run["compute"])
        run["off"] = run["predicted"] / run["loss"] - 1
    result = {"law": law.to_json()}
    for times, aim in AIMS.items():
        large = [run for run in runs if run["times"] == times]
        recommended = min(large, key=lambda run: run["predicted"])
        best = min(large, key=lambda run: run["loss"])
        result[f"{times}C"] = {
            "aim": aim,
            "worst_off": max((run["off"] for run in large), key=abs),
            "within_interval": sum(run["low"] <= run["loss"] <= run["high"] for run in large),
            "of": len(large),
            "recommended": f"{recommended['n_layer']} x {recommended['n_embd']}",
            "best": f"{best['n_layer']} x {best['n_embd']}",
            "recommended_above_best": recommended["loss"] / best["loss"] - 1,
        }
    return result


def show(task, runs, result):
    """Print the predicted runs of a task."""
    rows = [
        [
            f"{run['times']}C  {run['n_layer']} x {run['n_embd']}",
            f"{run['tokens']:,}",
            f"{run['loss']:.4f}",
            f"{run['predicted']:.4f}",
            f"{run['low']:.3f} to {run['high']:.3f}",
            f"{run['off']:+.1%}",
        ]
        for run in runs
        if run["times"] > 1
    ]
    print_table([task, "tokens", "loss", "predicted", "interval", "off"], rows)
    for times in AIMS:
        r = result[f"{times}C"]
        print(
            f"{times}C: worst {r['worst_off']:+.1%}, aim {r['aim']:.0%}; recommended"
            f" {r['recommended']}, {r['recommended_above_best']:.1%} above the best tried"
        )


def draw(tasks, path):
    """Loss over operations, a panel a task: what was fitted, predicted and came out."""
    import matplotlib
    from matplotlib.figure import Figure

    from tools.charts import BLUE, GREY, RED, STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11, 3.2 * math.ceil(len(tasks) / 2)), layout="constrained")
        panels = np.atleast_1d(figure.subplots(math.ceil(len(tasks) / 2), 2)).flatten()
        for axes, (name, task) in zip(panels, tasks.items(), strict=False):
            small = [run for run in task["runs"] if run["times"] == 1]
            large = [run for run in task["runs"] if run["times"] > 1]
            x = [run["compute"] for run in small]
            axes.plot(x, [run["loss"] for run in small], "o", color=GREY, label="fitted")
            x = [run["compute"] * (0.9 + 0.1 * (n % 3)) for n, run in enumerate(large)]
            middle = np.array([run["predicted"] for run in large])
            below = middle - [run["low"] for run in large]
            above = np.array([run["high"] for run in large]) - middle
            axes.errorbar(
                x, middle, (below, above), fmt="_", color=BLUE, capsize=2, label="predicted"
            )
            axes.plot(x, [run["loss"] for run in large], "x", color=RED, label="came out")
            axes.set_xscale("log")
            axes.set_title(name)
            axes.set_xlabel("operations")
            axes.set_ylabel("loss, nats a token")
            axes.legend(fontsize=8)
        for axes in panels[len(tasks) :]:
            axes.set_axis_off()
        figure.savefig(path, dpi=110)
        print(f"drawn to {path}")


def finished_tasks(path, compute):
    """The tasks of earlier calls with so many operations, by name: a new call adds to them."""
    known = json.loads(path.read_text()) if path.exists() else {"compute": None}
    return known["tasks"] if known["compute"] == compute else {}


def main(argv):
    parser = argument_parser("scaling", __doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS, metavar="TEXT:RECIPE")
    parser.add_argument("--data", type=Path, default=Path("data"), help="where the texts lie")
    parser.add_argument("--compute", type=float, default=2e11, help="C, in operations")
    parser.add_argument("--work", type=Path, default=Path("checkpoints/scaling_benchmark"))
    args = parser.parse_args(argv)
    device = hardware.find_device("auto")
    path = RESULTS / f"scaling_{device.type}.json"
    found = finished_tasks(path, args.compute)
    for task in args.tasks:
        text, recipe = task.split(":")
        data = args.data / text
        runs = train_all(recipe, data, args.compute, args.work / f"{text}_{recipe}")
        result = judge(runs, read_meta(data).splits["train"].tokens)
        show(task, runs, result)
        found[task] = {"result": result, "runs": runs}
    write("scaling", device, {"compute": args.compute, "tasks": found})
    if can_draw():
        draw(found, path.with_suffix(".png"))


if __name__ == "__main__":
    main(sys.argv[1:])
