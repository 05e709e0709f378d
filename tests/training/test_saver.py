"""saver.py: what a save holds, and saves that fail: full disks, folders that take no writes."""

import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from formats import run_folder, run_log
from formats.run_folder import CheckpointError
from tests.conftest import fails_clearly, train_small
from tests.training.conftest import small_run, start, wait_until
from training.start import Checkpoint


def save(run, step):
    """Save the state as that of a step, and wait until it is written or has failed."""
    run.state.counters.step = step
    run.saver.save(*run.snapshot())
    run.saver.wait()


def test_a_save_holds_the_state_of_its_moment_and_tied_weights_once(char_data, tmp_path):
    run = small_run(char_data, tmp_path, "--tie_weights=True")
    saver = run.saver
    saver.begin()
    moments = {}
    for step in (1, 2):
        run.trainer.step()
        saver.save(*run.snapshot())
        weight = run.state.model.wte.weight
        moment = run.state.optimizer.state[weight]["exp_avg"]
        moments[step] = (weight.detach().clone(), moment.clone())
        with torch.no_grad():
            weight.fill_(-1)
            moment.fill_(-1)
    saver.wait()
    for step, (weight, moment) in moments.items():
        folder = tmp_path / run_folder.step_name(step)
        model = run_folder.load_tensors(folder / "model.pt")
        optimizer = run_folder.load_tensors(folder / "optimizer.pt")["optimizer"]
        assert torch.equal(model["wte.weight"], weight)
        assert model["lm_head.weight"].data_ptr() == model["wte.weight"].data_ptr()
        assert any(torch.equal(s["exp_avg"], moment) for s in optimizer["state"].values())


def test_the_optimizers_state_goes_to_the_parameters_of_its_names(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    run.trainer.step()
    run.saver.finish(1, run.snapshot)
    path = tmp_path / run_folder.step_name(1) / "optimizer.pt"
    saved = torch.load(path)
    before = {
        name: run.state.optimizer.state[p]["exp_avg"].clone()
        for name, p in run.state.model.named_parameters()
    }
    last = len(saved["names"]) - 1
    saved["names"].reverse()
    state = saved["optimizer"]["state"]
    saved["optimizer"]["state"] = {last - number: values for number, values in state.items()}
    torch.save(saved, path)
    run.trainer.step()
    checkpoint = Checkpoint(path.parent, run_folder.read_state(path.parent, ()))
    checkpoint.load(run.state)
    for name, p in run.state.model.named_parameters():
        assert torch.equal(run.state.optimizer.state[p]["exp_avg"], before[name])


@pytest.mark.parametrize("changed", [{"exp_avg": torch.zeros(9)}, {"step": torch.zeros(9)}, {}])
def test_a_state_of_another_optimizer_is_refused(char_data, tmp_path, changed):
    run = small_run(char_data, tmp_path)
    run.trainer.step()
    run.saver.finish(1, run.snapshot)
    path = tmp_path / run_folder.step_name(1) / "optimizer.pt"
    saved = torch.load(path)
    saved["optimizer"]["state"][0] = changed
    torch.save(saved, path)
    checkpoint = Checkpoint(path.parent, run_folder.read_state(path.parent, ()))
    with pytest.raises(CheckpointError, match=r"optimizer.pt does not fit the model"):
        checkpoint.load(run.state)


def test_the_best_is_marked_once_it_is_written_and_training_does_not_wait(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    saver, may_write = run.saver, threading.Event()
    saver.thread.submit(may_write.wait)
    run.state.counters.step = 1
    saver.save(*run.snapshot())
    saver.mark_best(1, 2.5)
    assert saver.busy and not (tmp_path / "best.json").exists()
    may_write.set()
    saver.wait()
    assert run_folder.best_of(tmp_path) == 1 and saver.best == 2.5


def test_what_is_not_saved_is_not_the_best(char_data, tmp_path, capsys):
    run = small_run(char_data, tmp_path / "run")
    run.folder.rmdir()
    run.folder.write_text("no folder")
    save(run, 1)
    run.saver.mark_best(1, 2.5)
    run.saver.wait()
    said = capsys.readouterr().err
    assert "step 1 could not be saved" in said and "There is no checkpoint yet" in said
    assert run.saver.best is None


def test_a_save_that_fails_leaves_the_best_step_named_and_kept(char_data, tmp_path):
    run = small_run(char_data, tmp_path, "--keep_last=1")
    save(run, 1)
    run.saver.mark_best(1, 2.5)
    run.saver.wait()
    blocked = tmp_path / ".step_00000002.partial"
    blocked.write_text("a file where the folder is to be written")
    save(run, 2)
    run.saver.mark_best(2, 2.0)
    save(run, 3)
    save(run, 4)
    assert run_folder.best_of(tmp_path) == 1
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path)] == [1, 4]


