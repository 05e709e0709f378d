"""What benchmarks compute, and a part of `make gpu` on a CPU with the smallest of models."""

import json
import os
import re
import shutil
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

from benchmarks import ablation, generate, gpu, run_main, texts, time_to_loss
from benchmarks.laptop import bits_per_byte, read_documents
from tests.conftest import ROOT, SMALL, ok, run_script

VOCABULARY = 16


def count_up(ids):
    """A model that gives the id after each id all probability but a trace."""
    return 50.0 * torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY)


def test_a_model_that_knows_nothing_takes_the_bits_of_an_id_for_each():
    # Ten windows of 4 ids or fewer: 3 documents of 12, 12 and 13 ids to predict.
    documents = [[0] * 13, [1] * 13, [2] * 14]
    bits = bits_per_byte(lambda ids: torch.zeros(*ids.shape, VOCABULARY), documents, 4, 74)
    assert bits == pytest.approx(37 * 4 / 74)


def test_each_id_is_predicted_from_the_one_before_it_across_windows_too():
    assert bits_per_byte(count_up, [list(range(11))], 4, 10) < 1e-6


def test_a_file_is_held_out_as_a_whole(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"line of {i:02}\n" * 400)
    train, held_out = read_documents(str(tmp_path))
    assert set("".join(held_out).splitlines()) == {"line of 00", "line of 20"}
    assert len("".join(train + held_out)) == 40 * 400 * len("line of 00\n")
    assert "line of 20" not in "".join(train)


def test_the_rows_of_texts_become_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    args = Namespace(texts=["a, b=x.txt"], minutes=[2.0, 15.0], base="folder", out=tmp_path)
    keys = list(texts.runs(args))
    assert keys == ["a b, 0, base", *(f"a b, {m}, {s}" for m in (2, 15) for s in texts.STYLES)]
    result = tmp_path / "texts.json"
    result.write_text(
        json.dumps({"device": "cpu", "rows": {k: {"bits per byte": 1} for k in keys}})
    )
    texts.draw(result)
    assert (tmp_path / "texts.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("main", "words", "sentence"),
    [
        (generate.main, "--base MODEL", "no checkpoint at MODEL; it does not exist"),
        (texts.main, "a.txt --minutes 2,x", "x: it must be a number above 0"),
        (time_to_loss.main, "--nanochat PATH", "PATH is not a checkout of nanochat"),
    ],
)
def test_a_mistake_is_a_sentence_before_anything_is_measured(
    main, words, sentence, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["benchmark", *words.split()])
    with pytest.raises(SystemExit) as end:
        run_main("benchmark", main)
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err


def test_a_part_runs_and_what_it_measured_is_kept(char_data, tmp_path):
    settings = (*SMALL, f"--data_dir={char_data}", "--block_size=16", "--n_layer=1")
    command = ["-m", "benchmarks.gpu", "generate_modern", *settings]
    result = ok(run_script(*command, BENCHMARK_RESULTS=str(tmp_path)))
    (folder,) = tmp_path.glob("gpu_*")
    assert json.loads((folder / "parts.json").read_text())["generate_modern"] == "done"
    figures = json.loads((folder / "generate_modern_cpu.json").read_text())["figures"]
    assert figures["at 400: ours"] > 0
    assert figures["at 400: transformers in float32"] > 0  # of a modern model too
    assert "| generate_modern_cpu: at 400: ours |" in result.stdout


@pytest.mark.skipif(not shutil.which("make"), reason="needs make")
def test_make_gpu_says_where_there_is_no_gpu():
    result = subprocess.run(
        ["make", "gpu", f"PY={sys.executable}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    assert result.returncode == 2, result.stdout + result.stderr
    said = result.stderr.splitlines()[0]
    assert said.startswith("benchmarks.gpu: PyTorch ") and "finds no GPU here" in said
    assert "python -m benchmarks.gpu --device=cpu" in said


@pytest.mark.parametrize(
    ("gigabytes", "sequences"), [(141, 64), (79.6, 64), (42.5, 32), (23.6, 16), (15.6, 8)]
)
def test_a_plain_loop_gets_the_sequences_that_a_gpu_holds(gigabytes, sequences):
    assert gpu.sequences_in(int(1e9 * gigabytes)) == sequences
    assert f"--batch_size={sequences}" in gpu.command("ladder", None, sequences, [])


# Finds no package that tests alone need, as on a rented machine.
WITHOUT_THEM = """
import re
from importlib.machinery import PathFinder
from importlib.metadata import packages_distributions

def listed(path):
    return set(re.findall("(?m)^[a-z0-9_.-]+", open(path).read().lower()))

extra = listed("requirements-dev.txt") | listed("requirements-tools.txt")
extra -= listed("requirements.txt") | {"pytest"}
hidden = {name for name, of in packages_distributions().items() if extra & set(map(str.lower, of))}

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(
    lambda cls, name, *more: None if name in hidden else find(name, *more)
)
"""


def test_the_tests_for_a_gpu_need_pytest_alone(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_THEM)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    words = [word for part in ("tests", "other_tests") for word in gpu.command(part, None, 64, [])]
    named = [word for word in words if word.endswith(".py")]
    collect = ["-m", "pytest", "--collect-only", "-m", "gpu", *named]
    ok(run_script(*collect, PYTHONPATH=str(tmp_path)))
    tests = ROOT.glob("tests/**/test_*.py")
    marked = {path for path in tests if re.search(r"mark\.gpu\b", path.read_text())}
    assert {ROOT / name for name in named} == marked


def test_a_difference_within_the_spread_of_seeds_is_not_clear():
    rows = ablation.rows({"a": [2.0, 2.2], "b": [1.9, 2.1], "c": [1.5, 1.6]}, bits_a_nat=0.5)
    assert [row[1:] for row in rows] == [
        ["2", "2.1000", "0.2000", "1.0500", "", ""],
        ["2", "2.0000", "0.2000", "1.0000", "-0.1000", "no"],
        ["2", "1.5500", "0.1000", "0.7750", "-0.5500", "yes"],
    ]
