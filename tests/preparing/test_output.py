"""The output of prepare_data.py: splits, cleaning, finished folders and --verify."""

import itertools
import json
import os
import random
import shutil
import unicodedata
from collections import Counter

import numpy as np
import pytest
import tokenizers

import prepare_data
from formats import files
from formats.data_folder import TURN_BEGINS, read_meta, write_meta
from preparing import InputError, split, work_folder, writer
from preparing.arguments import parse
from preparing.mistakes import REPEATED
from preparing.split import LONG_BYTES, SHORT_BYTES, draw_by_chance, draw_of, find_cut
from preparing.tokenizers import default_vocab_size, word_pattern
from preparing.work_folder import WorkFolder
from tests.conftest import ROOT, conversations, fails_clearly, ok, prose, write_conversations
from tests.preparing.conftest import DOCUMENTS, documents, prepare, write
from tokenizer_bpe import EOT, GPT2_PATTERN, QWEN35_PATTERN, Tokenizer


def texts_of_splits(folder):
    """All text of train.bin, and of val.bin."""
    meta, tokenizer = read_meta(folder), Tokenizer.load(folder)
    files = [np.fromfile(folder / split.file, meta.dtype) for split in meta.splits.values()]
    return [tokenizer.decode(ids) for ids in files]


def test_the_split_keeps_copies_together_and_does_not_depend_on_their_place(tmp_path, tokenizer):
    write(tmp_path / "a.jsonl", "jsonl", DOCUMENTS + DOCUMENTS[::-1])
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.jsonl", tokenizer=tokenizer, val_fraction=0.3, out=out))
    train, val = (set(text.removesuffix(EOT).split(EOT)) for text in texts_of_splits(out))
    assert not train & val
    assert train | val == set(DOCUMENTS)
    assert 0.15 < len(val) / 200 < 0.45


def test_what_spells_a_special_token_of_the_tokenizer_is_counted(tmp_path, tokenizer):
    """It stays text; an added token that is not special has its id, as in `tokenizers`."""
    theirs = tokenizers.Tokenizer.from_file(str(tokenizer))
    theirs.add_special_tokens(["<file>", "covid19"])
    theirs.add_tokens(["<think>"])
    theirs.save(str(tmp_path / "tokenizer.json"))
    said = {"role": "assistant", "content": "<think><file>Of covid19."}
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [said]}))
    flags = {"tokenizer": tmp_path / "tokenizer.json", "val_fraction": 0, "out": tmp_path / "out"}
    result = ok(prepare(tmp_path / "a.jsonl", **flags))
    assert "  added tokens of this tokenizer, as letters: 1 document, 13 bytes; " in result.stdout
    assert "    'Assistant: <think><file>Of covid19.\\n\\n'\n" in result.stdout
    ids = np.fromfile(tmp_path / "out" / "train.bin", np.uint16).tolist()
    assert ids.count(theirs.token_to_id("<think>")) == 1
    assert not {theirs.token_to_id("<file>"), theirs.token_to_id("covid19")} & set(ids)


def test_the_summary_has_no_speed_for_a_small_text(tmp_path, flags):
    (tmp_path / "a.txt").write_text(prose()[:2500], "utf-8", newline="\n")
    result = ok(prepare(tmp_path / "a.txt", **flags))
    assert "; tokenizing 2.5 kB took " in result.stdout
    assert "MB/s" not in result.stdout


def test_a_single_document_is_split_at_its_end(tmp_path):
    text = prose() * 12  # more than one piece
    (tmp_path / "a.txt").write_text(text, "utf-8", newline="\n")
    result = ok(prepare(tmp_path / "a.txt", tokenizer="char", out=tmp_path / "out"))
    train, val = texts_of_splits(tmp_path / "out")
    assert train.removesuffix(EOT) + val == text + EOT
    assert 0.099 < len(val) / len(text) < 0.101
    said = " kB, 10% of the text: 1 document cut, of which it gets the end"
    assert said in result.stdout
    for words in ("bytes per token", "of them occur", "MB/s", f"begins     {text[:100]!r}"):
        assert words in result.stdout


