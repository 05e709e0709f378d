"""How good checkpoints are: loss on a whole validation split, and multiple choice.

    python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] [--data data/NAME] [--choices FILE.jsonl]

The loss stands beside what general compressors make of the same text; the questions are in
HellaSwag's format.
"""

import startup

if __name__ == "__main__":
    startup.begin("torch")  # before the slow imports

import argparse
import contextlib
import functools
import gzip
import json
import lzma
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

import hardware
from formats import mirror, run_folder
from formats.data_folder import DataError, read_meta
from formats.run_folder import CheckpointError
from generating.arguments import add_device
from generating.cpu_kernels import pack
from generating.load import load_model
from model import IGNORE
from tokenizer_bpe import Tokenizer, TokenizerError
from tools import command
from training.conversations import Conversations, check_validated
from training.dataset import Dataset, read_tokens
from training.errors import RunError

SEQUENCES = 8  # in a forward,
LOGITS_BYTES = 4e9  # but no more than have their logits in so much memory
LOSSES = {"loss": 17, "perplexity": 20, "bits per byte": 16}  # columns and their widths
DIGITS = {"loss": 4, "perplexity": 2, "bits per byte": 3}  # after the point
SHARES = {"accuracy": 16, "per character": 16}  # the columns of multiple choice


class ChoicesError(ValueError):
    """A file of questions that cannot be used, in a sentence for the user."""


@dataclass
class Estimate:
    """A mean and its standard error; NaN where one draw alone was seen."""

    mean: float
    error: float

    def times(self, factor: float) -> "Estimate":
        """The same in another unit."""
        return Estimate(self.mean * factor, self.error * factor)

    def text(self, digits: int) -> str:
        """4.4412 ±0.0210."""
        mean = f"{self.mean:,.{digits}f}"
        if not math.isfinite(self.error):
            return mean
        return f"{mean} ±{self.error:.{digits}f}"


def token_losses(model, x, y, cast) -> torch.Tensor:
    """Loss of each prediction in nats, float32 [B, T]; 0 where y is IGNORE. x, y: int64 [B, T]."""
    with torch.inference_mode(), cast():
        logits = model(x)
    losses = F.cross_entropy(
        logits.flatten(0, 1).float(), y.flatten(), ignore_index=IGNORE, reduction="none"
    )
    return losses.view(y.shape)


