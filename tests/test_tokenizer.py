"""tokenizer_bpe.py: every string comes back, and ids are those of the saved tokenizer.json.

What is read from files is checked.
"""

import base64
import hashlib
import json
import pickle
import re

import pytest
import regex
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models, pre_tokenizers, trainers

import tokenizer_bpe
from formats.pretrained import read_tokenizer
from tests.conftest import prose
from tokenizer_bpe import (
    ALPHABET,
    DIGITS_PATTERN,
    EOT,
    GPT2_PATTERN,
    GPT4O_PATTERN,
    KNOWN_PATTERNS,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    QWEN35_PATTERN,
    Tokenizer,
    TokenizerError,
    safe_cut,
)

OTHER_SCRIPTS = "你好。你好，Привет हिन्दी 🙂 " * 20
BPE = Tokenizer.train([prose(), OTHER_SCRIPTS], 700)
CHARS = Tokenizer.characters(prose() + "é\u4e2d\U0001f600")
PARTS = [" ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u3000", "\x00", "\x1c", "\u200d", "\ufeff"]
PARTS += ["'s", "'LL", "word", " Word", "12", " 345", "...", "!?", EOT]
PARTS += ["é", "e\u0301", "你好", "。", "，", "Привет", "हिन्दी", "🙂", "½", "_", "\u093c"]
TRICKY = st.lists(st.sampled_from(PARTS), max_size=20).map("".join)
ANY_TEXT = TRICKY | st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
# Engines differ on letters that are newer than their tables.
KNOWN_TEXT = TRICKY | st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=60)


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT)
def test_every_string_comes_back(text):
    assert BPE.decode_bytes(BPE.encode(text)) == text.encode()


@pytest.mark.parametrize("pattern", [GPT2_PATTERN, QWEN35_PATTERN])
def test_ids_are_those_of_tokenizers(pattern):
    bpe = Tokenizer.train([prose(), OTHER_SCRIPTS], 700, pattern=pattern)
    hf = HFTokenizer.from_str(bpe.to_json())

    @settings(max_examples=300, deadline=None)
    @given(KNOWN_TEXT.filter(lambda text: EOT not in text))
    def check(text):
        assert bpe.encode(text).tolist() == hf.encode(text).ids

    check()
    assert bpe.pattern == pattern
    assert bpe.encode(prose()).tolist() == hf.encode(prose()).ids
    assert hf.encode(f"one {EOT} two").ids == [*bpe.encode("one "), 0, *bpe.encode(" two")]
    assert bpe.eot_id == 0
    assert hf.get_vocab_size() == bpe.vocab_size == 700


def test_character_ids_are_those_of_tokenizers():
    hf = HFTokenizer.from_str(CHARS.to_json())
    text = prose()[:3000] + "é\u4e2d\U0001f600"
    assert CHARS.encode(text).tolist() == hf.encode(text).ids
    assert CHARS.decode(CHARS.encode(text)) == text == hf.decode(hf.encode(text).ids)
    assert hf.get_vocab_size() == CHARS.vocab_size


def test_what_is_loaded_is_what_was_saved(tmp_path):
    for tokenizer in (BPE, CHARS):
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = Tokenizer.load(tmp_path)
        assert loaded.same_as(tokenizer)
        assert loaded.to_json() == tokenizer.to_json()


