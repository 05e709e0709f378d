"""What tools.scaling promised of the runs that it recommended, beside what they ended with.

    python -m tools.scaling --data data/NAME --hours 0.1 --minutes 5 ...
    python train.py checkpoints/scaling/NAME_demo/recommended.py
    python -m benchmarks.promise checkpoints/scaling/NAME_demo [...]

Takes finished studies, trains nothing. Adds to results/promise.json, curves included, which
benchmarks/forecast.py tries its forecasts on.
"""

import json
import math
import sys
from pathlib import Path

from benchmarks import RESULTS, argument_parser, print_table, write_json
from formats import files
from tools import scaling_study
from tools.scaling_runs import evaluations, final_loss

SETTINGS = ("max_steps", "warmup_steps", "learning_rate", "min_lr", "lr_schedule", "decay_fraction")


def outcome(folder: Path) -> dict:
    """The promise of a study and the outcome of its run."""
    found = scaling_study.read(folder)
    if not found:
        sys.exit(f"{folder} holds no {scaling_study.FINDINGS}; give the folder of a finished study")
    promised, loss = found.recommended, final_loss(found.run)
    if loss is None or not math.isfinite(loss):
        sys.exit(f"{found.run} did not come to its end; python train.py {folder}/recommended.py")
    c = files.read_json(found.run / "config.json")
    return {
        "data": c["data_dir"],
        "size": f"{promised['size']['n_layer']} x {promised['size']['n_embd']}",
        "small_runs": len(found.runs),
        "extrapolation": promised["extrapolation"],
        "promised": [promised["loss"], promised["low"], promised["high"]],
        "loss": loss,
        "off": promised["loss"] / loss - 1,
        "inside": promised["low"] <= loss <= promised["high"],
        "settings": {name: c[name] for name in SETTINGS},
        "curve": evaluations(found.run),
    }


def earlier() -> list[dict]:
    """The outcomes that are known already: a new call adds to them."""
    path = RESULTS / "promise.json"
    return json.loads(path.read_text())["runs"] if path.exists() else []


def main(argv):
    parser = argument_parser("promise", __doc__)
    parser.add_argument("studies", nargs="+", type=Path)
    outcomes = {}
    for known in earlier() + [outcome(folder) for folder in parser.parse_args(argv).studies]:
        outcomes[known["data"], known["size"], known["settings"]["max_steps"]] = known
    outcomes = list(outcomes.values())
    rows = [
        [
            f"{o['data']}, {o['size']}",
            f"{o['extrapolation']:.0f}",
            "{:.3f} ({:.3f} to {:.3f})".format(*o["promised"]),
            f"{o['loss']:.3f}",
            f"{o['off']:+.1%}",
        ]
        for o in outcomes
    ]
    print_table(["run", "times the small ones", "promised", "came out", "off"], rows)
    write_json("promise", {"runs": outcomes})


if __name__ == "__main__":
    main(sys.argv[1:])
