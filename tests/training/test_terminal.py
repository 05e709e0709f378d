"""terminal.py: what a run says, as text."""

import math

from training import terminal


def test_an_evaluation_in_a_line_with_what_is_known():
    full = terminal.Evaluation(
        step=1000,
        total_steps=20000,
        epoch=0.5,
        training_loss=4.25,
        val_loss=4.5,
        bits_per_byte=1.234,
        best=4.4,
        tokens_per_second=12345.6,
        cost=1.5,
        seconds_left=7800,
    )
    assert str(full) == (
        "step 1,000 of 20,000, epoch 0.50: training loss 4.2500, validation loss 4.5000, 1.234"
        " bits per byte, best 4.4000, 12,346 tokens/s, cost 1.50, 2 h 10 min left"
    )
    little = terminal.Evaluation(
        step=5,
        total_steps=5,
        epoch=1.0,
        training_loss=None,
        val_loss=4.5,
        bits_per_byte=1.2,
        best=math.inf,
        tokens_per_second=None,
        cost=None,
        seconds_left=None,
    )
    assert str(little) == (
        "step 5 of 5, epoch 1.00: validation loss 4.5000, 1.200 bits per byte, best inf"
    )


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
