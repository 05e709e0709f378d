"""saver.py: what a save holds, and saves that fail: full disks, folders that take no writes."""

import dataclasses
import errno
import math
import os
import shutil
import subprocess
import textwrap
import time

import pytest
import torch

from formats import pretrained, run_folder
from formats.run_folder import CheckpointError
from tests.conftest import (
    fails_clearly,
    limited,
    ok,
    run_code,
    train_small,
    trained,
    wait_until,
)
from tests.power_cut import lay, power_cuts
from tests.training.conftest import small_run, start
from train import training_step
from training import RunError, distributed, saver
from training.optimizer import reserve_state
from training.plan import check_disk
from training.recorder import Recorder
from training.saver import copy_to_ram
from training.start import load_checkpoint


def counted(run, step):
    """The state as that of a step."""
    run.counters.step = step
    return run.snapshot()


def save(run, step, val_loss=None):
    """Save the state as that of a step, and wait until it is written or has failed."""
    run.saver.save(step, lambda: counted(run, step))
    if val_loss is not None:
        run.saver.mark_best(step, val_loss)
    run.saver.wait()


def test_a_save_holds_the_state_of_its_moment_and_tied_weights_once(char_data, tmp_path):
    run = small_run(char_data, tmp_path, "--tie_weights=True")
    moments = {}
    for step in (1, 2):
        training_step(run)
        run.saver.save(run.step, run.snapshot)
        weight = run.model.wte.weight
        moment = run.optimizer.state[weight]["exp_avg"]
        moments[step] = (weight.detach().clone(), moment.clone())
        with torch.no_grad():
            weight.fill_(-1)
            moment.fill_(-1)
    run.saver.wait()
    assert run_folder.tensor_bytes(run.model.state_dict()) == 4 * run.model.num_parameters()
    for step, (weight, moment) in moments.items():
        folder = tmp_path / run_folder.step_name(step)
        model = pretrained.load_tensors(folder / "model.pt")
        optimizer = pretrained.load_tensors(folder / "optimizer.pt")["optimizer"]
        assert torch.equal(model["wte.weight"], weight)
        assert model["lm_head.weight"].data_ptr() == model["wte.weight"].data_ptr()
        assert any(torch.equal(s["exp_avg"], moment) for s in optimizer["state"].values())


def test_a_copy_tells_tensors_apart_that_begin_at_one_address():
    """As a GPU's may; here a square matrix and its transpose do."""
    square = torch.arange(4.0).view(2, 2)
    plain, turned, part, again = copy_to_ram([square, square.T, square[:1], square])
    assert torch.equal(plain, square) and torch.equal(turned, square.T) and again is plain
    assert torch.equal(part, square[:1])


class Metal(torch.Tensor):
    """A tensor with the data_ptr() of an Apple GPU: an object's address plus the offset."""

    address = 0

    def data_ptr(self):
        return self.address + self.storage_offset() * self.itemsize


def test_a_copy_tells_an_apple_gpus_tensors_apart():
    weight, momenta = torch.ones(4).as_subclass(Metal), torch.zeros(8).as_subclass(Metal)
    weight.address, (first, second) = 16, momenta.split(4)
    assert weight.data_ptr() == second.data_ptr()
    assert [t.tolist() for t in copy_to_ram([weight, first, second])] == [[1] * 4, [0] * 4, [0] * 4]


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(exp_avg=torch.zeros(9)),
        lambda state: state.update(step=torch.zeros(9)),
        dict.clear,
    ],
)
def test_a_state_of_another_optimizer_is_refused(char_data, tmp_path, change):
    run = small_run(char_data, tmp_path)
    training_step(run)
    save(run, 1)
    folder = tmp_path / "step_00000001"
    saved = torch.load(folder / "optimizer.pt")
    change(saved["optimizer"]["state"][0])
    torch.save(saved, folder / "optimizer.pt")
    with pytest.raises(CheckpointError, match=r"optimizer.pt does not fit the model"):
        load_checkpoint(folder, run.model, run.optimizer, run.scaler)


