"""loss_on = "assistant": which targets count, where sequences begin, and what a mean is of."""

import math
import re

import numpy as np
import pytest
import torch

import hardware
from formats.data_folder import IN_REPLY, TURN_BEGINS, read_meta
from model import IGNORE
from tests.conftest import losses, run_script, trained
from tests.training.conftest import EXACT, assert_same_losses, train_on
from training.dataset import Dataset

CPU = torch.device("cpu")


def open_split(folder, split, block_size=32, loss_on="assistant"):
    return Dataset(folder, read_meta(folder), split, block_size, CPU, loss_on)


def test_sequences_begin_at_turns_and_replies_are_their_targets(chat_data):
    ids = np.fromfile(chat_data / "train.bin", read_meta(chat_data).dtype).astype(int)
    mask = np.fromfile(chat_data / "train.mask.bin", np.uint8)
    T = 64
    data = open_split(chat_data, "train", T)
    whole = open_split(chat_data, "train", T, "all")
    assert data.bytes == whole.bytes * 3 // 2
    starts = whole._starts(0, data.windows, 7).tolist()
    x, y = data.batch(0, data.windows, 7)
    at_turns = 0
    for start, row_x, row_y in zip(starts, x, y, strict=True):
        turns = np.flatnonzero(mask[start : start + T] & TURN_BEGINS)
        moved = start + int(turns[0]) if len(turns) else start
        if moved + T >= len(ids):
            moved = start
        at_turns += moved != start
        assert row_x.tolist() == ids[moved : moved + T].tolist()
        counts = mask[moved + 1 : moved + T + 1] & IN_REPLY > 0
        assert row_y.tolist() == np.where(counts, ids[moved + 1 : moved + T + 1], IGNORE).tolist()
    assert at_turns > data.windows / 3


def test_an_evaluation_counts_each_token_of_a_reply_once(chat_data):
    data, whole = (open_split(chat_data, "val", loss_on=on) for on in ("assistant", "all"))
    count = 0
    for (x, y), (all_x, all_y) in zip(data.evaluation(0, 7), whole.evaluation(0, 7), strict=True):
        assert torch.equal(x, all_x)
        assert ((y == all_y) | (y == IGNORE)).all()
        assert y.stride() == data.batch(0, 7, 1)[1].stride()  # else it is compiled again
        count += int((y != IGNORE).sum())
    assert count == read_meta(chat_data).splits["val"].mask.tokens


def test_batches_are_the_same_in_ram_and_memory_mapped(chat_data, monkeypatch):
    in_ram = open_split(chat_data, "train")
    monkeypatch.setattr(hardware, "free_ram", lambda: 1 << 10)
    mapped = open_split(chat_data, "train")
    assert (in_ram.location, mapped.location) == ("ram", "mmap")
    for first in (0, 100, mapped.windows - 4):
        x, y = in_ram.batch(first, 16, 7)
        mapped_x, mapped_y = mapped.batch(first, 16, 7)
        assert torch.equal(x, mapped_x)
        assert torch.equal(y, mapped_y)
        assert (y != IGNORE).any()


@pytest.fixture(scope="module")
def chat_run(chat_data, tmp_path_factory):
    """A run of 20 steps on replies alone, stopped once; and what its last start printed."""
    folder = tmp_path_factory.mktemp("runs") / "chat"
    for steps in (10, 20):
        more = ["--loss_on=assistant", f"--max_steps={steps}"]
        result = trained(chat_data, folder, *EXACT, *more)
    return folder, result.stdout


def test_micro_batches_processes_and_stops_change_no_loss(chat_data, chat_run, tmp_path):
    more = ["--loss_on=assistant", "--max_steps=20", "--micro_batch_size=1"]
    train_on(2, chat_data, tmp_path, *more)
    assert_same_losses(losses(chat_run[0]), losses(tmp_path))
    # The mean of what counts: a new model gives all 512 ids about the same probability.
    assert losses(tmp_path)[0][1] == pytest.approx(math.log(512), abs=0.2)


def test_a_run_on_replies_says_how_many_there_are_and_how_to_chat(chat_data, chat_run):
    folder, printed = chat_run
    splits = read_meta(chat_data).splits
    train, val = (splits[name].mask.tokens for name in ("train", "val"))
    assert f"the assistant's: {train:,} and {val:,}" in printed
    assert f"python generate.py --checkpoint {folder} --chat\n" in printed


def test_the_tool_finds_the_loss_of_the_replies_and_their_bits_per_byte(chat_data, chat_run):
    logged, replies = losses(chat_run[0])[1][20], read_meta(chat_data).splits["val"].mask
    shown = run_script("-m", "tools.evaluate", chat_run[0]).stdout
    loss, bits = re.search(r"replies alone +([\d.]+) .* ([\d.]+) ±", shown).groups()
    assert float(loss) == pytest.approx(logged, abs=2e-3)
    per_byte = logged / math.log(2) * replies.tokens / replies.text_bytes
    assert float(bits) == pytest.approx(per_byte, abs=2e-3)
    assert "gzip" not in shown
    everything = run_script("-m", "tools.evaluate", chat_run[0], "--loss_on=all").stdout
    assert "replies" not in everything
    assert "gzip" in everything
