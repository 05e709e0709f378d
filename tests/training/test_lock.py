"""lock.py: one trainer per run."""

from tests.conftest import fails_clearly, losses, train_small, trained
from tests.training.conftest import start, wait_until

ENDLESS = ["--max_steps=100000", "--eval_interval=0"]


def test_a_second_trainer_refuses_and_names_the_first(char_data, tmp_path):
    first = start(char_data, tmp_path, *ENDLESS)
    wait_until(first, lambda: losses(tmp_path)[0])
    second = train_small(char_data, tmp_path, "--max_steps=10", "--eval_interval=0")
    first.kill()
    first.communicate()
    fails_clearly(second, f"process {first.pid}", "checkpoint_dir", status=1)
    trained(char_data, tmp_path, "--max_steps=10")  # the lock of the dead one does not count
