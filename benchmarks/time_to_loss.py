"""Seconds of training until a recipe has the loss that another one ends with.

    python -m benchmarks.time_to_loss [--task shakespeare|sources|gpt2_small] [--nanogpt PATH]
        [--seeds 3] [--key=value ...]
    python -m benchmarks.time_to_loss --nanochat PATH [--data FOLDER] [--seconds 150] [--seeds 3]
        [--key=value ...]

On the same data and the same evaluation windows. `shakespeare` compares with nanoGPT's own recipe
for a CPU (4 layers, 128 dim, context 64, 2,000 iterations of 12 sequences), trained by nanoGPT's
train.py from a copy of the checkout at PATH; `gpt2_small` with nanoGPT at that size, for 3,000
steps, or without PATH with our GPT-2 preset. `sources` compares our GPT-2 preset with the modern
one; its data, 330 MB of Python, as `make .venv/dev` installs it:

    python prepare_data.py '.venv/lib/python3*/site-packages/**/*.py' --clean --vocab_size 8192 \\
        --out data/site_packages

With --nanochat it compares config/laptop.py with nanochat and the Trainer of transformers in bits
per byte of documents that none has seen, each at several learning rates. The best of these runs
sets the aim.
benchmarks/laptop.py says how; --key=value changes the shape and batch of all.

Training counts, compilation included; evaluation and saving do not. Seeds alternate, so that a
machine whose speed drifts compares fairly. Writes the curves as PNG and the numbers as JSON.
"""

import importlib.util
import itertools
import math
import operator
import statistics
import tempfile
from functools import partial
from pathlib import Path

import torch

import config as settings
import hardware
from benchmarks import argument_parser, checkout, laptop, nanogpt, report, run_main, train
from command_line import count, plural, positive
from config import Config
from formats import files
from formats.data_folder import read_meta
from model import IGNORE
from training.dataset import Dataset

# The settings that all of ours share in a task, and those of each contender.
TASKS = {
    "shakespeare": {
        "shared": """
            --data_dir=data/shakespeare_char --device=cpu --n_layer=4 --n_head=4 --n_embd=128
            --block_size=64 --batch_size=16 --eval_batches=0
        """,
        "GPT-2": "config/shakespeare_char.py --max_steps=1200 --eval_interval=60",
        "modern": "config/shakespeare_char_modern.py --max_steps=110 --eval_interval=10",
    },
    "sources": {
        "shared": """
            --data_dir=data/site_packages --n_layer=4 --n_head=4 --n_embd=256 --block_size=256
            --batch_size=16 --eval_batches=5 --save_interval=0 --sample_prompts=[] --compile=True
        """,
        "GPT-2": """
            config/gpt2_small.py --learning_rate=1e-3 --min_lr=None --warmup_steps=60
            --max_steps=480 --eval_interval=60
        """,
        "modern": """
            config/gpt2_small_modern.py --learning_rate=5e-3 --muon_lr=0.04 --muon_momentum=0.9
            --beta2=0.98991 --warmup_steps=0 --max_steps=190 --eval_interval=5
        """,
    },
    "gpt2_small": {
        "shared": """
            --data_dir=data/main --eval_batches=10 --save_interval=0 --save_minutes=0
            --sample_prompts=[]
        """,
        "GPT-2": """
            config/gpt2_small.py --max_steps=3000 --warmup_steps=200 --learning_rate=1e-3
            --min_lr=1e-4 --eval_interval=200
        """,
        "modern": "config/gpt2_small_modern.py --max_steps=1100 --eval_interval=50",
    },
}
# nanoGPT's train.py: for Shakespeare the recipe in its README, "I only have a macbook", word for
# word; at GPT-2 Small's size what our preset sets, with biases, for as many steps.
NANOGPT = {
    "shakespeare": """
        config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20
        --log_interval=1 --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128
        --max_iters=2000 --lr_decay_iters=2000 --dropout=0.0
    """,
    "gpt2_small": """
        {arguments} --learning_rate={learning_rate} --min_lr={min_lr} --warmup_iters={warmup_steps}
        --max_iters={max_steps} --lr_decay_iters={max_steps} --eval_interval={eval_interval}
        --eval_iters=1
    """,
}
# What makes nanoGPT's train.py save its weights at each evaluation, with the seconds of training
# before it: `clock` runs from the end of one evaluation to the start of the next.
CLOCK = {
    "while True:\n": "clock, mark = 0.0, time.time()\nwhile True:\n",
    "        losses = estimate_loss()\n": """
        if device_type == 'cuda':
            torch.cuda.synchronize()
        clock += time.time() - mark
        losses = estimate_loss()
""",
    "torch.save(checkpoint, os.path.join(out_dir, 'ckpt.pt'))": """torch.save(
                    [clock, model_args, checkpoint['model']],
                    os.path.join(out_dir, f'{iter_num:06d}.pt'))
""",
    "    if iter_num == 0 and eval_only:\n": """
    if iter_num % eval_interval == 0:
        mark = time.time()
    if iter_num == 0 and eval_only:
""",
}


