"""How good checkpoints are: loss on a whole validation split beside general compressors, and
multiple choice in HellaSwag's format.

python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] [--data data/NAME] [--choices FILE.jsonl]
"""

import argparse
import gzip
import json
import lzma
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

import hardware
from formats import run_folder
from formats.run_folder import CheckpointError
from generating.load import load_model
from hardware import DeviceError
from tokenizer_bpe import Tokenizer, TokenizerError
from training.dataset import IGNORE, DataError, Dataset, read_meta, read_tokens

SEQUENCES = 8  # in a forward


class ChoicesError(ValueError):
    """A file of questions that cannot be used, in a sentence for the user."""


def token_losses(model, x, y, cast) -> torch.Tensor:
    """Loss of each prediction in nats, float32 [B, T]; 0 where y is IGNORE. x, y: int64 [B, T]."""
    with torch.inference_mode(), cast():
        logits = model(x)
    return F.cross_entropy(
        logits.flatten(0, 1).float(), y.flatten(), ignore_index=IGNORE, reduction="none"
    ).view(y.shape)


def validation_loss(model, data: Dataset, cast) -> tuple[float, float]:
    """Mean loss over a whole split in nats a token, and the standard error of that mean.

    The error takes windows of block_size tokens as independent draws of unequal length (a ratio
    estimate): it tells how far another validation text of the kind and size would lead, not how
    exact the sum is.
    """
    sums, counts = [], []
    for x, y, _ in data.evaluation(0, SEQUENCES):
        losses = token_losses(model, x, y, cast)
        sums.append(losses.double().sum(1))
        counts.append((y != IGNORE).sum(1))
    sums, counts = torch.cat(sums), torch.cat(counts)
    sums, counts = sums[counts > 0], counts[counts > 0]
    mean, n = sums.sum() / counts.sum(), len(sums)
    if n == 1:
        return mean.item(), math.nan
    spread = ((sums - mean * counts) ** 2).sum().sqrt() / counts.sum() * math.sqrt(n / (n - 1))
    return mean.item(), spread.item()


