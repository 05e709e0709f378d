"""tools/evaluate.py: losses of a whole validation split, next to compressors."""

import gzip
import math
import re
import shutil

import pytest
import torch

from formats import files, run_folder
from formats.data_folder import DataError, read_meta
from generating.load import load_model
from model import IGNORE
from tests.conftest import fails_clearly, ok, run_script, trained
from tools import command, evaluate
from tools.evaluate import validation_loss
from training.dataset import Dataset

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def runs(char_data, bpe_data, tmp_path_factory):
    """A small run of each tokenizer."""
    folder = tmp_path_factory.mktemp("runs")
    for data in (char_data, bpe_data):
        more = ["--max_steps=20", "--eval_batches=0", "--sample_prompts=The "]
        trained(data, folder / data.name, *more)
    return folder


def evaluated(*arguments):
    """Run tools.evaluate; returns the finished process."""
    return run_script("-m", "tools.evaluate", *arguments)


def test_evaluation_is_that_of_training_next_to_compressors(runs, char_data, bpe_data):
    result = ok(evaluated(runs / "char", runs / "bpe"))
    texts = []
    for data in (char_data, bpe_data):
        label = re.escape(f"/{data.name}/step_00000020, on {data}")
        row = re.search(label + r"\s+([\d.]+) ±([\d.]+)" * 3, result.stdout)
        loss, error, perplexity, _, bits, _ = map(float, row.groups())
        logged = run_folder.evaluation_at(runs / data.name, 20)
        assert loss == pytest.approx(logged["val_loss"], abs=2e-3)
        assert bits == pytest.approx(logged["bits_per_byte"], abs=2e-3)
        assert perplexity == pytest.approx(math.exp(loss), rel=1e-2)
        assert 0 < error < 0.2
        packed = evaluate.compressed(data, lambda text: texts.append(text) or gzip.compress(text))
        assert len(texts[-1]) == read_meta(data).splits["val"].text_bytes
        assert packed in result.stdout
        assert "xz -9" in result.stdout
    assert result.stdout.splitlines()[-1].startswith("Lower is better.")


def test_the_error_of_the_mean_is_that_of_its_windows(runs, char_data):
    model, _, _ = load_model(run_folder.find(runs / "char"), CPU)
    data = Dataset(char_data, read_meta(char_data), "val", model.config.block_size, CPU)
    mean, error = validation_loss(model, data)
    windows = data.evaluation(0, 1)
    with torch.no_grad():
        losses = torch.stack([model(x, y) for x, y in windows if (y != IGNORE).all()])
    assert mean == pytest.approx(losses.mean().item(), rel=1e-3)
    assert error == pytest.approx(losses.std().item() / math.sqrt(len(losses)), rel=0.02)


def test_errors_have_the_units_of_their_numbers():
    row = evaluate.columns_of(2.0, 0.5, bits=0.75)
    assert row.split() == ["2.0000", "±0.5000", "7.39", "±3.69", "1.500", "±0.375"]


def test_other_data_is_refused_and_a_missing_checkpoint_or_file_named(runs, bpe_data, tmp_path):
    refused = evaluated(runs / "char", "--data", bpe_data)
    fails_clearly(refused, "another tokenizer", "--tokenizer")
    second = evaluated(runs / "bpe", runs / "char", "--data", bpe_data)
    fails_clearly(second, "another tokenizer")
    assert not refused.stdout + second.stdout  # before anything is evaluated
    fails_clearly(evaluated(tmp_path), "no checkpoint at")
    broken = shutil.copytree(runs / "char", tmp_path / "broken")
    with open(run_folder.find(broken) / "model.pt", "ab") as file:
        file.write(b"x")
    last = evaluated(runs / "char", broken)
    fails_clearly(last, "model.pt is damaged")
    assert not last.stdout


def test_data_that_has_changed_since_training_is_not_evaluated_on_unasked(runs, bpe_data, tmp_path):
    step = shutil.copytree(run_folder.find(runs / "bpe"), tmp_path / "step_00000020")
    evaluate.main([str(step), "--device=cpu"])
    state = run_folder.read_state(step)
    state["data"]["sha256"]["val"] = "another"
    files.write_checked(step / "state.json", state)
    with pytest.raises(DataError, match=f"may have seen.* give --data {bpe_data}"):
        evaluate.main([str(step), "--device=cpu"])
    evaluate.find_task(str(step), evaluate.parse_args([str(step), f"--data={bpe_data}"]))


@pytest.mark.parametrize(
    ("loss", "shown"), [(0.0, "1.00"), (9.0, "8,103.08"), (400.0, "5.22e+173"), (3000.0, "inf")]
)
def test_a_perplexity_is_short_however_large_the_loss_is(loss, shown):
    assert command.number(command.perplexity(loss)) == shown


def rows_of(*arguments):
    """(label, numbers) of each checkpoint's row."""
    lines = ok(evaluated(*arguments)).stdout.splitlines()
    rows = [re.split(r"\s{2,}", line) for line in lines if "±" in line]
    return [(label, numbers) for label, *numbers in rows]


def test_contexts_are_named_where_they_differ(runs):
    ((label, whole),) = rows_of(runs / "bpe")
    assert label.endswith("step_00000020")
    ((label, short),) = rows_of(runs / "bpe", "--block_size=8")
    assert label.endswith("step_00000020, context 8")
    assert short != whole
    longer = evaluated(runs / "bpe", "--block_size=33")
    fails_clearly(longer, "--block_size 33 is longer than the context of", ", 32")


def test_the_precision_can_be_chosen(runs, capsys):
    rows = set()
    for dtype in ("float32", "bfloat16"):  # of two runs, as one may show the same digits in both
        evaluate.main([str(runs / "bpe"), str(runs / "char"), f"--dtype={dtype}", "--device=cpu"])
        rows.add(tuple(capsys.readouterr().out.splitlines()[1:3]))
    assert len(rows) == 2


def test_a_folder_of_hugging_face_is_scored_like_the_run_that_it_was(
    runs, bpe_data, char_data, tmp_path, monkeypatch
):
    folder = tmp_path / "hf"
    ok(run_script("-m", "tools.export", runs / "bpe", "--out", folder))
    on = ["--data", bpe_data]
    (_, ours), (label, theirs) = rows_of(runs / "bpe", folder, *on)
    assert (label, theirs) == (str(folder), ours)
    monkeypatch.setattr(evaluate, "CONTEXT", 16)  # of a model whose own may be 131,072
    task = evaluate.find_task(str(folder), evaluate.parse_args([str(folder), f"--data={bpe_data}"]))
    assert (task.context, task.whole_context) == (16, 32)

    prepare = f"python prepare_data.py TEXT --tokenizer {folder} --out"
    fails_clearly(evaluated(folder), "there is no prepared text to evaluate", prepare)
    unprepared = evaluated(folder, "--data", __file__)
    fails_clearly(unprepared, prepare.replace("TEXT", __file__))
    other = evaluated(folder, "--data", char_data)
    fails_clearly(other, "another tokenizer", f"prepared with --tokenizer {folder}")
    (folder / "model.safetensors").unlink()
    last = evaluated(runs / "bpe", folder, *on)
    fails_clearly(last, f"{folder} has no model.safetensors; if you downloaded it")
    assert not last.stdout
