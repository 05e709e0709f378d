"""TensorBoard, Weights & Biases, report.html: they go on across resumes and end no run."""

import importlib.util
import os
import re

import pytest

from config import Config, ConfigError
from formats import files, run_log
from tests.conftest import train_small
from training.loggers import Loggers, check_installed
from training.report_process import ReportProcess


def test_tensorboard_continues_across_resumes(char_data, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (20, 40):
        result = train_small(
            char_data,
            tmp_path,
            f"--max_steps={steps}",
            "--tensorboard=True",
            "--sample_prompts=The ",
        )
        assert result.returncode == 0, result.stderr
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


def test_wandb_without_network_stays_in_the_folder_under_one_id(char_data, tmp_path):
    for steps in (10, 20):
        result = train_small(
            char_data,
            tmp_path,
            f"--max_steps={steps}",
            "--wandb=trial",
            "--sample_prompts=The ",
            WANDB_MODE="offline",
        )
        assert (
            result.returncode == 0
            and "wandb sync" in result.stdout
            and "failed" not in result.stderr
        ), result.stderr
    known = files.read_json(tmp_path / "wandb.json")["id"]
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


def test_the_report_is_refreshed_by_one_process_at_a_time_and_no_failure_matters(tmp_path, capsys):
    (tmp_path / "log.jsonl").write_text(
        "".join(f'{{"step": {n}, "loss": {9 - n}, "elapsed_s": {n}}}\n' for n in range(1, 4))
    )
    report = ReportProcess(tmp_path, 1e-9)
    report.refresh()
    first = report.process
    report.refresh()
    assert report.process is first  # still drawing
    assert os.getsid(first.pid) == os.getsid(0) and os.getpgid(first.pid) != os.getpgid(
        0
    )  # Linux weighs priorities within a session; Ctrl-C reaches a group
    assert report.finish() == tmp_path / "report.html" and (tmp_path / "report.html").exists()
    assert (
        first.poll() is not None and report.process.poll() is not None
    )  # no process is left behind
    (tmp_path / "log.jsonl").unlink()
    assert report.finish() is None
    assert "python -m tools.report" in capsys.readouterr().err
    later = ReportProcess(tmp_path, 10)
    later.refresh()
    assert later.process is None and later.finish() is None  # a short run draws nothing


def test_a_run_ends_with_its_report_drawn(char_data, tmp_path):
    result = train_small(
        char_data,
        tmp_path / "run",
        "--max_steps=20",
        "--report_minutes=0.00001",
        "--sample_prompts=The ",
        "--cost_per_hour=8",
    )
    assert (
        result.returncode == 0 and f"report: {tmp_path / 'run' / 'report.html'}" in result.stdout
    ), result.stderr
    line = (
        r"step 10 of 20, epoch 0\.\d\d: training loss [\d.]+, validation loss [\d.]+, [\d.]+ bits"
        r" per byte, best [\d.]+, [\d,]+ tokens/s, cost [\d.]+, \d+ s left\n  \| The"
    )
    assert (
        re.search(line, result.stdout)
        and "o validation" in result.stdout
        and f"kept in {tmp_path / 'run' / 'step_00000020'}" in result.stdout
    )
    assert (
        "\r" not in result.stdout + result.stderr and "\x1b" not in result.stdout + result.stderr
    )  # a log file stays readable
    assert (tmp_path / "run" / "report.png").read_bytes()[:4] == b"\x89PNG"