def test_the_state_of_any_optimizer_is_saved_and_loaded(char_data, tmp_path):
    def run_with_rprop():
        run = small_run(char_data, tmp_path)
        groups = [{"params": run.model.parameters(), "initial_lr": 1e-3}]
        run.optimizer = torch.optim.Rprop(groups)
        return run

    run, again = run_with_rprop(), run_with_rprop()
    training_step(run)
    save(run, 1)
    load_checkpoint(tmp_path / "step_00000001", again.model, again.optimizer, again.scaler)
    again.counters = dataclasses.replace(run.counters)
    for continued in (run, again):
        training_step(continued)
    for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_in_the_groups_of_an_optimizer_is_loaded_and_the_rates_are_those_of_now(
    char_data, tmp_path
):
    def run_with(rate):
        run = small_run(char_data, tmp_path)
        group = dict.fromkeys(("initial_lr", "weight_decay"), rate) | {"steps": 0}
        run.optimizer = torch.optim.Rprop([group | {"params": run.model.parameters()}])
        return run

    run, again = run_with(1e-3), run_with(2e-3)
    run.optimizer.param_groups[0]["steps"] = 7
    training_step(run)
    save(run, 1)
    load_checkpoint(tmp_path / "step_00000001", again.model, again.optimizer, again.scaler)
    (group,) = again.optimizer.param_groups
    assert (group["steps"], group["initial_lr"], group["weight_decay"]) == (7, 2e-3, 2e-3)


def test_each_parameter_keeps_its_moments_where_the_groups_have_another_order(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    training_step(run)
    save(run, 1)
    again = small_run(char_data, tmp_path, "--embedding_lr=0.1")
    assert again.step == 1
    for one, other in zip(run.model.parameters(), again.model.parameters(), strict=True):
        moments = [made.optimizer.state[p]["exp_avg"] for made, p in ((run, one), (again, other))]
        assert torch.equal(*moments)


@pytest.fixture
def slow_disk(monkeypatch):
    """Storage that takes a while for each file that it flushes and each folder that it deletes."""

    def slow(act):
        return lambda *args, **options: (time.sleep(0.03), act(*args, **options))

    monkeypatch.setattr(os, "fsync", slow(os.fsync))
    monkeypatch.setattr(shutil, "rmtree", slow(shutil.rmtree))


def test_the_best_is_marked_once_it_is_written_and_training_does_not_wait(
    char_data, tmp_path, slow_disk
):
    run = small_run(char_data, tmp_path)
    run.saver.save(1, lambda: counted(run, 1))
    run.saver.mark_best(1, 2.5)
    assert run.saver.busy
    assert not (tmp_path / "best.json").exists()
    saved = []
    run.saver.save(2, lambda: saved.append(run.saver.saved_step) or counted(run, 2))
    assert saved == [1]  # there is one copy of the state at a time
    run.saver.wait()
    assert run_folder.best_of(tmp_path) == 1
    assert run.saver.best == 2.5
    run.saver.mark_best(2, 2.0)  # no save follows
    run.saver.wait()
    assert run_folder.best_of(tmp_path) == 2


def test_the_last_save_and_the_tidying_of_the_one_before_it_do_not_meet(
    char_data, tmp_path, slow_disk, capsys
):
    """As at a signal, next to the thread that deletes what the save before it left to delete."""
    run = small_run(char_data, tmp_path, "--keep_last=1")
    save(run, 1)
    run.saver.save(2, lambda: counted(run, 2))
    run.saver.mark_best(2, 2.5)
    run.saver.finish(3, lambda: counted(run, 3))
    run.saver.close()
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path)] == [2, 3]
    assert run_folder.best_of(tmp_path) == 2
    assert not capsys.readouterr().err  # nothing was tried again


def test_a_save_that_fails_leaves_the_best_step_named_and_kept(char_data, tmp_path):
    run = small_run(char_data, tmp_path, "--keep_last=1")
    save(run, 1, 2.5)
    blocked = tmp_path / ".step_00000002.partial"
    blocked.write_text("a file where the folder is to be written")
    save(run, 2, 2.0)
    save(run, 3)
    save(run, 4)
    assert run_folder.best_of(tmp_path) == 1
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path)] == [1, 4]


