"""What prepare_data.py writes: splits, compressed copies, and what cleaning leaves."""

import gzip
import json
import os
import shutil
import time

import numpy as np
import pytest

from formats.data_folder import read_meta
from tests.conftest import fails_clearly, prose, run_script
from tests.preparing.conftest import DOCUMENTS, documents, ok, prepare, sha, write
from tokenizer_bpe import EOT, Tokenizer


def test_the_split_keeps_copies_together_and_does_not_depend_on_their_place(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", "jsonl", DOCUMENTS + DOCUMENTS[::-1])
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.jsonl", tokenizer=tokenizer, val_fraction=0.3, out=out))
    meta = read_meta(out)
    coder = Tokenizer.load(tokenizer)
    sides = [
        set(coder.decode(np.fromfile(out / s.file, meta.dtype)).split(EOT)) - {""}
        for s in meta.splits.values()
    ]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set(DOCUMENTS)
    assert 0.15 < len(sides[1]) / 200 < 0.45


def test_a_single_document_is_split_at_its_end(tmp_path):
    text = prose() * 12  # more than one piece
    (tmp_path / "a.txt").write_text(text, newline="\n")
    result = ok(prepare(tmp_path / "a.txt", tokenizer="char", out=tmp_path / "out"))
    coder = Tokenizer.load(tmp_path / "out")
    train, val = (
        coder.decode(np.fromfile(tmp_path / "out" / f"{name}.bin", np.uint16))
        for name in ("train", "val")
    )
    assert train + val == text + EOT and 0.099 < len(val) / len(text) < 0.101
    assert "the last 10% of the text" in result.stdout
    for words in ("bytes a token", "of them occur", "MB/s", "begins"):
        assert words in result.stdout


def test_workers_do_not_change_the_bytes(tmp_path):
    (tmp_path / "a.txt").write_text((prose() + f"\n{EOT}\n") * 10 + prose() * 15, newline="\n")
    write(tmp_path / "b.jsonl.gz", "jsonl.gz", DOCUMENTS * 20)
    inputs = (tmp_path / "a.txt", tmp_path / "b.jsonl.gz")
    for workers in (1, 3):
        out = tmp_path / str(workers)
        ok(prepare(*inputs, clean=True, vocab_size=1000, workers=workers, out=out))
    assert sha(tmp_path / "1") == sha(tmp_path / "3")


def test_a_finished_dataset_is_kept_and_changes_are_named(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)

    def again(**flags):
        return prepare(tmp_path / "a.txt", out=tmp_path / "out", **flags)

    ok(again(tokenizer=tokenizer))
    before = (tmp_path / "out/meta.json").read_bytes()
    assert "finished already" in ok(again(tokenizer=tokenizer)).stdout
    without_effect = {"sample_bytes": 1e6, "min_chars": 5, "max_char_share": 1, "min_letters": 0}
    assert "finished already" in ok(again(tokenizer=tokenizer, **without_effect)).stdout
    fails_clearly(
        again(tokenizer=tokenizer, val_fraction=0.5),
        "val_fraction was 0.1, is now 0.5",
        "--overwrite",
    )
    fails_clearly(again(tokenizer="char"), "tokenizer was sha256", "is now char", "--overwrite")
    with open(tmp_path / "a.txt", "a") as file:
        file.write("more")
    fails_clearly(again(tokenizer=tokenizer), "the input differs from", "a.txt on", "--overwrite")
    assert (tmp_path / "out/meta.json").read_bytes() == before
    ok(again(tokenizer="char", clean=True, overwrite=True))
    assert "finished already" in ok(again(tokenizer="char", clean=True, dedupe="exact")).stdout
    assert read_meta(tmp_path / "out").tokenizer["kind"] == "char"
    fails_clearly(again(tokenizer="char", clean=True, min_chars=5), "min_chars was 20, is now 5")


def test_a_finished_dataset_says_how_it_is_made_anew(tmp_path, tokenizer):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    write(text, "txt", DOCUMENTS)
    ok(prepare(text, out=out, tokenizer=tokenizer))
    assert "changed" not in ok(prepare(text, out=out, tokenizer=tokenizer)).stdout
    later = time.time() + 60
    os.utime(text, (later, later))  # as a typo that is corrected at the same size
    result = ok(prepare(text, out=out, tokenizer=tokenizer))
    assert "a.txt changed after that; --overwrite" in result.stdout
    (out / "train.bin").unlink()
    fails_clearly(
        prepare(text, out=out, tokenizer=tokenizer), "train.bin is missing", "with --overwrite"
    )
    ok(prepare(text, out=out, tokenizer=tokenizer, overwrite=True))


def test_text_is_counted_as_the_tokenizer_composes_it(tmp_path, tokenizer):
    composing = json.loads(tokenizer.read_text()) | {"normalizer": {"type": "NFC"}}
    (tmp_path / "composing.json").write_text(json.dumps(composing))
    (tmp_path / "a.txt").write_text("Cafe\u0301 in \u2126 and more. " * 100)
    flags = {"tokenizer": tmp_path / "composing.json", "val_fraction": 0}
    ok(prepare(tmp_path / "a.txt", out=tmp_path / "out", **flags))
    assert documents(tmp_path / "out") == ["Caf\u00e9 in \u03a9 and more. " * 100]


@pytest.mark.parametrize("left_over", [b"", b"caf\xe9\n" * 2000])
def test_a_long_document_ends_though_nothing_is_left_of_its_last_part(
    tmp_path, tokenizer, left_over
):
    # Cut between its last line and the separator, or skipped because of broken bytes.
    long = ("a line of a long book\n" * 50_000)[: (1 << 20) - 5] + "abc\n"
    data = long.encode() + left_over + b"<|endoftext|>\nthe next document\n"
    (tmp_path / "a.txt").write_bytes(data)
    flags = {"tokenizer": tokenizer, "val_fraction": 0, "on_error": "skip"}
    ok(prepare(tmp_path / "a.txt", out=tmp_path / "out", **flags))
    assert documents(tmp_path / "out") == [long, "the next document\n"]


def test_near_copies_are_dropped_whatever_the_number_of_workers(tmp_path, tokenizer):
    originals = [prose()[n * 4000 :][:4000].strip() for n in range(40)]
    copies = [text.replace(text.split()[n], "otherwise", 1) for n, text in enumerate(originals)]
    write(tmp_path / "a.jsonl", "jsonl", [*originals, *copies])
    flags = {"dedupe": "near", "tokenizer": tokenizer}
    result = ok(prepare(tmp_path / "a.jsonl", out=tmp_path / "one", workers=1, **flags))
    ok(prepare(tmp_path / "a.jsonl", out=tmp_path / "two", workers=2, **flags))
    assert sha(tmp_path / "one") == sha(tmp_path / "two")
    assert sorted(documents(tmp_path / "one")) == sorted(originals)
    assert "near duplicates: 40 documents" in result.stdout


def test_cleaning_and_its_report(tmp_path, tokenizer):
    noise = {
        "shorter than 20 characters": "too short",
        "one character is more than 50%": "=" * 90 + "heading",
        "fewer than 40% letters and digits": "?!*&%$#@ a" * 10,
    }
    texts = [
        *DOCUMENTS[:20],
        *noise.values(),
        *DOCUMENTS[:5],
        "Cafe\u0301 with a bell \x07 and\r\nsome more\ufffd text to keep here",
    ]
    write(tmp_path / "a.jsonl", "jsonl", texts)
    flags = {"clean": True, "tokenizer": tokenizer}
    result = ok(prepare(tmp_path / "a.jsonl", out=tmp_path / "out", **flags))
    assert sorted(documents(tmp_path / "out")) == sorted(
        [*DOCUMENTS[:20], "Café with a bell  and\nsome more text to keep here"]
    )
    report = json.loads((tmp_path / "out" / "cleaning.json").read_text())
    for rule, example in noise.items():
        found = {"documents": 1, "bytes": len(example), "examples": [example[:100]]}
        assert report[rule] == found and rule in result.stdout
    copies = report["exact duplicates"]
    assert copies["documents"] == 5 and len(copies["examples"]) == 3
    assert copies["bytes"] == sum(len(t.encode()) for t in DOCUMENTS[:5])
    for rule, size in (("not in NFC", 1), ("control characters", 1), ("broken encoding", 3)):
        assert report[rule]["documents"] == 1 and report[rule]["bytes"] == size
    flags |= {"min_chars": 5, "max_char_share": 1, "min_letters": 0}
    ok(prepare(tmp_path / "a.jsonl", out=tmp_path / "mild", **flags))
    assert len(documents(tmp_path / "mild")) == 24


def test_compressed_copies_and_verify(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    assert "train.bin.gz, val.bin.gz" in ok(prepare(compress=out)).stdout
    assert gzip.decompress((out / "train.bin.gz").read_bytes()) == (out / "train.bin").read_bytes()
    assert "is good: train.bin.gz, train.bin, val.bin.gz, val.bin" in ok(prepare(verify=out)).stdout
    shutil.copytree(out, tmp_path / "sent", ignore=shutil.ignore_patterns("*.bin"))
    assert "is good: train.bin.gz, val.bin.gz" in ok(prepare(verify=tmp_path / "sent")).stdout
    (tmp_path / "sent/val.bin.gz").write_bytes((out / "train.bin.gz").read_bytes())
    fails_clearly(prepare(verify=tmp_path / "sent"), "val.bin.gz is damaged", status=1)
    (out / "train.mask.bin").write_bytes(b"of another dataset")
    assert "is good" in ok(prepare(verify=out)).stdout
    data = (out / "train.bin").read_bytes()
    (out / "train.bin").write_bytes(data[:-2])
    fails_clearly(prepare(verify=out), "cut off", status=1)


def test_changed_bytes_are_found_when_the_data_is_opened(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS * 100)
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    data = (out / "train.bin").read_bytes()
    assert len(data) > 4_000_000  # so that there are bytes between the blocks
    training = ["train.py", "config/shakespeare_char.py", f"--data_dir={out}", "--dry_run"]
    for at in (0, len(data) // 31, len(data) - 1):
        damaged = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        (out / "train.bin").write_bytes(damaged)
        fails_clearly(run_script(*training), "train.bin is damaged", "copy it here again")
        fails_clearly(prepare(verify=out), "train.bin is damaged", status=1)
    damaged = data[:70_000] + bytes([data[70_000] ^ 1]) + data[70_001:]
    (out / "train.bin").write_bytes(damaged)
    read_meta(out)
    fails_clearly(prepare(verify=out), "train.bin is damaged", status=1)


def test_verify_compares_with_the_tokenizer(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=tmp_path / "out"))
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    for changed in (
        {"vocab_size": 700},
        {"eot_id": 5},
        {"tokenizer": meta["tokenizer"] | {"kind": "char"}},
    ):
        (tmp_path / "out/meta.json").write_text(json.dumps(meta | changed))
        described = "meta.json describes another tokenizer than tokenizer.json"
        fails_clearly(prepare(verify=tmp_path / "out"), described, status=1)
