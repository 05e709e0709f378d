"""formats/data_folder.py: what meta.json says of a prepared folder, and what does not fit it."""

import hashlib
import json
import math

import numpy as np
import pytest

from formats.data_folder import (
    DataError,
    Meta,
    Split,
    check_validated,
    dtype_for,
    read_meta,
    read_tokens,
    tokenizer_file,
    write_meta,
)


@pytest.fixture
def folder(tmp_path):
    """A prepared folder of 10 and 4 tokens, with masks: 6 and 2 of them are in replies."""
    splits = {}
    for name, count, replies in (("train", 10, 6), ("val", 4, 2)):
        tokens = np.arange(count, dtype=np.uint16)
        tokens.tofile(tmp_path / f"{name}.bin")
        np.ones(count, np.uint8).tofile(tmp_path / f"{name}.mask.bin")
        mask = Split(f"{name}.mask.bin", replies, text_bytes=replies, sha256=f"{name}'s mask")
        splits[name] = Split(
            file=f"{name}.bin",
            tokens=count,
            documents=1,
            text_bytes=3 * count,
            sha256=hashlib.sha256(tokens).hexdigest(),
            mask=mask,
        )
    tokenizer = {"kind": "bpe", "file": "tokenizer.json", "sha256": "ab"}
    write_meta(tmp_path, Meta("uint16", 300, 0, tokenizer, splits, [], {}, "2026-01-02T03:04:05Z"))
    return tmp_path


def changed(folder, old, new):
    """Replace a part of meta.json, and leave out its own checksum, as older folders do."""
    path = folder / "meta.json"
    values = json.loads(path.read_text())
    values.pop("sha256", None)
    text = json.dumps(values)
    assert old in text
    path.write_text(text.replace(old, new))


def test_what_is_written_is_what_is_read(folder):
    meta = read_meta(folder)
    assert meta.splits["val"].mask == Split("val.mask.bin", 2, None, 2, "val's mask")
    assert read_tokens(folder, meta, "train").tolist() == list(range(10))
    write_meta(folder, meta)
    assert read_meta(folder) == meta


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65536, "uint16"), (65537, "int32")])
def test_the_dtype_is_the_smallest_that_holds_all_ids(vocab_size, dtype):
    assert dtype_for(vocab_size) == dtype


def test_one_changed_digit_of_a_checksum_is_noticed(folder):
    checksum = read_meta(folder).splits["train"].sha256
    changed(folder, checksum, checksum[:-1] + ("0" if checksum[-1] != "0" else "1"))
    with pytest.raises(DataError, match=r"train\.bin is damaged"):
        read_tokens(folder, read_meta(folder), "train")


def test_one_changed_digit_of_meta_json_is_noticed(folder):
    path = folder / "meta.json"
    path.write_text(path.read_text().replace('"text_bytes": 12', '"text_bytes": 13'))
    with pytest.raises(DataError, match="its values are not those it was written with"):
        read_meta(folder)


def test_a_missing_file_is_named(folder):
    (folder / "val.bin").unlink()
    with pytest.raises(DataError, match=r"val\.bin is missing, though .*meta\.json names it"):
        read_meta(folder)


def test_a_tokenizer_that_did_not_make_the_data_is_refused(folder):
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        tokenizer_file(folder, read_meta(folder))
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="is not the tokenizer that made"):
        tokenizer_file(folder, read_meta(folder))


@pytest.mark.parametrize(
    ("name", "words"),
    [("val.bin", "6 bytes instead of 8 "), ("val.mask.bin", "2 bytes instead of 4 ")],
)
def test_a_file_that_is_cut_off_is_named_with_both_sizes(folder, name, words):
    path = folder / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=f"{name} has {words}"):
        read_meta(folder)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"format": 1', '"format": 2', "it has format 2, this code reads 1"),
        ('"vocab_size"', '"vocab"', "vocab"),
        ('"val": {', '"test": {', "val"),
        ('"uint16"', "16", "no dtype 16"),
        ('"file": "tokenizer.json", ', "", "file"),
        ('"tokens": 10', '"tokens": "ten"', "ValueError"),
        ('"file": "train.bin"', '"file": null', "NoneType"),
    ],
)
def test_a_meta_json_that_says_something_else_is_a_sentence(folder, old, new, words):
    changed(folder, old, new)
    with pytest.raises(DataError, match=f"meta.json cannot be used .*{words}"):
        read_meta(folder)


def test_fields_of_another_version_are_skipped(folder):
    before = read_meta(folder)
    changed(folder, '"file": "train.bin"', '"blocks_sha256": "ab", "file": "train.bin"')
    changed(folder, '"created"', '"later": 1, "created"')
    assert read_meta(folder) == before


def test_bits_per_byte_are_those_of_the_text_that_the_loss_counts(folder):
    meta = read_meta(folder)
    assert meta.bits_per_byte(math.log(2), "all") == pytest.approx(4 / 12)
    assert meta.bits_per_byte(math.log(2), "assistant") == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"vocab_size": 300', '"vocab_size": 301'),
        ('"sha256": "ab"', '"sha256": "c"'),
        ('"text_bytes": 12', '"text_bytes": 13'),
        ("train's mask", "another mask"),
        (hashlib.sha256(np.arange(4, dtype=np.uint16)).hexdigest(), "0"),
    ],
)
def test_other_data_has_another_identity(folder, old, new):
    before = read_meta(folder).identity()
    changed(folder, old, new)
    assert read_meta(folder).identity() != before


def test_data_without_replies_cannot_be_trained_on_replies(folder):
    meta = read_meta(folder)
    check_validated(folder, meta, "assistant")
    for split in meta.splits.values():
        split.mask = None
    check_validated(folder, meta, "all")
    with pytest.raises(DataError, match="has no mask of the assistant's tokens"):
        check_validated(folder, meta, "assistant")


def test_data_without_a_validation_split_is_a_sentence(folder):
    meta = read_meta(folder)
    meta.splits["val"].tokens = 0
    with pytest.raises(DataError, match="nothing to validate on"):
        check_validated(folder, meta, "all")


def test_a_folder_that_is_not_prepared_names_the_command_and_those_that_are(folder, monkeypatch):
    monkeypatch.chdir(folder)
    with pytest.raises(DataError, match=r"prepare_data.py YOUR_TEXT --out none\n"):
        read_meta("none")
    (folder / "data/texts").mkdir(parents=True)
    with pytest.raises(DataError, match=r"prepare_data.py data/texts --out data/NAME\n"):
        read_meta("data/texts")
    with pytest.raises(DataError, match=r"prepared in .*: nothing yet$"):
        read_meta("none")
    (folder / "data/texts/meta.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match=r"prepared in .*: data/texts$"):
        read_meta("none")
