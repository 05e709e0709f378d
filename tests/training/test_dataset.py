"""training/dataset.py: batches, where the tokens are kept, and splits that are too short."""

import hashlib

import numpy as np
import pytest
import torch

import hardware
from formats.data_folder import DataError, Meta, Split, read_meta, write_meta
from model import IGNORE
from training import distributed
from training.dataset import Dataset, find_location

CPU = torch.device("cpu")


def make(folder, dtype="uint16", tokens=5000):
    """A folder with made-up tokens; returns them."""
    folder.mkdir()
    ids = np.random.default_rng(1).integers(0, 60000, tokens).astype(dtype)
    splits = {}
    for name in ("train", "val"):
        ids.tofile(folder / f"{name}.bin")
        splits[name] = Split(f"{name}.bin", tokens, 1, tokens, hashlib.sha256(ids).hexdigest())
    tokenizer = {"kind": "bpe", "file": "tokenizer.json", "sha256": "0"}
    vocab_size = 60000 if dtype == "uint16" else 70000
    write_meta(folder, Meta(dtype, vocab_size, 0, tokenizer, splits, [], {}, "now"))
    return ids


def train_split(folder, block_size=32):
    return Dataset(folder, read_meta(folder), "train", block_size, CPU)


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_batches_are_the_same_in_ram_and_memory_mapped(tmp_path, monkeypatch, dtype):
    make(tmp_path / "data", dtype)
    data = {}
    for location, free in (("ram", 1 << 30), ("mmap", 1 << 10)):
        monkeypatch.setattr(hardware, "free_ram", lambda free=free: free)
        data[location] = train_split(tmp_path / "data")
        assert data[location].location == location
        assert data[location].bytes == 5000 * np.dtype(dtype).itemsize
    pairs = [[part.batch(first, 16, 7) for part in data.values()] for first in (0, 100, 150, 160)]
    pairs += zip(*(part.evaluation(0, 8) for part in data.values()), strict=True)
    for (x, y), (mapped_x, mapped_y) in pairs:
        assert x.dtype == y.dtype == torch.int64
        assert torch.equal(x, mapped_x)
        assert torch.equal(y, mapped_y)


def test_an_epoch_visits_every_window_once_from_a_drawn_offset(tmp_path):
    ids = make(tmp_path / "data")
    data = train_split(tmp_path / "data")
    places = np.lib.stride_tricks.sliding_window_view(ids, 32)
    offsets, orders = [], []
    for seed, epoch in ((3, 0), (3, 1), (4, 0), (5, 0)):
        x, y = data.batch(epoch * data.windows, data.windows, seed)
        assert torch.equal(x[:, 1:], y[:, :-1])
        seen = [int(np.flatnonzero((places == row.numpy()).all(1))[0]) for row in x]
        offsets.append(min(seen) % 32)
        orders.append([start // 32 for start in seen])
        assert sorted(seen) == [offsets[-1] + 32 * n for n in range(data.windows)]
    for drawn in (offsets, orders):
        assert len(set(map(str, drawn))) == 4


@pytest.mark.parametrize("windows", [0, 7, 40])
@pytest.mark.parametrize(("micro_batch", "ranks"), [(1, 1), (4, 1), (64, 1), (4, 2)])
def test_an_evaluation_counts_each_target_once(tmp_path, windows, micro_batch, ranks):
    ids = make(tmp_path / "data", tokens=1024).astype(np.int64)
    data, batches = train_split(tmp_path / "data"), []
    for rank in range(ranks):
        batches += data.evaluation(windows, micro_batch, rank, ranks)
    assert all(x.shape == y.shape == (micro_batch, 32) for x, y in batches)
    x, y = (torch.cat(part).flatten() for part in zip(*batches, strict=True))
    # All, with the partial one; seven, spread over the split; all that are whole, fewer than 40.
    starts = {0: range(0, 1024, 32), 7: [0, 128, 256, 416, 544, 704, 832], 40: range(0, 992, 32)}
    starts = [start for rank in range(ranks) for start in starts[windows][rank::ranks]]
    assert len(batches) == -(-len(starts) // (ranks * micro_batch)) * ranks
    at = np.concatenate([np.arange(start, min(start + 32, 1023)) for start in starts])
    counts = y != IGNORE
    assert x[counts].tolist() == ids[at].tolist()
    assert y[counts].tolist() == ids[at + 1].tolist()


def test_processes_of_one_machine_share_its_memory(monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 1000)
    assert find_location(500, CPU) == "ram"
    monkeypatch.setattr(distributed, "local_world_size", 2)
    assert find_location(500, CPU) == "mmap"


def test_a_gpu_takes_tokens_of_a_twentieth_of_its_memory(monkeypatch):
    monkeypatch.setattr(hardware, "free_ram", lambda: 1000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4000, 8000))
    gpu = torch.device("cuda")
    places = {size: find_location(size, gpu) for size in (100, 200, 201, 501)}
    assert places == {100: "gpu", 200: "gpu", 201: "ram", 501: "mmap"}


def test_a_split_shorter_than_a_sequence_is_refused(tmp_path):
    make(tmp_path / "data", tokens=50)
    with pytest.raises(DataError, match=r"50 tokens, too few .* 32: lower it to 25 .* more text"):
        train_split(tmp_path / "data")
    with pytest.raises(DataError, match=r"50 tokens, too few .* 50: lower it to 49 .*val_fraction"):
        Dataset(tmp_path / "data", read_meta(tmp_path / "data"), "val", 50, CPU)


@pytest.mark.parametrize("windows", [0, 7])
def test_a_single_sequence_is_enough_to_validate(tmp_path, windows):
    ids = make(tmp_path / "data", tokens=50).astype(np.int64)
    data = Dataset(tmp_path / "data", read_meta(tmp_path / "data"), "val", 49, CPU)
    ((x, y),) = data.evaluation(windows, 4)
    counts = y != IGNORE
    assert x[counts].tolist() == ids[:-1].tolist()
    assert y[counts].tolist() == ids[1:].tolist()
