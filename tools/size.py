"""Choose the size of model that suits a text and some hours; write a preset that trains it.

    python -m tools.size data/mine --hours 2 [--preset config/laptop.py]

Times a few steps of each size in a family with the preset's proportions. From that follow the
tokens that each can train on in these hours, within the preset's epochs. The best size is the one
whose loss is predicted to be the lowest, by a law of the form of Hoffmann et al., 2022, "Training
Compute-Optimal Large Language Models", fitted to runs of config/laptop.py (docs/experiments.md).
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import config as settings
import hardware
from command_line import Parser, local_path, our_file, place, positive, quote
from config import Config
from formats import files
from tools import command
from training import RunError
from training.plan import measure
from training.setup import build

WIDTHS = (64, 128, 192, 256, 384, 512, 768, 1024)
# The loss falls with one power of the tokens and of the parameters in the layers, each of which is
# worth so many tokens. Those of embedding and output count little.
LOSS_POWER = -0.75
TOKENS_PER_PARAMETER = 4.5
RATE_POWER = -0.5  # the best learning rate is proportional to this power of the width
MARK = "# Written by python -m tools.size, which replaces it.\n"
TIMED_S = 3.0  # seconds per size


@dataclass
class Size:
    """One member of the family, and the run that fits into the hours."""

    config: Config
    parameters: int
    in_layers: int  # of them
    tokens: float
    epochs: float
    hours: float

    @property
    def lack_of_tokens(self) -> float:
        """What too few tokens add to the loss, but for a factor that all sizes share."""
        return self.tokens**LOSS_POWER

    @property
    def excess(self) -> float:
        """What too few tokens and parameters add to the loss, but for the same factor."""
        return self.lack_of_tokens + (TOKENS_PER_PARAMETER * self.in_layers) ** LOSS_POWER


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


def time_size(config: Config, hours: float, may_compile: bool = False) -> Size:
    """Time a few steps of one size; returns the run that fits into `hours` and the preset's epochs.

    may_compile: on a CPU, too, if a run of config.max_steps does. Raises RunError or MemoryError if
    it does not fit in memory.
    """
    run = build(
        replace(config, checkpoint_dir=str(Path(config.data_dir) / "none"), sample_prompts=[])
    )
    step_s, _ = measure(run, TIMED_S, may_compile)
    text = run.data.train.windows * config.block_size
    batch = config.tokens_per_step
    steps = min(hours * 3600 / step_s, (config.epochs or math.inf) * text / batch)
    tokens, parameters = steps * batch, run.model.num_parameters()
    in_layers = sum(p.numel() for p in run.model.h.parameters())
    config = replace(config, max_steps=max(1, round(steps)), epochs=None)
    return Size(config, parameters, in_layers, tokens, tokens / text, steps * step_s / 3600)


def run_name(config: Config, hours: float) -> str:
    """The run's folder. By the preset's name, every run would share checkpoints/size."""
    text = Path(config.data_dir).resolve().name
    return f"checkpoints/{text}_{config.n_layer}x{config.n_embd}_{hours:g}h"


def main(argv: list[str]) -> None:
    parser = Parser(prog="python -m tools.size", description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("data", type=place, metavar="FOLDER", help="prepared folder")
    add("--hours", type=positive, required=True, help="hours of training")
    text = "recipe, which settings such as --batch_size=8 change; default %(default)s"
    add("--preset", type=place, default="config/laptop.py", help=text)
    text = "preset to write, whose name the run gets, too; default: FOLDER/size.py"
    add("--out", type=local_path, metavar="NAME.py", help=text)
    args, more = parser.parse_known_args(argv)
    path = args.out or Path(args.data, "size.py")
    if path.suffix != ".py":
        parser.error(f"--out {path}: the name must end in .py")
    if files.is_foreign(files.read_text(path), MARK):
        parser.error(f"{path} exists already, and tools.size did not write it; give another --out")
    if args.out:
        path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent.exists() and not os.access(path.parent, os.W_OK):
        parser.error(f"{path.parent} is read-only; give another --out")
    config = settings.load([args.preset, f"--data_dir={args.data}", *more])
    if config.init_from:
        parser.error(f"the weights of init_from = {config.init_from} have a size already")

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
        best = min(sizes, key=lambda size: size.excess)
        if sizes[-1].lack_of_tokens > best.excess:  # larger ones lack even more
            break
    if hardware.find_device(config.device).type == "cpu":  # where none is compiled above
        print(f"timing {best.config.n_layer} x {best.config.n_embd} as it will run ...")
        row, of_length = sizes.index(best), replace(best.config, epochs=config.epochs)
        best = sizes[row] = time_size(of_length, args.hours, may_compile=True)
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
    print("<< is predicted to reach the lowest loss")
    print(f"  python {our_file('train.py')} {quote(path.as_posix())}")


if __name__ == "__main__":
    command.run("tools.size", main)