def cut_by(pattern):
    """A pre-tokenizer that cuts words by an expression and turns them into bytes."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    steps = [split | {"invert": False}, to_bytes | {"trim_offsets": True}]
    return {"type": "Sequence", "pretokenizers": steps}


def template(token, n):
    """A post-processor that puts a token before each text."""
    begin, text = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    )
    known = {token: {"id": token, "ids": [n], "tokens": [token]}}
    single = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text]}
    return single | {"special_tokens": known}


def ids_agree(tokenizer, hf, without):
    """Assert that both give the same ids. without: characters or words that no text has."""

    @settings(max_examples=100, deadline=None)
    @given(KNOWN_TEXT.filter(lambda text: not any(part in text for part in without)))
    def check(text):
        assert tokenizer.encode(text).tolist() == hf.encode(text, add_special_tokens=False).ids

    check()


def test_a_tokenizer_of_qwen_gives_the_ids_of_tokenizers():
    """It composes characters, cuts words by its own expression, and its vocabulary lacks EOT."""
    description = json.loads(BPE.to_json()) | {"normalizer": {"type": "NFC"}}
    del description["model"]["vocab"][EOT]
    description["added_tokens"][0]["id"] = 700
    description["pre_tokenizer"] = cut_by(QWEN2_PATTERN)
    tokenizer = Tokenizer(description)
    assert (tokenizer.eot_id, tokenizer.vocab_size) == (700, 701)
    hf = HFTokenizer.from_str(json.dumps(description))
    ids_agree(tokenizer, hf, without=[EOT])
    # Python sorts the nukta of Unicode 11 before the line below; `tokenizers` does not know it.
    text = "Cafe\u0301, it's 1234 o'clock\n\n  e\u0331\U0001183a\u0301 \u4f60\u597d\uff01"
    assert tokenizer.encode(text).tolist() == hf.encode(text).ids
    assert not tokenizer.same_as(Tokenizer(description | {"normalizer": None}))
    description["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"
    with pytest.raises(TokenizerError, match="not plain byte-level BPE"):
        Tokenizer(description)


def test_a_tokenizer_of_llama_gives_the_ids_of_tokenizers():
    """It has all merges of each token and takes known words whole. It begins texts, unlike ours."""
    description = json.loads(BPE.to_json())
    vocab = description["model"]["vocab"]
    del vocab[EOT]
    # No merges make the last one: Q and z go together first.
    vocab |= {token: 700 + n for n, token in enumerate(("Qz", "zX", "zXw", "QzXw"))}
    merges = []
    for token in vocab:
        parts = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += [list(pair) for pair in parts if vocab.keys() >= set(pair)]
    description["model"] |= {"merges": merges, "ignore_merges": True}
    description["pre_tokenizer"] = cut_by(LLAMA3_PATTERN)
    first = description["added_tokens"][0]
    description["added_tokens"] = [
        first | {"content": "<|begin_of_text|>", "id": 704},
        first | {"content": "<|end_of_text|>", "id": 705},
    ]
    description["post_processor"] = template("<|begin_of_text|>", 704)
    hf = HFTokenizer.from_str(json.dumps(description))
    tokenizer = Tokenizer(description)
    assert (tokenizer.eot, tokenizer.eot_id, tokenizer.vocab_size) == ("<|end_of_text|>", 705, 706)
    ids_agree(tokenizer, hf, without=tokenizer.specials)  # hypothesis tries words of our files
    for text in ("QzXw", " QzXw", "QzXw 12345 I'LL"):
        assert tokenizer.encode(text).tolist() == hf.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("QzXw").tolist() == [703]
    written = HFTokenizer.from_str(tokenizer.to_json())  # which begins no texts
    assert written.encode("QzXw").ids == [703]


def test_a_tokenizer_of_smollm_gives_the_ids_of_tokenizers():
    """It sets each digit apart, and its vocabulary lacks bytes, most of which no text has."""
    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    hf = HFTokenizer(models.BPE())
    hf.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = [char for byte, char in ALPHABET.items() if byte != 4 and byte < 0xF8]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=[EOT], initial_alphabet=alphabet, show_progress=False
    )
    hf.train_from_iterator([prose(), OTHER_SCRIPTS, "in 1234 days' 99th\n 7"], trainer)
    tokenizer = Tokenizer(json.loads(hf.to_str()))
    assert tokenizer.pattern == DIGITS_PATTERN
    assert tokenizer.vocab_size == 700

    ids_agree(tokenizer, hf, without=[EOT, "\x04"])
    assert tokenizer.decode(tokenizer.encode(OTHER_SCRIPTS)) == OTHER_SCRIPTS
    assert Tokenizer(json.loads(tokenizer.to_json())).same_as(tokenizer)
    with pytest.raises(TokenizerError, match=r"U\+0004\) at position 2 .* lacks the byte 0x04"):
        tokenizer.encode("é \x04\x04")


PUNCTUATION = {"type": "Punctuation", "behavior": "Contiguous"}
# As in the files of DeepSeek V3, of Falcon, and of a user who set digits apart, in two ways.
STEPS = {
    "deepseek": [
        *cut_by(r"\p{N}{1,3}")["pretokenizers"][:1],
        *cut_by("[一-龥぀-ゟ゠-ヿ]+")["pretokenizers"][:1],
        *cut_by(r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|\s+(?!\S)|\s+")["pretokenizers"],
    ],
    "falcon": [
        PUNCTUATION,
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        {"type": "Digits", "individual_digits": False},
        *cut_by("[0-9][0-9][0-9]")["pretokenizers"][:1],
    ],
    "rest": cut_by(r"\d")["pretokenizers"],
    "repeated": cut_by(r"\p{L}{1,3}+|[^\p{L}]+$|[^\p{L}]+")["pretokenizers"],
}


@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_a_tokenizer_with_other_steps_gives_the_ids_of_tokenizers(steps):
    """tiktoken drops what an expression does not match, and reads `{1,3}+` and `$` differently."""
    description = json.loads(BPE.to_json())
    description["normalizer"] = {"type": "Sequence", "normalizers": []}
    description["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    tokenizer = Tokenizer(description)
    assert not tokenizer.composes
    ids_agree(tokenizer, HFTokenizer.from_str(json.dumps(description)), without=[EOT])
    text = f"in 12345678 days,\n\n你好 3ab {EOT}e\u0301 "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert Tokenizer(json.loads(tokenizer.to_json())).same_as(tokenizer)
    assert not tokenizer.same_as(BPE)
    sent = pickle.loads(pickle.dumps(tokenizer))  # as to the processes of Ray
    assert sent.encode(text).tolist() == tokenizer.encode(text).tolist()
    with pytest.raises(TokenizerError, match="lone surrogate at character 2"):
        tokenizer.encode("a \ud800")
    del description["model"]["vocab"]["!"]
    with pytest.raises(TokenizerError, match=r"U\+0021\) at position 1 .* lacks the byte 0x21"):
        Tokenizer(description).encode("e!")


@pytest.mark.parametrize("pattern", [LLAMA3_PATTERN, GPT4O_PATTERN])
def test_a_tokenizer_that_removes_nothing_gives_the_ids_of_tokenizers(pattern):
    """The files of OLMo 2 and Phi-4 remove what the expression does not match: it matches all."""
    description = json.loads(BPE.to_json()) | {"pre_tokenizer": cut_by(pattern)}
    description["pre_tokenizer"]["pretokenizers"][0] |= {"behavior": "Removed", "invert": True}
    tokenizer = Tokenizer(description)
    ids_agree(tokenizer, HFTokenizer.from_str(json.dumps(description)), without=[EOT])
    description["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\w+"
    with pytest.raises(TokenizerError, match="not plain byte-level BPE"):
        Tokenizer(description)


def test_an_added_token_that_is_not_special_is_found_in_a_text():
    """As `tokenizers` does: Qwen3's <think>, and the runs of spaces of Phi-2 and GPT-NeoX."""
    description = json.loads(BPE.to_json())
    first = description["added_tokens"][0]
    names = ["   ", "  ", "<think>", "<|fim|>", "<file>"]
    for n, name in enumerate(names, start=BPE.vocab_size):
        special = name == "<file>"
        added = {"id": n, "content": name, "special": special, "normalized": not special}
        description["added_tokens"].append(first | added)
    tokenizer = Tokenizer(description)
    assert tokenizer.ordinary == {"   ", "  ", "<think>"}
    assert not tokenizer.same_as(BPE)
    hf = HFTokenizer.from_str(json.dumps(description))
    ids_agree(tokenizer, hf, without=[EOT])
    text = "<think>a\n       b</think>"
    assert tokenizer.encode(text).tolist() == hf.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    for text in ("<file>", "<|fim|>", EOT):  # of which the rest are letters, next to it too
        assert tokenizer.encode(text).tolist() == BPE.encode(text).tolist()
        ids = [*BPE.encode(text), tokenizer.specials["<think>"]]
        assert tokenizer.encode(f"{text}<think>").tolist() == ids
    description["added_tokens"][3]["special"] = True
    assert not tokenizer.same_as(Tokenizer(description))  # which has the same ids


