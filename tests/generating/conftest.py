"""Runs and a tokenizer that the tests of generating share."""

import pytest

from tests.conftest import run_script
from tokenizer_bpe import Tokenizer


def train(data, folder):
    """A barely trained run."""
    shape = [
        "--n_layer=1",
        "--n_head=2",
        "--n_embd=32",
        "--block_size=32",
        "--batch_size=4",
        "--compile=False",
    ]
    result = run_script(
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        *shape,
        "--max_steps=20",
        "--eval_interval=10",
        "--eval_batches=2",
    )
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def char_run(tmp_path_factory, char_data):
    """One at character level."""
    return train(char_data, tmp_path_factory.mktemp("runs") / "char")


@pytest.fixture(scope="session")
def bpe_run(tmp_path_factory, bpe_data):
    """One with a byte-level BPE."""
    return train(bpe_data, tmp_path_factory.mktemp("runs") / "bpe")


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A BPE that knows little more than bytes."""
    return Tokenizer.train(["the the the"], 258)
