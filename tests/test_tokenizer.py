"""tokenizer_bpe.py: any text round-trips, ids are those of the saved file, errors name what is wrong."""
import json

import pytest
from conftest import prose
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer

from tokenizer_bpe import EOT, GPT2_FILE, Tokenizer, TokenizerError


@pytest.fixture(scope="module")
def bpe():
    return Tokenizer.train([prose()], 1000)


@pytest.fixture(scope="module")
def saved(bpe, tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    bpe.save(path)
    return path


@settings(deadline=None, max_examples=300)
@given(st.text() | st.lists(st.sampled_from([" ", "\n", "\t", "\x00", "\x85", "é", "🙂", "👨‍👩‍👧", "한국어", "עברית", "word", "'ll", "123", EOT])).map("".join))
def test_any_text_round_trips_with_the_ids_of_the_saved_file(bpe, saved, text):
    ids = bpe.encode(text).tolist()
    assert bpe.decode(ids) == text
    assert bpe.decode_bytes(ids) == text.encode()
    assert Tokenizer.load(saved).encode(text).tolist() == ids
    if EOT not in text:  # `tokenizers` reads it as the token, here it is text
        assert HFTokenizer.from_file(str(saved)).encode(text, add_special_tokens=False).ids == ids


def test_training_twice_gives_the_same_tokenizer(bpe):
    again = Tokenizer.train([prose()], 1000)
    assert again.to_json() == bpe.to_json() and (bpe.vocab_size, bpe.eot_id, bpe.kind) == (1000, 0, "bpe")


def test_characters_round_trip_and_unknown_ones_name_themselves(tmp_path):
    coder = Tokenizer.characters("héllo 🙂\n")
    coder.save(tmp_path / "tokenizer.json")
    loaded = Tokenizer.load(tmp_path)
    assert loaded.kind == "char" and loaded.vocab_size == 1 + len(set("héllo 🙂\n"))
    text = "hello 🙂\n".replace("e", "é") * 1000
    assert loaded.decode(loaded.encode(text)) == text and loaded.encode(text).tolist() == coder.encode(text).tolist()
    with pytest.raises(TokenizerError, match=r"'z' \(U\+007A\) at position 3"):
        loaded.encode("holz")


def test_what_cannot_be_used_is_named(tmp_path, bpe):
    with pytest.raises(TokenizerError, match="no tokenizer at"):
        Tokenizer.load(tmp_path / "none.json")
    path = tmp_path / "tokenizer.json"
    for content, words in (("{", "cannot be read"), ("{}", "no model.vocab"), (bpe.to_json().replace(EOT, "<end>"), "has no <|endoftext|>")):
        path.write_text(content, encoding="utf-8")
        with pytest.raises(TokenizerError, match=words.replace("|", r"\|")):
            Tokenizer.load(path)
    description = json.loads(bpe.to_json()) | {"normalizer": {"type": "Lowercase"}}
    with pytest.raises(TokenizerError, match="not plain byte-level BPE"):
        Tokenizer(description)
    with pytest.raises(TokenizerError, match="supports a vocabulary of"):
        Tokenizer.train(["only a few words"], 5000)
    with pytest.raises(TokenizerError, match="outside the vocabulary of 1000"):
        bpe.decode([1000])
    with pytest.raises(TokenizerError, match="surrogate"):
        bpe.encode("\ud83d")


def test_gpt2_vocabulary_or_where_to_put_it(tmp_path, monkeypatch):
    if not GPT2_FILE.exists():
        monkeypatch.chdir(tmp_path)
    try:
        coder = Tokenizer.gpt2()
    except TokenizerError as error:
        assert "r50k_base.tiktoken" in str(error) and "put it at" in str(error)
    else:
        assert coder.vocab_size == 50257 and coder.encode("Hello world").tolist() == [15496, 995]
