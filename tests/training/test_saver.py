"""saver.py: saves that fail, full disks, folders that take no writes."""

import json
import math
import resource
import subprocess
import threading
from pathlib import Path

import pytest
import torch

from formats import run_folder, run_log
from tests.conftest import run_script, train_small
from tests.training.conftest import start, wait_until
from training.saver import Saver


@pytest.fixture
def disk(tmp_path, request):
    """A small file system of its own, of the size given as parameter."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", path]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("may not mount a small file system here")
    yield path
    subprocess.run(["umount", path], check=True)


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
        folder = tmp_path / f"step_{step:08d}"
        model = run_folder.load_tensors(folder / "model.pt")
        optimizer = run_folder.load_tensors(folder / "optimizer.pt")
        assert (model["w"] == step).all()
        assert model["tied"].data_ptr() == model["w"].data_ptr()
        assert optimizer["m"][0][0] == step


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
    best = json.loads((tmp_path / "best.json").read_text())["step"]
    (tmp_path / "best.json").unlink()
    more = ["--max_steps=21", "--eval_interval=0", "--save_interval=0"]
    result = train_small(char_data, tmp_path, *more)
    assert result.returncode == 0, result.stderr
    assert run_folder.best_of(tmp_path) in (best, 21)


def test_an_evaluation_cut_off_between_its_records_is_recorded_once(char_data, tmp_path):
    more = ["--max_steps=10", "--sample_prompts=The"]
    assert train_small(char_data, tmp_path, *more).returncode == 0
    whole = (tmp_path / "log.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join(line for line in lines if "val_loss" not in line))
    result = train_small(char_data, tmp_path, *more)
    assert result.returncode == 0, result.stderr
    log = run_log.read(tmp_path)
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
    said = capsys.readouterr().err
    assert "step 2 could not be saved" in said
    assert "MB are free" in said
    assert saver.saved == 1
    assert sorted(p.name for p in (disk / "run").iterdir()) == ["log.jsonl", "step_00000001"]
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
    saver = Saver(tmp_path, 1)
    tensors = {"w": torch.zeros(50_000_000)}
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = resource.getrlimit(resource.RLIMIT_AS)
    low = pages * resource.getpagesize() + 100_000_000
    resource.setrlimit(resource.RLIMIT_AS, (low, limit[1]))
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
    immutable = ["chattr", "+i", folder]  # holds for root too, unlike permissions
    if subprocess.run(immutable, capture_output=True).returncode:
        process.kill()
        pytest.skip("may not make a folder immutable here")
    try:
        _, err = process.communicate(timeout=120)
    finally:
        subprocess.run(["chattr", "-i", folder], check=True)
    assert process.returncode == 1, err
    assert "could not be saved" in err
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
    assert "passed over" in result.stdout
    assert "optimizer.pt is damaged" in result.stdout
    assert "continues at step 10" in result.stdout
    assert [run_folder.step_of(p) for p in run_folder.steps(folder)] == [30, 40]
    assert len(list(folder.glob("damaged_*"))) == 1
