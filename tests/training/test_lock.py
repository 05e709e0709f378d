"""lock.py: one trainer per run."""

from tests.conftest import fails_clearly, losses, train_small
from tests.training.conftest import start, wait_until


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
