"""loss_on = "assistant": which targets count, where sequences begin, and what a mean is of."""

import copy
import gzip
import math
import re
import shutil

import numpy as np
import pytest
import torch

import hardware
from formats.data_folder import IN_REPLY, TURN_BEGINS, read_meta
from model import GPT, IGNORE, GPTConfig, cross_entropy
from tests.conftest import conversations, fails_clearly, losses, run_script, write_conversations
from tests.training.test_ranks import EXACT, same, train_on
from training.conversations import Conversations
from training.dataset import Dataset
from training.low_memory import use_chunked_loss
from training.step import evaluate, forward_backward

CPU = torch.device("cpu")


def plain():
    """No autocast."""
    return hardware.autocast(CPU, torch.float32)


def flat(folder, split):
    """The ids and the mask of a folder's only file of a split."""
    meta = read_meta(folder)
    ids = np.fromfile(folder / f"{split}.bin", meta.dtype).astype(int)
    return ids, np.fromfile(folder / f"{split}.mask.bin", np.uint8)


# -- batches ---------------------------------------------------------------------------------------


def test_sequences_begin_at_turns_and_replies_are_their_targets(chat_data):
    ids, mask = flat(chat_data, "train")
    T = 64
    meta = read_meta(chat_data)
    data = Conversations(chat_data, meta, "train", T, CPU)
    whole = Dataset(chat_data, meta, "train", T, CPU)
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
    meta = read_meta(chat_data)
    data = Conversations(chat_data, meta, "val", 32, CPU)
    whole = Dataset(chat_data, meta, "val", 32, CPU)
    count = 0
    for (x, y), (all_x, all_y) in zip(data.evaluation(0, 7), whole.evaluation(0, 7), strict=True):
        assert torch.equal(x, all_x) and ((y == all_y) | (y == IGNORE)).all()
        assert y.stride() == data.batch(0, 7, 1)[1].stride()  # else it is compiled for anew
        count += int((y != IGNORE).sum())
    assert count == meta.splits["val"].mask.tokens


def test_every_form_of_the_mask_gives_the_same_batches(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("Plain text is in no conversation. " * 400)
    write_conversations(tmp_path / "in/b.jsonl", conversations(150))
    flags = ["--tokenizer", "char", "--val_fraction", "0", "--out", tmp_path / "whole"]
    result = run_script("prepare_data.py", tmp_path / "in/*", *flags)
    assert result.returncode == 0, result.stderr
    meta = read_meta(tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "packed")
    for file in (meta.splits["train"], meta.splits["train"].mask):
        path = tmp_path / "packed" / file.file
        data = gzip.compress(path.read_bytes())
        path.unlink()
        (tmp_path / "packed" / f"{file.file}.gz").write_bytes(data)
    reference = None
    for name, location in (("whole", "ram"), ("whole", "mmap"), ("packed", "mmap")):
        folder = tmp_path / name
        data = Conversations(folder, read_meta(folder), "train", 32, CPU, location)
        batches = [data.batch(first, 16, 7) for first in (0, 100, data.windows - 4)]
        reference = reference or batches
        for (x, y), (wanted_x, wanted_y) in zip(batches, reference, strict=True):
            assert torch.equal(x, wanted_x) and torch.equal(y, wanted_y)
    assert all((y != IGNORE).any() for _, y in reference)


# -- means -----------------------------------------------------------------------------------------


def uneven_batch():
    """Inputs, and targets of which each sequence counts another number; of two none at all."""
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
    found = forward_backward(other, x, y, micro_batch, plain, scaler, predictions=count)
    assert found.item() == pytest.approx(loss.item(), rel=1e-5)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-6)


def test_where_nothing_counts_loss_and_gradients_are_zero():
    logits = torch.randn(8, 50, requires_grad=True)
    loss = cross_entropy(logits, torch.full((8,), IGNORE))
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_an_evaluation_does_not_depend_on_its_micro_batch(chat_data):
    torch.manual_seed(0)
    meta = read_meta(chat_data)
    model = GPT(GPTConfig(512, 32, 1, 2, 32))
    data = Conversations(chat_data, meta, "val", 32, CPU)
    sums = [evaluate(model, data, 0, micro_batch, plain) for micro_batch in (1, 7, 64)]
    for total, count in sums:
        assert count == meta.splits["val"].mask.tokens
        assert total.item() == pytest.approx(sums[0][0].item(), rel=1e-5)


# -- runs ------------------------------------------------------------------------------------------


def test_micro_batches_processes_and_stops_change_no_loss(chat_data, tmp_path):
    replies = ["--loss_on=assistant", "--eval_interval=10"]
    one = ["train.py", f"--data_dir={chat_data}", f"--checkpoint_dir={tmp_path / 'one'}", *EXACT]
    for more in (["--max_steps=10"], ["--max_steps=20", "--loss_chunks=3"]):
        result = run_script(*one, *replies, *more)
        assert result.returncode == 0, result.stderr
        assert f"python generate.py --checkpoint {tmp_path / 'one'} --chat\n" in result.stdout
    more = ["--max_steps=20", "--micro_batch_size=1"]
    result = train_on(2, chat_data, tmp_path / "two", *replies, *more)
    assert result.returncode == 0, result.stderr
    assert same(losses(tmp_path / "one"), losses(tmp_path / "two"))
    meta = read_meta(chat_data)
    counted = meta.splits["val"].mask
    assert f"the assistant's {meta.splits['train'].mask.tokens:,} and {counted.tokens:,}" in (
        result.stdout
    )
    # The tool finds the same loss, and bits of the replies' text.
    shown = run_script("-m", "tools.evaluate", tmp_path / "two").stdout
    loss, bits = re.search(r"replies alone +([\d.]+) .* ([\d.]+) ±", shown).groups()
    logged = losses(tmp_path / "two")[1][20]
    assert float(loss) == pytest.approx(logged, abs=2e-3)
    wanted = logged / math.log(2) * counted.tokens / counted.text_bytes
    assert float(bits) == pytest.approx(wanted, abs=2e-3) and "gzip" not in shown
    everything = run_script("-m", "tools.evaluate", tmp_path / "two", "--loss_on=all").stdout
    assert "replies" not in everything and "gzip" in everything


def test_text_without_conversations_is_refused_with_the_command(bpe_data, tmp_path):
    result = run_script(
        "train.py", f"--data_dir={bpe_data}", f"--checkpoint_dir={tmp_path}", "--loss_on=assistant"
    )
    fails_clearly(result, "no mask", "python prepare_data.py CONVERSATIONS.jsonl --tokenizer")
