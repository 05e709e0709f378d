"""The masks that prepare_data.py writes beside conversations: what is the assistant's, by token."""

import json

import numpy as np
import pytest

from formats.data_folder import IN_REPLY, TURN_BEGINS, read_meta
from preparing import writer
from tests.conftest import conversations, fails_clearly, ok, write_conversations
from tests.preparing.conftest import DOCUMENTS, prepare, write
from tokenizer_bpe import Tokenizer

NFC = {"type": "NFC"}
SAID = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": " Hello?\n\nAssistant: this is quoted.\n\nUser: and this\n"},
    {"role": "assistant", "content": "Good day!\n\nHow are you?"},
    {"role": "user", "content": "Fine."},
    {"role": "assistant", "content": "I'm glad. "},
]


def parts_in(folder, split, bit):
    """The texts for which a split's mask has a bit set, run by run."""
    meta, tokenizer = read_meta(folder), Tokenizer.load(folder)
    described = meta.splits[split]
    ids = np.fromfile(folder / described.file, meta.dtype)
    mask = np.fromfile(folder / described.mask.file, np.uint8)
    assert len(mask) == len(ids) == described.tokens
    edges = np.flatnonzero(np.diff(np.pad((mask & bit > 0).astype(int), 1)))
    runs = zip(edges[::2], edges[1::2], strict=True)
    return [tokenizer.decode(ids[begin:end]) for begin, end in runs]


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_a_mask_has_what_the_assistant_says_and_what_ends_it(tmp_path, tokenizer, kind):
    write_conversations(tmp_path / "a.jsonl", [SAID, SAID[1:2], SAID[:3]])
    write(tmp_path / "b.jsonl", "jsonl", DOCUMENTS[:1])
    flags = {"tokenizer": tokenizer if kind == "bpe" else "char", "val_fraction": 0}
    out = tmp_path / "out"
    result = ok(prepare(tmp_path / "b.jsonl", tmp_path / "a.jsonl", out=out, **flags))
    assert parts_in(out, "train", IN_REPLY) == [
        " Good day!\n\nHow are you?\n\nUser:",
        " I'm glad.\n\n<|endoftext|>",
        " Good day!\n\nHow are you?\n\n<|endoftext|>",
    ]
    first = ["System", "User", "User", "User", "System", "User"]
    begins = parts_in(out, "train", TURN_BEGINS)
    assert [name[: len(part)] for name, part in zip(first, begins, strict=True)] == begins
    mask = read_meta(out).splits["train"].mask
    replies = parts_in(out, "train", IN_REPLY)
    assert mask.text_bytes == len("".join(replies).replace("<|endoftext|>", ""))
    assert f"{mask.tokens:,} tokens in replies" in result.stdout
    assert "Warning" not in result.stderr


def test_a_mask_follows_what_cleaning_and_composing_change(tmp_path, tokenizer):
    said = [
        {"role": "user", "content": "Cafe\u0301 \x07 and a long question\r\nof two lines?"},
        {"role": "assistant", "content": "Voila\u0300, a cafe\u0301 it is."},
        {"role": "user", "content": "Half a pair: \ud83d."},
        {"role": "assistant", "content": "Half of \ud83d it."},
    ]
    write_conversations(tmp_path / "a.jsonl", [said])
    composing = tmp_path / "composing.json"
    composing.write_text(json.dumps(json.loads(tokenizer.read_text("utf-8")) | {"normalizer": NFC}))
    for name, flags, replies in (
        ("as it is", {}, ["Voila\u0300, a cafe\u0301 it is.", "Half of \ufffd it."]),
        ("clean", {"clean": True}, ["Voilà, a café it is.", "Half of  it."]),
        ("composed", {"tokenizer": composing}, ["Voilà, a café it is.", "Half of \ufffd it."]),
    ):
        flags = {"tokenizer": tokenizer, "val_fraction": 0, "on_error": "replace"} | flags
        ok(prepare(tmp_path / "a.jsonl", out=tmp_path / name, **flags))
        assert parts_in(tmp_path / name, "train", IN_REPLY) == [
            f" {replies[0]}\n\nUser:",
            f" {replies[1]}\n\n<|endoftext|>",
        ]


def test_a_mask_follows_a_text_before_it_that_is_cut_in_two(tmp_path, flags):
    records = [{"text": "A line.\n" * 200}, {"messages": SAID}, {"messages": SAID[:3]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)))
    result = ok(prepare(tmp_path / "a.jsonl", **flags))
    assert "1 document cut" in result.stdout
    assert parts_in(tmp_path / "out", "train", IN_REPLY) == [
        " Good day!\n\nHow are you?\n\nUser:",
        " I'm glad.\n\n<|endoftext|>",
        " Good day!\n\nHow are you?\n\n<|endoftext|>",
    ]


