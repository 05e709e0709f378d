"""How good checkpoints are: their loss on a whole validation split, next to gzip and xz.

    python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] [--data data/NAME]

Bits per byte compare across tokenizers, and with the compressors, which run on the same text.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import gzip
import lzma
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shlex import quote

import numpy as np
import torch
import torch.nn.functional as F

import hardware
from command_line import Parser, place
from config import Config
from formats import pretrained
from formats.conversation import form_of
from formats.data_folder import DataError, check_validated, read_meta, read_tokens, tokenizer_file
from formats.run_folder import CheckpointError
from generating.load import load_model
from generating.terminal import add_device
from model import IGNORE
from tokenizer_bpe import Tokenizer, TokenizerError
from tools import command
from training.dataset import Dataset
from training.start import other_data

TOKENS = 2048  # per forward: at most about 3 GB of logits, with Qwen3's vocabulary
COMPRESSORS = {"gzip -9": gzip.compress, "xz -9": partial(lzma.compress, preset=9)}


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="python -m tools.evaluate",
        description="Print loss, perplexity and bits per byte of a whole validation split; ± is the"
        " standard error.",
    )
    add = parser.add_argument
    text = "a run, a step, or the address of a run"
    add("checkpoints", nargs="+", type=place, metavar="CHECKPOINT", help=text)
    text = "prepared folder, whose validation split is used; default: the data of the run"
    add("--data", type=place, metavar="FOLDER", help=text)
    text = "assistant: only the replies in conversations count; default: as in training"
    add("--loss_on", choices=["all", "assistant"], help=text)
    add_device(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Print a row for each checkpoint, then one for each compressor of the same text."""
    args = parse_args(argv)
    device = hardware.find_device(args.device)
    models, compressors = {}, {}  # {label: function that computes the columns}
    for folder in map(pretrained.resolve, args.checkpoints):
        pretrained.check_run(folder)
        state = pretrained.check_step(folder)  # before one is evaluated, which may take minutes
        data_dir = args.data or state["settings"]["data_dir"]
        loss_on = args.loss_on or state["settings"].get("loss_on", Config.loss_on)
        check_data(data_dir, loss_on, folder, state)
        if not args.data:
            check_same_data(data_dir, folder, state)
        label = f"{folder}, replies alone" if loss_on == "assistant" else str(folder)
        models[label] = partial(evaluate, folder, data_dir, loss_on, device)
        if loss_on == "all":
            for name, compress in COMPRESSORS.items():
                compressors[f"{name} on {data_dir}"] = partial(compressed, data_dir, compress)

    rows = models | compressors
    width = max(map(len, rows))
    print(f"{'':{width}}{'loss':>18}{'perplexity':>22}{'bits per byte':>16}", flush=True)
    for label, columns in rows.items():
        print(f"{label:{width}}{columns()}", flush=True)
    if compressors:
        print(
            "Lower is better. Plain text has 8 bits per byte; a model with fewer than gzip and xz"
            " predicts the text better than they do."
        )


def check_data(data_dir: str, loss_on: str, folder: Path, state: dict) -> None:
    """Raises DataError for data made with another tokenizer, or without a validation split."""
    meta = read_meta(data_dir)
    check_validated(data_dir, meta, loss_on)
    if meta.tokenizer["sha256"] != state["data"]["tokenizer_sha256"]:
        raise DataError(
            f"{data_dir} has another tokenizer than {folder}; give --data the folder that it was"
            f" trained on, or one prepared with --tokenizer {quote(str(folder))}"
        )


def check_same_data(data_dir: str, folder: Path, state: dict) -> None:
    """Raises DataError where a run's data_dir holds other data now: the run may have seen it."""
    if other := other_data(state["data"], read_meta(data_dir), folder):
        raise DataError(
            f"{data_dir} is no longer what {folder} was trained on, and the model may have seen its"
            f" validation text; to evaluate on it nevertheless, give --data {quote(data_dir)}:\n"
            + other[0]
        )


def evaluate(folder: Path, data_dir: str, loss_on: str, device: torch.device) -> str:
    """Loss, perplexity and bits per byte of a validation split with their standard errors."""
    model, _, _ = load_model(folder, device)
    meta, context = read_meta(data_dir), model.config.block_size
    data = Dataset(data_dir, meta, "val", context, device, loss_on)
    with hardware.autocast(device, hardware.find_dtype(device, "auto")):
        loss, error = validation_loss(model, data)
    return columns_of(loss, error, meta.bits_per_byte(1.0, loss_on))


def columns_of(loss: float, error: float, bits: float) -> str:
    """A row's numbers. loss, error: in nats a token. bits: those per byte of one nat a token."""
    perplexity = command.perplexity(loss)
    columns = [
        f"{loss:,.4f} ±{error:.4f}",
        f"{command.number(perplexity)} ±{command.number(perplexity * error)}",
        f"{bits * loss:,.3f} ±{bits * error:.3f}",
    ]
    return "{:>18} {:>21} {:>15}".format(*columns)


@torch.inference_mode()
def validation_loss(model, data: Dataset) -> tuple[float, float]:
    """Mean loss over a whole split in nats a token, and the standard error of that mean.

    The error takes windows of block_size tokens as independent draws of unequal length (a ratio
    estimate): how far another validation text of the kind and size would lead. Not finite for one
    window.
    """
    windows = []  # [2, B]: the sum of each window's losses, and how many they are
    for x, y in data.evaluation(0, max(1, TOKENS // model.config.block_size)):
        logits = model(x).flatten(0, 1).float()
        losses = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORE, reduction="none")
        windows.append(torch.stack([losses.view(y.shape).sum(1), (y != IGNORE).sum(1)]).cpu())
    sums, counts = torch.cat(windows, dim=1).double()  # on the CPU: some GPUs have no float64
    mean = sums.sum() / counts.sum()
    n = (counts > 0).sum()
    variance = ((sums - mean * counts) ** 2).sum() * n / (n - 1)
    return mean.item(), (variance.sqrt() / counts.sum()).item()


def compressed(data_dir: str, compress: Callable[[bytes], bytes]) -> str:
    """Bits per byte of a compressor on a validation split, below those of models."""
    meta = read_meta(data_dir)
    ids = read_tokens(data_dir, meta, "val")
    tokenizer = Tokenizer.load(tokenizer_file(data_dir, meta))
    markers = [meta.eot_id, *form_of(tokenizer).markers.values()]
    text = tokenizer.decode_bytes(ids[~np.isin(ids, markers)].tolist())
    return f"{8 * len(compress(text)) / len(text):56.3f}"


if __name__ == "__main__":
    mistakes = (CheckpointError, TokenizerError, hardware.DeviceError)
    command.run("tools.evaluate", main, mistakes)