def test_after_a_resume_a_worse_evaluation_is_no_new_best(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    training_step(run)
    save(run, 1, 2.5)
    run.saver.close()
    again = small_run(char_data, tmp_path)
    again.saver.begin()
    save(again, 2, 2.6)
    assert run_folder.best_of(tmp_path) == 1
    assert again.saver.best == 2.5


def test_a_run_continues_after_a_validation_loss_of_nan(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    training_step(run)
    save(run, 1)
    Recorder(run).evaluation(math.nan)
    again = small_run(char_data, tmp_path)
    again.saver.begin()
    save(again, 2, 2.6)
    assert run_folder.best_of(tmp_path) == 2


def test_a_step_that_was_moved_away_is_not_the_best(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    save(run, 1, 2.5)
    assert run_folder.best_of(tmp_path) == 1
    shutil.rmtree(tmp_path / "step_00000001")
    small_run(char_data, tmp_path).saver.begin()
    assert not run_folder.best_of(tmp_path)


def test_after_a_power_cut_a_run_goes_on_from_a_whole_step_with_its_log_and_the_right_best(
    char_data, tmp_path
):
    run, losses = small_run(char_data, tmp_path / "run", "--keep_last=1"), {1: 3.0, 2: 2.0, 3: 2.5}
    recorder = Recorder(run)
    recorder.begin()
    with power_cuts(run.folder) as disks:
        run.saver.begin()
        saved = []  # how many disks there were when each step was saved
        for step, loss in losses.items():
            training_step(run)
            recorder.record({"loss": loss})
            save(run, step)
            saved.append(len(disks))
            recorder.evaluation(loss)
            run.saver.mark_best(step, loss)
            run.saver.wait()
    assert len(disks) > 30
    for number, disk in enumerate(disks):
        folder = lay(disk, tmp_path / "disk")
        _, state, problems = run_folder.latest(folder)
        assert not problems
        assert state.get("step", 0) >= sum(count <= number for count in saved)
        named = run_folder.read_best(folder)
        assert named is None or losses[named["step"]] == named["val_loss"]
        # As the same command starts.
        again = small_run(char_data, folder, "--keep_last=1")
        again.saver.begin()
        again.saver.wait()
        assert [r["step"] for r in again.log if "loss" in r] == list(range(1, again.step + 1))
        there = [run_folder.step_of(step) for step in run_folder.steps(folder)]
        known = [r["step"] for r in again.log if "val_loss" in r and r["step"] in there]
        if known:
            assert run_folder.best_of(folder) == min(known, key=losses.get)
        if there:
            run_folder.read_state(run_folder.find(folder))


def test_after_a_crash_best_json_and_the_last_evaluation_are_written_again(char_data, tmp_path):
    more = ["--max_steps=20", "--sample_prompts=The"]
    trained(char_data, tmp_path, *more)
    best = (tmp_path / "best.json").read_text()
    for left_out in ("", '{"step": 20, "val_loss": 9.9}'):
        (tmp_path / "best.json").write_text(left_out)
        assert "already finished" in trained(char_data, tmp_path, *more).stdout
        assert (tmp_path / "best.json").read_text() == best
    later = [*more, "--max_steps=21", "--eval_interval=0", "--save_interval=0"]
    trained(char_data, tmp_path, *later)
    # The loss of an evaluation is recorded last.
    log = tmp_path / run_folder.LOG
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(line for line in lines if "val_loss" not in line))
    trained(char_data, tmp_path, *later)
    records = run_folder.read_log(tmp_path)
    assert sum("samples" in r for r in records) == sum("val_loss" in r for r in records) == 1


@pytest.mark.parametrize("disk", ["2m"], indirect=True)
def test_a_run_whose_checkpoints_have_no_room_is_refused(char_data, disk):
    result = train_small(char_data, disk / "run", "--n_embd=128", "--max_steps=10")
    words = ["run has no room for a checkpoint", "MB, and 2.1 MB are free"]
    fails_clearly(result, *words, "lower keep_last, or use a larger disk", status=1)
    assert list(disk.iterdir()) == []


def test_a_disk_that_renames_no_folders_is_known_before_the_first_step(
    char_data, tmp_path, monkeypatch
):
    rename = os.replace

    def of_a_bucket(source, target):
        if os.path.isdir(source):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(source))
        rename(source, target)

    run = small_run(char_data, tmp_path / "run")
    there = sorted(os.listdir(run.folder))
    check_disk(run)
    monkeypatch.setattr(os, "replace", of_a_bucket)
    with pytest.raises(RunError, match=r"run cannot hold checkpoints: .*Too many open files.*mirr"):
        check_disk(run)
    run.counters.step = 10  # another checkpoint_dir would begin again
    with pytest.raises(RunError, match="copy its folder"):
        check_disk(run)
    assert sorted(os.listdir(run.folder)) == there


@pytest.fixture
def bucket(tmp_path):
    """A folder as rclone mounts a bucket by default: its files are written once, from the start."""
    there, path = tmp_path / "there", tmp_path / "bucket"
    there.mkdir()
    path.mkdir()
    mount = ["rclone", "mount", there, path, "--daemon"]
    if not shutil.which("rclone") or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs rclone, FUSE, and the right to mount")
    yield path
    subprocess.run(["fusermount3", "-u", path], check=True)


def test_a_bucket_that_rclone_mounts_takes_no_run_but_its_mirror(char_data, tmp_path, bucket):
    result = train_small(char_data, bucket / "run", "--max_steps=10")
    words = ["run cannot hold checkpoints", "Operation not permitted", "mirror"]
    fails_clearly(result, *words, status=1)
    trained(char_data, tmp_path / "run", "--max_steps=10", f"--mirror={bucket}")
    run_folder.read_state(bucket / "run" / "step_00000010")


@pytest.mark.parametrize("disk", ["8m"], indirect=True)
def test_a_disk_with_room_for_some_of_the_checkpoints_is_a_warning(char_data, disk):
    arguments = ["--n_embd=64", "--max_steps=10", "--warmup_steps=20"]
    result = trained(char_data, disk / "run", *arguments, "--keep_last=6")
    assert "warning     the checkpoints take up to 10 MB more, and 8 MB are free" in result.stdout
    assert "warning     warmup_steps = 20 takes" in result.stdout
    killed = disk / "run" / ".step_00000020.partial"  # in the middle of a save
    killed.mkdir()
    (killed / "model.pt").write_bytes(bytes(5_000_000))
    result = trained(char_data, disk / "run", *arguments, "--max_steps=20")
    assert "the checkpoints take" not in result.stdout


@pytest.mark.parametrize("disk", ["1m"], indirect=True)
def test_the_lock_of_a_run_needs_no_room(disk):
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free))
    with distributed.locked(disk / "run"), pytest.raises(RunError, match="by another process;"):
        distributed.locked(disk / "run").__enter__()


