"""tools/evaluate.py: losses beside compressors, multiple choice as transformers judges it."""

import gzip
import json
import math
import re

import pytest
import torch

from formats import run_folder, run_log
from formats.data_folder import read_meta
from generating.load import load_model
from model import IGNORE
from tests.conftest import fails_clearly, prose, run_script, train_small
from tests.test_model import huggingface_twin
from tools import evaluate
from tools.evaluate import (
    accuracies,
    choice_losses,
    encode_choice,
    read_choices,
    sequences_at_once,
    validation_loss,
    validation_text,
)
from training.dataset import Dataset
from training.errors import RunError

CPU = torch.device("cpu")


def plain():
    """No autocast."""
    return torch.autocast("cpu", enabled=False)


@pytest.fixture(scope="module")
def runs(char_data, bpe_data, tmp_path_factory):
    """A small run of each tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    for data in (char_data, bpe_data):
        result = train_small(
            data, folder / data.name, "--max_steps=20", "--eval_batches=0", "--sample_prompts=The "
        )
        assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    """A file in HellaSwag's format, made of real sentences.

    The ending that follows, and three from elsewhere; one context is longer than a model's.
    """
    sentences = [
        s.strip()
        for s in re.split(r"(?<=[.;])\s+", prose()[150_000:])
        if 30 < len(s.strip()) < 200 and s.isascii()
    ][:40]
    path = tmp_path_factory.mktemp("choices") / "choices.jsonl"
    lines = []
    for n in range(20):
        ctx, _, ending = sentences[n].partition(" ")
        endings = [sentences[(n + k * 7) % 40].partition(" ")[2] for k in range(4)]
        label = n % 4
        endings[0], endings[label] = endings[label], ending
        lines.append(
            json.dumps(
                {
                    "ind": n,
                    "activity_label": "Reading",
                    "ctx": (sentences[n + 1] * 3 if n == 5 else "") + ctx,
                    "endings": endings,
                    "label": label,
                }
            )
        )
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_evaluation_is_that_of_training_and_stands_beside_compressors(runs, char_data, bpe_data):
    result = run_script("-m", "tools.evaluate", runs / "char", runs / "bpe")
    assert result.returncode == 0, result.stderr
    for data in (char_data, bpe_data):
        row = re.search(
            rf"/{data.name}/step_00000020\s+([\d.]+) ±([\d.]+)\s+([\d.]+) ±([\d.]+)\s+([\d.]+)"
            r" ±([\d.]+)",
            result.stdout,
        )
        loss, error, perplexity, _, bits, _ = map(float, row.groups())
        logged = [r for r in run_log.read(runs / data.name) if "val_loss" in r][-1]
        assert loss == pytest.approx(logged["val_loss"], abs=2e-3) and bits == pytest.approx(
            logged["bits_per_byte"], abs=2e-3
        )
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-2) and 0 < error < 0.2
        text = validation_text(data)
        assert len(text) == read_meta(data).splits["val"].text_bytes
        assert (
            f"{8 * len(gzip.compress(text, 9)) / len(text):.3f}" in result.stdout
            and "xz -9" in result.stdout
        )


def test_the_error_of_the_mean_is_that_of_its_windows(runs, char_data):
    model, _, _ = load_model(run_folder.find(runs / "char"), CPU)
    data = Dataset(char_data, read_meta(char_data), "val", model.config.block_size, CPU)
    mean, error = validation_loss(model, data, plain)
    with torch.no_grad():
        losses = torch.stack([model(x, y) for x, y in data.evaluation(0, 1) if (y != IGNORE).all()])
    assert mean == pytest.approx(losses.mean().item(), rel=1e-3)
    assert error == pytest.approx(losses.std().item() / math.sqrt(len(losses)), rel=0.02)


@pytest.mark.parametrize("name", ["bpe", "char"])
def test_multiple_choice_is_that_of_transformers_with_the_same_weights(runs, questions, name):
    model, tokenizer, _ = load_model(run_folder.find(runs / name), CPU)
    asked = read_choices(questions)
    losses, theirs = choice_losses(model, tokenizer, asked, plain), []
    hf = huggingface_twin(model)
    for question in asked:
        theirs.append([])
        for ending in question["endings"]:
            ids, count = encode_choice(tokenizer, question["ctx"], ending, model.config.block_size)
            assert (" " + ending).startswith(tokenizer.decode(ids[-count:])) and len(ids) <= 33
            with torch.no_grad():
                logs = hf(torch.tensor([ids[:-1]])).logits[0].log_softmax(-1)
            theirs[-1].append(
                -sum(
                    logs[len(ids) - 1 - count + k, ids[len(ids) - count + k]].item()
                    for k in range(count)
                )
            )
    assert losses == [pytest.approx(row, rel=1e-4) for row in theirs]
    assert accuracies(asked, losses) == accuracies(asked, theirs)


def test_choices_in_the_table(runs, questions):
    result = run_script("-m", "tools.evaluate", runs / "bpe", "--choices", questions)
    assert result.returncode == 0, result.stderr
    assert (
        "20 questions; by chance 25.0%" in result.stdout
        and len(re.findall(r"\d+\.\d% ±\d+\.\d%", result.stdout)) == 2
    )


def test_the_right_ending_wins_by_loss_and_length_does_not_count():
    question = [{"ctx": "a", "endings": ["bb", "cccccccc"], "label": 1}]
    assert accuracies(question, [[6.0, 9.0]]) == (0.0, 1.0)  # 6 / 2 against 9 / 8 characters
    # As lm-evaluation-harness has it, which leaves out the space before an ending.
    question = [{"ctx": "a", "endings": ["b" * 10, "c" * 22], "label": 1}]
    assert accuracies(question, [[10.0, 21.5]]) == (0.0, 1.0)


def test_no_memory_is_a_sentence(runs, monkeypatch):
    def nothing_left(*arguments):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(evaluate, "load_model", nothing_left)
    with pytest.raises(RunError, match="out of memory; end what else"):
        evaluate.main([str(runs / "bpe")])


def test_large_vocabularies_are_evaluated_in_fewer_sequences_at_once():
    assert sequences_at_once(50304, 512) == sequences_at_once(151936, 100) == 8
    assert sequences_at_once(151936, 1024) == 2
    assert sequences_at_once(151936, 8192) == 1


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ('{"ctx": "a", "endings": ["b"]', "line 2"),
        ('{"endings": ["b"], "label": 0}', "'ctx'"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 2}', "index"),
        ('{"ctx": "a", "endings": ["b", ""], "label": 0}', "not empty"),
        ("7", "line 2"),
    ],
)
def test_a_question_that_is_none_is_named_by_its_line(tmp_path, line, word):
    from tools.evaluate import ChoicesError

    (tmp_path / "q.jsonl").write_text('{"ctx": "a", "endings": ["b", "c"], "label": "1"}\n' + line)
    with pytest.raises(ChoicesError, match=word):
        read_choices(tmp_path / "q.jsonl")


def test_other_data_is_refused_and_a_missing_checkpoint_or_file_named(runs, bpe_data, tmp_path):
    refused = run_script("-m", "tools.evaluate", runs / "char", "--data", bpe_data)
    fails_clearly(refused, "another tokenizer", "--tokenizer")
    assert not refused.stdout  # no head without a table
    fails_clearly(run_script("-m", "tools.evaluate", tmp_path), "no checkpoint at")
    fails_clearly(
        run_script("-m", "tools.evaluate", runs / "char", "--choices", tmp_path / "none.jsonl"),
        "none.jsonl cannot be read",
    )


def test_the_loss_of_fewer_bits_is_that_of_float32_and_a_little(runs):
    losses = {}
    for dtype in ("float32", "float16"):
        result = run_script("-m", "tools.evaluate", runs / "bpe", "--dtype", dtype)
        assert result.returncode == 0, result.stderr
        row = re.search(r"/step_00000020\s+([\d.]+) ±", result.stdout)
        losses[dtype] = float(row[1])
    assert losses["float16"] == pytest.approx(losses["float32"], abs=2e-3)
