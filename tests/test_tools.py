"""tools/: evaluation beside compressors, and the picture of a run."""
import gzip
import math
import re

import pytest

import checkpoint
from metadata import read_meta
from tests.conftest import fails_clearly, run_script
from tests.test_train import train_small
from tools.evaluate import validation_text


@pytest.fixture(scope="module")
def runs(char_data, bpe_data, tmp_path_factory):
    """A small run of each tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    for data in (char_data, bpe_data):
        result = train_small(data, folder / data.name, "--max_steps=20", "--eval_batches=0", "--sample_prompts=The ")
        assert result.returncode == 0, result.stderr
    return folder


def test_evaluation_is_that_of_training_and_stands_beside_compressors(runs, char_data):
    result = run_script("-m", "tools.evaluate", runs / "char")
    assert result.returncode == 0, result.stderr
    loss, perplexity, bits = map(float, re.search(r"step_00000020\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)", result.stdout).groups())
    logged = [r for r in checkpoint.read_log(runs / "char") if "val_loss" in r][-1]
    assert loss == pytest.approx(logged["val_loss"], abs=2e-3) and bits == pytest.approx(logged["bits_per_byte"], abs=2e-3)
    assert perplexity == pytest.approx(math.exp(loss), rel=1e-2)
    text = validation_text(char_data)
    assert len(text) == read_meta(char_data).splits["val"].text_bytes
    assert f"{8 * len(gzip.compress(text, 9)) / len(text):.3f}" in result.stdout and "xz -9" in result.stdout


def test_other_data_is_refused_and_a_missing_checkpoint_named(runs, bpe_data, tmp_path):
    fails_clearly(run_script("-m", "tools.evaluate", runs / "char", "--data", bpe_data), "another tokenizer", "--tokenizer")
    fails_clearly(run_script("-m", "tools.evaluate", tmp_path), "no checkpoint at")


def test_the_picture_of_a_run(runs, tmp_path):
    result = run_script("-m", "tools.report", runs / "bpe", "--out", tmp_path / "new" / "run.png")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "new" / "run.png").read_bytes()[:4] == b"\x89PNG"
    fails_clearly(run_script("-m", "tools.report", tmp_path), "has logged no loss")
