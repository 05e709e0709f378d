"""Runs and a tokenizer that the tests of generating share."""

import pytest

from tests.conftest import train_small
from tokenizer_bpe import Tokenizer


def train(data, folder):
    """A barely trained run, of one layer."""
    result = train_small(data, folder, "--n_layer=1", "--batch_size=4", "--max_steps=20")
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