# -- curves: (seconds of training, validation loss in nats per token) ------------------------------


def our_curve(arguments: list[str], seed: int) -> list[tuple[float, float]]:
    log = train(*arguments, f"--seed={seed}")
    return [(record["elapsed_s"], record["val_loss"]) for record in log if "val_loss" in record]


def nanogpt_curve(
    path: Path, arguments: list[str], c: Config, seed: int
) -> list[tuple[float, float]]:
    """nanoGPT's curve: its weights at each of its evaluations, evaluated on our windows."""
    edits = CLOCK | {"torch.manual_seed(1337 + seed_offset)": f"torch.manual_seed({seed})"}
    with tempfile.TemporaryDirectory() as folder:
        copy = nanogpt.copy_checkout(path, Path(folder) / "nanogpt", c.data_dir, edits)
        nanogpt.train(copy, [*arguments, "--out_dir=out", "--always_save_checkpoint=True"])
        module = nanogpt.model_module(copy)
        return [validation_loss(module, saved, c) for saved in sorted(copy.glob("out/*.pt"))]


def validation_loss(module, saved: Path, c: Config) -> tuple[float, float]:
    """Seconds of training, and the loss on the windows that our runs evaluate.

    saved: weights of nanoGPT. module: its model.py.
    """
    device = hardware.find_device(c.device)
    seconds, shape, weights = torch.load(saved, map_location=device, weights_only=True)
    model = module.GPT(module.GPTConfig(**shape)).to(device).eval()
    model.load_state_dict({name.removeprefix("_orig_mod."): w for name, w in weights.items()})
    # In the precision that nanoGPT trains in: on a CPU that of its weights.
    dtype = torch.float32 if device.type == "cpu" else hardware.find_dtype(device, c.dtype)
    data = Dataset(c.data_dir, read_meta(c.data_dir), "val", c.block_size, device)
    total = count = 0
    with torch.no_grad(), hardware.autocast(device, dtype):
        for x, y in data.evaluation(c.eval_batches * c.batch_size, 64):
            predictions = int((y != IGNORE).sum())
            total += model(x, y.contiguous())[1].item() * predictions
            count += predictions
    return seconds, total / count


def seconds_to(curve: list[tuple[float, float]], aim: float) -> float:
    """When a curve first reaches the aim, on the line between its points; infinite if never."""
    for (before, above), (after, loss) in itertools.pairwise(curve):
        if loss <= aim:
            return before + (after - before) * (above - aim) / (above - loss)
    return math.inf


def final_loss(curves: list[list[tuple[float, float]]]) -> float:
    """The loss at the end of a contender's curves, the median over seeds."""
    return statistics.median(curve[-1][1] for curve in curves)


# -- the command -----------------------------------------------------------------------------------


def contenders(task: str, checkout: Path | None, extra: list[str]):
    """What a task compares: curves as functions of a seed, command lines, settings of ours."""
    commands = {}
    for name in ("GPT-2", "modern"):
        commands[name] = [*TASKS[task][name].split(), *TASKS[task]["shared"].split(), *extra]
    curves = {name: partial(our_curve, words) for name, words in commands.items()}
    c = settings.load(commands["GPT-2"])
    if checkout:
        words = NANOGPT[task].format(**vars(c), arguments=" ".join(nanogpt.arguments(c)))
        commands["nanoGPT"] = words.split()
        curves = {"nanoGPT": partial(nanogpt_curve, checkout, commands["nanoGPT"], c)} | curves
    return curves, commands, c


