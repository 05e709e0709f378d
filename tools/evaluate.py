"""Evaluates checkpoints on a whole validation split, and compares them with gzip and xz.

    python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] [--data data/NAME]

Bits per byte are comparable across tokenizers, and with the compressors, which run on the same
text.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import gzip
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

import hardware
from command_line import Parser, count, our_file, place, quote
from config import Config
from formats import pretrained
from formats.conversation import form_of
from formats.data_folder import DataError, check_validated, read_meta, read_tokens, tokenizer_file
from formats.run_folder import CheckpointError
from generating.load import load_model
from generating.terminal import add_device
from model import IGNORE
from tokenizer_bpe import Tokenizer
from tools import command
from training.dataset import Dataset
from training.start import other_data

TOKENS = 2048  # per forward: at most about 3 GB of logits, with Qwen3's vocabulary
# Default context for models trained elsewhere, in tokens, as in config/finetune.py: a forward over
# their whole context, 8,192 or more, takes much memory.
CONTEXT = 512
COMPRESSORS = {"gzip -9": gzip.compress, "xz -9": partial(lzma.compress, preset=9)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.evaluate",
        description="Print loss, perplexity and bits per byte of a whole validation split; ± is the"
        " standard error.",
    )
    add = parser.add_argument
    text = "a run, a step, a folder in Hugging Face's format, or the address of one"
    add("checkpoints", nargs="+", type=place, metavar="CHECKPOINT", help=text)
    text = "prepared folder, whose validation split is used; default: the data of the run"
    add("--data", type=place, metavar="FOLDER", help=text)
    text = "assistant: only the replies in conversations count; default: as in training"
    add("--loss_on", choices=["all", "assistant"], help=text)
    text = f"context, in tokens; default: as in training, for Hugging Face's at most {CONTEXT:,}"
    add("--block_size", type=count, metavar="N", help=text)
    text = "precision of matrix products; auto: as a run on this device; default %(default)s"
    add("--dtype", default="auto", choices=["auto", *hardware.DTYPES], help=text)
    add_device(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Print a row for each checkpoint, then one for each compressor of the same text."""
    args = parse_args(argv)
    device = hardware.find_device(args.device)
    # Check all before evaluating the first, which may take minutes.
    tasks = [find_task(path, args) for path in args.checkpoints]
    contexts = {length for task in tasks for length in (task.context, task.whole_context)}
    texts = {task.data_dir for task in tasks}
    models, compressors = {}, {}  # {label: function that computes the columns}
    for task in tasks:
        label = str(task.folder)
        if task.loss_on == "assistant":
            label += ", replies alone"
        if len(contexts) > 1:
            label += f", context {task.context:,}"
        if len(texts) > 1:
            label += f", on {task.data_dir}"
        models[label] = partial(evaluate, task, device, args.dtype)
        if task.loss_on == "all":
            for name, compress in COMPRESSORS.items():
                on = f"{name} on {task.data_dir}"
                compressors[on] = partial(compressed, task.data_dir, compress)

    rows = models | compressors
    width = max(map(len, rows))
    print(f"{'':{width}}{'loss':>18}{'perplexity':>22}{'bits per byte':>16}", flush=True)
    for label, columns in rows.items():
        print(f"{label:{width}}{columns()}", flush=True)
    if compressors:
        print("Lower is better. Plain text has 8 bits per byte.")


@dataclass
class Task:
    """A checkpoint to evaluate. context: tokens per window. whole_context: the model's."""

    folder: Path
    data_dir: str
    loss_on: str
    context: int
    whole_context: int