def test_the_length_to_which_another_program_cut_texts_is_not_kept(tmp_path):
    file = str(tmp_path / "tokenizer.json")
    hf = HFTokenizer.from_str(BPE.to_json())
    hf.enable_truncation(4)
    hf.enable_padding(length=9000)
    hf.save(file)
    Tokenizer.load(file).save(file)
    ids = BPE.encode(OTHER_SCRIPTS).tolist()
    assert HFTokenizer.from_file(file).encode(OTHER_SCRIPTS).ids == ids


@pytest.mark.parametrize("bad", ["x", "é", "\U0010ffff", "\x00"])
def test_an_unknown_character_names_itself(bad):
    place = rf"U\+{ord(bad):04X}\) at position 4 is not among the 3 characters"
    with pytest.raises(TokenizerError, match=place):
        Tokenizer.characters("ab\n").encode(f"ab\na{bad}{bad}")


def test_a_lone_surrogate_is_a_sentence():
    for tokenizer in (BPE, CHARS):
        with pytest.raises(TokenizerError, match="surrogate"):
            tokenizer.encode("a\ud800")


def test_the_ids_that_a_model_gives_are_decoded():
    for tokenizer in (BPE, CHARS):
        ids = torch.tensor(tokenizer.encode("ab").tolist())
        assert tokenizer.decode(ids) == "ab"