def sequences_at_once(vocab_size: int, tokens: int) -> int:
    """How many sequences of so many tokens a forward takes.

    A logit takes 10 bytes: as the head gives it, in float32, and its logarithm.
    """
    logits = 10 * tokens * vocab_size
    return int(min(max(1, LOGITS_BYTES // logits), SEQUENCES))


def validation_loss(model, data: Dataset, cast) -> tuple[float, float]:
    """Mean loss over a whole split in nats a token, and the standard error of that mean.

    The error takes windows of block_size tokens as independent draws of unequal length (a ratio
    estimate): it tells how far another validation text of the kind and size would lead, not how
    exact the sum is.
    """
    sums = []
    counts = []
    c = model.config
    for x, y in data.evaluation(0, sequences_at_once(c.vocab_size, c.block_size)):
        losses = token_losses(model, x, y, cast)
        sums.append(losses.double().sum(1))
        counts.append((y != IGNORE).sum(1))
    sums = torch.cat(sums)
    counts = torch.cat(counts)
    sums = sums[counts > 0]
    counts = counts[counts > 0]

    mean = sums.sum() / counts.sum()
    n = len(sums)
    if n == 1:
        return mean.item(), math.nan
    spread = ((sums - mean * counts) ** 2).sum().sqrt() / counts.sum() * math.sqrt(n / (n - 1))
    return mean.item(), spread.item()


def read_choices(path: Path) -> list[dict]:
    """Questions from a file in HellaSwag's format.

    A line is a JSON object with "ctx", "endings" and "label", the index of the right ending. Raises
    ChoicesError naming the line that is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise ChoicesError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ChoicesError(f"{path} is not text in UTF-8: {error}") from None
    questions = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            questions.append(read_question(line))
        except (ValueError, TypeError, KeyError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ChoicesError(
                f'{path}, line {number}: {what}; a line looks like {{"ctx": "A man sits down and",'
                ' "endings": ["eats.", "flies."], "label": 0}'
            ) from None
    if not questions:
        raise ChoicesError(f"{path} holds no questions")
    return questions


def read_question(line: str) -> dict:
    """One question. Raises ValueError, TypeError or KeyError for a line that is none."""
    raw = json.loads(line)
    ctx = raw["ctx"]
    endings = raw["endings"]
    label = int(raw["label"])
    texts = isinstance(ctx, str) and all(isinstance(e, str) and e for e in endings)
    if not texts or not 0 <= label < len(endings):
        raise ValueError(
            "ctx must be text, endings texts that are not empty, and label the index of one of them"
        )
    return {"ctx": ctx, "endings": endings, "label": label}


def encode_choice(
    tokenizer: Tokenizer, ctx: str, ending: str, block_size: int
) -> tuple[list[int], int]:
    """Token ids of a context, a space and an ending, and how many of them are the ending's.

    They are at most block_size + 1, as the last is only predicted. The context loses its beginning
    where that is too long, and an ending longer than block_size its end.
    """
    context = tokenizer.encode(ctx).tolist() or [tokenizer.eot_id]
    ids = tokenizer.encode(" " + ending).tolist()[:block_size]
    return (context + ids)[-(block_size + 1) :], len(ids)


def choice_losses(model, tokenizer: Tokenizer, questions: list[dict], cast) -> list[list[float]]:
    """The summed loss, in nats, of each ending of each question after its context."""
    rows = []
    for question in questions:
        for ending in question["endings"]:
            rows.append(encode_choice(tokenizer, question["ctx"], ending, model.config.block_size))
    # Rows of like length side by side: little padding.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]))
    sums = [0.0] * len(rows)
    longest = max(len(ids) for ids, _ in rows)
    count = sequences_at_once(model.config.vocab_size, longest)
    for at in range(0, len(order), count):
        part = order[at : at + count]
        x, y = padded_batch([rows[i] for i in part], model.wte.weight.device)
        losses = token_losses(model, x, y, cast).sum(1).tolist()
        for i, loss in zip(part, losses, strict=True):
            sums[i] = loss
    found = iter(sums)
    return [[next(found) for _ in question["endings"]] for question in questions]


def padded_batch(rows: list[tuple[list[int], int]], device) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets for rows of encode_choice, int64 [B, T]: only endings are targets.

    Padding stands on the right, where a causal model does not see it.
    """
    width = max(len(ids) for ids, _ in rows) - 1
    x = torch.zeros(len(rows), width, dtype=torch.int64)
    y = torch.full((len(rows), width), IGNORE)
    for n, (ids, count) in enumerate(rows):
        end = len(ids) - 1
        x[n, :end] = torch.tensor(ids[:-1])
        y[n, end - count : end] = torch.tensor(ids[-count:])
    return x.to(device), y.to(device)


def accuracies(questions: list[dict], losses: list[list[float]]) -> tuple[float, float]:
    """The shares of questions whose right ending is the likeliest: as it is, and a character.

    The second does not favour short endings and compares across tokenizers. lm-evaluation-harness
    calls them acc and acc_norm.
    """
    plain = 0
    normalised = 0
    for question, sums in zip(questions, losses, strict=True):
        endings = question["endings"]
        by_length = [loss / len(ending) for loss, ending in zip(sums, endings, strict=True)]
        plain += sums.index(min(sums)) == question["label"]
        normalised += by_length.index(min(by_length)) == question["label"]
    return plain / len(questions), normalised / len(questions)


def evaluate_checkpoint(
    model, state: dict, folder: Path, data_dir: str, loss_on: str, cast
) -> dict[str, Estimate]:
    """Loss (nats a token), perplexity and bits a byte of a model on a whole validation split.

    loss_on: what of it counts, as the setting of that name. Returns them under the names of LOSSES.
    Raises DataError if the data was not made with the checkpoint's tokenizer, or has no validation
    split.
    """
    meta = read_meta(data_dir)
    check_validated(data_dir, meta, loss_on)
    if meta.tokenizer["sha256"] != state["data"]["tokenizer_sha256"]:
        raise DataError(
            f"{data_dir} was made with another tokenizer than {folder}; give --data the folder that"
            f" it was trained on, or one prepared with --tokenizer {folder}"
        )
    if state["settings"]["data_dir"] == data_dir and state["data"] != meta.identity():
        print(
            f"note: {data_dir} was prepared anew since {folder} was trained; the model may have"
            " seen some of this validation text",
            file=sys.stderr,
        )
    kind = Conversations if loss_on == "assistant" else Dataset
    data = kind(data_dir, meta, "val", model.config.block_size, model.wte.weight.device)
    loss = Estimate(*validation_loss(model, data, cast))
    perplexity = math.exp(loss.mean)
    return {
        "loss": loss,
        "perplexity": Estimate(perplexity, perplexity * loss.error),
        "bits per byte": loss.times(meta.bits_per_byte(1.0, loss_on)),
    }


def answer_choices(model, tokenizer: Tokenizer, questions: list[dict], cast) -> dict[str, str]:
    """The accuracies of a model, as the cells of SHARES."""
    shares = accuracies(questions, choice_losses(model, tokenizer, questions, cast))
    cells = {}
    for name, share in zip(SHARES, shares, strict=True):
        error = math.sqrt(share * (1 - share) / len(questions))
        cells[name] = f"{share:.1%} ±{error:.1%}"
    return cells


def validation_text(data_dir: str) -> bytes:
    """The text of a validation split, end-of-text markers left out."""
    meta = read_meta(data_dir)
    ids = read_tokens(data_dir, meta, "val")
    tokenizer = Tokenizer.load(Path(data_dir) / meta.tokenizer["file"])
    return tokenizer.decode_bytes(ids[ids != meta.eot_id].tolist())


def trained_on(folder: Path) -> str:
    """What counted in a checkpoint's loss, as the setting loss_on has it."""
    return run_folder.read_state(folder, ())["settings"].get("loss_on", "all")


def label_of(folder: Path, loss_on: str) -> str:
    """A checkpoint's name in the table."""
    return f"{folder}, replies alone" if loss_on == "assistant" else str(folder)


def table_line(label: str, width: int, columns: dict[str, int], cells: dict[str, str]) -> str:
    """A line of the table: the label to the left, each column's cell, if any, to the right."""
    line = f"{label:{width}}"
    for name, column_width in columns.items():
        line += f"{cells.get(name, ''):>{column_width}}"
    return line.rstrip()


def print_compressors(data_dirs: list[str], width: int) -> None:
    """The bits a byte that general compressors take for the validation texts."""
    for data_dir in data_dirs:
        text = validation_text(data_dir)
        compressed = {"gzip -9": gzip.compress(text, 9), "xz -9": lzma.compress(text, preset=9)}
        for name, packed in compressed.items():
            cells = {"bits per byte": f"{8 * len(packed) / len(text):.3f}"}
            print(table_line(f"{name} on {data_dir}", width, LOSSES, cells))


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.evaluate",
        usage="python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] ... (--help lists all)",
        description="Loss, perplexity and bits per byte on a whole validation split; accuracy in"
        " multiple choice. ± is the standard error.",
    )
    parser.add_argument(
        "checkpoints",
        nargs="+",
        metavar="CHECKPOINT",
        help="a run, a step, or the address of either",
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="prepared folder; default: the one that the checkpoint was trained on",
    )
    parser.add_argument(
        "--loss_on",
        choices=["all", "assistant"],
        help="assistant: in conversations its replies alone count; default: as it was trained",
    )
    parser.add_argument(
        "--choices",
        type=Path,
        metavar="FILE",
        help='also multiple choice, from a local file in HellaSwag\'s format: {"ctx", "endings",'
        ' "label"} a line',
    )
    parser.add_argument(
        "--dtype",
        choices=list(hardware.DTYPES),
        help="of the weights, as generate.py keeps them on a CPU; default: float32, with the"
        " products in bfloat16 where the hardware has them",
    )
    add_device(parser)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """The command line's work."""
    try:
        print_table(parse_args(argv))
    except (RuntimeError, MemoryError) as error:
        if not hardware.out_of_memory(error):
            raise
        raise RunError("out of memory; end what else uses it, or choose another --device") from None


def print_table(args: argparse.Namespace) -> None:
    """A line for each checkpoint as it is done, and what compressors make of the text."""
    sys.stdout.reconfigure(errors="replace")
    device = hardware.find_device(args.device)
    cast = functools.partial(hardware.autocast, device, hardware.find_dtype(device, "auto"))
    if args.dtype:
        if device.type != "cpu":
            raise hardware.DeviceError(f"--dtype is for CPUs; on {device} leave it out")
        cast = contextlib.nullcontext
    folders = [mirror.find(path) for path in args.checkpoints]
    questions = read_choices(args.choices) if args.choices else []
    columns = LOSSES | SHARES if questions else LOSSES

    counted = [args.loss_on or trained_on(folder) for folder in folders]
    labels = [label_of(folder, loss_on) for folder, loss_on in zip(folders, counted, strict=True)]
    width = max(map(len, labels)) + 2
    data_dirs = []
    head = table_line("", width, columns, {name: name for name in columns})
    for folder, loss_on, label in zip(folders, counted, labels, strict=True):
        model, tokenizer, state = load_model(folder, device)
        if args.dtype:
            pack(model, args.dtype)
        data_dir = args.data or state["settings"]["data_dir"]
        found = evaluate_checkpoint(model, state, folder, data_dir, loss_on, cast)
        cells = {name: estimate.text(DIGITS[name]) for name, estimate in found.items()}
        if questions:
            cells |= answer_choices(model, tokenizer, questions, cast)
        if head:
            print(head)
            head = ""
        print(table_line(label, width, columns, cells), flush=True)
        if loss_on == "all" and data_dir not in data_dirs:
            data_dirs.append(data_dir)
    print_compressors(data_dirs, width)
    if questions:
        by_chance = sum(1 / len(q["endings"]) for q in questions) / len(questions)
        print(
            f"{len(questions):,} questions; by chance {by_chance:.1%}. per character: the ending"
            " with the least loss a character"
        )


if __name__ == "__main__":
    mistakes = (ChoicesError, CheckpointError, TokenizerError, hardware.DeviceError)
    command.run("tools.evaluate", main, mistakes, (RunError,))