def test_text_without_conversations_has_no_mask(tmp_path, flags):
    write(tmp_path / "a.jsonl", "jsonl", DOCUMENTS)
    ok(prepare(tmp_path / "a.jsonl", **flags))
    assert not list((tmp_path / "out").glob("*.mask*"))
    assert '"mask"' not in (tmp_path / "out" / "meta.json").read_text("utf-8")


def test_what_moves_between_the_splits_leaves_no_mask_behind(tmp_path, tokenizer, monkeypatch):
    """As where replies drawn for validation go back, and the end of the text takes their place."""
    monkeypatch.setattr(writer, "CHUNK_BYTES", 4)  # tokens moved at a time
    own = Tokenizer.load(tokenizer)
    train, val = (writer.SplitWriter(tmp_path, name, own, 0) for name in ("train", "val"))
    train.write(np.array([own.eot_id, *[1] * 8], train.dtype))
    mask = np.array([IN_REPLY | TURN_BEGINS, IN_REPLY, 0, IN_REPLY, IN_REPLY], np.uint8)
    val.write(np.ones(5, val.dtype), mask)
    val.write(np.ones(2, val.dtype))
    val.move_end(train, 0)
    train.mark()
    train.move_end(val, 1)  # before the mark
    train.mark()
    val.move_end(train, 9)  # from within a reply, the rest of which counts
    for _ in range(2):
        train.move_end(val, train.tokens)  # nothing
    assert val.finish(masked=True).mask.tokens == 1
    assert train.finish(masked=True).mask.tokens == 3
    masks = [np.fromfile(tmp_path / f"{name}.mask.bin", np.uint8) for name in ("val", "train")]
    assert np.concatenate(masks).tolist() == [0] * 8 + [*mask[:1], 0, *mask[1:], 0, 0]


def test_turns_before_a_long_text_do_not_decide_where_it_is_cut(tmp_path, tokenizer):
    own = Tokenizer.load(tokenizer)
    ids = own.encode("A line of a text.\n" * 50)
    train = writer.SplitWriter(tmp_path, "train", own, 0)
    train.write(ids.astype(train.dtype), np.full(len(ids), TURN_BEGINS, np.uint8))
    train.write(ids.astype(train.dtype))
    cut = train.place_to_cut(len(ids), 100)
    assert own.decode(ids[cut - len(ids) :]) == "A line of a text.\n" * 6


def test_masks_are_verified(tmp_path, tokenizer):
    write_conversations(tmp_path / "a.jsonl", conversations(100))
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.jsonl", tokenizer=tokenizer, val_fraction=0.2, out=out))
    assert "train.bin, train.mask.bin, val.bin, val.mask.bin" in ok(prepare(verify=out)).stdout
    data = bytearray((out / "val.mask.bin").read_bytes())
    data[100] ^= 1
    (out / "val.mask.bin").write_bytes(data)
    fails_clearly(prepare(verify=out), "val.mask.bin is damaged")
    (out / "val.mask.bin").write_bytes(data[:-1])
    fails_clearly(prepare(verify=out), "val.mask.bin", "cut off")


def test_a_single_conversation_is_split_with_its_mask(tmp_path, tokenizer):
    said = [turn for messages in conversations(40) for turn in messages]
    write_conversations(tmp_path / "a.jsonl", [said])
    out, whole = tmp_path / "out", tmp_path / "whole"
    ok(prepare(tmp_path / "a.jsonl", tokenizer=tokenizer, val_fraction=0.25, out=out))
    ok(prepare(tmp_path / "a.jsonl", tokenizer=tokenizer, val_fraction=0, out=whole))
    train, val, both = (
        path.read_bytes() for path in (out / "train.bin", out / "val.bin", whole / "train.bin")
    )
    assert val
    assert train.removesuffix(bytes(2)) + val == both  # an end-of-text is at the cut
    meta = read_meta(out)
    train, val = (np.fromfile(out / split.mask.file, np.uint8) for split in meta.splits.values())
    both = np.fromfile(whole / "train.mask.bin", np.uint8)
    rest = both[len(train) - 1 :]
    rest[: np.argmin(rest & IN_REPLY)] &= TURN_BEGINS  # the name that ended the reply before it
    assert np.array_equal(np.append(train[:-1], val), both)
    assert train[-1] == 0
    ok(prepare(verify=out))