def test_end_of_text_in_a_text_is_text():
    ids = BPE.encode(f"a{EOT}b")
    assert BPE.eot_id not in ids
    assert BPE.specials == {EOT: BPE.eot_id}
    assert BPE.decode([BPE.eot_id]) == EOT


@pytest.mark.parametrize("pattern", [None, QWEN2_PATTERN])
@pytest.mark.parametrize("run", [" ", "\r\n", "\n \t\u3000", "a1", "汉"])
def test_a_million_characters_of_a_kind_have_the_ids_of_fewer(run, pattern):
    tokenizer = BPE
    if pattern:
        tokenizer = Tokenizer(BPE.description | {"pre_tokenizer": cut_by(pattern)})
    short, long = (tokenizer.encode(f"Hello!{run * n}{EOT}").tolist() for n in (4096, 1 << 20))
    assert long[:50] == short[:50] and long[-20:] == short[-20:]
    assert tokenizer.decode(long) == f"Hello!{run * (1 << 20)}{EOT}"
    with pytest.raises(TokenizerError, match=f"surrogate at character {len(run) * 4000}"):
        tokenizer.encode(f"{run * 4000}\ud800")


def test_a_vocabulary_that_the_text_does_not_support():
    supports = "supports --vocab_size 2356 at most, not 50000: use --vocab_size 1024, say, or --to"
    with pytest.raises(TokenizerError, match=supports):
        Tokenizer.train([" ".join(map(str, range(2000)))], 50_000)
    with pytest.raises(TokenizerError, match="269 at most, not 50000: use --tokenizer char"):
        Tokenizer.train(["only a few words"], 50_000)  # the 256 bytes are no vocabulary of words


