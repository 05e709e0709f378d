"""A checkout of nanoGPT to compare with: a copy with our tokens, its train.py, and its model.

The checkout itself stays as it is.
"""

import importlib.util
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path

import hardware
from benchmarks import ENVIRONMENT, checkout, edited_copy
from command_line import Parser
from config import Config
from formats.data_folder import read_meta
from training.run import largest_divisor


def add_option(parser: Parser) -> None:
    """Take --nanogpt PATH."""
    text = "checkout of nanoGPT to compare with"
    is_nanogpt = checkout("nanoGPT", "train.py")
    parser.add_argument("--nanogpt", type=is_nanogpt, metavar="PATH", help=text)


def copy_checkout(path: Path, copy: Path, data_dir: str, edits: dict[str, str]) -> Path:
    """Copy a checkout, with a prepared folder's tokens as its data set `same`; returns the copy.

    edits: passages of its train.py, and what replaces each.
    """
    edited_copy(path, copy, "train.py", edits)
    data = copy / "data" / "same"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (data / name).symlink_to((Path(data_dir) / name).absolute())
    with open(data / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": read_meta(data_dir).vocab_size}, file)
    return copy


def arguments(c: Config) -> list[str]:
    """The model, batch, device and dtype of a run as nanoGPT's train.py takes them."""
    device = hardware.find_device(c.device)
    micro_batch = largest_divisor(c.batch_size, c.micro_batch_size or c.batch_size)
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias", "dropout")
    return [
        *(f"--{name}={getattr(c, name)}" for name in names),
        f"--batch_size={micro_batch}",
        f"--gradient_accumulation_steps={c.batch_size // micro_batch}",
        f"--device={device.type}",
        f"--dtype={str(hardware.find_dtype(device, c.dtype)).removeprefix('torch.')}",
        f"--compile={c.compile is not False}",
    ]


def train(copy: Path, words: list[str]) -> list[tuple[int, float]]:
    """Run its train.py. Returns the iterations that it logs, and the moment of each in seconds."""
    # The data set comes last: a config file among the words sets another.
    words = [sys.executable, "-u", "train.py", *words, "--dataset=same"]
    stamps = []
    with subprocess.Popen(
        words, cwd=copy, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        for line in process.stdout:
            if match := re.match(r"iter (\d+): loss", line):
                stamps.append((int(match[1]), time.perf_counter()))
    if process.returncode:
        sys.exit(process.returncode)  # it has said why
    return stamps


def model_module(path: Path):
    """Its model.py as a module, under a name of its own next to our model.py."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path / "model.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
