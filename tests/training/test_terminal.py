"""terminal.py: samples and curves as text, and a terminal that takes none."""

import subprocess
import sys

from formats import run_folder
from tests.conftest import ROOT, SMALL
from tests.training.conftest import start
from training import terminal


def test_samples_cannot_move_the_cursor():
    text = terminal.samples(
        [
            {"prompt": "a\tb", "text": "\x1b[31m\rc\n\nd\u2028e"},
            {"prompt": "Z", "text": "\u00e9" * 200},
        ]
    )
    assert text.splitlines()[:4] == ["  | a   b?[31m?c", "  |", "  | d?e", "  |"]
    assert max(map(len, text.splitlines())) <= 124 and text.count("\u00e9") == 200


def test_the_curve_shows_both_losses_and_its_range():
    training = [(n, 2 + 8 / n) for n in range(1, 1001)]
    drawn = terminal.curve(training, [(500, 2.5), (1000, 2.25)], width=40, height=10)
    lines = drawn.splitlines()
    assert len(lines) == 13 and max(map(len, lines)) <= 49 and "step 1,000" in lines[-1]
    rows = [line.partition("|")[2] for line in lines[1:-2]]
    assert (
        rows[0].startswith(".") and sum(row.count("o") for row in rows) == 2
    )  # the steep beginning lies at the upper edge
    assert lines[1].split()[0] > lines[-3].split()[0] == "2.01"
    dots = [min(n for n, row in enumerate(rows) if row.ljust(40)[x] != " ") for x in range(40)]
    assert dots[:20] == sorted(dots[:20])  # it falls


def test_a_curve_of_nothing_is_nothing():
    assert (
        terminal.curve([], []) == ""
        and terminal.curve([(5, None)], []) == ""
        and terminal.curve([(5, 3.0)], []) == ""
    )
    assert "2.00" in terminal.curve([(5, 2.0), (10, 2.0)], [])


def test_a_run_whose_output_cannot_be_written_goes_on(char_data, tmp_path):
    with open("/dev/full", "w") as full:
        arguments = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'full'}", *SMALL]
        command = [sys.executable, "train.py", *arguments, "--max_steps=20"]
        ended = subprocess.run(command, cwd=ROOT, stdout=full, stderr=full)
    assert ended.returncode == 0
    assert run_folder.read_state(tmp_path / "full" / "step_00000020")["step"] == 20
    process = start(char_data, tmp_path / "head", "--max_steps=20")  # as with | head -1
    process.stdout.readline()
    process.stdout.close()
    process.stderr.close()
    assert process.wait(timeout=60) == 0
    assert run_folder.read_state(tmp_path / "head" / "step_00000020")["step"] == 20
    again = start(char_data, tmp_path / "head", "--n_layer=5")
    again.stdout.close()
    again.stderr.close()
    assert again.wait(timeout=60) == 2