def test_what_validation_shares_with_training_is_reported(tmp_path, flags):
    text = prose()
    lines = [text[at : at + 200].replace("\n", " ") for at in range(0, 100_000, 200)]
    dice = random.Random(0)
    drawn = {
        "lines": dice.choices(lines, k=1500),  # as customers write the same praise again
        "licensed": [f"{text[-900:]}\n{line * 2}\n<|endoftext|>" for line in lines],
        "ordinary": lines,
    }
    shares = {}
    for name, parts in drawn.items():
        path = tmp_path / f"{name}.txt"
        path.write_text("\n".join(parts), "utf-8")
        result = ok(prepare(path, **flags | {"overwrite": True}))
        meta = read_meta(tmp_path / "out")
        if name == "ordinary":
            assert REPEATED not in result.stdout
        else:
            found = json.loads((tmp_path / "out/cleaning.json").read_text())[REPEATED]
            assert f"  {REPEATED}: " in result.stdout
            assert 1 <= found["documents"] <= meta.splits["val"].documents
            assert found["examples"][0] in path.read_text("utf-8")
            shares[name] = found["bytes"] / meta.splits["val"].text_bytes
    assert 0.4 < shares["lines"] < 0.95
    assert 0.4 < shares["licensed"] < 0.7


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("cached", [7, 1 << 15])
def test_the_share_of_equal_sequences_is_that_of_all_of_them(monkeypatch, length, cached):
    monkeypatch.setattr(split, "CACHED", cached)
    monkeypatch.setattr(split, "SAMPLED", np.uint64(0))
    train = np.arange(300, dtype=np.uint16)
    val = np.concatenate([np.full(50, 999), np.arange(100, 140), np.full(10, 998)]).astype("uint16")
    share, places = split.repeated(train, val, length)
    assert share == 40 / 100
    assert sorted(places) == list(range(50, 91 - length))
    again = np.concatenate([val, train[120:130]])
    assert 70 <= split.repeated(train, again, length)[1][0] < 80
    assert split.repeated(train[::-1], val, 4)[0] == 0
    for few in (val[50:60], val[:2]):
        assert split.repeated(train, few, 4)[0] == 0


LETTER = "The same letter again, word for word.\n" * 10
TEXTS = [f"Text {n}.\n{prose()}" for n in range(30)]
SPLIT = {
    "a novel and letters.txt": [TEXTS[0] * 5, *(f"Letter {n}.\n{LETTER}" * 9 for n in range(4))],
    "a few texts.jsonl": [TEXTS[n] * n for n in range(1, 5)],
    "copies of one letter.txt": [LETTER] * 400,
    "many, half of them copies.jsonl": [*DOCUMENTS, *[DOCUMENTS[7]] * 200],
    "books.txt": [TEXTS[n] * (n + 1) for n in range(8)],  # more than is known at once
    "texts and a book.jsonl": [*TEXTS, TEXTS[0] * 8],
}


@pytest.mark.parametrize("name", SPLIT)
def test_validation_gets_its_share_of_the_bytes(tmp_path, flags, name):
    texts = SPLIT[name]
    write(tmp_path / name, name.split(".")[1], texts)
    ok(prepare(tmp_path / name, **flags))
    train, val = (text.split(EOT)[:-1] for text in texts_of_splits(tmp_path / "out"))
    val = [text.rstrip("\n") for text in val]  # a .txt has a line break before the mark
    texts = [text.rstrip("\n") for text in texts]
    assert 0.08 < len("".join(val)) / len("".join(texts)) < 0.12
    ended = [text.rstrip("\n") for text in train]
    assert len(set(texts)) == 1 or not set(ended) & set(val)
    whole = [text for text in [*ended, *val] if text in texts]
    joined = [begin + end for begin in train for end in {*val} if begin + end in texts]
    assert sorted([*whole, *joined]) == sorted(texts)
    assert name != "books.txt" or len(joined) == 8  # each is cut
    assert len(joined) <= len(set(texts))  # copies of a letter are not cut, each at the same place


