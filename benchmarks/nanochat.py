"""A checkout of nanochat to compare with: a copy with our documents, its scripts, and its models.

The checkout itself stays as it is. It needs rustbpe.
"""

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import hardware
from benchmarks import ENVIRONMENT
from config import Config

# The learning rates of its base_train.py in July 2026; it scales them by batch size and width.
RATES = {"embedding": 0.3, "unembedding": 0.008, "matrix": 0.02, "scalar": 0.5}
SEED = "torch.manual_seed(42)"  # in its common.py


def copy_checkout(path: Path, copy: Path, train: Path, val: Path, vocab_size: int) -> None:
    """Copy a checkout, with two parquet files as its shards, and train its tokenizer."""
    shutil.copytree(path, copy, ignore=shutil.ignore_patterns(".git"))
    common = copy / "nanochat" / "common.py"
    text = common.read_text(encoding="utf-8")
    assert SEED in text, f"this nanochat's common.py lacks: {SEED}"
    text = text.replace(SEED, 'torch.manual_seed(int(os.environ["SEED"]))')
    common.write_text(text, encoding="utf-8")
    shards = copy / "base" / "base_data_climbmix"
    shards.mkdir(parents=True)
    (shards / "shard_00000.parquet").symlink_to(train)
    (shards / "shard_00001.parquet").symlink_to(val)  # its loader takes the last for validation
    run(copy, "scripts.tok_train", f"--vocab-size={vocab_size}", SEED="0")


def run(copy: Path, *words: str, **variables: str) -> str:
    """Run one of its scripts with variables in the environment; returns what it prints."""
    env = ENVIRONMENT | {"NANOCHAT_BASE_DIR": str(copy / "base")} | variables
    result = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=copy,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        env=env,
    )
    if result.returncode:
        sys.exit(result.stdout)
    return result.stdout


class Run:
    """Runs of a copy at the shape, batch and dtype of ours, with full attention as its runcpu.sh.

    Left to itself it takes float32 on a CPU, where a step in bfloat16 takes half the time. rates:
    what all its learning rates are multiplied with. command: the words of base_train.
    """

    def __init__(self, copy: Path, c: Config, device: torch.device, rates: float):
        self.copy, self.device = copy, device
        self.dtype = str(hardware.find_dtype(device, c.dtype)).removeprefix("torch.")
        self.command = [
            "scripts.base_train",
            f"--device-type={device.type}",
            f"--depth={c.n_layer}",
            f"--aspect-ratio={c.n_embd // c.n_layer}",  # it rounds the width up to whole heads
            f"--head-dim={c.n_embd // c.n_head}",
            f"--max-seq-len={c.block_size}",
            "--window-pattern=L",
            f"--device-batch-size={c.batch_size}",
            f"--total-batch-size={c.batch_size * c.block_size}",
            *(f"--{name}-lr={rates * value}" for name, value in RATES.items()),
            *("--eval-every=-1", "--core-metric-every=-1", "--sample-every=-1", "--model-tag=run"),
        ]

    def train(self, steps: int, save_every: int, seed: int) -> list[float]:
        """Seconds of training after each step; every save_every-th and the last are saved."""
        options = [f"--num-iterations={steps}", f"--save-every={save_every}"]
        variables = {"NANOCHAT_DTYPE": self.dtype, "SEED": str(seed)}
        output = run(self.copy, *self.command, *options, **variables)
        milliseconds = map(float, re.findall(r"\| dt: ([\d.]+)ms", output))
        return list(itertools.accumulate(ms / 1000 for ms in milliseconds))

    def load(self, step: int) -> tuple[Callable, Callable]:
        """The model of a saved step, ids -> logits, and its tokenizer, a document -> ids."""
        os.environ |= {"NANOCHAT_BASE_DIR": str(self.copy / "base"), "NANOCHAT_DTYPE": self.dtype}
        if str(self.copy) not in sys.path:
            sys.path.append(str(self.copy))
        from nanochat.checkpoint_manager import build_model

        folder = self.copy / "base" / "base_checkpoints" / "run"
        model, tokenizer, _ = build_model(folder, step, self.device, "eval")
        return model, lambda text: tokenizer.encode(text, prepend="<|bos|>")
