"""training/dataset.py and formats/data_folder.py: every form of the data gives the same batches."""

import gzip
import json
import shutil

import numpy as np
import pytest
import torch

from formats.data_folder import DataError, Meta, Split, dtype_for, read_meta, write_meta
from training.dataset import Dataset, read_tokens

CPU = torch.device("cpu")


def make(folder, dtype="uint16", shards=0, compressed=False, tokens=5000):
    """A folder with made-up tokens: whole, or in shards."""
    ids = np.random.default_rng(1).integers(0, 60000, tokens).astype(dtype)
    for n in range(1, max(1, shards) + 1):
        place = folder / f"shard-{n}-of-{shards}" if shards else folder
        place.mkdir(parents=True)
        splits = {}
        for name in ("train", "val"):
            part = np.array_split(ids, shards)[n - 1] if shards else ids
            part.tofile(place / f"{name}.bin")
            splits[name] = Split(f"{name}.bin", len(part), 1, len(part), "0")
            if compressed:
                data = gzip.compress(part.tobytes())
                (place / f"{name}.bin").unlink()
                (place / f"{name}.bin.gz").write_bytes(data)
                copy = {"file": f"{name}.bin.gz", "bytes": len(data), "sha256": "0"}
                splits[name].compressed = copy
        tokenizer = {"kind": "bpe", "file": "tokenizer.json", "sha256": "0"}
        write_meta(place, Meta(dtype, 60000, 0, tokenizer, splits, [], {}, "now"))
    return ids


@pytest.mark.parametrize("dtype", ["uint16", "int32"])
def test_every_form_and_place_gives_the_same_batches(tmp_path, dtype):
    make(tmp_path / "whole", dtype)
    make(tmp_path / "shards", dtype, shards=3)
    make(tmp_path / "packed", dtype, compressed=True)
    make(tmp_path / "both", dtype, shards=2, compressed=True)
    reference = Dataset(tmp_path / "whole", read_meta(tmp_path / "whole"), "train", 32, CPU, "ram")
    for name, location in (
        ("whole", "mmap"),
        ("shards", "ram"),
        ("shards", "mmap"),
        ("packed", "ram"),
        ("both", "ram"),
    ):
        data = Dataset(tmp_path / name, read_meta(tmp_path / name), "train", 32, CPU, location)
        for first in (0, 100, 150, 160):
            batches = zip(data.batch(first, 16, 7), reference.batch(first, 16, 7), strict=True)
            for ours, theirs in batches:
                assert ours.dtype == torch.int64 and torch.equal(ours, theirs)
        for ours, theirs in zip(data.evaluation(0, 8), reference.evaluation(0, 8), strict=True):
            assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


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


def test_a_file_of_several_pieces_is_read_whole(tmp_path):
    ids = make(tmp_path / "large", tokens=(1 << 26) + 5)  # 128 MiB and a little: three pieces
    meta = read_meta(tmp_path / "large")
    assert np.array_equal(read_tokens(tmp_path / "large", meta, "train"), ids)


def test_what_does_not_fit_together_is_named(tmp_path):
    make(tmp_path / "a")
    meta = json.loads((tmp_path / "a/meta.json").read_text())

    def fails(*words, **changes):
        (tmp_path / "a/meta.json").write_text(json.dumps(meta | changes))
        with pytest.raises(DataError) as error:
            Dataset(tmp_path / "a", read_meta(tmp_path / "a"), "train", 32, CPU)
        for word in words:
            assert word in str(error.value), (word, error.value)

    fails("train.bin", "fits dtype uint16", dtype="int32")
    fails("int8", dtype="int8")
    fails("beyond the vocabulary of 100", vocab_size=100)
    fails("format 2", format=2)
    fails("damaged", splits={})
    (tmp_path / "a/train.bin").write_bytes((tmp_path / "a/train.bin").read_bytes()[:-10])
    fails("cut off")
    (tmp_path / "a/train.bin").unlink()
    fails("train.bin is missing")
    (tmp_path / "a/meta.json").write_text("{")
    with pytest.raises(DataError, match="damaged"):
        read_meta(tmp_path / "a")
    with pytest.raises(DataError, match="does not exist"):
        read_meta(tmp_path / "none")
    assert dtype_for(65536) == "uint16" and dtype_for(65537) == "int32"


def test_shards_and_copies_that_are_not_whole_are_named(tmp_path):
    make(tmp_path / "shards", shards=3)
    shutil.rmtree(tmp_path / "shards/shard-2-of-3")
    (tmp_path / "shards/shard-2-of-3.tar").write_bytes(b"copied, not unpacked")
    with pytest.raises(DataError, match="lacks shard-2-of-3"):
        read_meta(tmp_path / "shards")
    make(tmp_path / "packed", compressed=True)
    meta = read_meta(tmp_path / "packed")
    with pytest.raises(DataError, match="gunzip"):
        Dataset(tmp_path / "packed", meta, "train", 32, CPU, "mmap")
    data = (tmp_path / "packed/train.bin.gz").read_bytes()
    (tmp_path / "packed/train.bin.gz").write_bytes(data[:2000] + bytes(20) + data[2020:])
    with pytest.raises(DataError, match="copy it again"):
        Dataset(tmp_path / "packed", meta, "train", 32, CPU, "ram")
    (tmp_path / "packed/train.bin.gz").write_bytes(data[:-100])
    with pytest.raises(DataError, match="cut off"):
        read_meta(tmp_path / "packed")