def book(name, words):
    return " ".join(f"{name}{n}" for n in range(words))


COPIES = {
    "a letter twice": [book("a", 300)] * 2,
    "all of three books twice": [book("a", 3000), book("b", 2000), book("c", 1000)] * 2,
    "one of two books ten times": [book("a", 3000)] * 10 + [book("b", 500)],
}


@pytest.mark.parametrize("name", COPIES)
def test_no_part_of_a_copy_is_in_both_splits(tmp_path, flags, name):
    write(tmp_path / "a.jsonl", "jsonl", COPIES[name])
    ok(prepare(tmp_path / "a.jsonl", **flags))
    train, val = texts_of_splits(tmp_path / "out")
    assert 0.05 < len(val) / len(train + val) < 0.15
    train, val = (text.replace(EOT, " ").split() for text in (train, val))
    assert len(set(train) & set(val)) <= len(set(COPIES[name]))  # a word may be cut


def test_a_few_conversations_are_split_between_their_turns(tmp_path, flags):
    said = list(conversations(6))
    write_conversations(tmp_path / "a.jsonl", said)
    ok(prepare(tmp_path / "a.jsonl", val_fraction=0.2, **flags))
    train, val = texts_of_splits(tmp_path / "out")
    assert 0.1 < len(val) / len(train + val) < 0.3
    assert all(text.startswith(("System: ", "User: ")) for text in val.split(EOT)[:-1])


@pytest.mark.parametrize("val_fraction", [0.5, 0.999])
def test_training_gets_its_share_however_large_that_of_validation_is(tmp_path, flags, val_fraction):
    write(tmp_path / "a.jsonl", "jsonl", DOCUMENTS[:3])
    flags |= {"val_fraction": val_fraction}
    ok(prepare(tmp_path / "a.jsonl", **flags))
    _, val = texts_of_splits(tmp_path / "out")
    share = len(val.replace(EOT, "")) / sum(map(len, DOCUMENTS[:3]))
    assert 0.75 * val_fraction < share < min(1, 1.25 * val_fraction)