@pytest.mark.parametrize("disk", ["8m"], indirect=True)
def test_a_lower_keep_last_makes_room_on_a_full_disk(char_data, disk):
    run = small_run(char_data, disk / "run", "--n_embd=64", "--keep_last=9")  # 1.3 MB
    for _ in range(3):
        training_step(run)
        save(run, run.step)
    run.saver.close()
    (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 2_000_000))
    more = ["--n_embd=64", "--max_steps=4"]
    refused = train_small(char_data, disk / "run", *more, "--keep_last=9")
    fails_clearly(refused, "run has no room for a checkpoint", status=1)
    assert len(run_folder.steps(run.folder)) == 3
    result = trained(char_data, disk / "run", *more, "--keep_last=1")
    assert "continues at step 3" in result.stdout
    assert run_folder.step_of(run_folder.find(run.folder)) == 4


@pytest.mark.parametrize("disk", ["12m"], indirect=True)
def test_a_full_disk_is_reported_and_the_step_is_saved_once_there_is_room(char_data, disk, capsys):
    run = small_run(char_data, disk / "run", "--n_embd=128")
    reserve_state(run.optimizer)  # 5 MB with it, 1.7 without
    save(run, 1)
    (disk / "filler").write_bytes(bytes(3_000_000))
    save(run, 2)  # the room is looked at first
    said = capsys.readouterr().err
    assert "step 2 could not be saved" in said
    assert "MB are free" in said
    assert run.saver.saved_step == 1
    assert sorted(p.name for p in run.folder.iterdir()) == ["log.jsonl", "step_00000001"]
    (disk / "filler").unlink()
    run.saver.finish(2, run.snapshot)  # as at the end of a run: what failed is tried again
    assert run.saver.saved_step == 2
    assert run_folder.latest(run.folder)[0].name == "step_00000002"


