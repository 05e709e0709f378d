"""benchmarks/laptop.py: the documents held out, and the one score of all contenders."""

import pytest
import torch

from benchmarks.laptop import bits_per_byte, read_documents

VOCABULARY = 16


def count_up(ids):
    """A model that gives the id after each id all probability but a trace."""
    return 50.0 * torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY)


def test_a_model_that_knows_nothing_takes_the_bits_of_an_id_for_each():
    # Ten windows of 4 ids, in more than one forward: 3 documents of 12, 12 and 13 ids to predict.
    documents = [[0] * 13, [1] * 13, [2] * 14]
    bits = bits_per_byte(lambda ids: torch.zeros(*ids.shape, VOCABULARY), documents, 4, 74)
    assert bits == pytest.approx(37 * 4 / 74)


def test_each_id_is_predicted_from_the_one_before_it_across_windows_too():
    assert bits_per_byte(count_up, [list(range(11))], 4, 10) < 1e-6


def test_a_window_does_not_see_the_one_before_it():
    seen = []

    def model(ids):
        seen.append(ids[:3].tolist())
        return count_up(ids)

    bits_per_byte(model, [list(range(6)), [7, 8]], 4, 1)
    assert [row[0] for row in seen[0]] == [0, 4, 7]


def test_a_file_is_held_out_as_a_whole(tmp_path):
    for i in range(40):
        (tmp_path / f"{i:02}.txt").write_text(f"line of {i:02}\n" * 400)
    train, held_out = read_documents(str(tmp_path))
    assert {line for document in held_out for line in document.splitlines()} == {
        "line of 00",
        "line of 20",
    }
    assert len("".join(train + held_out)) == 40 * 400 * len("line of 00\n")
    assert "line of 20" not in "".join(train)
