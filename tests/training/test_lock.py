"""lock.py: one trainer a run."""

import os
import time

import pytest

from tests.conftest import fails_clearly, losses, train_small
from tests.training.conftest import start, wait_until
from training.errors import RunError
from training.lock import Lock


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


def test_a_lock_of_another_machine_counts_while_it_is_fresh(tmp_path):
    (tmp_path / ".lock").write_text("17\tanother-host\t2026-01-01 00:00:00")
    with pytest.raises(RunError, match="process 17 on another-host"):
        Lock(tmp_path)
    os.utime(tmp_path / ".lock", (0, time.time() - 2 * Lock.stale_s))
    Lock(tmp_path).release()