def test_after_a_resume_a_worse_evaluation_is_no_new_best(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    run.trainer.step()
    save(run, 1)
    run.saver.mark_best(1, 2.5)
    run.saver.close()
    again = small_run(char_data, tmp_path)
    again.saver.begin()
    save(again, 2)
    again.saver.mark_best(2, 2.6)
    again.saver.wait()
    assert run_folder.best_of(tmp_path) == 1 and again.saver.best == 2.5


def test_a_step_that_was_moved_away_is_not_the_best(char_data, tmp_path):
    assert train_small(char_data, tmp_path, "--max_steps=20").returncode == 0
    assert run_folder.best_of(tmp_path)
    for step in run_folder.steps(tmp_path):
        shutil.rmtree(step)
    small_run(char_data, tmp_path, "--max_steps=20").saver.begin()
    assert not run_folder.best_of(tmp_path)


def test_what_a_crash_left_out_after_a_save_is_made_up_for(char_data, tmp_path):
    more = ["--max_steps=20", "--sample_prompts=The"]
    assert train_small(char_data, tmp_path, *more).returncode == 0
    best = run_folder.best_of(tmp_path)
    (tmp_path / "best.json").unlink()
    later = [*more, "--max_steps=21", "--eval_interval=0", "--save_interval=0"]
    assert train_small(char_data, tmp_path, *later).returncode == 0
    assert run_folder.best_of(tmp_path) in (best, 21)
    # The loss of an evaluation is recorded last.
    log = tmp_path / run_log.NAME
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if "val_loss" not in line))
    result = train_small(char_data, tmp_path, *later)
    assert result.returncode == 0, result.stderr
    records = run_log.read(tmp_path)
    assert sum("samples" in r for r in records) == sum("val_loss" in r for r in records) == 1


@pytest.mark.parametrize("disk", ["2m"], indirect=True)
def test_a_run_whose_checkpoints_have_no_room_is_refused(char_data, disk):
    result = train_small(char_data, disk / "run", "--n_embd=128", "--max_steps=10")
    words = ["run has no room for a checkpoint", "MB, and 2.1 MB are free"]
    fails_clearly(result, *words, "choose a larger disk", status=1)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("disk", ["8m"], indirect=True)
def test_a_disk_with_room_for_some_of_the_checkpoints_is_a_warning(char_data, disk):
    arguments = ["--n_embd=64", "--max_steps=10", "--warmup_steps=20"]
    result = train_small(char_data, disk / "run", *arguments, "--keep_last=6")
    assert result.returncode == 0, result.stderr
    assert "warning     the checkpoints take up to 10 MB more, and 8 MB are free" in result.stdout
    assert "warning     warmup_steps = 20 takes" in result.stdout
    killed = disk / "run" / ".step_00000020.partial"  # in the middle of a save
    killed.mkdir()
    (killed / "model.pt").write_bytes(bytes(5_000_000))
    result = train_small(char_data, disk / "run", *arguments, "--max_steps=20")
    assert result.returncode == 0 and "the checkpoints take" not in result.stdout


@pytest.mark.parametrize("disk", ["8m"], indirect=True)
def test_a_full_disk_is_reported_and_the_step_is_saved_once_there_is_room(char_data, disk, capsys):
    run = small_run(char_data, disk / "run", "--n_embd=128")  # 1.7 MB
    saver = run.saver
    save(run, 1)
    (disk / "filler").write_bytes(bytes(5_000_000))
    save(run, 2)  # the room is looked at first
    said = capsys.readouterr().err
    assert "step 2 could not be saved" in said and "MB are free" in said
    assert saver.saved_step == 1
    assert sorted(p.name for p in run.folder.iterdir()) == ["log.jsonl", "step_00000001"]
    (disk / "filler").unlink()
    saver.finish(2, run.snapshot)  # as at the end of a run: what failed is tried again
    assert saver.saved_step == 2 and run_folder.latest(run.folder)[0].name == "step_00000002"