def test_gpt2s_vocabulary_without_a_network_says_which_file_to_put_where(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")  # nothing listens there
    place = tmp_path / "data" / "r50k_base.tiktoken"
    with pytest.raises(TokenizerError, match=tokenizer_bpe.GPT2_URL) as error:
        Tokenizer.gpt2()
    assert str(place) in str(error.value)
    place.parent.mkdir()
    place.write_text("something else")
    with pytest.raises(TokenizerError, match=r"cannot be read from data.r50k_base\.tiktoken"):
        Tokenizer.gpt2()


def test_gpt2s_vocabulary_comes_as_ranks_and_merges_as_it_did(tmp_path, monkeypatch):
    """With another vocabulary in its place, that of a tokenizer that was trained here."""
    to_byte = {char: byte for byte, char in tokenizer_bpe.ALPHABET.items()}
    tokens = [token for token in BPE.description["model"]["vocab"] if token != EOT]
    ranks = [base64.b64encode(bytes(to_byte[char] for char in token)).decode() for token in tokens]
    file = tmp_path / tokenizer_bpe.GPT2_FILE
    file.parent.mkdir()
    file.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(ranks)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tokenizer_bpe, "GPT2_SHA256", hashlib.sha256(file.read_bytes()).hexdigest())
    found = Tokenizer.gpt2()
    assert found.description["model"]["merges"] == BPE.description["model"]["merges"]
    assert found.decode(found.encode(OTHER_SCRIPTS)) == OTHER_SCRIPTS


def as_tinyllama(values):
    values["model"] |= {"byte_fallback": True, "fuse_unk": True}
    steps = [{"type": "Prepend", "prepend": "▁"}]
    values["normalizer"] = {"type": "Sequence", "normalizers": steps}
    values["pre_tokenizer"] = None
    values["added_tokens"][0]["content"] = "</s>"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.pop("model"), "no model.vocab"),
        (lambda d: d["added_tokens"].clear(), "has no <|endoftext|>, and no config next to it"),
        (lambda d: d["model"].update(type="WordPiece"), "is not plain byte-level BPE"),
        (lambda d: d["model"].update(type="Unigram"), "is a SentencePiece tokenizer"),
        (
            as_tinyllama,
            "is a SentencePiece tokenizer, not byte-level BPE (model BPE, normalizer Pre",
        ),
        (lambda d: d.update(normalizer={"type": "NFKC"}), "not plain byte-level BPE"),
        (
            lambda d: (d["model"].update(byte_fallback=True), d.update(normalizer={"type": "NFD"})),
            "not plain byte-level BPE",
        ),
        (lambda d: d.update(pre_tokenizer=None), "pre-tokenizer None"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer Whitespace"),
        (lambda d: d["pre_tokenizer"].update(add_prefix_space=True), "without prefix space"),
        (lambda d: d["model"]["vocab"].update({"中": 900}), "character '中', which spells no byte"),
        (lambda d: d["model"].update(vocab=[]), "cannot be read as a tokenizer"),
        (lambda d: d["model"]["merges"].append(["Q", "zzz"]), "cannot be read as a tokenizer"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_faithfully_is_refused(tmp_path, change, words):
    description = json.loads(BPE.to_json())
    change(description)
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    with pytest.raises(TokenizerError, match=re.escape(words)):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", [b"GGUF\x03\0\0\0\x10\x01\xc3", b"", b"\x0a\x09<unk>\x15"])
def test_another_file_than_a_tokenizer_json_is_told(tmp_path, content):
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(
        TokenizerError, match=r"model\.gguf is not a tokenizer\.json; give that file"
    ):
        Tokenizer.load(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("config", "values"),
    [
        ("tokenizer_config.json", {"eos_token": "</s>", "eos_token_id": 5}),
        ("tokenizer_config.json", {"eos_token": {"content": "</s>", "special": True}}),
        ("generation_config.json", {"eos_token": [], "eos_token_id": [0, 5]}),
        ("config.json", {"eos_token_id": 0}),
    ],
)
def test_a_config_says_what_ends_a_text_where_the_tokenizer_does_not(tmp_path, config, values):
    text = BPE.to_json().replace(EOT, "</s>").replace('"special": true', '"special": false')
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(TokenizerError, match="which token ends a text"):
        Tokenizer.load(tmp_path)
    (tmp_path / config).write_text(json.dumps(values))
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.eot, tokenizer.eot_id) == ("</s>", 0)
    assert 0 not in tokenizer.encode("spelled</s>")  # though no special token elsewhere
    tokenizer.save(tmp_path / "own.json")  # its own file suffices from here
    (tmp_path / config).unlink()
    assert Tokenizer.load(tmp_path / "own.json").eot == "</s>"
    assert HFTokenizer.from_file(str(tmp_path / "own.json")).encode("the</s>").ids[-1] == 0


def test_the_two_files_of_an_older_tokenizer_are_answered_with_what_makes_one(tmp_path):
    """They say neither how to cut text nor which tokens are special."""
    (tmp_path / "vocab.json").write_text(json.dumps(BPE.description["model"]["vocab"]))
    advice = f"AutoTokenizer.from_pretrained({str(tmp_path)!r}).save_pretrained('OUT')"
    with pytest.raises(TokenizerError, match=re.escape(advice)):
        Tokenizer.load(tmp_path)
    with pytest.raises(TokenizerError, match=re.escape(advice)):
        read_tokenizer(tmp_path)


@settings(max_examples=300, deadline=None)
@given(ANY_TEXT | st.text(st.sampled_from("ab \n.'\r\t1"), max_size=80), st.integers(1, 80))
def test_text_cut_at_a_safe_place_encodes_as_the_whole_does(text, limit):
    at = safe_cut(text, limit)
    assert 0 <= at <= limit
    assert [*BPE.encode(text[:at]), *BPE.encode(text[at:])] == BPE.encode(text).tolist()


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from("aé1 \n\r/.'s。你\u0301_"), max_size=20), st.integers(1, 20))
@example("x;\n// a comment", 3)  # GPT-4o's ;\n//
def test_no_word_of_a_known_expression_crosses_a_safe_place(text, limit):
    at = safe_cut(text, limit)
    for pattern in KNOWN_PATTERNS:
        first, second = (regex.findall(pattern, part) for part in (text[:at], text[at:]))
        assert first + second == regex.findall(pattern, text)


