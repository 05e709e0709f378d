"""What must not lose a run: two trainers, full disks, saves that fail, signals."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from formats import run_folder
from tests.conftest import ROOT, SMALL, fails_clearly, losses, run_script, train_small
from tests.torture import torture
from training.errors import RunError
from training.lock import Lock
from training.saver import Saver


def start(data, folder, *more, before=(), **options):
    """Begin training a small model; returns the process."""
    command = [
        *before,
        sys.executable,
        "train.py",
        f"--data_dir={data}",
        f"--checkpoint_dir={folder}",
        *SMALL,
        *more,
    ]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def wait_until(process, condition):
    """Wait until something holds, or the process has ended."""
    while process.poll() is None and not condition():
        time.sleep(0.01)


@pytest.fixture
def disk(tmp_path, request):
    """A small file system of its own, of the size given as parameter."""
    path = tmp_path / "disk"
    path.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", path], capture_output=True
    ).returncode:
        pytest.skip("may not mount a small file system here")
    yield path
    subprocess.run(["umount", path], check=True)


def test_killed_at_random_moments_it_ends_in_the_same_weights(char_data, tmp_path):
    torture(char_data, tmp_path, kills=3, steps=60)


# -- one writer -----------------------------------------------------------------------------------


def test_a_second_trainer_refuses_and_names_the_first(char_data, tmp_path):
    first = start(char_data, tmp_path, "--max_steps=100000", "--eval_interval=0")
    try:
        wait_until(first, lambda: losses(tmp_path)[0])
        fails_clearly(
            train_small(char_data, tmp_path, "--max_steps=100000", "--eval_interval=0"),
            f"process {first.pid}",
            "checkpoint_dir",
            status=1,
        )
    finally:
        first.kill()
        first.communicate()
    assert (
        train_small(char_data, tmp_path, "--max_steps=10").returncode == 0
    )  # the dead one's lock does not count


def test_a_lock_of_another_machine_counts_while_it_is_fresh(tmp_path):
    (tmp_path / ".lock").write_text("17\tanother-host\t2026-01-01 00:00:00")
    with pytest.raises(RunError, match="process 17 on another-host"):
        Lock(tmp_path)
    os.utime(tmp_path / ".lock", (0, time.time() - 2 * Lock.stale_s))
    Lock(tmp_path).release()


# -- saving ---------------------------------------------------------------------------------------


def test_what_is_saved_is_the_state_at_the_moment_of_the_save(tmp_path):
    saver = Saver(tmp_path, 2)
    tensors = {"w": torch.ones(1_000_000), "tied": None}
    tensors["tied"] = tensors["w"]
    saver.reserve([tensors["w"]])
    for step in (1, 2):
        tensors["w"].fill_(step)
        saver.save({"step": step}, tensors, {"m": [torch.full((3,), float(step))]}, "{}")
        tensors["w"].fill_(-1)
    saver.wait()
    for step in (1, 2):
        loaded = run_folder.load_tensors(tmp_path / f"step_{step:08d}" / "model.pt")
        assert (loaded["w"] == step).all() and loaded["tied"].data_ptr() == loaded["w"].data_ptr()
        assert (
            run_folder.load_tensors(tmp_path / f"step_{step:08d}" / "optimizer.pt")["m"][0][0]
            == step
        )


def test_the_best_is_marked_when_it_is_written_and_training_does_not_wait(tmp_path):
    saver = Saver(tmp_path / "run", 2)
    saver.save({"step": 1}, {"w": torch.ones(20_000_000)}, {}, "{}")
    saver.mark_best(1, 2.5)
    assert saver.busy and not (tmp_path / "run/best.json").exists()
    saver.wait()
    assert run_folder.best_of(tmp_path / "run") == 1 and saver.best == 2.5


def test_what_is_not_saved_is_not_the_best(tmp_path, capsys):
    (tmp_path / "run").write_text("no folder")
    saver = Saver(tmp_path / "run", 2)
    saver.save({"step": 1}, {"w": torch.ones(3)}, {}, "{}")
    saver.mark_best(1, 2.5)
    saver.wait()
    assert "step 1 could not be saved" in capsys.readouterr().err and saver.best == math.inf


def test_a_best_that_a_crash_left_unmarked_is_marked_at_the_next_start(char_data, tmp_path):
    assert train_small(char_data, tmp_path, "--max_steps=20").returncode == 0
    best = (tmp_path / "best.json").read_text()
    (tmp_path / "best.json").unlink()
    result = train_small(
        char_data, tmp_path, "--max_steps=21", "--eval_interval=0", "--save_interval=0"
    )
    assert result.returncode == 0 and run_folder.best_of(tmp_path) in (
        json.loads(best)["step"],
        21,
    ), result.stderr


def test_an_evaluation_cut_off_between_its_records_is_recorded_once(char_data, tmp_path):
    more = ["--max_steps=10", "--sample_prompts=The"]
    assert train_small(char_data, tmp_path, *more).returncode == 0
    whole = (tmp_path / "log.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join(line for line in lines if "val_loss" not in line))
    result = train_small(char_data, tmp_path, *more)
    assert result.returncode == 0, result.stderr
    log = run_folder.read_log(tmp_path)
    assert sum("samples" in record for record in log) == sum("val_loss" in record for record in log)


def test_without_memory_for_a_thread_a_save_is_made_all_the_same(tmp_path):
    code = """if True:
        import resource, sys, threading, pathlib, torch
        from training.saver import Saver
        saver, model = Saver(pathlib.Path(sys.argv[1]), 2), {"w": torch.ones(3)}
        used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
        limit = used + (6 << 20)  # a thread's stack has 8 MB
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        saver.reserve([model["w"]])
        saver.save({"step": 1}, model, {}, "{}")
        print(saver.thread, saver.saved)
    """
    result = run_script("-c", code, tmp_path)
    assert result.stdout == "None 1\n", result.stderr


@pytest.mark.parametrize("disk", ["8m"], indirect=True)
def test_a_full_disk_is_reported_and_the_next_save_succeeds(disk, capsys):
    model, saver = {"w": torch.zeros(700_000)}, Saver(disk / "run", 2)
    saver.save({"step": 1}, model, {}, "{}")
    saver.wait()
    (disk / "filler").write_bytes(bytes(4_000_000))
    saver.save({"step": 2}, model, {}, "{}")  # the room is looked at first
    saver.wait()
    assert (
        "step 2 could not be saved" in (said := capsys.readouterr().err) and "MB are free" in said
    )
    assert saver.saved == 1 and sorted(p.name for p in (disk / "run").iterdir()) == [
        "log.jsonl",
        "step_00000001",
    ]
    (disk / "filler").unlink()
    saver.save({"step": 3}, model, {}, "{}")
    saver.wait()
    assert saver.saved == 3 and run_folder.latest(disk / "run")[0].name == "step_00000003"


@pytest.mark.parametrize("disk", ["40m"], indirect=True)
def test_a_disk_that_fills_up_in_the_middle_of_a_save_leaves_no_half_of_it(disk, capsys):
    """The room was there when it was looked at; another process took it."""
    saver = Saver(disk / "run", 2)
    (disk / "run").mkdir()
    filler = threading.Thread(target=fill, args=(disk / "filler", 36_000_000, disk / "run"))
    filler.start()
    saver.save({"step": 1}, {"w": torch.zeros(8_000_000)}, {}, "{}")
    saver.wait()
    filler.join()
    assert "could not be saved" in capsys.readouterr().err and not list((disk / "run").iterdir())


def fill(path, size, after):
    """Write a file as soon as something appears in the folder `after`."""
    while not list(after.iterdir()):
        pass
    with open(path, "wb", buffering=0) as f:
        while size > 0:
            try:
                size -= f.write(bytes(1 << 16))
            except OSError:
                return


def test_memory_that_does_not_suffice_for_the_copy_fails_the_save_and_not_the_run(tmp_path, capsys):
    limit, saver = resource.getrlimit(resource.RLIMIT_AS), Saver(tmp_path, 1)
    tensors = {"w": torch.zeros(50_000_000)}
    resource.setrlimit(
        resource.RLIMIT_AS,
        (
            int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            + 100_000_000,
            limit[1],
        ),
    )
    try:
        saver.save({"step": 1}, tensors, {}, "{}")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    saver.wait()
    assert "step 1 could not be saved" in capsys.readouterr().err and saver.saved == 0
    saver.save({"step": 2}, tensors, {}, "{}")
    saver.wait()
    assert saver.saved == 2


def test_a_run_survives_a_folder_that_becomes_read_only(char_data, tmp_path):
    """In mid-run nothing can be created in it any more.

    Saves fail and are reported; the run ends with status 1 and the last checkpoint whole.
    """
    folder = tmp_path / "run"
    often = ["--max_steps=400", "--save_interval=20", "--eval_interval=100"]
    process = start(char_data, folder, *often)
    wait_until(process, lambda: run_folder.steps(folder))
    if subprocess.run(
        ["chattr", "+i", folder], capture_output=True
    ).returncode:  # holds for root too, unlike permissions
        process.kill()
        pytest.skip("may not make a folder immutable here")
    try:
        _, err = process.communicate(timeout=120)
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
    assert process.returncode == 1 and "could not be saved" in err and "Traceback" not in err, err
    assert run_folder.latest(folder)[0] is not None
    assert (
        train_small(char_data, folder, *often).returncode == 0
    )  # with the folder back, the same command goes on


def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_continues(char_data, tmp_path):
    folder = tmp_path / "run"
    assert train_small(char_data, folder, "--max_steps=20").returncode == 0
    newest = run_folder.steps(folder)[-1]
    data = bytearray((newest / "optimizer.pt").read_bytes())
    data[len(data) // 2] ^= 4
    (newest / "optimizer.pt").write_bytes(data)
    result = train_small(char_data, folder, "--max_steps=40")
    assert (
        result.returncode == 0
        and "passed over" in result.stdout
        and "optimizer.pt is damaged" in result.stdout
    )
    assert "continues at step 10" in result.stdout
    assert [run_folder.step_of(p) for p in run_folder.steps(folder)] == [30, 40] and len(
        list(folder.glob("damaged_*"))
    ) == 1


@pytest.mark.parametrize("moment", ["compiling", "evaluating"])
def test_a_signal_while_compiling_or_evaluating_is_honoured(char_data, tmp_path, moment):
    more = {
        "compiling": ["--compile=True"],
        "evaluating": ["--eval_interval=5", "--eval_batches=0", "--eval_interval=1"],
    }[moment]
    process = start(
        char_data,
        tmp_path / "run",
        "--max_steps=100000",
        *more,
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
    )
    wait_until(
        process,
        {
            "compiling": lambda: list(tmp_path.glob("cache/**/*.cpp")),
            "evaluating": lambda: run_folder.steps(tmp_path / "run"),
        }[moment],
    )
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert (
        "Traceback" not in err
        and ("no step was done yet" if moment == "compiling" else "is saved in") in out
    )


def test_nohup_is_respected(char_data, tmp_path):
    process = start(char_data, tmp_path, "--max_steps=300", before=["nohup"])
    wait_until(process, lambda: losses(tmp_path)[0])
    process.send_signal(signal.SIGHUP)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and "finished: 300 steps" in out, err