def test_a_disk_that_fills_up_in_the_middle_of_a_save_leaves_no_half_of_it(
    char_data, tmp_path, capsys
):
    """A limit on the size of files ends a write in the middle, as a full disk does."""
    run = small_run(char_data, tmp_path, "--n_embd=128")
    with limited("RLIMIT_FSIZE", 1 << 20):
        save(run, 1, 2.5)
    said = capsys.readouterr().err
    assert "step 1 could not be saved" in said
    assert "There is no checkpoint yet" in said
    assert not list(tmp_path.iterdir())
    assert run.saver.best is None


def test_an_error_that_is_not_the_disks_ends_the_run(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    run.saver.save(1, lambda: ({"step": 1, "settings": {1}}, {}, {}))
    with pytest.raises(TypeError, match="set is not JSON serializable"):
        while run.saver.busy:  # as the loop asks at each step
            time.sleep(0.01)
    save(run, 2)
    assert run.saver.saved_step == 2


def test_without_the_memory_for_a_copy_a_save_fails_and_the_run_continues(char_data, tmp_path):
    """In a process of its own: in this one, earlier tests may have left room for the copy."""
    code = """
        import sys
        from tests.conftest import address_space, limited
        from tests.training.conftest import small_run
        from tests.training.test_saver import save

        run = small_run(*sys.argv[1:], "--n_embd=2048", "--n_layer=1")  # two matrices of 67 MB
        run.saver.begin()
        run.saver.wait()
        with limited("RLIMIT_AS", address_space() + 60_000_000):
            save(run, 1)
        print(run.saver.saved_step)
        save(run, 2)
        print(run.saver.saved_step)
    """
    result = ok(run_code(textwrap.dedent(code), char_data, tmp_path))
    assert "step 1 could not be saved" in result.stderr
    assert result.stdout.split()[-2:] == ["0", "2"]


def test_a_run_survives_a_folder_that_becomes_read_only(char_data, tmp_path):
    """Saves fail and are reported, and the last one succeeds once the folder is back."""
    folder = tmp_path / "run"
    often = ["--max_steps=200", "--save_interval=20", "--eval_interval=50"]
    process = start(char_data, folder, *often)
    wait_until(process, lambda: run_folder.steps(folder))
    immutable = ["chattr", "+i", folder]  # holds for root too, unlike permissions
    if not shutil.which("chattr") or subprocess.run(immutable, capture_output=True).returncode:
        process.kill()
        pytest.skip("may not make a folder immutable here")
    try:
        wait_until(process, lambda: run_folder.evaluation_at(folder, 200))
        time.sleep(0.5)  # for its first try
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert err.count("step 200 could not be saved") == 1
    assert "trying for 120 s to save the last step" in err
    assert "Traceback" not in err
    assert run_folder.step_of(run_folder.latest(folder)[0]) == 200


def test_a_last_save_that_fails_for_good_names_the_last_checkpoint(
    char_data, tmp_path, monkeypatch
):
    monkeypatch.setattr(saver, "LAST_SAVE_S", 0)
    run = small_run(char_data, tmp_path / "run")
    save(run, 1)
    (tmp_path / "run").rename(tmp_path / "away")
    (tmp_path / "run").write_text("a mount that is gone")
    words = r"step 2 could not .*run/step_00000001\. Fix that, and start the same command again"
    with pytest.raises(RunError, match=words):
        run.saver.finish(2, run.snapshot)


def test_the_seconds_of_all_starts_count_and_of_what_a_kill_lost(char_data, tmp_path):
    run = small_run(char_data, tmp_path)
    training_step(run)
    run.clock.before = 3600.0
    save(run, 1)
    assert small_run(char_data, tmp_path, "--max_hours=1").clock.exceeded()
    training_step(run)
    run.clock.before = 7200.0
    Recorder(run).record({"loss": 1.0})
    again = small_run(char_data, tmp_path, "--max_hours=2", "--cost_per_hour=3")
    assert again.step == 1
    assert again.clock.exceeded()
    assert again.clock.cost == pytest.approx(6, abs=0.1)
