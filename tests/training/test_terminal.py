"""terminal.py: samples and curves as text, and a terminal that takes none."""

import pytest

from formats import run_folder
from tests.training.conftest import start
from training import terminal


def test_samples_cannot_move_the_cursor():
    escapes = {"prompt": "a\tb", "text": "\x1b[31m\rc\n\nd\u2028e"}
    text = terminal.samples([escapes, {"prompt": "Z", "text": "\u00e9" * 200}])
    assert text.splitlines()[:4] == ["  | a   b?[31m?c", "  |", "  | d?e", "  |"]
    assert max(map(len, text.splitlines())) <= 124
    assert text.count("\u00e9") == 200


def test_the_curve_shows_both_losses_and_its_range():
    training = [(n, 2 + 8 / n) for n in range(1, 1001)]
    drawn = terminal.curve(training, [(500, 2.5), (1000, 2.25)], width=40, height=10)
    lines = drawn.splitlines()
    rows = [line.partition("|")[2] for line in lines[1:-2]]
    assert len(rows) == 10
    assert max(map(len, rows)) <= 40
    assert "step 1,000" in lines[-1]
    assert rows[0].startswith(".")  # the steep beginning is at the upper edge
    assert lines[-3].split()[0] == "2.01"
    assert sum(row.count("o") for row in rows) == 2


@pytest.mark.parametrize(
    ("training", "words"), [([], ""), ([(5, None), (10, 3.0)], ""), ([(5, 2.0), (10, 2.0)], "2.00")]
)
def test_one_loss_has_no_curve_and_a_constant_one_has(training, words):
    drawn = terminal.curve(training, [])
    assert words in drawn
    assert bool(drawn) == bool(words)


def test_a_run_whose_disk_takes_no_output_continues(char_data, tmp_path):
    with open("/dev/full", "w") as full:
        process = start(char_data, tmp_path, "--max_steps=20", stdout=full, stderr=full)
    assert process.wait(timeout=60) == 0
    assert run_folder.read_state(tmp_path / "step_00000020")["step"] == 20


def test_a_mistake_that_nobody_reads_has_its_exit_status(char_data, tmp_path):
    process = start(char_data, tmp_path, "--batch_size=0")
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=60) == 2
