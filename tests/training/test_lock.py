"""lock.py: one trainer a run."""

import os
import time

import pytest

from formats import files, run_log
from tests.conftest import fails_clearly, losses, train_small
from tests.training.conftest import start, wait_until
from training import RunError
from training.lock import FRESH_S, Lock


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
    after = train_small(char_data, tmp_path, "--max_steps=10")
    assert after.returncode == 0, after.stderr  # the lock of the dead one does not count


def test_a_lock_of_another_machine_counts_while_the_log_is_fresh(tmp_path):
    holder = {"pid": 17, "host": "another-host", "since": "2026-01-01 00:00:00"}
    files.write_json(tmp_path / ".trainer.json", holder)
    log = tmp_path / run_log.NAME
    log.touch()
    with pytest.raises(RunError, match=r"process 17 on another-host.*wait 3 minutes"):
        Lock(tmp_path)
    long_ago = time.time() - 2 * FRESH_S
    os.utime(log, (0, long_ago))
    with pytest.raises(RunError):  # it may be reading its data, before the first line of its log
        Lock(tmp_path)
    os.utime(tmp_path / ".trainer.json", (0, long_ago))
    lock = Lock(tmp_path)
    assert files.read_json(tmp_path / ".trainer.json")["pid"] == os.getpid()
    lock.release()
    assert not (tmp_path / ".trainer.json").exists()