@pytest.mark.parametrize(
    ("text", "limit", "cut"),
    [
        ("one two three", 12, 7),
        ("one two three", 6, 3),
        ("a line.\n*another*", 8, 8),
        ("你好，世界。", 4, 2),
        (f"one two{'.' * 100_000}", 100_000, 3),
        ("one, two. 345  six", 18, 0),
        ("/usr/bin\n/usr/lib\n/usr/x.\n/a", 27, 18),
    ],
)
def test_text_is_cut_at_the_last_safe_place(text, limit, cut):
    assert safe_cut(text, limit) == cut


def _reversed_ids(values):
    vocab = values["model"]["vocab"]
    for token, n in list(vocab.items()):
        if n > 256:
            vocab[token] = 257 + BPE.vocab_size - 1 - n


@pytest.mark.parametrize(
    "change",
    [
        _reversed_ids,
        lambda values: values["model"]["merges"].reverse(),
        lambda values: values["model"]["merges"].__delitem__(slice(10, None)),
    ],
)
def test_a_file_with_other_merges_than_its_ids_say_gives_the_ids_of_tokenizers(change):
    values = json.loads(BPE.to_json())
    change(values)
    ids_agree(Tokenizer(values), HFTokenizer.from_str(json.dumps(values)), without=[EOT])


def test_merges_by_chance_are_refused():
    values = json.loads(BPE.to_json())
    values["model"]["dropout"] = 0.1
    HFTokenizer.from_str(json.dumps(values))  # which takes it
    with pytest.raises(TokenizerError, match=r"dropout 0\.1"):
        Tokenizer(values)
