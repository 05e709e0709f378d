"""A checkout of nanoGPT to compare with: a copy with our tokens, its train.py, and its model.

The checkout itself stays as it is.
"""

import argparse
import importlib.util
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import startup
from config import Config
from formats.data_folder import read_meta

# What startup.py sets in this process, and stock nanoGPT does not set.
OURS = {
    "THP_MEM_ALLOC_ENABLE": "1",
    "TORCHINDUCTOR_VEC_ISA_OK": "1",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    "GOMP_SPINCOUNT": startup.SPIN,
}


def add_option(parser: argparse.ArgumentParser) -> None:
    """Take --nanogpt PATH: None, or a folder with a train.py."""
    text = "checkout of nanoGPT to compare with"
    parser.add_argument("--nanogpt", type=_checkout, metavar="PATH", help=text)


def _checkout(path):
    if not Path(path, "train.py").is_file():
        raise argparse.ArgumentTypeError(f"{path} is no checkout of nanoGPT: it has no train.py")
    return Path(path)


def copy_checkout(path: Path, copy: Path, data_dir: str, edits: dict[str, str]) -> Path:
    """Copy a checkout, with a prepared folder's tokens as its data set `same`; returns the copy.

    edits: passages of its train.py, and what replaces each.
    """
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns(".git"))
    data = copy / "data" / "same"
    data.mkdir(parents=True)
    for name in ("train.bin", "val.bin"):
        (data / name).symlink_to((Path(data_dir) / name).absolute())
    with open(data / "meta.pkl", "wb") as file:
        pickle.dump({"vocab_size": read_meta(data_dir).vocab_size}, file)
    script = copy / "train.py"
    text = script.read_text()
    for old, new in edits.items():
        assert old in text, f"this nanoGPT's train.py lacks: {old}"
        text = text.replace(old, new)
    script.write_text(text)
    return copy


def shape_arguments(c: Config) -> list[str]:
    """The model of a run, and whether it is compiled, as nanoGPT's train.py takes them."""
    names = ("n_layer", "n_head", "n_embd", "block_size", "bias")
    shape = [f"--{name}={getattr(c, name)}" for name in names]
    return [*shape, f"--compile={c.compile is not False}"]


def train(copy: Path, arguments: list[str]) -> list[tuple[int, float]]:
    """Run its train.py. Returns the iterations that it logs, and the moment of each in seconds."""
    # The data set comes last: a config file among the arguments sets another.
    words = [sys.executable, "-u", "train.py", *arguments, "--dataset=same"]
    clean = {name: value for name, value in os.environ.items() if OURS.get(name) != value}
    stamps = []
    with subprocess.Popen(words, cwd=copy, stdout=subprocess.PIPE, text=True, env=clean) as process:
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
