"""loss_on = "assistant": which targets count, where sequences begin, and what a mean is of."""

import math
import re
import sys

import numpy as np
import pytest
import torch

import hardware
from formats import run_folder
from formats.data_folder import IN_REPLY, TURN_BEGINS, read_meta
from model import IGNORE
from tests.conftest import losses, run_script, trained
from tests.training.conftest import EXACT, assert_same_losses, train_on
from training.dataset import Dataset
from training.replies import find_replies, reply_windows

CPU = torch.device("cpu")


def open_split(folder, split, block_size=32, loss_on="assistant"):
    return Dataset(folder, read_meta(folder), split, block_size, CPU, loss_on)


def mask_of(lengths):
    """The mask of conversations [(tokens asked, tokens replied), ...], two tokens a name.

    Also where each question begins, where the reply to it begins, and where what ends it ends.
    """
    parts, asked, begins, ends, at = [], [], [], [], 0
    for turns in lengths:
        for n, (question, reply) in enumerate(turns):
            name = np.full(2, IN_REPLY if n else 0, np.uint8)  # it ends the reply before
            name[0] |= TURN_BEGINS
            parts += [name, np.zeros(question + 2, np.uint8), np.full(reply, IN_REPLY, np.uint8)]
            asked.append(at)
            begins.append(at + question + 4)
            at += question + 4 + reply
            ends.append(at + (2 if n + 1 < len(turns) else 1))
        parts.append(np.array([IN_REPLY], np.uint8))  # end-of-text
        at += 1
    return np.concatenate(parts), asked, begins, ends


@pytest.mark.parametrize("T", [64, 512])
@pytest.mark.parametrize(
    ("asked", "replied", "turns", "most"),
    [
        (40, 250, 1, 1.4),
        (20, 60, 4, 1.6),
        (60, 1000, 1, 1.1),  # replies longer than the context
        (800, 60, 1, 0.6),  # articles with summaries
        (900, 4, 1, 0.6),
    ],
)
def test_each_reply_is_seen_once_with_what_was_asked(T, asked, replied, turns, most):
    """Lengths are log-normal. most: windows that an epoch has, of those that the tokens fill."""
    dice = np.random.default_rng(1)
    lengths = np.exp(dice.normal(np.log((asked, replied)), 0.5, (300, turns, 2))).astype(int) + 1
    mask, asked, begins, ends = mask_of(lengths)
    starts, since = reply_windows(mask, T)
    assert len(starts) < most * len(mask) / T + 1
    seen, context = np.zeros(len(mask), int), np.zeros(len(mask), int)
    for start, first in zip(starts, since, strict=True):
        assert mask[first + 1] & IN_REPLY  # no window without a reply
        seen[first + 1 : start + T + 1] += 1
        context[first + 1 : start + T + 1] = start
    assert (seen[mask & IN_REPLY > 0] == 1).all()
    for question, begin, end in zip(asked, begins, ends, strict=True):
        if end - question <= T:
            assert (context[begin:end] <= question).all()
        elif end - begin <= T // 2:
            assert (context[begin:end] <= begin - T // 2).all()


def test_a_split_may_begin_within_a_reply():
    mask = np.array([IN_REPLY, IN_REPLY, 0, TURN_BEGINS, 0, IN_REPLY, IN_REPLY, 0], np.uint8)
    assert [part.tolist() for part in find_replies(mask)] == [[0, 3], [0, 4], [1, 6]]


def test_what_a_reply_answers_begins_with_the_first_turn_after_the_reply_before():
    """A system message and a question, two replies in a row, and a text between conversations."""
    turn, other, reply = [TURN_BEGINS, 0, 0, 0], [0] * 4, [IN_REPLY] * 6
    said = turn + turn + other + reply + other + reply + [0] * 90 + turn + other + reply
    starts, since = reply_windows(np.array(said + [0] * 99, np.uint8), 24)
    assert starts.tolist() == [0, 18, 118]
    assert since.tolist() == [11, 24, 125]


@pytest.mark.parametrize("T", [16, 64])
def test_an_epoch_and_an_evaluation_count_each_token_of_a_reply_once(chat_data, T):
    for split in ("train", "val"):
        data, meta = open_split(chat_data, split, T), read_meta(chat_data)
        ids = np.fromfile(chat_data / f"{split}.bin", meta.dtype).astype(int)
        mask = np.fromfile(chat_data / f"{split}.mask.bin", np.uint8)
        batches = [data.batch(data.windows, data.windows, 7)]
        evaluated = list(data.evaluation(0, 7))
        assert evaluated[0][1].stride() == data.batch(0, 7, 1)[1].stride()  # or it compiles again
        for pairs in (batches, evaluated):
            x, y = (torch.cat(part) for part in zip(*pairs, strict=True))
            counts = y != IGNORE
            assert counts[: data.windows].any(dim=1).all()
            assert sorted(y[counts].tolist()) == sorted(ids[mask & IN_REPLY > 0].tolist())
            assert torch.equal(x[:, 1:][counts[:, :-1]], y[:, :-1][counts[:, :-1]])
        assert data.bytes == open_split(chat_data, split, T, "all").bytes * 3 // 2


@pytest.mark.parametrize("windows", [0, 7])
def test_a_single_sequence_is_enough_to_validate(chat_data, windows):
    mask = np.fromfile(chat_data / "val.mask.bin", np.uint8)
    ids = np.fromfile(chat_data / "val.bin", read_meta(chat_data).dtype).astype(int)
    ((_, y),) = open_split(chat_data, "val", len(ids) - 1).evaluation(windows, 2)
    assert y[y != IGNORE].tolist() == ids[mask & IN_REPLY > 0].tolist()


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


@pytest.mark.skipif(sys.platform != "linux", reason="needs forks")
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
    assert run_folder.evaluation_at(chat_run[0], 20)["bits_per_byte"] == pytest.approx(per_byte)
    assert "gzip" not in shown
    everything = run_script("-m", "tools.evaluate", chat_run[0], "--loss_on=all").stdout
    assert "replies" not in everything
    assert "gzip" in everything
