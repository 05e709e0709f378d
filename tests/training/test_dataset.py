"""training/dataset.py and formats/data_folder.py: every form of the data gives the same batches."""

import gzip
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from formats.data_folder import (
    DataError,
    Meta,
    Split,
    blocks_sha256,
    dtype_for,
    read_meta,
    write_meta,
)
from training.dataset import Dataset, read_tokens

CPU = torch.device("cpu")


def make(folder, dtype="uint16", compressed=False, tokens=5000):
    """A folder with made-up tokens."""
    folder.mkdir()
    ids = np.random.default_rng(1).integers(0, 60000, tokens).astype(dtype)
    splits = {}
    for name in ("train", "val"):
        ids.tofile(folder / f"{name}.bin")
        blocks = blocks_sha256(folder / f"{name}.bin")
        splits[name] = Split(f"{name}.bin", len(ids), 1, len(ids), "0", blocks)
        if compressed:
            data = gzip.compress(ids.tobytes())
            (folder / f"{name}.bin").unlink()
            (folder / f"{name}.bin.gz").write_bytes(data)
    tokenizer = {"kind": "bpe", "file": "tokenizer.json", "sha256": "0"}
    write_meta(folder, Meta(dtype, 60000, 0, tokenizer, splits, [], {}, "now"))
    return ids


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_every_form_and_place_gives_the_same_batches(tmp_path, dtype):
    make(tmp_path / "whole", dtype)
    make(tmp_path / "packed", dtype, compressed=True)
    reference = Dataset(tmp_path / "whole", read_meta(tmp_path / "whole"), "train", 32, CPU, "ram")
    for name, location in (("whole", "mmap"), ("packed", "ram"), ("packed", "mmap")):
        data = Dataset(tmp_path / name, read_meta(tmp_path / name), "train", 32, CPU, location)
        for first in (0, 100, 150, 160):
            batches = zip(data.batch(first, 16, 7), reference.batch(first, 16, 7), strict=True)
            for ours, theirs in batches:
                assert ours.dtype == torch.int64 and torch.equal(ours, theirs)
        for ours, theirs in zip(data.evaluation(0, 8), reference.evaluation(0, 8), strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_compressed_tokens_are_unpacked_once_whole_or_not_at_all(tmp_path):
    ids = make(tmp_path / "a", compressed=True, tokens=1_000_000)
    meta = read_meta(tmp_path / "a")
    with ThreadPoolExecutor(4) as processes:  # of torchrun; one of them unpacks
        found = processes.map(lambda _: read_tokens(tmp_path / "a", meta, "train"), range(4))
        assert all(np.array_equal(tokens, ids) for tokens in found)
    files = {"meta.json", "train.bin", "train.bin.gz", "val.bin.gz"}
    left = {path.name for path in (tmp_path / "a").iterdir()}
    assert left - {".train.bin.lock"} == files
    (tmp_path / "a/train.bin.gz").unlink()
    assert np.array_equal(read_tokens(tmp_path / "a", read_meta(tmp_path / "a"), "train"), ids)
    data = (tmp_path / "a/val.bin.gz").read_bytes()
    others = gzip.compress(ids[::-1].tobytes())
    for damaged in (data[:2000] + bytes(20) + data[2020:], data[:-100], others):
        (tmp_path / "a/val.bin.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"val.bin.gz is damaged .* copy it again"):
            read_tokens(tmp_path / "a", meta, "val")
        assert not (tmp_path / "a/val.bin").exists()


def test_an_epoch_visits_every_window_once_from_a_drawn_offset(tmp_path):
    ids = make(tmp_path / "whole")
    data = Dataset(tmp_path / "whole", read_meta(tmp_path / "whole"), "train", 32, CPU)
    x, y = data.batch(0, data.windows, 3)
    places = np.lib.stride_tricks.sliding_window_view(ids, 32)
    seen = sorted(int(np.flatnonzero((places == row.numpy()).all(1))[0]) for row in x)
    offset = seen[0] % 32
    assert seen == list(range(offset, offset + 32 * data.windows, 32))
    assert torch.equal(x[:, 1:], y[:, :-1])
    next_epoch, _ = data.batch(data.windows, data.windows, 3)
    assert not torch.equal(next_epoch, x)


def test_what_does_not_fit_together_is_named(tmp_path):
    folder = tmp_path / "a"
    ids = make(folder)
    meta = json.loads((folder / "meta.json").read_text())

    def fails(*words, location="ram", **changes):
        (folder / "meta.json").write_text(json.dumps(meta | changes))
        with pytest.raises(DataError) as error:
            Dataset(folder, read_meta(folder), "train", 32, CPU, location).batch(0, 100, 1)
        for word in words:
            assert word in str(error.value), (word, error.value)

    fails("train.bin", "10,000 bytes instead of 20,000", "int32", dtype="int32")
    fails("dtype float32 cannot hold", dtype="float32")
    fails("dtype uint16 cannot hold 100,000 ids", vocab_size=100_000)
    for location in ("ram", "mmap"):
        fails("beyond the vocabulary of 100", location=location, vocab_size=100)
    fails("format 2", format=2)
    fails("cannot be used", splits={})
    ids[:-5].tofile(folder / "train.bin")
    fails("cut off")
    (folder / "train.bin").unlink()
    fails("train.bin is missing")
    for damaged in ("{", "[]"):
        (folder / "meta.json").write_text(damaged)
        with pytest.raises(DataError, match="cannot be used"):
            read_meta(folder)
    with pytest.raises(DataError, match=r"(?s)holds no prepared data.*--out '.*/my data'"):
        read_meta(folder / "my data")
    (tmp_path / "text.txt").write_text("some text")
    with pytest.raises(DataError, match=r"text.txt holds(?s:.*)--out data/NAME\n"):
        read_meta(tmp_path / "text.txt")
    with pytest.raises(DataError, match="holds no prepared data"):
        read_meta(tmp_path / "none")
    assert dtype_for(65536) == "uint16" and dtype_for(65537) == "int32"
