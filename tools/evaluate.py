"""How good checkpoints are on a whole validation split, beside what general compressors make of the same text.

    python -m tools.evaluate CHECKPOINT [CHECKPOINT ...] [--data data/NAME]
"""
import argparse
import gzip
import lzma
import math
import sys
from pathlib import Path

import checkpoint
import hardware
from checkpoint import CheckpointError
from dataset import DataError, Dataset, read_meta, read_tokens
from generate import load_model
from hardware import DeviceError
from step import evaluate
from tokenizer_bpe import Tokenizer, TokenizerError


def evaluate_checkpoint(folder: Path, data_dir: str | None, device, dtype) -> tuple[str, dict]:
    """The data folder used, and loss (nats a token), perplexity and bits a byte of one step folder on its whole validation split.

    Raises DataError if the data was not made with the checkpoint's tokenizer.
    """
    model, _, state = load_model(folder, device)
    data_dir = data_dir or state["settings"]["data_dir"]
    meta = read_meta(data_dir)
    if meta.tokenizer["sha256"] != state["data"]["tokenizer_sha256"]:
        raise DataError(f"{data_dir} was made with another tokenizer than {folder}; give --data the folder that it was trained on, or one prepared with --tokenizer {folder}")
    val = meta.splits["val"]
    if not val.tokens:
        raise DataError(f"{data_dir} has no validation split; prepare it with a --val_fraction above 0")
    data = Dataset(data_dir, meta, "val", model.config.block_size, device)
    loss = evaluate(model, data, 0, 8, lambda: hardware.autocast(device, dtype))
    return data_dir, {"loss": loss, "perplexity": math.exp(loss), "bits_per_byte": loss / math.log(2) * val.tokens / val.text_bytes}


def validation_text(data_dir: str) -> bytes:
    """The text of a validation split, end-of-text markers left out."""
    meta = read_meta(data_dir)
    ids = read_tokens(data_dir, meta, "val")
    return Tokenizer.load(Path(data_dir) / meta.tokenizer["file"]).decode_bytes(ids[ids != meta.eot_id].tolist())


def main(argv):
    """The command line's work."""
    parser = argparse.ArgumentParser(prog="python -m tools.evaluate", description="Loss, perplexity and bits per byte on a whole validation split.")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT", help="a run or one step of it")
    parser.add_argument("--data", metavar="FOLDER", help="prepared folder; default: the one that the checkpoint was trained on")
    parser.add_argument("--device", default="auto", help="auto, cuda, cuda:1, mps or cpu; default %(default)s")
    args = parser.parse_args(argv)
    device = hardware.find_device(args.device)
    folders = [checkpoint.find(path) for path in args.checkpoints]
    width = max(len(str(f)) for f in folders) + 2
    print(f"{'':{width}}{'loss':>9}{'perplexity':>12}{'bits per byte':>15}")
    used = {}
    for folder in folders:
        data_dir, result = evaluate_checkpoint(folder, args.data, device, hardware.find_dtype(device, "auto"))
        used[data_dir] = True
        print(f"{folder!s:{width}}{result['loss']:9.4f}{result['perplexity']:12.2f}{result['bits_per_byte']:15.3f}")
    for data_dir in used:
        text = validation_text(data_dir)
        for name, packed in (("gzip -9", gzip.compress(text, 9)), ("xz -9", lzma.compress(text, preset=9))):
            print(f"{name + ' on ' + data_dir:{width}}{'':21}{8 * len(packed) / len(text):15.3f}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except (CheckpointError, DataError, TokenizerError, DeviceError) as error:
        print(f"tools.evaluate: {error}", file=sys.stderr)
        sys.exit(2)
