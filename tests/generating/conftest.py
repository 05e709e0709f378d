"""Runs and a tokenizer that the tests of generating share."""

import pytest

from tests.conftest import reciting, trained
from tokenizer_bpe import Tokenizer


@pytest.fixture(scope="session")
def char_run(tmp_path_factory, char_data):
    """A barely trained run at character level."""
    folder = tmp_path_factory.mktemp("runs") / "char"
    trained(char_data, folder, "--n_layer=1", "--batch_size=4", "--max_steps=20")
    return folder


@pytest.fixture(scope="session")
def byte_tokenizer():
    """A BPE that knows little more than bytes."""
    return Tokenizer.train(["the the the"], 258)


@pytest.fixture(scope="session")
def reciting_run(tmp_path_factory):
    """A run that recites a sentence in which no character occurs twice."""
    return reciting(tmp_path_factory.mktemp("runs") / "reciting", "The quick, brown!")
