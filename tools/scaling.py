"""What a budget will buy on your text: which size, how many tokens, which loss.

    python -m tools.scaling --data data/main --hours 2 [--preset config/laptop.py] [--key=value ...]
    python -m tools.scaling --data data/main --max_cost 50 --cost_per_hour 8
    python -m tools.scaling --data data/main --flops 1e18

Trains small models of the preset's family for some minutes, fits their losses (scaling_fit.py),
measures the speed of larger ones here, and recommends one as a preset that is ready to run. The
same command continues what was interrupted. docs/scaling.md explains the table.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import copy
import importlib
import math
from dataclasses import asdict
from pathlib import Path

import config as settings
import hardware
from config import Config, ConfigError
from formats import files
from formats.data_folder import read_meta
from tokenizer_bpe import TokenizerError
from tools import command, scaling_study
from tools.command import short, table
from tools.scaling_family import Size, family, settings_of
from tools.scaling_fit import fit_runs
from tools.scaling_plan import (
    LEAST_STEPS,
    TRAINING,
    PlanError,
    SmallRun,
    check_budget,
    doubts,
    finite,
    offer,
    offers,
    small_runs,
)
from tools.scaling_runs import RunFailed, final_loss, seconds_of, train
from training.conversations import check_validated
from training.errors import RunError
from training.memory import release
from training.plan import check_ram
from training.setup import build
from training.terminal import duration
from training.trial import measure

PRESETS = {"cuda": "config/gpt2_small_modern.py", "cpu": "config/laptop.py"}
EVALUATED = 1 << 17  # tokens of an evaluation, the same ones for small runs and large
SWEPT = 4  # times at most that the learning rate is doubled, or halved
# Of every small run: what costs time and shows nothing, and what hides how long a step takes.
QUIET = {
    "compile": False,
    "eval_interval": 0,
    "save_interval": 0,
    "keep_last": 1,
    "sample_prompts": [],
    "epochs": None,  # a run's length is in steps here
    "max_hours": None,
    "max_cost": None,
    "mirror": None,
    "wandb": None,
    "tensorboard": False,
    "profile": False,
}
PATHS = ("data_dir", "checkpoint_dir")  # the same text may lie elsewhere


class Study:
    """A family on a text: its settings, its small runs and where they lie.

    arguments: the preset and settings, as train.py takes them.
    """

    def __init__(self, data: str, preset: str, extra: list[str], folder: Path | None):
        self.arguments = [preset, f"--data_dir={data}", *extra]
        self.config = settings.load([*self.arguments, "--checkpoint_dir=checkpoints/none"])
        self.config.epochs = None
        refuse_other_shapes(self.config)
        self.meta = read_meta(data)
        check_validated(data, self.meta, self.config.loss_on)
        self.sizes = family(self.config, self.meta)
        self.tokens_a_step = self.config.batch_size * self.config.block_size
        self.unique = self.meta.splits["train"].tokens
        self.eval_batches = math.ceil(EVALUATED / self.tokens_a_step)
        name = f"{Path(data).resolve().name}_{Path(preset).stem}"
        self.folder = folder or Path("checkpoints/scaling") / name
        self.seconds = files.read_json(self.folder / "speeds.json") or {}  # a step's, by size

    def claim_folder(self) -> None:
        """Write down whose small runs the folder holds. Raises ConfigError for another family's."""
        mine = {"settings": asdict(self.config), "data": self.meta.identity()}
        known = files.read_json(self.folder / "family.json", settings=dict, data=dict)
        if known:
            before = asdict(Config()) | known["settings"]  # that had fewer, perhaps
            now = mine["settings"].items()
            differ = [name for name, value in now if name not in PATHS and before[name] != value]
            if known["data"] != mine["data"]:
                differ.append("text")
            if differ and any(self.folder.glob("*_steps_*")):
                raise ConfigError(
                    f"{self.folder} holds small runs of other {', '.join(differ)}; give --out"
                    " another folder, or delete that one"
                )
            if differ:  # what was timed and planned for others
                self.seconds = {}
                (self.folder / "plans.json").unlink(missing_ok=True)
        if self.folder.is_file():
            raise ConfigError(f"--out {self.folder}: it must be a folder, there or to be made")
        self.folder.mkdir(parents=True, exist_ok=True)
        files.write_json(self.folder / "family.json", mine)

    def plan(self, minutes: float) -> list[SmallRun]:
        """The small runs for so many minutes: those of the first time, if they were planned before.

        Speeds measured again would be others, and so would the runs.
        """
        path, name = self.folder / "plans.json", f"{minutes:g} minutes"
        by_name = {str(size): size for size in self.sizes}
        known = files.read_json(path) or {}
        if name in known and all(size in by_name for size, _ in known[name]):
            return [SmallRun(by_name[size], steps) for size, steps in known[name]]
        tokens = (self.tokens_a_step, self.unique)
        runs = small_runs(self.sizes, self.step_seconds, 60 * minutes, *tokens)
        known[name] = [[str(run.size), run.steps] for run in runs]
        files.write_json(path, known)
        return runs

    def check_budget(self, hours: float | None, flops: float | None) -> None:
        """Raises PlanError for a budget that pays for nothing, before the small runs take time."""
        smallest = self.sizes[0]
        if flops:
            check_budget(flops / smallest.flops / self.tokens_a_step)
        elif step_s := self.step_seconds(smallest):
            check_budget(hours * 3600 * TRAINING / step_s)

    def step_seconds(self, size: Size, steps: int = 0) -> float | None:
        """Seconds of an optimiser step here, measured; None where it does not fit into memory.

        steps: of the run that it is for, which decides whether it is compiled; 0: of a small run.
        speeds.json keeps it, so that the same command recommends the same again.
        """
        device = hardware.describe(hardware.find_device(self.config.device))
        name = f"{size}, {steps} steps, {device}"
        if name not in self.seconds:
            self.seconds[name] = self._measure(size, steps)
            measured = {name: seconds for name, seconds in self.seconds.items() if seconds}
            files.write_json(self.folder / "speeds.json", measured)
        return self.seconds[name]

    def _measure(self, size: Size, steps: int) -> float | None:
        c = copy.copy(self.config)
        values = settings_of(c, size, steps or LEAST_STEPS)
        values["checkpoint_dir"] = str(self.folder / "none")
        if not steps:
            values["compile"] = False
        for name, value in values.items():
            setattr(c, name, value)
        run = None
        try:
            run = build(c)
            check_ram(run)
            # Ctrl-C passes through it: only train.py turns signals into a Stop.
            return measure(run, seconds=3.0 if steps else 2.0).step_s
        except (RuntimeError, MemoryError) as error:
            if not hardware.out_of_memory(error):
                raise
            return None
        finally:
            run = None  # the small runs need its memory
            release(hardware.find_device(c.device))

    def train(self, size: Size, steps: int, factor: float) -> dict:
        """The small run of a size, by name of what the fit and the report need.

        Its loss is infinite where it diverged.
        """
        name = f"{size.n_layer}x{size.n_embd}_{steps}_steps_{factor:g}"
        values = settings_of(self.config, size, steps, factor) | QUIET
        values["eval_batches"] = self.eval_batches
        known = final_loss(self.folder / name) is not None
        loss = train(self.folder / name, self.arguments, values)
        seconds = seconds_of(self.folder / name)
        if not known:
            rates = "" if factor == 1 else f", learning rates x {factor:g}"
            outcome = f"loss {loss:.4f}" if math.isfinite(loss) else "diverged"
            print(
                f"{size}, {steps:,} steps{rates}: {outcome} after {duration(seconds)}", flush=True
            )
        tokens = steps * self.tokens_a_step
        return asdict(size) | {
            "run": name,
            "steps": steps,
            "factor": factor,
            "tokens": tokens,
            "compute": tokens * size.flops,
            "loss": loss,
            "seconds": seconds,
        }


