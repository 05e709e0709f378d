"""Choose the size of model that suits a text and some hours; write a preset that trains it.

    python -m tools.size data/mine --hours 2 [--preset config/laptop.py]

Times a few steps of each size in a family with the preset's proportions. From that follow the
tokens that each can train on in these hours, within the preset's epochs; the best size is the one
nearest to 20 tokens per parameter (Hoffmann et al., 2022, "Training Compute-Optimal Large Language
Models").
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import math
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote

import config as settings
import hardware
from command_line import Parser, local_path, place, positive
from config import Config, ConfigError
from formats import files
from hardware import DeviceError
from tools import command
from training import RunError
from training.plan import measure
from training.setup import build

WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
TOKENS_PER_PARAMETER = 20
RATE_POWER = -0.5  # the best learning rate is proportional to this power of the width
MARK = "# Written by python -m tools.size, which replaces it.\n"
TIMED_S = 3.0  # seconds per size


@dataclass
class Size:
    """One member of the family, and the run that fits into the hours."""

    config: Config
    parameters: int
    tokens: float
    epochs: float
    hours: float


def family(config: Config) -> list[Config]:
    """The preset at each width, with layers, heads and learning rates scaled to it."""
    found = []
    for width in WIDTHS:
        ratio = width / config.n_embd
        heads = max(1, round(config.n_head * ratio))
        while width % heads:
            heads -= 1
        member = replace(
            config,
            n_layer=max(4, round(config.n_layer * ratio)),
            n_head=heads,
            n_kv_head=config.n_kv_head and math.gcd(heads, max(1, round(config.n_kv_head * ratio))),
            n_embd=width,
            learning_rate=config.learning_rate * ratio**RATE_POWER,
            muon_lr=config.muon_lr * ratio**RATE_POWER,
        )
        found.append(member)
    return found


def time_size(config: Config, hours: float) -> Size:
    """Time a few steps of one size; returns the run that fits into `hours` and the preset's epochs.

    Raises RunError or MemoryError if it does not fit in memory.
    """
    run = build(
        replace(config, checkpoint_dir=str(Path(config.data_dir) / "none"), sample_prompts=[])
    )
    step_s, _ = measure(run, TIMED_S)
    text = run.data.train.windows * config.block_size
    batch = config.tokens_per_step
    steps = min(hours * 3600 / step_s, (config.epochs or math.inf) * text / batch)
    tokens, parameters = steps * batch, run.model.num_parameters()
    config = replace(config, max_steps=max(1, round(steps)), epochs=None)
    return Size(config, parameters, tokens, tokens / text, steps * step_s / 3600)


def run_name(config: Config, hours: float) -> str:
    """The run's folder. By the preset's name, every run would share checkpoints/size."""
    text = Path(config.data_dir).resolve().name
    return f"checkpoints/{text}_{config.n_layer}x{config.n_embd}_{hours:g}h"


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m tools.size", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("data", type=place, help="prepared folder")
    add("--hours", type=positive, required=True, help="hours of training")
    add("--preset", type=place, default="config/laptop.py", help="recipe; default %(default)s")
    add("--out", type=local_path, help="preset to write; default: FOLDER/size.py")
    args, more = parser.parse_known_args(argv)
    path = args.out or Path(args.data, "size.py")
    if path.suffix != ".py":
        parser.error(f"--out {path}: the name must end in .py")
    if files.is_foreign(files.read_text(path), MARK):
        parser.error(f"{path} exists already, and tools.size did not write it; give another --out")
    config = settings.load([args.preset, f"--data_dir={args.data}", *more])

    sizes = []
    for member in family(config):
        try:
            sizes.append(time_size(member, args.hours))
        except (MemoryError, RuntimeError, RunError) as error:
            no_memory = isinstance(error, RunError) or hardware.out_of_memory(error)
            if not sizes or not no_memory:
                raise
            print(f"{member.n_layer} x {member.n_embd} does not fit the memory of this machine")
            break
        if sizes[-1].tokens < sizes[-1].parameters:  # even fewer for larger ones
            break
    # Distance in the logarithm: twice as many tokens are as far off as half as many.
    best = min(sizes, key=lambda s: abs(math.log(s.tokens / s.parameters / TOKENS_PER_PARAMETER)))
    rows = []
    for size in sizes:
        name = f"{size.config.n_layer} x {size.config.n_embd}{' <<' if size is best else ''}"
        amounts = [f"{size.parameters / 1e6:,.2f}M", f"{size.tokens / 1e6:,.1f}M"]
        rows.append([name, *amounts, f"{size.epochs:.2f}", f"{size.hours:.2f}"])
    print(command.table(["size", "parameters", "tokens", "epochs", "hours"], rows))

    chosen, defaults = best.config, Config().recorded()
    if "checkpoint_dir" not in chosen.typed:
        chosen.checkpoint_dir = None if args.out else run_name(chosen, args.hours)
    lines = [f"{name} = {v!r}\n" for name, v in chosen.recorded().items() if v != defaults[name]]
    files.write_text(path, "".join([MARK, *lines]))
    print(f"<< is nearest to {TOKENS_PER_PARAMETER} tokens per parameter")
    print(f"  python train.py {quote(path.as_posix())}")


if __name__ == "__main__":
    command.run("tools.size", main, (ConfigError, DeviceError, RunError))
