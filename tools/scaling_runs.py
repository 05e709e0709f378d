"""A preset's family on a text, and its small runs: train.py in one process after another.

The family is the preset's recipe at other widths. A run that is finished is read from its log; one
that was interrupted continues.
"""

import functools
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import config as settings
import hardware
from config import Config, ConfigError
from formats import files, run_log
from formats.data_folder import Meta, read_meta
from model import GPT
from training import RunError
from training.conversations import check_validated
from training.memory import release
from training.plan import check_ram
from training.setup import build, model_shape
from training.trial import measure

TRAIN = Path(__file__).parent.parent / "train.py"
WIDTHS = [32, 48, 64, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024, 1280, 1536, 2048]
# With three layers, one learned to copy from its context far later (docs/findings.md).
LEAST_LAYERS = 4
# The power of the width that the best learning rate follows (docs/findings.md).
WIDTH_POWER = {"adamw": -0.5, "muon": -0.6}
WARMUP = 0.1  # of the steps, at most: a preset's warm-up is that of a long run

SIZES, THIRDS = 4, 3  # of the small runs: four sizes, each on C, C / 3 and C / 9 operations
STRIDE = 2  # every second size of the family: a law needs them far apart
LEAST_STEPS = 50  # below, a run is all warm-up
LEAST_RUNS = 6  # fewer cannot tell the law's five numbers apart
MOST_EPOCHS = 4  # of a small run: up to here a repeated token is almost a new one
MARGIN = 1.2  # of the minutes that are advised, as speeds vary
RUNNING = 0.6  # share of --minutes; the rest is starts, evaluations, the sweep, measuring
TIMED_S = 3.0  # seconds for which a size is timed
EVALUATED = 1 << 17  # tokens of an evaluation, the same ones for small runs and large
# Of every small run: its length is in steps, and it does nothing that shows nothing.
QUIET = {
    "compile": False,
    "eval_interval": 0,
    "save_interval": 0,
    "keep_last": 1,
    "sample_prompts": [],
    "epochs": None,
    "max_hours": None,
    "max_cost": None,
    "mirror": None,
    "wandb": None,
    "tensorboard": False,
    "profile": False,
}


# -- the family ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Size:
    """One width and depth of a family.

    weights: parameters that multiply, those of the blocks and the head: the law's N. parameters:
    all of them. flops: floating-point operations to train on a token.
    """

    n_layer: int
    n_head: int
    n_embd: int
    weights: int
    parameters: int
    flops: int

    def __str__(self) -> str:
        return f"{self.n_layer} x {self.n_embd}"


def family(config: Config, meta: Meta) -> list[Size]:
    """The sizes of a recipe, smallest first, as deep for their width as the preset.

    Raises ConfigError for settings of the shape that do not grow with width and depth.
    """
    for name in ("n_inner", "n_kv_head", "head_dim", "init_from"):
        if getattr(config, name) is not None:
            raise ConfigError(
                f"{name} = {getattr(config, name)}: a family varies width and depth alone; leave it"
                f" out with --{name}=None"
            )
    return [size_of(config, meta, width) for width in WIDTHS]


def size_of(config: Config, meta: Meta, width: int) -> Size:
    """The size of this width, counted. Heads stay about as wide as the preset's."""
    depth = max(LEAST_LAYERS, round(width * config.n_layer / config.n_embd))
    wanted = width * config.n_head / config.n_embd
    possible = [h for h in range(1, width + 1) if width % (2 * h) == 0]
    heads = min(possible, key=lambda h: abs(h - wanted))
    c = replace(config, n_layer=depth, n_head=heads, n_embd=width)
    with torch.device("meta"):  # no memory
        model = GPT(model_shape(c, meta.vocab_size))
    weights = sum(p.numel() for p in model.h.parameters()) + model.lm_head.weight.numel()
    return Size(depth, heads, width, weights, model.num_parameters(), model.flops_per_token())


def settings_of(config: Config, size: Size, steps: int, factor: float = 1.0) -> dict:
    """The settings in which a run of a size differs from the preset.

    Learning rates follow by WIDTH_POWER from the preset's, at its own width, times `factor`; but
    embedding_lr stays, as the steps of AdamW in an embedding are as long at any width.
    """
    scale = factor * (size.n_embd / config.n_embd) ** WIDTH_POWER[config.optimizer]
    values = {
        "n_layer": size.n_layer,
        "n_head": size.n_head,
        "n_embd": size.n_embd,
        "max_steps": steps,
        "warmup_steps": min(config.warmup_steps, math.ceil(WARMUP * steps)),
    }
    rates = ["learning_rate"]
    if config.min_lr:
        rates.append("min_lr")
    if config.optimizer == "muon":
        rates.append("muon_lr")
    for name in rates:
        values[name] = float(f"{getattr(config, name) * scale:.3g}")
    return values