def test_a_disk_that_fills_up_in_the_middle_of_a_save_leaves_no_half_of_it(
    char_data, tmp_path, capsys
):
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    run = small_run(char_data, tmp_path, "--n_embd=128")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limit[1]))
    try:
        save(run, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "step 1 could not be saved" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_memory_that_does_not_suffice_for_the_copy_fails_the_save_and_not_the_run(
    char_data, tmp_path, capsys
):
    run = small_run(char_data, tmp_path, "--n_embd=768", "--n_layer=6")  # 170 MB
    run.saver.begin()
    run.saver.wait()
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    low = pages * resource.getpagesize() + 60_000_000
    resource.setrlimit(resource.RLIMIT_AS, (low, limit[1]))
    try:
        save(run, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert "step 1 could not be saved" in capsys.readouterr().err and run.saver.saved_step == 0
    save(run, 2)
    assert run.saver.saved_step == 2


def test_a_run_survives_a_folder_that_becomes_read_only(char_data, tmp_path):
    """In mid-run nothing can be created in it any more.

    Saves fail and are reported; the run ends with status 1 and the last checkpoint whole.
    """
    folder = tmp_path / "run"
    often = ["--max_steps=400", "--save_interval=20", "--eval_interval=100"]
    process = start(char_data, folder, *often)
    wait_until(process, lambda: run_folder.steps(folder))
    immutable = ["chattr", "+i", folder]  # holds for root too, unlike permissions
    if subprocess.run(immutable, capture_output=True).returncode:
        process.kill()
        pytest.skip("may not make a folder immutable here")
    try:
        _, err = process.communicate(timeout=120)
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
    assert process.returncode == 1, err
    assert "could not be saved" in err and "Make room, and start the same command" in err
    assert "Traceback" not in err
    assert run_folder.latest(folder)[0] is not None
    # With the folder back, the same command goes on.
    assert train_small(char_data, folder, *often).returncode == 0


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_continues(char_data, tmp_path):
    folder = tmp_path / "run"
    assert train_small(char_data, folder, "--max_steps=20").returncode == 0
    newest = run_folder.steps(folder)[-1]
    data = bytearray((newest / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (newest / "optimizer.pt").write_bytes(data)
    result = train_small(char_data, folder, "--max_steps=40")
    assert result.returncode == 0, result.stderr
    assert "skipping damaged checkpoint" in result.stdout
    assert "optimizer.pt is damaged" in result.stdout
    assert "continues at step 10" in result.stdout
    assert [run_folder.step_of(p) for p in run_folder.steps(folder)] == [30, 40]
    assert len(list(folder.glob("damaged_*"))) == 1


def test_a_step_is_flushed_to_the_disk_before_it_has_its_name(char_data, tmp_path, monkeypatch):
    flushed, unflushed = set(), {}

    def flush(descriptor, fsync=os.fsync):
        flushed.add(Path(f"/proc/self/fd/{descriptor}").readlink())
        fsync(descriptor)

    def rename(source, target, replace=os.replace):
        unflushed[target.name] = {source, *source.glob("*.*")} - flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(os, "replace", rename)
    save(small_run(char_data, tmp_path), 1)
    assert unflushed["step_00000001"] == set()
    assert tmp_path in flushed  # which has the name


def test_one_digit_changed_in_state_json_is_damage(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    save(run, 1)
    save(run, 2)
    path = tmp_path / run_folder.step_name(2) / "state.json"
    path.write_text(path.read_text().replace('"seed": 1337', '"seed": 1338', 1))
    folder, _, (problem,) = run_folder.latest(tmp_path)
    assert folder.name == "step_00000001"
    assert "state.json is damaged" in problem


def test_a_checkpoint_counts_the_seconds_of_all_starts(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    run.trainer.step()
    run.clock.before = 3600.0
    save(run, 1)
    again = small_run(char_data, tmp_path, "--max_hours=1")
    assert again.clock.exceeded()
