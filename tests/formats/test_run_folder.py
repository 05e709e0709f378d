"""formats/run_folder.py: whole step folders or none, what is found, and how damage is answered."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from datetime import datetime

import pytest
import torch

from formats import files, pretrained, run_folder
from formats.run_folder import CheckpointError
from tests.conftest import ROOT


def save(run, step, value=1.0):
    """A small checkpoint."""
    return run_folder.save(
        run,
        {"step": step},
        {"w": torch.full((100,), value)},
        {"m": torch.zeros(3)},
        "{}\n",
    )


@pytest.mark.parametrize("name", ["model.pt", "optimizer.pt", "tokenizer.json", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_checkpoint_is_named_and_passed_over(tmp_path, name, damage):
    save(tmp_path, 1)
    file = save(tmp_path, 2) / name
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    if damage == "remove":
        file.unlink()
    elif damage == "cut":
        file.write_bytes(data[:middle])
    else:
        data[middle] ^= 0x40
        file.write_bytes(data)
    folder, _, problems = run_folder.latest(tmp_path)
    assert folder.name == "step_00000001"
    assert len(problems) == 1
    assert name in problems[0]


def test_one_changed_digit_of_state_json_is_noticed(tmp_path):
    path = save(tmp_path, 2) / "state.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
    with pytest.raises(CheckpointError, match="its values are not those it was saved with"):
        run_folder.read_state(path.parent)


def test_a_step_of_a_later_version_is_not_passed_over_as_damaged(tmp_path, monkeypatch):
    save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "FORMAT", 2)
        (save(tmp_path, 2) / "model.pt").unlink()  # its files may have other names
    with pytest.raises(CheckpointError, match="step_00000002: its format is 2"):
        run_folder.latest(tmp_path)


def test_damaged_steps_beyond_the_one_that_continues_are_set_aside(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step)
    run_folder.set_aside(tmp_path, 2)
    assert [run_folder.step_of(folder) for folder in run_folder.steps(tmp_path)] == [1, 2]
    assert len(list(tmp_path.glob("damaged_step_00000003_*"))) == 1


def test_a_crash_while_a_step_is_replaced_leaves_no_half_of_it(tmp_path, monkeypatch):
    folder = save(tmp_path, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: None)  # the crash comes before it
        save(tmp_path, 1, value=2.0)
    assert run_folder.latest(tmp_path)[0] == folder
    assert pretrained.load_tensors(folder / "model.pt")["w"][0] == 2
    assert list(tmp_path.glob(".step_*"))
    run_folder.rotate(tmp_path, 1, best=None)
    assert not list(tmp_path.glob(".step_*"))


def test_the_last_and_the_best_are_kept(tmp_path):
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step)
    run_folder.write_best(tmp_path, 2, 1.0)
    (tmp_path / "step_00000003 (copy)").mkdir()  # which is the user's
    run_folder.rotate(tmp_path, 2, best=2)
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path)] == [2, 4, 5]
    assert run_folder.find(tmp_path).name == "step_00000002"
    assert run_folder.find(tmp_path / "step_00000004").name == "step_00000004"
    (tmp_path / "step_00000002").rename(tmp_path / "step_00000002 (kept)")
    assert run_folder.find(tmp_path).name == "step_00000005"


def test_a_run_may_have_a_name_that_ends_like_a_steps(tmp_path):
    run = tmp_path / "warm_step_2"
    folder = save(run, 100)
    assert run_folder.find(run) == folder
    assert run_folder.find(folder) == folder


@pytest.mark.parametrize("mounted", [True, False])
def test_on_a_mounted_drive_what_goes_to_the_trash_is_empty(tmp_path, monkeypatch, mounted):
    monkeypatch.setattr(files, "DRIVE", tmp_path if mounted else tmp_path / "elsewhere")
    trash = tmp_path / "trash.pt"
    trash.hardlink_to(save(tmp_path / "run", 1) / "model.pt")
    save(tmp_path / "run", 2)
    run_folder.rotate(tmp_path / "run", 1, best=None)
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path / "run")] == [2]
    assert not list((tmp_path / "run").glob(".*"))
    assert (trash.stat().st_size == 0) == mounted


def test_what_cannot_be_read_just_now_is_not_damaged(tmp_path):
    save(tmp_path, 1)
    state = save(tmp_path, 2) / "state.json"
    state.unlink()
    state.mkdir()
    with pytest.raises(OSError, match="step_00000002"):
        run_folder.latest(tmp_path)


def test_without_a_path_the_newest_run_is_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint under checkpoints/"):
        run_folder.find(None)
    (tmp_path / "checkpoints/begun").mkdir(parents=True)
    files.write_json(tmp_path / "checkpoints/begun/config.json", {"checkpoint_dir": ""})
    with pytest.raises(CheckpointError, match=r"not saved yet.*train.py checkpoints/begun"):
        run_folder.find(None)
    for name, step in (("new", 1), ("old", 9), ("new", 2)):
        save(tmp_path / "checkpoints" / name, step)
    assert run_folder.find(None).as_posix() == "checkpoints/new/step_00000002"


def test_the_newest_run_is_the_one_saved_last_not_the_one_touched_last(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = {}
    for name, saved in (
        ("new", "2026-11-29T01:00:00-0500"),
        ("old", "2026-11-29T05:30:00+0000"),
        ("words", "2026-11-29T09:00:00 Central European Time"),
        ("lost", "2026-11-29T09:00:00+0000"),
    ):
        state = {"step": 1, "saved": saved}
        folders[name] = run_folder.save(tmp_path / "checkpoints" / name, state, {}, {}, "{}\n")
        (folders[name] / ".DS_Store").touch()  # as Finder does; a copy has new times, too
    (folders["lost"] / "state.json").write_bytes(bytes(100))
    for name, time in (("lost", "2026-11-29T07:00:00+0000"), ("words", "2026-11-29T05:50:00+0000")):
        os.utime(folders[name], (datetime.fromisoformat(time).timestamp(),) * 2)
    found = [run.name for run in run_folder.runs_with_steps()]
    assert found == ["lost", "new", "words", "old"]  # the time of a damaged one is its folder's
    assert run_folder.find(None) == folders["lost"].relative_to(tmp_path)


def test_a_path_without_a_checkpoint_says_where_there_are_some(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="it holds no step_"):
        run_folder.find(tmp_path)
    (tmp_path / "model.pt").touch()
    with pytest.raises(CheckpointError, match="it is a file"):
        run_folder.find(tmp_path / "model.pt")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/model.safetensors").touch()
    with pytest.raises(CheckpointError, match=f"give {(tmp_path / 'hf').as_posix()}"):
        run_folder.find(tmp_path / "hf/model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"')  # not a run's, and damaged
    with pytest.raises(CheckpointError, match="it holds no step_"):
        run_folder.find(tmp_path)
    step = save(tmp_path / "checkpoints" / "a_run", 1)
    with pytest.raises(CheckpointError, match="it holds runs; give one of them: checkpoints/a_run"):
        run_folder.find("checkpoints")
    with pytest.raises(CheckpointError, match=f"it is a file.*; give {step.as_posix()}"):
        run_folder.find(step / "model.pt")
    (tmp_path / "ckpt.pt").touch()
    for path in (tmp_path, tmp_path / "ckpt.pt"):
        with pytest.raises(CheckpointError, match=r"does not read nanoGPT's ckpt.pt"):
            run_folder.find(path)
    with pytest.raises(CheckpointError, match=r"does not exist; .* checkpoints/a_run"):
        run_folder.find("nowhere")


def test_a_run_in_a_folder_whose_name_is_not_utf_8_is_read(tmp_path):
    step = save(tmp_path / "b\udcffd", 1)
    assert pretrained.load_tensors(step / "model.pt").keys()


def test_a_log_keeps_every_character_of_a_sample(tmp_path):
    record = {"step": 1, "samples": ["line\u2028paragraph\u2029next\x85\x0c\x1c\r\udcff"]}
    run_folder.append_log(tmp_path, record, {"step": 2})
    assert run_folder.read_log(tmp_path) == [record, {"step": 2}]


@pytest.mark.parametrize(
    "content",
    [
        '{"step": 3',
        "\0" * 9,
        "[3]",
        '{"step": 3}',
        '{"step": "3", "val_loss": 1.5}',
        '{"step": 3, "val_loss": "low"}',
        '{"step": 3, "val_loss": 0.5, "sha256": "of 1.5"}',
    ],
)
def test_a_best_json_that_is_damaged_counts_as_none(tmp_path, content):
    run_folder.write_best(tmp_path, 3, 1.5)
    assert run_folder.best_of(tmp_path) == 3
    (tmp_path / "best.json").write_text(content)
    assert run_folder.best_of(tmp_path) is None
    assert run_folder.find(save(tmp_path, 4).parent).name == "step_00000004"


def test_the_best_step_of_an_older_run_is_known(tmp_path):
    files.write_json(tmp_path / "best.json", {"step": 3, "val_loss": 1.5})
    assert run_folder.best_of(tmp_path) == 3


def test_what_is_no_record_of_a_log_is_passed_over(tmp_path):
    lines = [
        "[1]",
        "5",
        '{"loss": 1}',
        '{"step": "1"}',
        '{"step": 1, "val_loss": "low"}',
        '{"step": 1, "running_s": "long"}',
        '{"step": 1, "lo',
        '{"step": 2, "loss": null}',
        '{"ste',
    ]
    (tmp_path / "log.jsonl").write_bytes("\n".join(lines).encode() + b"\xe4")  # half a letter
    run_folder.append_log(tmp_path, {"step": 3})
    assert run_folder.read_log(tmp_path) == [{"step": 2, "loss": None}, {"step": 3}]


@pytest.mark.parametrize(
    ("there", "name"),
    [
        ({"config.json": '{"model_type": "gpt2"}'}, "config.json"),
        ({"config.json": '{"n_layer": 2}', "log.jsonl": ""}, "config.json"),  # an old GPT-2
        (
            {"config.json": '{"model_type": "gpt2"}', "step_00000001/state.json": "{}"},
            "config.json",
        ),
        ({"log.jsonl": "{}"}, "log.jsonl"),
        ({"best.json": "{}"}, "best.json"),
        ({"trace.json": "{}"}, "trace.json"),
        ({"step_100/model.bin": ""}, "step_100/model.bin"),
        ({"config.json": '{"data_dir": "a", "checkpoint_dir": "b"'}, None),  # damaged
        ({"config.json": "\0" * 9, "log.jsonl": ""}, "log.jsonl"),
        ({"step_00000001/state.json": "{}", "log.jsonl": ""}, None),
        ({"README.md": "", "step_one/a": ""}, None),
        ({}, None),
    ],
)
def test_a_run_takes_no_folder_in_which_it_would_replace_what_no_run_wrote(tmp_path, there, name):
    for path, content in there.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(content)
    with pytest.raises(CheckpointError, match=f"holds {name},") if name else nullcontext():
        run_folder.check_own(tmp_path)


def test_a_copy_of_a_run_is_another_run_and_a_moved_run_is_not(tmp_path, monkeypatch):
    run = tmp_path / "run"
    save(run, 1)
    (run / "wandb_id").write_text("of the first")
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)  # the run goes on from elsewhere
        run_folder.write_config(run.relative_to(tmp_path), {"checkpoint_dir": "run"}, "first")
    copy = shutil.copytree(run, tmp_path / "copy")
    for folder in (run, copy):
        run_folder.new_id_for_a_copy(folder)
    assert run_folder.run_id(run) == "first" != run_folder.run_id(copy)
    assert (run / "wandb_id").exists() > (copy / "wandb_id").exists()
    moved = run.rename(tmp_path / "moved")
    run_folder.new_id_for_a_copy(moved)
    assert run_folder.run_id(moved) == "first"


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs util-linux")
def test_a_copy_of_what_another_user_keeps_private_is_the_run(tmp_path):
    """As a run that trained in a container, under /root, and goes on outside."""
    run = tmp_path / "private" / "run"
    save(run, 1)
    run_folder.write_config(run, {}, "first")
    copy = shutil.copytree(run, tmp_path / "copy")
    run.parent.chmod(0)
    # Without its capabilities, root may not read this either.
    drop = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"] if os.geteuid() == 0 else []
    code = "import sys; from formats.run_folder import *; new_id_for_a_copy(Path(sys.argv[1]))"
    command = [*drop, sys.executable, "-c", code, copy]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
    run.parent.chmod(0o700)
    assert run_folder.run_id(copy) == "first"


@pytest.mark.parametrize("value", [None, "x", -1, [], {}])
def test_a_damaged_identity_is_none(tmp_path, value):
    files.write_json(tmp_path / "config.json", {"run": value})
    run_folder.new_id_for_a_copy(tmp_path)
    assert run_folder.run_id(tmp_path) is None


def test_a_run_knows_its_id_from_its_newest_step_where_its_settings_are_lost(tmp_path):
    state = {"step": 1, "run": {"id": "first"}}
    run_folder.save(tmp_path, state, {}, {}, "{}")
    assert run_folder.run_id(tmp_path) == "first"
    assert run_folder.run_id(tmp_path / "none") is None