def refuse_other_shapes(c: Config) -> None:
    """Raises ConfigError for settings of the shape that do not grow with width and depth."""
    for name in ("n_inner", "n_kv_head", "head_dim", "init_from"):
        if getattr(c, name) is not None:
            raise ConfigError(
                f"{name} = {getattr(c, name)}: a family has widths and depths alone; leave it out"
                f" with --{name}=None"
            )


def best_factor(study: Study, size: Size, steps: int) -> float:
    """The factor on the preset's learning rates that does best at the smallest size.

    By doublings, on to where the loss rises again.
    """
    losses = {}

    def loss(power):
        if power not in losses:
            losses[power] = study.train(size, steps, 2.0**power)["loss"]
        return losses[power]

    power = min((0, 1, -1), key=loss)
    while 0 < abs(power) < SWEPT and loss(power + (1 if power > 0 else -1)) < loss(power):
        power += 1 if power > 0 else -1
    return 2.0**power


def fit_small_runs(study: Study, minutes: float) -> tuple:
    """The law, the small runs that it was fitted to, and the factor on the learning rates."""
    plan = study.plan(minutes)
    sizes = [str(size) for size in dict.fromkeys(run.size for run in plan)]
    print(f"{len(plan)} small runs of the sizes {', '.join(sizes)} (layers x width)", flush=True)
    smallest = [run for run in plan if run.size == plan[0].size]
    swept = smallest[len(smallest) // 2]
    factor = best_factor(study, swept.size, swept.steps)
    print(f"learning rates: {factor:g} times those that follow from the preset", flush=True)
    runs = finite([study.train(run.size, run.steps, factor) for run in plan])
    return fit_runs(runs, study.unique), runs, factor


def offers_for(study: Study, law, hours: float | None, flops: float | None, runs: list[dict]):
    """What the budget pays for, around the best. hours or flops: the budget."""
    largest = max(runs, key=lambda run: run["compute"])
    rate = largest["compute"] / largest["seconds"]  # operations a second, for a first guess

    def guess(size):
        operations = flops or hours * 3600 * TRAINING * rate
        return round(operations / size.flops / study.tokens_a_step)

    def made(size, steps, step_s):
        taken = steps * step_s / TRAINING / 3600
        return offer(size, steps, taken, study.tokens_a_step, study.unique, law)

    def make(size):
        if guess(size) < LEAST_STEPS // 2:
            return None
        print(f"measuring {size} ...", flush=True)
        step_s = study.step_seconds(size, max(1, guess(size)))
        if step_s is None:
            print(f"  {size} does not fit into the memory here", flush=True)
            return None
        steps = guess(size) if flops else int(hours * 3600 * TRAINING / step_s)
        return made(size, steps, step_s) if steps >= LEAST_STEPS else None

    expected = [
        made(size, guess(size), 0.0).loss if guess(size) >= LEAST_STEPS else math.inf
        for size in study.sizes
    ]
    found = offers(study.sizes, make, expected.index(min(expected)))
    check_budget(max((o.steps for o in found), default=0))
    return found


def print_offers(study: Study, found: list, best, price: float) -> None:
    """The table. price: of an hour, 0 where none is set."""
    head = ["size", "parameters", "tokens", "epochs", "hours", "cost", "loss", "bits per byte"]
    rows = []
    for o in found:
        losses = (o.loss, o.low, o.high)
        bits = [study.meta.bits_per_byte(loss, study.config.loss_on) for loss in losses]
        rows.append(
            [
                f"{o.size}{' <<' if o is best else ''}",
                short(o.size.parameters),
                short(o.tokens),
                f"{o.epochs:.2f}",
                f"{o.hours:.2f}",
                f"{o.hours * price:,.2f}" if price else "-",
                f"{o.loss:.3f} ({o.low:.3f} to {o.high:.3f})",
                f"{bits[0]:.3f} ({bits[1]:.3f} to {bits[2]:.3f})",
            ]
        )
    print(table(head, rows))


def write_preset(study: Study, best, factor: float, price: float) -> Path:
    """The recommended run as a preset: what differs from the defaults, line by line."""
    c = copy.copy(study.config)
    values = settings_of(c, best.size, best.steps, factor)
    values |= {
        "eval_batches": study.eval_batches,
        "eval_interval": max(1, best.steps // 40),
        "checkpoint_dir": str(scaling_study.run_folder(study.folder, asdict(best))),
        "cost_per_hour": price,
    }
    for name, value in values.items():
        setattr(c, name, value)
    defaults = asdict(Config())
    lines = [
        f"# {best.size}, {best.steps:,} steps, about {best.hours:.2f} hours here: a loss of"
        f" {best.loss:.3f} is expected,",
        f"# between {best.low:.3f} and {best.high:.3f} in nine of ten cases"
        " (python -m tools.scaling, docs/scaling.md).",
    ]
    for name, value in asdict(c).items():
        if value != defaults[name]:
            lines.append(f"{name} = {value!r}")
    path = study.folder / "recommended.py"
    files.write_text(path, "\n".join(lines) + "\n")
    return path


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The command line, and settings for train.py."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.scaling",
        usage="python -m tools.scaling --data FOLDER (--hours H | --max_cost M --cost_per_hour P |"
        " --flops F) [--key=value ...]",
        description="Which size and how many tokens a budget buys, and which loss comes out.",
        allow_abbrev=False,
    )
    parser.add_argument("--data", required=True, help="a prepared folder, such as data/main")
    parser.add_argument(
        "--preset", help="the recipe; default: config/laptop.py, on a GPU gpt2_small_modern.py"
    )
    parser.add_argument("--hours", type=command.positive, help="of this machine")
    parser.add_argument("--max_cost", type=command.positive, help="in the unit of --cost_per_hour")
    parser.add_argument("--cost_per_hour", type=command.positive, help="the price of this machine")
    parser.add_argument("--flops", type=command.positive, help="operations, in place of hours")
    parser.add_argument(
        "--minutes", type=command.positive, default=10.0, help="for small runs; default 10"
    )
    parser.add_argument("--out", type=Path, help="default: checkpoints/scaling/DATA_PRESET")
    args, extra = parser.parse_known_args(argv)
    for word in extra:
        if not word.startswith("--"):
            parser.error(f"{word}: a preset stands behind --preset, a setting is --key=value")
    if sum(bool(value) for value in (args.hours, args.max_cost, args.flops)) != 1:
        parser.error("give one budget: --hours, --max_cost with --cost_per_hour, or --flops")
    if args.max_cost:
        if not args.cost_per_hour:
            parser.error(f"--max_cost {args.max_cost} needs --cost_per_hour, the machine's price")
        args.hours = args.max_cost / args.cost_per_hour
    return args, extra


def preset_for(extra: list[str]) -> str:
    """The recipe of the machine. extra: settings for train.py, of which --device counts."""
    chosen = [word for word in extra if word.startswith("--device=")]
    device = hardware.find_device(settings.load([*chosen, "--checkpoint_dir=none"]).device)
    return PRESETS["cuda" if device.type == "cuda" else "cpu"]


def main(argv: list[str]) -> None:
    """The command line's work."""
    args, extra = parse_args(argv)
    importlib.import_module("scipy")  # without it nothing is trained: the fit comes last
    study = Study(args.data, args.preset or preset_for(extra), extra, args.out)
    study.claim_folder()
    study.check_budget(args.hours, args.flops)
    law, runs, factor = fit_small_runs(study, args.minutes)
    found = offers_for(study, law, args.hours, args.flops, runs)
    best = min(found, key=lambda o: o.loss)
    price = args.cost_per_hour or study.config.cost_per_hour
    print_offers(study, found, best, price)
    for sentence in doubts(found, best, law, len(runs)):
        print(sentence)
    path = write_preset(study, best, factor, price)
    scaling_study.write(study.folder, law, study.unique, runs, asdict(best))
    print(f"recommended: {best.size}, in {path}\n  python train.py {path}")


if __name__ == "__main__":
    command.run(
        "tools.scaling",
        main,
        mistakes=(ConfigError, PlanError, TokenizerError, hardware.DeviceError),
        failures=(RunFailed, RunError),
        stopped="stopped; the same command goes on from here",
    )