def read_choices(path: Path) -> list[dict]:
    """Questions from a file in HellaSwag's format: a JSON object a line with "ctx", "endings" and
    "label", the index of the right ending.

    Raises ChoicesError naming the line that is none.
    """
    questions = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ChoicesError(f"{path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            question = {"ctx": raw["ctx"], "endings": raw["endings"], "label": int(raw["label"])}
            if not (
                isinstance(question["ctx"], str)
                and all(isinstance(e, str) and e for e in question["endings"])
                and 0 <= question["label"] < len(question["endings"])
            ):
                raise ValueError(
                    "ctx must be text, endings texts that are not empty, and label the index of one"
                    " of them"
                )
        except (ValueError, TypeError, KeyError) as error:
            what = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ChoicesError(
                f'{path}, line {number}: {what}; a line looks like {{"ctx": "A man sits down and",'
                ' "endings": ["eats.", "flies."], "label": 0}'
            ) from None
        questions.append(question)
    if not questions:
        raise ChoicesError(f"{path} holds no questions")
    return questions


def encode_choice(
    tokenizer: Tokenizer, ctx: str, ending: str, block_size: int
) -> tuple[list[int], int]:
    """Token ids of a context, a space and an ending, and how many of them are the ending's; at most
    block_size + 1, as the last is only predicted. The context loses its beginning where that is
    too long, and an ending longer than block_size its end.
    """
    context = tokenizer.encode(ctx).tolist() or [tokenizer.eot_id]
    ids = tokenizer.encode(" " + ending).tolist()[:block_size]
    return (context + ids)[-(block_size + 1) :], len(ids)


def choice_losses(model, tokenizer: Tokenizer, questions: list[dict], cast) -> list[list[float]]:
    """The summed loss, in nats, of each ending of each question after its context."""
    device, rows = model.wte.weight.device, []
    for question in questions:
        rows += [
            encode_choice(tokenizer, question["ctx"], ending, model.config.block_size)
            for ending in question["endings"]
        ]
    order, sums = (
        sorted(range(len(rows)), key=lambda i: len(rows[i][0])),
        [0.0] * len(rows),
    )  # rows of like length side by side: little padding
    for at in range(0, len(order), SEQUENCES):
        part = order[at : at + SEQUENCES]
        width = max(len(rows[i][0]) for i in part)
        x = torch.zeros(len(part), width - 1, dtype=torch.int64)
        y = torch.full((len(part), width - 1), IGNORE)
        for n, i in enumerate(part):  # padding on the right: what is causal does not see it
            ids, count = rows[i]
            x[n, : len(ids) - 1] = torch.tensor(ids[:-1])
            y[n, len(ids) - 1 - count : len(ids) - 1] = torch.tensor(ids[-count:])
        for i, loss in zip(
            part, token_losses(model, x.to(device), y.to(device), cast).sum(1).tolist(), strict=True
        ):
            sums[i] = loss
    found = iter(sums)
    return [[next(found) for _ in question["endings"]] for question in questions]


def accuracies(questions: list[dict], losses: list[list[float]]) -> tuple[float, float]:
    """The shares of questions whose right ending is the likeliest: as it is, and a byte of UTF-8,
    which does not favour short endings and compares across tokenizers (lm-evaluation-harness
    calls them acc and acc_norm).
    """
    plain = normalised = 0
    for question, sums in zip(questions, losses, strict=True):
        per_byte = [
            loss / len((" " + ending).encode())
            for loss, ending in zip(sums, question["endings"], strict=True)
        ]
        plain += sums.index(min(sums)) == question["label"]
        normalised += per_byte.index(min(per_byte)) == question["label"]
    return plain / len(questions), normalised / len(questions)


def evaluate_checkpoint(model, state: dict, folder: Path, data_dir: str, cast) -> dict:
    """Loss (nats a token), perplexity and bits a byte of a model on a whole validation split, and
    their standard errors as *_error.

    Raises DataError if the data was not made with the checkpoint's tokenizer.
    """
    meta = read_meta(data_dir)
    if meta.tokenizer["sha256"] != state["data"]["tokenizer_sha256"]:
        raise DataError(
            f"{data_dir} was made with another tokenizer than {folder}; give --data the folder that"
            f" it was trained on, or one prepared with --tokenizer {folder}"
        )
    val = meta.splits["val"]
    if state["settings"]["data_dir"] == data_dir and state["data"] != meta.identity():
        print(
            f"note: {data_dir} was prepared anew since {folder} was trained; the model may have"
            " seen some of this validation text",
            file=sys.stderr,
        )
    if not val.tokens:
        raise DataError(
            f"{data_dir} has no validation split; prepare it with a --val_fraction above 0"
        )
    data = Dataset(data_dir, meta, "val", model.config.block_size, model.wte.weight.device)
    loss, error = validation_loss(model, data, cast)
    bits = val.tokens / val.text_bytes / math.log(2)
    return {
        "loss": loss,
        "loss_error": error,
        "perplexity": math.exp(loss),
        "perplexity_error": math.exp(loss) * error,
        "bits_per_byte": loss * bits,
        "bits_per_byte_error": error * bits,
    }


def validation_text(data_dir: str) -> bytes:
    """The text of a validation split, end-of-text markers left out."""
    meta = read_meta(data_dir)
    ids = read_tokens(data_dir, meta, "val")
    return Tokenizer.load(Path(data_dir) / meta.tokenizer["file"]).decode_bytes(
        ids[ids != meta.eot_id].tolist()
    )


def with_error(value: float, error: float, digits: int) -> str:
    """4.4412 ±0.0210."""
    return f"{value:,.{digits}f}" + (f" ±{error:.{digits}f}" if math.isfinite(error) else "")


def main(argv):
    """The command line's work."""
    what = (
        "Loss, perplexity and bits per byte on a whole validation split; accuracy in multiple"
        " choice. ± is the standard error."
    )
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description=what)
    parser.add_argument(
        "checkpoints", nargs="+", metavar="CHECKPOINT", help="a run or one step of it"
    )
    parser.add_argument(
        "--data",
        metavar="FOLDER",
        help="prepared folder; default: the one that the checkpoint was trained on",
    )
    parser.add_argument(
        "--choices",
        type=Path,
        metavar="FILE",
        help=(
            'also multiple choice, from a local file in HellaSwag\'s format: {"ctx", "endings",'
            ' "label"} a line'
        ),
    )
    parser.add_argument(
        "--device", default="auto", help="auto, cuda, cuda:1, mps or cpu; default %(default)s"
    )
    args = parser.parse_args(argv)
    sys.stdout.reconfigure(errors="replace")
    device = hardware.find_device(args.device)
    folders, questions = (
        [run_folder.find(path) for path in args.checkpoints],
        read_choices(args.choices) if args.choices else [],
    )
    width = max(len(str(f)) for f in folders) + 2
    print(
        f"{'':{width}}{'loss':>17}{'perplexity':>20}{'bits per byte':>16}"
        + (f"{'accuracy':>16}{'a byte':>16}" if questions else "")
    )

    def cast():
        return hardware.autocast(device, hardware.find_dtype(device, "auto"))

    used = {}
    for folder in folders:
        model, tokenizer, state = load_model(folder, device)
        data_dir = args.data or state["settings"]["data_dir"]
        r = evaluate_checkpoint(model, state, folder, data_dir, cast)
        used[data_dir] = True
        cells = (
            with_error(r["loss"], r["loss_error"], 4),
            with_error(r["perplexity"], r["perplexity_error"], 2),
            with_error(r["bits_per_byte"], r["bits_per_byte_error"], 3),
        )
        line = f"{folder!s:{width}}{cells[0]:>17}{cells[1]:>20}{cells[2]:>16}"
        if questions:
            for share in accuracies(questions, choice_losses(model, tokenizer, questions, cast)):
                line += (
                    f"{f'{share:.1%} ±{math.sqrt(share * (1 - share) / len(questions)):.1%}':>16}"
                )
        print(line, flush=True)
    for data_dir in used:
        text = validation_text(data_dir)
        for name, packed in (
            ("gzip -9", gzip.compress(text, 9)),
            ("xz -9", lzma.compress(text, preset=9)),
        ):
            print(
                f"{name + ' on ' + data_dir:{width}}{'':37}{f'{8 * len(packed) / len(text):.3f}':>16}"
            )
    if questions:
        print(
            f"{len(questions):,} questions; by chance"
            f" {sum(1 / len(q['endings']) for q in questions) / len(questions):.1%}. a byte: the"
            " ending with the least loss a byte"
        )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (ChoicesError, CheckpointError, DataError, TokenizerError, DeviceError) as error:
        print(f"tools.evaluate: {error}", file=sys.stderr)
        sys.exit(2)
