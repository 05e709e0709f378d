"""loss_on = "assistant": which targets count, where sequences begin, and what a mean is of."""

import contextlib
import copy
import math
import re

import numpy as np
import pytest
import torch

import hardware
from formats.data_folder import IN_REPLY, TURN_BEGINS, read_meta
from model import GPT, IGNORE, GPTConfig, cross_entropy
from tests.conftest import conversations, fails_clearly, losses, run_script, write_conversations
from tests.training.conftest import EXACT, same_losses, train_on
from training.dataset import Dataset
from training.low_memory import use_chunked_loss
from training.step import evaluate, forward_backward

CPU = torch.device("cpu")


def open_split(folder, split, block_size=32, loss_on="assistant"):
    return Dataset(folder, read_meta(folder), split, block_size, CPU, loss_on)


# -- batches ---------------------------------------------------------------------------------------


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


def test_batches_are_the_same_in_ram_and_memory_mapped(tmp_path, monkeypatch):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("Plain text is in no conversation. " * 400)
    write_conversations(tmp_path / "in/b.jsonl", conversations(150))
    flags = ["--tokenizer", "char", "--val_fraction", "0", "--out", tmp_path / "data"]
    result = run_script("prepare_data.py", tmp_path / "in/*", *flags)
    assert result.returncode == 0, result.stderr
    data = {}
    for location, free in (("ram", 1 << 30), ("mmap", 1 << 10)):
        monkeypatch.setattr(hardware, "free_ram", lambda free=free: free)
        data[location] = open_split(tmp_path / "data", "train")
        assert data[location].location == location
    for first in (0, 100, data["ram"].windows - 4):
        x, y = data["ram"].batch(first, 16, 7)
        mapped_x, mapped_y = data["mmap"].batch(first, 16, 7)
        assert torch.equal(x, mapped_x)
        assert torch.equal(y, mapped_y)
        assert (y != IGNORE).any()


# -- means -----------------------------------------------------------------------------------------


def uneven_batch():
    """Inputs, and targets of which each sequence counts another number, and two count none."""
    chance = torch.Generator().manual_seed(1)
    x, y = torch.randint(50, (2, 8, 16), generator=chance)
    for row, count in enumerate((16, 1, 0, 0, 5, 9, 2, 7)):
        y[row, count:] = IGNORE
    return x, y


@pytest.mark.parametrize("head", ["plain", "chunked"])
@pytest.mark.parametrize("micro_batch", [1, 2, 4, 8])
def test_unequal_micro_batches_make_the_mean_of_one_batch(micro_batch, head):
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    x, y = uneven_batch()
    loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-1)
    loss.backward()
    other = copy.deepcopy(model)
    other.zero_grad()
    if head == "chunked":
        use_chunked_loss(other, 3)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    count = (y != IGNORE).sum()
    found = forward_backward(other, x, y, micro_batch, contextlib.nullcontext, scaler, count)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_where_nothing_counts_loss_and_gradients_are_zero():
    logits = torch.randn(8, 50, requires_grad=True)
    loss = cross_entropy(logits, torch.full((8,), IGNORE))
    loss.backward()
    assert loss.item() == 0
    assert not logits.grad.any()


def test_an_evaluation_does_not_depend_on_its_micro_batch(chat_data):
    torch.manual_seed(0)
    model, data = GPT(GPTConfig(512, 32, 1, 2, 32)), open_split(chat_data, "val")
    sums = []
    for micro_batch in (1, 7, 64):
        batches = data.evaluation(0, micro_batch)
        total, count = evaluate(model, batches, contextlib.nullcontext)
        assert count == read_meta(chat_data).splits["val"].mask.tokens
        sums.append(total.item())
    assert sums == pytest.approx([sums[0]] * 3, rel=1e-5)


# -- runs ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def chat_run(chat_data, tmp_path_factory):
    """A run of 20 steps on replies alone, stopped once; and what its last start printed."""
    folder = tmp_path_factory.mktemp("runs") / "chat"
    where = [f"--data_dir={chat_data}", f"--checkpoint_dir={folder}", "--loss_on=assistant"]
    for steps in (10, 20):
        result = run_script("train.py", *where, *EXACT, f"--max_steps={steps}")
        assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_micro_batches_processes_and_stops_change_no_loss(chat_data, chat_run, tmp_path):
    more = ["--loss_on=assistant", "--max_steps=20", "--micro_batch_size=1"]
    result = train_on(2, chat_data, tmp_path, *more)
    assert result.returncode == 0, result.stderr
    assert same_losses(losses(chat_run[0]), losses(tmp_path))


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


def test_text_without_conversations_is_refused_with_the_command(bpe_data, tmp_path):
    result = run_script(
        "train.py", f"--data_dir={bpe_data}", f"--checkpoint_dir={tmp_path}", "--loss_on=assistant"
    )
    fails_clearly(result, "no mask", "python prepare_data.py CONVERSATIONS.jsonl --tokenizer")