def find_task(path: str, args: argparse.Namespace) -> Task:
    """The checkpoint at `path`, and how to evaluate it.

    Raises CheckpointError if it is damaged, DataError if the data does not match it.
    """
    folder = pretrained.resolve(path)
    config, state = pretrained.check(folder)
    own = state.get("settings", {})
    default = own.get("block_size", min(config.block_size, CONTEXT))
    data_dir = args.data or own.get("data_dir")
    prepare = f"--tokenizer {quote(path)}"
    if not data_dir or Path(data_dir).is_file():
        text = quote(data_dir or "TEXT")
        raise DataError(
            f"there is no prepared text to evaluate {folder} on; prepare some with its tokenizer,"
            f" and add --data data/NAME:\n  python {our_file('prepare_data.py')} {text} {prepare}"
            " --out data/NAME"
        )
    loss_on = args.loss_on or own.get("loss_on", Config.loss_on)
    meta = read_meta(data_dir)
    check_validated(data_dir, meta, loss_on)
    tokenizer = Tokenizer.load(tokenizer_file(data_dir, meta))
    if not tokenizer.same_as(Tokenizer.load(folder)):
        raise DataError(
            f"{data_dir} has another tokenizer than {folder}; give --data a folder that was"
            f" prepared with {prepare}"
        )
    if own and not args.data and (other := other_data(state["data"], meta, folder)):
        raise DataError(
            f"{data_dir} is no longer what {folder} was trained on, and the model may have seen its"
            f" validation text; to evaluate on it nevertheless, give --data {quote(data_dir)}:\n"
            + other[0]
        )
    context = args.block_size or default
    if context > config.block_size:
        raise CheckpointError(
            f"--block_size {context} is longer than the context of {folder}, {config.block_size}"
        )
    return Task(folder, data_dir, loss_on, context, config.block_size)


def evaluate(task: Task, device: torch.device, dtype: str) -> str:
    """Loss, perplexity and bits per byte on a validation split, with standard errors, as a row.

    dtype: as in hardware.find_dtype.
    """
    model, _, _ = load_model(task.folder, device)
    meta = read_meta(task.data_dir)
    data = Dataset(task.data_dir, meta, "val", task.context, device, task.loss_on)
    with hardware.autocast(device, hardware.find_dtype(device, dtype)):
        loss, error = validation_loss(model, data)
    return columns_of(loss, error, meta.bits_per_byte(1.0, task.loss_on))


def columns_of(loss: float, error: float, bits: float) -> str:
    """A row's numbers. loss, error: nats per token. bits: bits per byte for 1 nat per token."""
    perplexity = command.perplexity(loss)
    columns = [
        f"{loss:,.4f} ±{error:.4f}",
        f"{command.number(perplexity)} ±{command.number(perplexity * error)}",
        f"{bits * loss:,.3f} ±{bits * error:.3f}",
    ]
    return "{:>18} {:>21} {:>15}".format(*columns)


@torch.inference_mode()
def validation_loss(model, data: Dataset) -> tuple[float, float]:
    """Mean loss over a whole split in nats per token, and its standard error.

    The error estimates how much the loss would vary with another validation text of this kind and
    size. It treats windows of block_size tokens as independent samples of unequal length (a ratio
    estimator). Not finite for a single window.
    """
    windows = []  # [2, B]: the sum and the number of each window's losses
    for x, y in data.evaluation(0, max(1, TOKENS // data.block_size)):
        logits = model(x).flatten(0, 1).float()
        losses = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="none")
        windows.append(torch.stack([losses.view(y.shape).sum(1), (y != IGNORE).sum(1)]).cpu())
    sums, counts = torch.cat(windows, dim=1).double()  # on the CPU: some GPUs have no float64
    mean = sums.sum() / counts.sum()
    n = (counts > 0).sum()
    variance = ((sums - mean * counts) ** 2).sum() * n / (n - 1)
    return mean.item(), (variance.sqrt() / counts.sum()).item()


def compressed(data_dir: str, compress: Callable[[bytes], bytes]) -> str:
    """Bits per byte of a compressor on a validation split, aligned with the models' column."""
    meta = read_meta(data_dir)
    ids = read_tokens(data_dir, meta, "val")
    tokenizer = Tokenizer.load(tokenizer_file(data_dir, meta))
    markers = [meta.eot_id, *form_of(tokenizer).markers.values()]
    text = tokenizer.decode_bytes(ids[~np.isin(ids, markers)].tolist())
    return f"{8 * len(compress(text)) / len(text):56.3f}"


if __name__ == "__main__":
    command.run("tools.evaluate", main)
