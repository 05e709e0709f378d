"""TensorBoard and Weights & Biases: what they show, and that none ends a run."""

import json
import struct
from pathlib import Path

import pytest

from config import Config
from formats import run_folder
from tests.conftest import trained
from training.loggers import Loggers, display_name


def wandb_records(path):
    """The records that W&B uploads from its file, whose blocks are those of a LevelDB log."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, record, at = path.read_bytes(), b"", 7
    while at < len(content):
        size, kind = struct.unpack_from("<HB", content, at + 4)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole of a record, or its end
            yield Record.FromString(record)
            record = b""
        if at % 32768 > 32768 - 7:
            at += -at % 32768


def test_loggers_continue_across_starts(char_data, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    for steps in (20, 40):
        settings = [f"--max_steps={steps}", "--tensorboard=True", "--wandb=team/trial"]
        result = trained(char_data, tmp_path, *settings)
        assert "failed" not in result.stderr, result.stderr

    log = run_folder.read_log(tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    for name in ("loss", "val_loss", "lr"):
        points = [(e.step, e.value) for e in events.Scalars(name)]
        assert points == [(r["step"], pytest.approx(r[name], rel=1e-5)) for r in log if name in r]

    run_id, shown = run_folder.run_id(tmp_path), []
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert len(files) == 2
    for file in files:
        records = list(wandb_records(file))
        (run,) = (record.run for record in records if record.HasField("run"))
        # one, over both starts
        assert (run.run_id, run.entity, run.project) == (run_id, "team", "trial")
        assert run.telemetry.feature.finish_timeout  # W&B's end of a run has one
        (metric,) = (r.metric for r in records if r.metric.glob_name == "*")
        assert metric.step_metric == "step"
        for record in records:
            items = record.history.item
            shown.append({i.nested_key[0]: json.loads(i.value_json) for i in items})
    for name in ("loss", "val_loss", "lr"):
        points = [(values["step"], values[name]) for values in shown if name in values]
        assert points == [(r["step"], r[name]) for r in log if name in r]


def test_what_tensorboard_has_of_steps_after_the_checkpoint_is_purged(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for step, values in ((0, {1: 1.0, 2: 1.0, 3: 1.0}), (1, {2: 2.0})):
        loggers = Loggers(Config(tensorboard=True), tmp_path, step, "id")
        for n, value in values.items():
            loggers.write({"step": n, "loss": value})
        if step:
            events = EventAccumulator(str(tmp_path / "tensorboard"))  # as a kill would leave it
            points = [(e.step, e.value) for e in events.Reload().Scalars("loss")]
        loggers.close()
    assert points == [(1, 1.0), (2, 2.0)]


def test_a_logger_that_fails_is_reported_once(tmp_path, capsys):
    (tmp_path / "tensorboard").write_text("in the way")
    loggers = Loggers(Config(tensorboard=True), tmp_path, 0, "id")
    for step in (1, 2):
        loggers.write({"step": step, "loss": 1.0})
    loggers.close()
    assert capsys.readouterr().err.count("training continues without it") == 1


@pytest.mark.parametrize(
    ("folder", "name"),
    [("checkpoints/demo", "demo"), ("exp1/run", "exp1/run"), ("../run", "/run"), (".", "/here")],
)
def test_runs_in_folders_of_one_name_have_names_of_their_own(tmp_path, monkeypatch, folder, name):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    shown = display_name(Path(folder))
    assert shown == (f"{tmp_path.as_posix()}{name}" if name.startswith("/") else name)
