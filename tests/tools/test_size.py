"""tools/size.py: from a text and hours to a preset that trains."""

import itertools
import os
import shutil
import sys
import time

import pytest

import config as settings
import processors
import tools.size
from formats.data_folder import read_meta
from tests.conftest import address_space, fails_clearly, limited, ok, run_code, run_script


def test_from_a_text_and_hours_to_a_preset_that_trains(bpe_data, tmp_path):
    preset = tmp_path / "presets" / "sized.py"
    family = ["--block_size=32", "--batch_size=8", "--device=cpu"]
    family += ["--n_kv_head=2", "--induction_init=False"]  # the smallest have a single head
    code = "from tools import command, size; size.TIMED_S = 0.1; command.run('size', size.main)"
    result = ok(run_code(code, bpe_data, "--hours", 0.001, "--out", preset, *family))
    rows = [line for line in result.stdout.splitlines() if "M" in line]
    assert sum("<<" in line for line in rows) == 1
    assert f"python train.py {preset}" in result.stdout
    options = [f"--checkpoint_dir={tmp_path / 'run'}", "--max_steps=2", "--compile=False"]
    trained = run_script("train.py", preset, *options)
    assert "finished: 2 steps" in trained.stdout, trained.stderr


@pytest.fixture
def choose(bpe_data, tmp_path, monkeypatch, capsys):
    """choose(widths, *settings) writes a.py for ten hours on a CPU; returns what it prints."""

    def choose(widths, *settings):
        monkeypatch.setattr(tools.size, "WIDTHS", widths)
        monkeypatch.setattr(tools.size, "TIMED_S", 0.01)
        command = [str(bpe_data), "--hours=10", f"--out={tmp_path / 'a.py'}", "--device=cpu"]
        tools.size.main([*command, "--compile=False", *settings])
        return capsys.readouterr().out

    return choose


@pytest.fixture
def steps_of_a_fifth(monkeypatch):
    """Forward and backward take 0.1 s, and so does the update."""
    looks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) / 10)


@pytest.mark.usefixtures("steps_of_a_fifth")
@pytest.mark.parametrize("epochs", [1000, 1])
def test_hours_buy_tokens_at_the_measured_speed(choose, bpe_data, tmp_path, epochs):
    """An epoch is the most that is run."""
    said = choose((64,), "--block_size=32", "--batch_size=8", f"--epochs={epochs}")
    windows = (read_meta(bpe_data).splits["train"].tokens - 32) // 32
    steps = min(10 * 3600 / 0.2, epochs * windows / 8)
    tokens, hours = steps * 8 * 32 / 1e6, steps * 0.2 / 3600
    row = said.splitlines()[2].split()
    assert row[:4] == ["4", "x", "64", "<<"]
    assert row[5:] == [f"{tokens:.1f}M", f"{steps * 8 / windows:.2f}", f"{hours:.2f}"]
    assert f"max_steps = {round(steps)}\n" in (tmp_path / "a.py").read_text()


PRESET = """
n_layer, n_head, n_embd, block_size, batch_size = 16, 4, 256, 32, 8
arch, optimizer, learning_rate, muon_lr, epochs = "gpt2", "muon", 4e-4, 0.04, 100000
"""


def parameters(n_layer, n_embd):
    """Those of a GPT-2 with 512 ids and a context of 32: embeddings, blocks, norms."""
    return (512 + 32 + 12 * n_layer * n_embd + 13 * n_layer + 2) * n_embd


@pytest.mark.usefixtures("steps_of_a_fifth")
def test_a_size_is_a_narrower_preset_with_its_rates(choose, tmp_path):
    """A step takes as long whatever the size: the larger is better."""
    (tmp_path / "p.py").write_text(PRESET)
    rows = choose((64, 128), f"--preset={tmp_path / 'p.py'}").splitlines()[2:4]
    assert [row.split("   ")[0].strip() for row in rows] == ["4 x 64", "8 x 128 <<"]
    assert f" {parameters(4, 64) / 1e6:.2f}M" in rows[0]
    assert f" {parameters(8, 128) / 1e6:.2f}M" in rows[1]
    chosen = settings.load([str(tmp_path / "a.py")])
    ratio = chosen.n_embd / 256
    assert (chosen.n_layer, chosen.n_head) == (16 * ratio, 4 * ratio)
    rates = chosen.learning_rate, chosen.muon_lr  # less for the wider
    assert rates == pytest.approx((4e-4 / ratio**0.5, 0.04 / ratio**0.5))