# -- the small runs --------------------------------------------------------------------------------


class Study:
    """A family on a text, and the folder of its small runs.

    arguments: preset and settings as train.py takes them. unique: tokens of the training text.
    """

    def __init__(self, data: str, preset: str, extra: list[str], folder: Path | None):
        self.arguments = [preset, f"--data_dir={data}", *extra]
        self.config = settings.load([*self.arguments, "--checkpoint_dir=none"])
        self.config.epochs = None
        self.meta = read_meta(data)
        check_validated(data, self.meta, self.config.loss_on)
        self.sizes = family(self.config, self.meta)
        self.tokens_a_step = self.config.batch_size * self.config.block_size
        self.unique = self.meta.splits["train"].tokens
        self.eval_batches = math.ceil(EVALUATED / self.tokens_a_step)
        name = f"{Path(data).resolve().name}_{Path(preset).stem}"
        self.folder = folder or Path("checkpoints/scaling") / name
        if self.folder.is_file():
            raise ConfigError(f"--out {self.folder} is a file; name a folder")
        if self.unique * MOST_EPOCHS < LEAST_STEPS * self.tokens_a_step:
            raise ConfigError(
                f"the text has {self.unique:,} tokens, too few for {LEAST_STEPS} steps of"
                f" {self.tokens_a_step:,}; add text, or lower --batch_size"
            )

    def flops_a_step(self, size: Size) -> int:
        return size.flops * self.tokens_a_step

    def step_seconds(self, size: Size, steps: int = 0) -> float:
        """Seconds of an optimiser step on this machine; infinite where it does not fit into memory.

        steps: of the run, which decides whether it is compiled; 0: of a small run, which is not.
        """
        values = settings_of(self.config, size, steps or LEAST_STEPS)
        c = replace(self.config, **values, checkpoint_dir=str(self.folder / "none"))
        if not steps:
            c.compile = False
        run = None
        try:
            run = build(c)
            check_ram(run)
            return measure(run, TIMED_S).step_s
        except (RuntimeError, MemoryError) as error:
            if not hardware.out_of_memory(error):
                raise
            return math.inf
        finally:
            run = None  # the small runs need its memory
            release(hardware.find_device(c.device))

    def plan(self, minutes: float) -> list[tuple[Size, int]]:
        """The small runs that fill a number of minutes, as sizes and steps.

        plan.json keeps them: speeds measured at another start would lead to other runs. Raises
        ConfigError for a folder with those of other settings or another text.
        """
        of_run = asdict(self.config)
        del of_run["data_dir"], of_run["checkpoint_dir"]  # the same text may have moved
        mine = {"settings": of_run, "data": self.meta.identity()}
        path = self.folder / "plan.json"
        known = files.read_json(path, settings=dict, data=dict, minutes=float, runs=list)
        if known and {name: known[name] for name in mine} != mine:
            raise ConfigError(
                f"{self.folder} has small runs with other settings or of another text; delete it,"
                " or give --out another folder"
            )
        if not known or known["minutes"] != minutes:
            runs = small_runs(
                self.sizes,
                step_seconds=self.step_seconds,
                seconds=60 * minutes,
                tokens_a_step=self.tokens_a_step,
                unique=self.unique,
            )
            known = mine | {"minutes": minutes}
            known["runs"] = [[size.n_embd, steps] for size, steps in runs]
            self.folder.mkdir(parents=True, exist_ok=True)
            files.write_json(path, known)
        by_width = {size.n_embd: size for size in self.sizes}
        return [(by_width[width], steps) for width, steps in known["runs"]]

    def train(self, size: Size, steps: int, factor: float = 1.0) -> dict:
        """A small run, trained unless it is finished: what the fit needs of it, by name.

        Its loss is infinite where it diverged.
        """
        folder = self.folder / f"{size.n_layer}x{size.n_embd}_{steps}_steps_{factor:g}"
        loss = final_loss(folder)
        if loss is None:
            values = settings_of(self.config, size, steps, factor) | QUIET
            values["eval_batches"] = self.eval_batches
            loss = train(folder, self.arguments, values)
            name = f"{size}, {steps:,} steps, learning rates x {factor:g}"
            print(f"{name}: loss {loss:.4f}", flush=True)
        tokens = steps * self.tokens_a_step
        seconds = max(record.get("elapsed_s", 0.0) for record in run_log.iterate(folder))
        found = {"tokens": tokens, "compute": tokens * size.flops, "loss": loss, "seconds": seconds}
        return asdict(size) | found