def main(argv):
    parser = argument_parser("time_to_loss", __doc__)
    parser.add_argument("--task", choices=TASKS, default="shakespeare")
    nanogpt.add_option(parser)
    text = "checkout of nanochat to compare config/laptop.py with, instead of a task"
    is_nanochat = checkout("nanochat", laptop.COMMON)
    parser.add_argument("--nanochat", type=is_nanochat, metavar="PATH", help=text)
    text = "with --nanochat: files to train on, each a text; default: the standard library"
    parser.add_argument("--data", metavar="FOLDER", help=text)
    text = "with --nanochat: of each run; default %(default)s"
    parser.add_argument("--seconds", type=positive, default=150, help=text)
    parser.add_argument("--seeds", type=count, default=3)
    args, extra = parser.parse_known_args(argv)
    task, unit = args.task, "nats per token"
    with tempfile.TemporaryDirectory() as folder:
        if args.nanochat:
            task, unit = "laptop", "bits per byte"
            runs, commands, c = laptop.contenders(
                args.nanochat, args.data, args.seconds, extra, Path(folder)
            )
        else:
            runs, commands, c = contenders(task, args.nanogpt, extra)
        curves = {name: [] for name in runs}
        for seed in range(1, args.seeds + 1):
            for name, run in runs.items():
                curves[name].append(run(seed))
                seconds, loss = curves[name][-1][-1]
                print(f"seed {seed}, {name}: {loss:.4f} {unit} after {seconds:.1f} s", flush=True)

    rivals = [name for name in curves if name != laptop.OURS] if args.nanochat else list(curves)[:1]
    first = min(rivals, key=lambda name: final_loss(curves[name]))
    aims = [curve[-1][1] for curve in curves[first]]
    reached = {name: list(map(seconds_to, of_name, aims)) for name, of_name in curves.items()}
    figures = {}
    for name, seconds in reached.items():
        shares = map(operator.truediv, seconds, reached[first])
        figures[f"{name}: {unit} at the end"] = final_loss(curves[name])
        figures[f"{name}: seconds to the aim"] = statistics.median(seconds)
        figures[f"{name}: share of {first}'s time"] = statistics.median(shares)
    details = {"settings": commands, "aim": aims, "seconds_to_aim": reached, "curves": curves}
    device = hardware.find_device(c.device)
    path = report(f"time_to_loss_{task}", figures, device, **details)
    if importlib.util.find_spec("matplotlib"):
        draw(path)


# Of the picture: a task's title, a contender's name if that of the JSON file is shorter.
TITLES = {
    "shakespeare": "Shakespeare by characters",
    "sources": "330 MB of Python",
    "gpt2_small": "GPT-2 Small",
    "laptop": "config/laptop.py, nanochat and Trainer",
}
NAMES = {"GPT-2": "GPT-2 recipe", "modern": "modern recipe"}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def draw(path: Path) -> None:
    """Draw the result at `path` as PNG next to it: curves, names, seconds to the aim.

    The aim is the loss that one contender ends with. Times are medians over the seeds.
    """
    from matplotlib.figure import Figure

    result = files.read_json(path)
    aim = statistics.median(result["aim"])
    unit = next(name for name in result["figures"]).partition(": ")[2].removesuffix(" at the end")
    task = path.stem.removeprefix("time_to_loss_").rpartition("_")[0]
    title = f"{TITLES[task]}; {result['device']}; {plural(len(result['aim']), 'seed')}"
    figure = Figure((6, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="seconds of training", ylabel=f"validation loss, {unit}")
    axes.set_title(title, fontsize=10)
    axes.axhline(aim, color="gray", linestyle=":")
    for color, (name, curves) in zip(COLORS, result["curves"].items(), strict=False):
        label = NAMES.get(name, name)
        seconds = statistics.median(result["seconds_to_aim"][name])
        if seconds < math.inf:
            axes.plot(seconds, aim, "o", color=color)
            label += f": {aim:.2f} after {seconds:.0f} s"
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color=color, label=label)
            label = None  # of the first curve only
    figure.legend(loc="outside lower center", ncols=2, fontsize=9)
    bottom = axes.get_ylim()[0]
    axes.set_ylim(bottom - 0.1, aim + 0.8)
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    figure.savefig(path.with_suffix(".png"), dpi=170)


if __name__ == "__main__":
    run_main("time_to_loss", main)
