"""How good checkpoints are: their loss on a whole validation split, next to gzip and xz.

    python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] [--data data/NAME]

Bits per byte compare across tokenizers, and with the compressors, which run on the same text.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import contextlib
import functools
import gzip
import lzma
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import hardware
from config import Config
from formats import pretrained, run_folder
from formats.data_folder import DataError, check_validated, read_meta, read_tokens
from formats.run_folder import CheckpointError
from generating.arguments import add_device
from generating.cpu_kernels import pack
from generating.load import load_model
from model import IGNORE, GPTConfig
from tokenizer_bpe import Tokenizer, TokenizerError
from tools import command
from training.dataset import Dataset

SEQUENCES = 8  # per forward, fewer if their logits exceed LOGITS_BYTES
LOGITS_BYTES = 4e9


def parse_args(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate",
        description="Print loss, perplexity and bits per byte of a whole validation split; ± is the"
        " standard error.",
    )
    add = parser.add_argument
    text = "a run, a step, or the address of either"
    add("checkpoints", nargs="+", metavar="CHECKPOINT", help=text)
    text = "prepared folder, whose validation split is used; default: the data of the run"
    add("--data", metavar="FOLDER", help=text)
    text = "assistant: only the replies in conversations count; default: as in training"
    add("--loss_on", choices=["all", "assistant"], help=text)
    text = (
        "precision of the weights, as in generate.py on a CPU; default: float32, with products in"
        " bfloat16 where the hardware has them"
    )
    add("--dtype", choices=list(hardware.DTYPES), help=text)
    add_device(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """A row for each checkpoint, then what compressors make of the same text."""
    sys.stdout.reconfigure(errors="replace")
    args = parse_args(argv)
    device = hardware.find_device(args.device)
    if args.dtype and device.type != "cpu":
        raise hardware.DeviceError(f"--dtype is for CPUs; on {device} leave it out")
    asked, texts = {}, {}  # {label: (checkpoint, data, what of it counts)}; {label: data}
    for folder in map(pretrained.resolve, args.checkpoints):
        state = run_folder.read_state(folder, ())
        data_dir = args.data or state["settings"]["data_dir"]
        loss_on = args.loss_on or state["settings"].get("loss_on", Config.loss_on)
        check_data(data_dir, loss_on, folder, state)
        label = f"{folder}, replies alone" if loss_on == "assistant" else str(folder)
        asked[label] = (folder, data_dir, loss_on)
        if loss_on == "all":
            texts |= {f"{name} on {data_dir}": data_dir for name in ("gzip -9", "xz -9")}

    width = max(map(len, (*asked, *texts)))
    print(f"{'':{width}}{'loss':>18}{'perplexity':>22}{'bits per byte':>16}", flush=True)
    for label, (folder, data_dir, loss_on) in asked.items():
        loss, error = evaluate(folder, data_dir, loss_on, device, args.dtype)
        perplexity = math.exp(loss)
        bits = read_meta(data_dir).bits_per_byte(1.0, loss_on)
        row = f"{estimate(loss, error, 4):>18}{estimate(perplexity, perplexity * error, 2):>22}"
        row += f"{estimate(bits * loss, bits * error, 3):>16}"
        print(f"{label:{width}}{row}", flush=True)
    for label, data_dir in texts.items():
        text = validation_text(data_dir)
        packed = gzip.compress(text, 9) if "gzip" in label else lzma.compress(text, preset=9)
        print(f"{label:{width}}{8 * len(packed) / len(text):56.3f}")
    if texts:
        print(
            "Fewer bits per byte are better: plain text has 8, and with fewer than gzip or xz the"
            " model predicts the text better than they do."
        )


def check_data(data_dir: str, loss_on: str, folder: Path, state: dict) -> None:
    """Raises DataError for data made with another tokenizer, or without a validation split."""
    meta = read_meta(data_dir)
    check_validated(data_dir, meta, loss_on)
    if meta.tokenizer["sha256"] != state["data"]["tokenizer_sha256"]:
        raise DataError(
            f"{data_dir} has another tokenizer than {folder}; give --data the folder that it was"
            f" trained on, or one prepared with --tokenizer {folder}"
        )
    if state["settings"]["data_dir"] == data_dir and state["data"] != meta.identity():
        print(
            f"note: {data_dir} has changed since {folder} was trained; the model may have seen some"
            " of this validation text",
            file=sys.stderr,
        )


def estimate(mean: float, error: float, digits: int) -> str:
    """4.4412 ±0.0210; without an error where there is none."""
    if not math.isfinite(error):
        return f"{mean:,.{digits}f}"
    return f"{mean:,.{digits}f} ±{error:.{digits}f}"


def evaluate(
    folder: Path, data_dir: str, loss_on: str, device: torch.device, dtype: str | None
) -> tuple[float, float]:
    """The mean loss of a validation split in nats a token, and its standard error.

    loss_on: as the setting. dtype: of the weights, packed for a CPU; None: as in training.
    """
    model, _, _ = load_model(folder, device)
    if dtype:
        pack(model, dtype)
        cast = contextlib.nullcontext
    else:
        cast = functools.partial(hardware.autocast, device, hardware.find_dtype(device, "auto"))
    meta, context = read_meta(data_dir), model.config.block_size
    data = Dataset(data_dir, meta, "val", context, device, loss_on)
    return validation_loss(model, data, cast)


def validation_loss(model, data: Dataset, cast) -> tuple[float, float]:
    """Mean loss over a whole split in nats a token, and the standard error of that mean.

    The error takes windows of block_size tokens as independent draws of unequal length (a ratio
    estimate): how far another validation text of the kind and size would lead. Not finite for one
    window.
    """
    sums, counts = [], []
    for x, y in data.evaluation(0, micro_batch(model.config)):
        with torch.inference_mode(), cast():
            logits = model(x)
        losses = F.cross_entropy(
            logits.flatten(0, 1).float(), y.flatten(), ignore_index=IGNORE, reduction="none"
        )
        sums.append(losses.view(y.shape).sum(1).cpu())
        counts.append((y != IGNORE).sum(1).cpu())
    sums = torch.cat(sums).double()  # Apple's and some of Intel's GPUs have no float64
    counts = torch.cat(counts)
    mean = sums.sum() / counts.sum()
    n = (counts > 0).sum()
    variance = ((sums - mean * counts) ** 2).sum() * n / (n - 1)
    return mean.item(), (variance.sqrt() / counts.sum()).item()


def micro_batch(config: GPTConfig) -> int:
    """Sequences in a forward. A logit takes 10 bytes: as given, in float32, and its logarithm."""
    sequence = 10 * config.block_size * config.vocab_size
    return int(min(max(1, LOGITS_BYTES // sequence), SEQUENCES))


def validation_text(data_dir: str) -> bytes:
    """The text of a validation split, end-of-text markers left out."""
    meta = read_meta(data_dir)
    ids = read_tokens(data_dir, meta, "val")
    tokenizer = Tokenizer.load(Path(data_dir) / meta.tokenizer["file"])
    return tokenizer.decode_bytes(ids[ids != meta.eot_id].tolist())


if __name__ == "__main__":
    mistakes = (CheckpointError, TokenizerError, hardware.DeviceError)
    command.run("tools.evaluate", main, mistakes)