@pytest.mark.parametrize("fraction", [0.001, 0.1, 0.9])
@pytest.mark.parametrize(
    ("size", "count"), [(300, 20_000), (30_000, 3000), (250_000, 400), (3_000_000, 3000)]
)
def test_a_text_that_is_drawn_by_chance_is_split_by_its_share(fraction, size, count):
    dice = np.random.default_rng(0)
    sizes, hashes = dice.integers(size // 2, size, count), dice.permutation(count)
    hashes = hashes.astype(np.uint64) * (2**64 // count)  # as even as those of many more
    draw, cuttable = draw_by_chance(fraction, sizes.sum()), np.ones(count, bool)
    shares = draw.shares(hashes, sizes, ~cuttable)
    assert abs(shares @ sizes / sizes.sum() - fraction) < 0.1 * min(fraction, 1 - fraction)
    assert size > SHORT_BYTES or set(shares) == {0, 1}
    assert size / 2 < LONG_BYTES or max(shares) < 1
    assert set(draw.shares(hashes, sizes, cuttable)) <= {0, 1}


def test_documents_of_a_few_kb_are_drawn_whole_where_the_share_allows_it():
    known = draw_of(0.1, np.arange(20, dtype=np.uint64), np.full(20, 3000), np.zeros(20)).known
    assert sorted(known.values()) == [0] * 18 + [1] * 2


CUTS = [  # bytes to follow the cut, which is expected at ^; a turn begins at ~, a document after ¶
    (10, "¶" * 9 + "a" * 30 + "^" + "a" * 10),
    (10, "今今今今今今今^今今今"),
    (9, "abc\n" * 18 + "^" + "abc\n" * 2),  # the nearest
    (3, "aaaaaaaaaa\nb¶^c\n~d\neee"),  # rather a document, a turn, or a line
    (3, "aaaaaaaaaa\nbbb\n~^dd\neee"),
    (9, "今今今\n^今今今今"),
    (1, "b" * 20 + "\n^" + "a" * 6),
    (40, "a" * 30 + "\n" + "a" * 29 + "^" + "a" * 40),  # but not far away
    (60, "a" * 40 + "^" + "a" * 25 + "\n" + "a" * 34),
    (20, "a^" + "a" * 19),  # with something before it and after it
    (1, "a^\n¶"),
    (1, "a¶"),
]


@pytest.mark.parametrize("block", [split.BLOCK, 7])
@pytest.mark.parametrize(("end_bytes", "text"), CUTS)
def test_a_document_is_cut_at_the_best_place_near_its_share(monkeypatch, end_bytes, text, block):
    monkeypatch.setattr(split, "BLOCK", block)
    tokenizer = Tokenizer.train([text], 257)  # each byte is an id
    begins, mask, ids = 0, None, []
    for char in text:
        if char == "^":
            begins = len(ids)
        elif char == "~":
            mask = np.zeros(len(text), np.uint8)
            mask[len(ids)] = TURN_BEGINS
        else:
            ids += [tokenizer.eot_id] if char == "¶" else tokenizer.encode(char).tolist()
    mask = None if mask is None else mask[: len(ids)]
    assert find_cut(tokenizer, np.array(ids), end_bytes, mask) == begins


@pytest.mark.parametrize("text", ["a", "ab", f"a\n{EOT}\nb\n"])
def test_hardly_any_text_is_prepared(tmp_path, text):
    (tmp_path / "a.txt").write_text(text, newline="\n")
    result = ok(prepare(tmp_path / "a.txt", tokenizer="char", out=tmp_path / "out"))
    assert "ids, 100.0% of them occur" in result.stdout
    train, val = texts_of_splits(tmp_path / "out")
    assert sorted((train + val).replace(EOT, "")) == sorted(text.replace(f"{EOT}\n", ""))
    ok(prepare(verify=tmp_path / "out"))


def test_without_vocab_size_a_small_text_gets_the_vocabulary_that_it_supports(tmp_path):
    (tmp_path / "a.txt").write_text("so it is, so it was")
    result = ok(prepare(tmp_path / "a.txt", out=tmp_path / "out"))
    assert read_meta(tmp_path / "out").vocab_size == 265
    assert "bpe, 265 ids" in result.stdout


def test_of_a_large_text_20_mb_are_for_validation(tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder, "SAMPLES", 1)  # a MB of it is as the rest
    with (tmp_path / "a.txt").open("wb") as file:
        file.write(b"a line of text\n" * 200_000)
        file.truncate(400_000_000)  # a hole, which takes no disk space
    words = [f"{tmp_path}/a.txt", f"--out={tmp_path}/out"]
    for more, share in ([], 0.05), (["--gigabytes=0.25"], 0.08), (["--gigabytes=0.1"], 0.1):
        with WorkFolder(parse([*words, *more])) as work:
            assert work.settings["val_fraction"] == pytest.approx(share, rel=0.01)


@pytest.mark.parametrize("format", ["txt", "txt.gz", "jsonl.zst", "parquet"])
def test_the_default_vocabulary_follows_from_the_bytes_of_text(tmp_path, format):
    write(tmp_path / f"a.{format}", format, [prose() + str(n) for n in range(60)])
    words = [f"{tmp_path}/a.{format}", f"--out={tmp_path}/out"]
    with WorkFolder(parse(words)) as work:
        assert work.text_size == pytest.approx(12e6, rel=0.02)
        assert default_vocab_size(work.text_size, Counter(prose())) == 4096
    with WorkFolder(parse([*words, "--gigabytes=0.009", "--sample_bytes=1e6"])) as work:
        assert default_vocab_size(work.text_size, Counter(prose())) == 1024
        assert work.settings["sample_bytes"] == 1e6  # on which the vocabulary depends


def test_a_text_of_many_characters_has_a_larger_vocabulary(tmp_path):
    """As Chinese, whose characters are else cut into bytes."""
    characters = Counter({chr(0x4E00 + n): 1 for n in range(800)})
    assert default_vocab_size(1e6, characters) == 4096
    assert default_vocab_size(1e6, characters + Counter("e" * 10**6)) == 1024
    many = Counter(map(chr, range(0x4E00, 0x9000)))
    assert [default_vocab_size(size, many) for size in (1e6, 5e7, 1e9)] == [4096, 16384, 32000]
    text = "".join(itertools.chain(*itertools.permutations(list(characters)[:260], 2)))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ok(prepare(tmp_path / "a.txt", out=tmp_path / "out"))
    assert read_meta(tmp_path / "out").vocab_size == 2048
    assert default_vocab_size(0, Counter()) == 1024


def test_a_vowel_sign_is_a_part_of_its_word(tmp_path):
    """GPT-2's expression cuts before each, so no token of Hindi had more than two letters."""
    words = "हिन्दी में लिखते हैं।"
    (tmp_path / "a.txt").write_text(f"{prose()[:150_000]}\n{words * 1000}", encoding="utf-8")
    ok(prepare(tmp_path / "a.txt", vocab_size=400, out=tmp_path / "out"))
    tokenizer = Tokenizer.load(tmp_path / "out")
    tokens = [tokenizer.decode([i]) for i in tokenizer.encode(words)]
    assert tokens == ["हिन्दी", " में", " लिखते", " हैं", "।"]
    decomposed = unicodedata.normalize("NFD", "ein Café, ein Müller; " * 50)
    assert word_pattern(Counter(decomposed)) == QWEN35_PATTERN
    assert word_pattern(Counter(prose() + "👍🏽 ☺️ naïve")) == GPT2_PATTERN


def test_a_finished_dataset_is_kept_and_changes_are_named(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)

    def again(**flags):
        return prepare(tmp_path / "a.txt", out=tmp_path / "out", **flags)

    ok(again(tokenizer=tokenizer))
    named = read_meta(tmp_path / "out").settings.keys()  # as older versions named them
    assert named == {"on_error", "tokenizer", "val_fraction", "text_bytes"}
    before = (tmp_path / "out/meta.json").read_bytes()
    assert "finished already" in ok(again(tokenizer=tokenizer)).stdout
    assert "finished already" in ok(again(tokenizer=tokenizer, sample_bytes=1e6)).stdout
    assert "finished already" in ok(again(tokenizer=tokenizer, on_error="skip")).stdout
    result = again(tokenizer=tokenizer, val_fraction=0.5)
    fails_clearly(result, "val_fraction was 0.1, is now 0.5", "--overwrite")
    fails_clearly(again(tokenizer="char"), "tokenizer was sha256", "is now char")
    with open(tmp_path / "a.txt", "a") as file:
        file.write("more")
    fails_clearly(again(tokenizer=tokenizer), "the input differs from", "a.txt on")
    shutil.copy(tmp_path / "a.txt", tmp_path / "b.txt")
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    words = [f"{tmp_path}/{name}.txt" for name in "ab"]
    plan = parse([*words, f"--out={tmp_path}/out", f"--tokenizer={tokenizer}"])
    with pytest.raises(InputError, match=r"b\.txt on\."), WorkFolder(plan) as work:
        work.finished()
    assert (tmp_path / "out/meta.json").read_bytes() == before
    meta = read_meta(tmp_path / "out")
    meta.sources.append({"path": "gone.txt", "bytes": 9})
    write_meta(tmp_path / "out", meta)
    plan = parse([words[0], f"--out={tmp_path}/out", f"--tokenizer={tokenizer}"])
    with pytest.raises(InputError, match=r"gone\.txt on\."), WorkFolder(plan) as work:
        work.finished()
    ok(again(tokenizer="char", clean=True, overwrite=True))
    assert "finished already" in ok(again(tokenizer="char", clean=True, dedupe=True)).stdout


def test_a_finished_dataset_is_compared_by_time_and_then_by_content(tmp_path, tokenizer):
    path, out = tmp_path / "a.txt", tmp_path / "out"
    write(path, "txt", DOCUMENTS)
    flags = {"tokenizer": tokenizer, "out": out}
    ok(prepare(path, **flags))
    os.utime(path, (1, 1))
    assert "finished already" in ok(prepare(path, **flags)).stdout
    path.write_bytes(path.read_bytes().replace(b"the", b"eth"))  # of the same size
    fails_clearly(prepare(path, **flags), "a.txt on, whose content has changed", "--overwrite")
    meta = read_meta(out)
    del meta.sources[0]["sha256"]  # as of a file that changed while it was read
    write_meta(out, meta)
    fails_clearly(prepare(path, **flags), "a.txt on, whose content has changed", "--overwrite")
    meta.sources = [{name: meta.sources[0][name] for name in ("path", "bytes")}]
    meta.settings |= {"clean": False, "conversations": "plain"}
    write_meta(out, meta)  # as of 2026-11-23
    assert "finished already" in ok(prepare(path, **flags)).stdout


def test_the_size_of_another_text_is_not_that_of_this_one(tmp_path):
    for name, count in (("a", 10), ("b", 20_000)):
        (tmp_path / f"{name}.txt").write_text("a line of text\n" * count)
    out = f"--out={tmp_path}/out"

    def text_bytes(name, *more, is_other=False):
        with WorkFolder(parse([f"{tmp_path}/{name}.txt", out, *more])) as work:
            work.tokenizer.touch()  # made from the text
            work.start_or_resume()
            assert work.tokenizer.exists() != is_other
            work.checked_sources()  # a thread has written their checksums
            work.journal.touch()  # there is work to continue
            return work.settings["text_bytes"]

    assert text_bytes("a") == text_bytes("a") == 150
    assert text_bytes("b", "--overwrite", is_other=True) == 300_000  # of unfinished work
    (tmp_path / "out/.partial/progress.json").unlink()
    # Of work that was stopped before its first record.
    assert text_bytes("a", is_other=True) == 150
    (tmp_path / "out/.partial/progress.json").unlink()
    files.write_json(tmp_path / "out/meta.json", {"eot_id": 0, "settings": {"text_bytes": 150}})
    assert text_bytes("b", "--overwrite", is_other=True) == 300_000  # of a finished dataset


def test_a_file_that_changes_while_it_is_read_is_not_the_same_next_time(tmp_path, capsys):
    path = tmp_path / "a.txt"
    words = [str(path), f"--out={tmp_path}/out"]
    path.write_text("A text.")
    with WorkFolder(parse(words)) as work:
        work.start_or_resume()
        assert "sha256" in work.checked_sources()[0]
        path.write_text("A longer text.")
        assert "sha256" not in work.checked_sources()[0]
    assert f"{path} changed while it was read; prepare it again" in capsys.readouterr().err
    with WorkFolder(parse(words)) as work:
        path.unlink()
        work.start_or_resume()
        assert "sha256" not in work.checked_sources()[0]


@pytest.mark.skipif(os.name == "nt", reason="the folders may be on two drives, without links")
def test_a_file_is_the_same_input_however_its_path_is_spelled(tmp_path, flags):
    path, moved = tmp_path / "a.txt", tmp_path / "moved"
    write(path, "txt", DOCUMENTS)
    ok(prepare(os.path.relpath(path, ROOT), **flags))
    moved.mkdir()
    (tmp_path / "linked").symlink_to(".")
    for given in (path, f"./{os.path.relpath(path, ROOT)}", tmp_path / "linked/a.txt"):
        assert "finished already" in ok(prepare(given, **flags)).stdout
    path.rename(moved / "a.txt")
    assert "finished already" in ok(prepare(moved / "a.txt", **flags)).stdout
    text = (moved / "a.txt").read_text("utf-8").replace("the", "eth")
    times = (moved / "a.txt").stat().st_mtime_ns
    (moved / "a.txt").write_text(text)
    os.utime(moved / "a.txt", ns=(times, times))  # which do not count at another place
    fails_clearly(prepare(moved / "a.txt", **flags), "the input differs from", "moved/a.txt on")
    write(moved / "a.md", "txt", DOCUMENTS)
    fails_clearly(prepare(moved / "a.md", **flags), "the input differs from", "a.md on")


def test_a_finished_dataset_says_how_it_is_made_anew(tmp_path, tokenizer):
    text, out = tmp_path / "a.txt", tmp_path / "out"
    write(text, "txt", DOCUMENTS)
    ok(prepare(text, out=out, tokenizer=tokenizer))
    (out / "train.bin").unlink()
    result = prepare(text, out=out, tokenizer=tokenizer)
    fails_clearly(result, "train.bin is missing", "with --overwrite")
    ok(prepare(text, out=out, tokenizer=tokenizer, overwrite=True))
    for name, kept in (("plan.json", True), ("train.bin", False)):  # a plan: of unfinished work
        (out / ".partial").mkdir()
        (out / ".partial" / name).touch()
        ok(prepare(text, out=out, tokenizer=tokenizer))
        assert (out / ".partial").exists() == kept
        shutil.rmtree(out / ".partial", ignore_errors=True)


def test_what_was_costly_outlives_a_stop_before_the_first_record(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    made = [("bpe", "tokenizer.json"), ("char", "tokenizer.json"), ("gpt2", "cache")]
    made.append(("gpt2", "meta.json"))  # of a stop while the finished files move
    for tokenizer, name in [*made, ("gpt2", "tokenizer.json"), ("bpe", "train.bin")]:
        out = tmp_path / tokenizer / name
        words = [f"{tmp_path}/a.txt", f"--tokenizer={tokenizer}", f"--out={out}"]
        with WorkFolder(parse(words)) as work:
            (work.path / name).touch()
        assert out.exists() == ((tokenizer, name) in made)


@pytest.mark.parametrize("left_over", [b"", b"caf\xe9\n" * 2000])
def test_a_long_document_ends_though_nothing_is_left_of_its_last_part(tmp_path, flags, left_over):
    # Cut between its last line and the separator, or skipped because of broken bytes.
    long = ("a line of a long book\n" * 50_000)[: (1 << 20) - 5] + "abc\n"
    data = long.encode() + left_over + b"<|endoftext|>\nthe next document\n"
    (tmp_path / "a.txt").write_bytes(data)
    flags |= {"val_fraction": 0, "on_error": "skip"}
    ok(prepare(tmp_path / "a.txt", **flags))
    assert documents(tmp_path / "out") == [long, "the next document\n"]


@pytest.mark.parametrize("known_bytes", [0, writer.KNOWN_BYTES])
@pytest.mark.parametrize("left", [b"", b"a line\n" * 200_000])
def test_nothing_may_be_left_of_where_a_long_document_begins(
    tmp_path, tokenizer, monkeypatch, left, known_bytes
):
    monkeypatch.setattr(writer, "KNOWN_BYTES", known_bytes)
    data = b"caf\xe9\n" * 250_000 + left + f"{EOT}\nthe next document\n".encode()
    (tmp_path / "a.txt").write_bytes(data)
    words = [tmp_path / "a.txt", "--tokenizer", tokenizer, "--out", tmp_path / "out"]
    prepare_data.prepare(parse([*map(str, words), "--on_error", "skip"]))
    assert "the next document" in "".join(documents(tmp_path / "out"))


def test_cleaning_and_its_report(tmp_path, flags):
    noise = {
        "shorter than 20 bytes": "too short",
        "one character is more than 50%": "= " * 90 + "heading",
        "fewer than 40% letters and digits": "A title. " * 60 + "?!*&%$#@ a" * 200,
    }
    unclean = (
        "A long text. " * 20
        + "Cafe\u0301 \x07 \x1b[1;31mand\x1b[?1m\r\nsome\rmore\ufffd text\r\r\nto \ufb01\u00ad\nnd"
    )
    haiku = "古池や蛙飛びこむ水の音"
    texts = [*DOCUMENTS[:20], *noise.values(), *DOCUMENTS[:5], unclean, haiku]
    write(tmp_path / "a.jsonl", "jsonl", texts)
    flags |= {"clean": True, "val_fraction": 0}
    result = ok(prepare(tmp_path / "a.jsonl", **flags))
    clean = "A long text. " * 20 + "Café  and\nsome\nmore text\nto find"
    assert documents(tmp_path / "out") == [*DOCUMENTS[:20], clean, haiku]
    report = json.loads((tmp_path / "out" / "cleaning.json").read_text("utf-8"))
    for rule, example in noise.items():
        found = {"documents": 1, "bytes": len(example), "examples": [example[:100]]}
        assert report[rule] == found
        assert rule in result.stdout
    copies = report["exact duplicates"]
    assert copies["documents"] == 5
    assert copies["bytes"] == sum(len(t.encode()) for t in DOCUMENTS[:5])
    for rule, size in (("not in NFC", 1), ("control characters", 13), ("broken encoding", 3)):
        assert (report[rule]["documents"], report[rule]["bytes"]) == (1, size)
    (example,) = report["control characters"]["examples"]
    assert "\x07" in example


def test_cleaning_keeps_scripts_whose_vowels_are_marks(tmp_path, flags):
    texts = [  # Burmese words, and a line of Hindi
        "ဖွံ့ဖြိုးမှု မြို့တို့၌ ပြီးပြည့်စုံ ကြွေးကြော်သည် ငြိမ်းချမ်း တို့ကို",
        "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    ]
    write(tmp_path / "a.jsonl", "jsonl", texts)
    flags |= {"clean": True, "val_fraction": 0}
    ok(prepare(tmp_path / "a.jsonl", **flags))
    assert len(documents(tmp_path / "out")) == len(texts)


def test_gigabytes_do_not_count_copies(tmp_path, flags):
    write(tmp_path / "a.jsonl", "jsonl", [text for text in DOCUMENTS for _ in range(3)])
    flags |= {"dedupe": True, "gigabytes": 5e-5, "val_fraction": 0}
    ok(prepare(tmp_path / "a.jsonl", **flags))
    sizes = [len(text.encode()) for text in documents(tmp_path / "out")]
    assert sum(sizes[:-1]) < 50_000 <= sum(sizes)


def test_documents_above_a_megabyte_are_not_compared(tmp_path, flags):
    book = prose() * 6
    (tmp_path / "a.txt").write_bytes(
        f"{book}\n{EOT}\nshort\n{EOT}\n{book}\n{EOT}\nshort\n".encode()
    )
    flags |= {"dedupe": True, "val_fraction": 0}
    result = ok(prepare(tmp_path / "a.txt", **flags))
    assert documents(tmp_path / "out") == [f"{book}\n", "short\n", f"{book}\n"]
    assert "exact duplicates: 1 document, 6 bytes" in result.stdout


def test_verify_finds_what_is_damaged_and_says_what_is_good(tmp_path, tokenizer):
    write(tmp_path / "a.txt", "txt", DOCUMENTS)
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, out=out))
    assert "is good: train.bin, val.bin, tokenizer.json" in ok(prepare(verify=out)).stdout
    data = (out / "train.bin").read_bytes()
    (out / "train.bin").write_bytes(data[:500] + b"x" + data[501:])
    fails_clearly(prepare(verify=out), "train.bin is damaged")
    (out / "train.bin").write_bytes(data[:-2])
    fails_clearly(prepare(verify=out), "cut off")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train.bin", "nanoGPT's"),
        ("tokenizer.json", "{}"),  # of a model, or of a step of a run
        ("meta.json", '{"stoi": {}}'),
        ("config.json", '{"checkpoint_dir": "."}'),
        ("config.json", '{"model_type": "gpt2"}'),
    ],
)
def test_what_prepare_data_did_not_write_is_not_replaced(tmp_path, name, content):
    (tmp_path / "a.txt").write_text("A text.")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text(content)
    options = [f"{tmp_path}/a.txt", f"--out={tmp_path}/out", "--overwrite"]
    with pytest.raises(InputError, match=rf"holds {name}.* did not write"):
        WorkFolder(parse(options))
    assert [path.name for path in (tmp_path / "out").iterdir()] == [name]