# Bits per byte that docs/experiments.md has: {millions of parameters in layers: (steps, bits)}.
MEASURED = {
    "German, 2 minutes": {0.21: (645, 1.252), 0.81: (366, 1.127), 1.77: (249, 1.151)},
    "Python, 2 minutes": {0.21: (645, 1.429), 0.81: (366, 1.327), 1.77: (249, 1.370)},
    "plays, 2 minutes": {0.21: (645, 2.108), 0.81: (366, 2.074), 1.77: (249, 2.089)},
    "100 MB, 2 minutes": {0.21: (645, 1.670), 0.81: (366, 1.475)},
    "German, 10 minutes": {0.81: (3220, 0.874), 1.77: (1830, 0.841), 4.82: (880, 0.853)},
    "Python, 10 minutes": {0.81: (3220, 1.074), 1.77: (1830, 1.049), 4.82: (880, 1.079)},
}


@pytest.mark.parametrize("runs", MEASURED.values(), ids=MEASURED)
def test_the_size_that_reached_the_lowest_loss_is_chosen(runs):
    bits = {
        tools.size.Size(None, 0, 1e6 * millions, 4096 * steps, 0, 0).excess: bits
        for millions, (steps, bits) in runs.items()
    }
    assert bits[min(bits)] == min(bits.values())


@pytest.mark.parametrize(
    ("options", "preset", "folder"),
    [
        ([], "play/size.py", "checkpoints/play_4x64_1.5h"),
        (["--out=mine.py"], "mine.py", "checkpoints/mine"),
        (["--checkpoint_dir=runs/a"], "play/size.py", "runs/a"),
    ],
)
def test_a_run_has_a_folder_of_its_own(bpe_data, tmp_path, monkeypatch, options, preset, folder):
    """Whatever --checkpoint_dir says, or text, size and hours, or --out."""
    shutil.copytree(bpe_data, tmp_path / "play")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tools.size, "TIMED_S", 0.01)
    monkeypatch.setattr(tools.size, "WIDTHS", (64,))
    command = ["play", "--hours=1.5", "--block_size=32", "--batch_size=1", "--device=cpu"]
    command.append("--compile=False")
    tools.size.main([*command, *options])
    assert settings.load([preset]).checkpoint_dir == folder


def test_a_folder_that_is_not_prepared_is_a_sentence(tmp_path):
    result = run_script("-m", "tools.size", tmp_path, "--hours", 1)
    fails_clearly(result, "holds no prepared data")


@pytest.mark.skipif(sys.platform != "linux", reason="needs limits and /proc")
def test_sizes_that_fit_the_memory_are_shown_when_a_larger_one_does_not(choose, tmp_path):
    family = ["--n_layer=2", "--n_embd=64", "--block_size=32", "--batch_size=1"]
    with limited("RLIMIT_AS", address_space() + 150_000_000):
        said = choose((64, 1024), *family, "--epochs=1000")
    assert "does not fit the memory" in said
    assert "4 x 64 " in said
    assert (tmp_path / "a.py").exists()


def test_a_size_for_which_linux_has_too_little_memory_is_not_tried(choose, tmp_path, monkeypatch):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable: 30000 kB\n")
    monkeypatch.setattr(processors, "SYSTEM", tmp_path)
    (tmp_path / "p.py").write_text(PRESET)
    said = choose((64, 256), f"--preset={tmp_path / 'p.py'}", "--batch_size=1")
    assert "16 x 256 does not fit the memory" in said
    assert "4 x 64 <<" in said


def test_a_preset_of_the_users_is_not_replaced(bpe_data, tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("n_layer = 3\n")
    result = run_script("-m", "tools.size", bpe_data, "--hours", 1, "--out", path)
    fails_clearly(result, "mine.py exists already", "--out")
    assert path.read_text() == "n_layer = 3\n"


def test_a_preset_for_weights_is_refused_as_they_have_a_size(bpe_data, capsys):
    with pytest.raises(SystemExit):
        tools.size.main([str(bpe_data), "--hours", "1", "--preset", "config/finetune.py"])
    assert "init_from = checkpoints/gpt2_small_modern have a size" in capsys.readouterr().err


def test_a_preset_that_cannot_be_written_is_a_sentence_before_anything_is_timed(
    bpe_data, monkeypatch, capsys
):
    monkeypatch.setattr(os, "access", lambda path, mode: path != bpe_data)  # a read-only disk
    with pytest.raises(SystemExit):
        tools.size.main([str(bpe_data), "--hours", "1"])
    assert f"{bpe_data} is read-only; give another --out" in capsys.readouterr().err


def test_a_preset_has_a_name_that_train_takes(bpe_data, tmp_path, capsys):
    with pytest.raises(SystemExit):
        tools.size.main([str(bpe_data), "--hours", "1", "--out", str(tmp_path / "size.html")])
    assert "size.html: the name must end in .py" in capsys.readouterr().err
