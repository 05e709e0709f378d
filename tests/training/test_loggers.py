"""TensorBoard, Weights & Biases, report.html: none of them ends a run."""

import importlib.util
import re

import pytest

from config import Config, ConfigError
from formats import files, run_log
from tests.conftest import train_small
from training.loggers import Loggers, check_installed
from training.recorder import draw_report


def test_loggers_continue_across_resumes(char_data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    more = ["--tensorboard=True", "--wandb=trial", "--sample_prompts=The "]
    for steps in (20, 40):
        settings = [f"--max_steps={steps}", *more]
        result = train_small(char_data, tmp_path, *settings, WANDB_MODE="offline")
        assert result.returncode == 0 and "failed" not in result.stderr, result.stderr
        assert "wandb sync" in result.stdout

    log = run_log.read(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for curve, field in (
        ("loss/training", "loss"),
        ("loss/validation", "val_loss"),
        ("training/learning_rate", "lr"),
    ):
        points = [(e.step, e.value) for e in events.Scalars(curve)]
        assert points == [(r["step"], pytest.approx(r[field], rel=1e-5)) for r in log if field in r]
    assert any("The" in name for name in events.Tags()["tensors"])

    known = files.read_json(tmp_path / "wandb.json")["id"]  # one, over both starts
    written = sorted(tmp_path.glob(f"wandb/offline-run-*-{known}/run-{known}.wandb"))
    assert len(written) == 2 and all(b"loss/training" in f.read_bytes() for f in written)


def test_a_logger_that_is_not_installed_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install tensorboard"):
        check_installed(Config(tensorboard=True))
    with pytest.raises(ConfigError, match="pip install wandb"):
        check_installed(Config(wandb="trial"))


def test_a_logger_that_fails_is_said_once_and_left_alone(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("in the way")
    loggers = Loggers(Config(tensorboard=True), tmp_path, 0)
    for step in (1, 2):
        loggers.write({"step": step, "loss": 1.0})
    loggers.close()
    assert capsys.readouterr().err.count("training goes on without it") == 1


def test_a_run_prints_readable_lines_and_its_report_is_drawn(char_data, tmp_path, capfd):
    more = ["--max_steps=20", "--sample_prompts=The ", "--cost_per_hour=8"]
    result = train_small(char_data, tmp_path / "run", *more)
    assert result.returncode == 0, result.stderr
    line = (
        r"step 10 of 20, epoch 0\.\d\d: training loss [\d.]+, validation loss [\d.]+, [\d.]+ bits"
        r" per byte, best [\d.]+, [\d,]+ tokens/s, cost [\d.]+, \d+ s left\n  \| The"
    )
    assert re.search(line, result.stdout)
    assert "o validation" in result.stdout
    assert f"kept in {tmp_path / 'run' / 'step_00000020'}" in result.stdout
    assert f"  python -m tools.report {tmp_path / 'run'}\n" in result.stdout
    printed = result.stdout + result.stderr
    assert "\r" not in printed and "\x1b" not in printed

    assert not (tmp_path / "run" / "report.html").exists()  # so short a run draws none
    assert draw_report(tmp_path / "run") and (tmp_path / "run" / "report.html").exists()
    assert not draw_report(tmp_path / "run", timeout_s=0.01)
    assert not draw_report(tmp_path / "none")
    assert capfd.readouterr() == ("", "")