def small_runs(
    sizes: list[Size],
    step_seconds: Callable[[Size], float],
    seconds: float,
    tokens_a_step: int,
    unique: int,
) -> list[tuple[Size, int]]:
    """Runs that together take `seconds`, as sizes and steps.

    Each of SIZES on C operations and thirds of it. The sizes are as large as lets the largest of
    them see a token for each of its weights. unique: tokens of the text.
    """
    step_seconds = functools.cache(step_seconds)
    most_steps = MOST_EPOCHS * unique / tokens_a_step
    shares = [3.0**-n for n in reversed(range(THIRDS))]

    chosen, smallest = [], []
    for first in range(len(sizes) - STRIDE * (SIZES - 1)):
        of_time = sizes[first::STRIDE][:SIZES]
        rates = [size.flops * tokens_a_step / step_seconds(size) for size in of_time]
        if 0 in rates:  # one does not fit into memory
            break
        compute = RUNNING / sum(shares) / sum(1 / rate for rate in rates)  # in each second
        paces = [  # the runs, with their steps in each second
            (size, compute * s / (size.flops * tokens_a_step)) for size in of_time for s in shares
        ]
        smallest = smallest or paces
        runs = [(size, round(pace * seconds)) for size, pace in paces]
        runs = [(size, steps) for size, steps in runs if LEAST_STEPS <= steps <= most_steps]
        largest = of_time[-1]
        seen = max((steps * tokens_a_step for size, steps in runs if size == largest), default=0)
        if first and (seen < largest.weights or len(runs) < LEAST_RUNS):
            break
        chosen = runs
    if len(chosen) >= LEAST_RUNS:
        return chosen
    if not smallest:
        raise ConfigError(
            "the small runs do not fit into this memory; lower --batch_size or --block_size"
        )
    enough = LEAST_STEPS / sorted(pace for _, pace in smallest)[-LEAST_RUNS]
    if seconds < enough:
        raise ConfigError(
            f"{seconds / 60:.3g} minutes are too few on this machine for {LEAST_RUNS} small runs of"
            f" {LEAST_STEPS} steps; take --minutes {math.ceil(MARGIN * enough / 60)}, or lower"
            " --batch_size or --block_size"
        )
    raise ConfigError(
        f"the text has {unique:,} tokens, too few for small runs of {seconds / 60:.3g} minutes,"
        f" which see it {MOST_EPOCHS} times at most; add text, or lower --minutes or --batch_size"
    )


def final_loss(folder: Path) -> float | None:
    """The validation loss at a run's last step; infinite if it diverged, None if it is not done."""
    total, loss = None, None
    for record in run_log.iterate(folder):
        total = record.get("total_steps", total)
        if "val_loss" in record and record["step"] == total:
            loss = math.inf if record["val_loss"] is None else record["val_loss"]
        elif record.get("event") == "diverged":
            loss = math.inf
    return loss


def train(folder: Path, arguments: list[str], values: dict) -> float:
    """The final loss of train.py in a process that ends with this one.

    arguments: a preset and settings, as on its command line; values: more settings by name. Raises
    RunError with its last words.
    """
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, str(TRAIN), *arguments, f"--checkpoint_dir={folder}"]
    words += [f"--{name}={value}" for name, value in values.items()]
    output = folder / "output.txt"
    with (
        open(output, "w", encoding="utf-8") as file,
        subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT) as process,
    ):
        before = signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
        try:
            status = process.wait()
        finally:
            process.terminate()  # where a signal ends this one: it saves
            process.wait()  # until then it holds the folder's lock
            signal.signal(signal.SIGTERM, before)
    loss = final_loss(folder)
    if loss is None or (status and math.isfinite(loss)):
        lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
        raise RunError(f"{folder} ended with status {status}: {lines[-1]}; all of it: {output}")
    return loss


def converged(runs: list[dict]) -> list[dict]:
    """The small runs that did not diverge. Raises ConfigError where they are too few for a law."""
    found = [run for run in runs if math.isfinite(run["loss"])]
    if len(found) < LEAST_RUNS:
        raise ConfigError(
            f"{len(runs) - len(found)} of {len(runs)} small runs diverged, and {LEAST_RUNS} are"
            " needed; lower --learning_rate, and --muon_lr where the preset has Muon"
        )
    return found
