"""gigatoken against tiktoken: the same ids."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats.gguf import LLAMA3_PATTERN, QWEN2_PATTERN, QWEN35_PATTERN
from preparing import PrepareError
from preparing.encoder import FastEncoder, new_encoder
from tests.conftest import ok, prose, run_code, run_script
from tests.preparing.conftest import DOCUMENTS, sha
from tests.test_tokenizer import cut_by
from tokenizer_bpe import EOT, Tokenizer

pytest.importorskip("gigatoken")

TEXTS = [
    *DOCUMENTS,
    f"a {EOT} b\n\n{EOT}",
    "x\0y \0",
    "汉字和かな、12 345。" * 50,
    "e\u0301 é \U0001f600 don't   \t\r\n" * 20,
    prose()[:30_000],
    "",
]
PIECES = st.text() | st.sampled_from(["the ", "the", " he", EOT, "\n\n", "  ", "don't", "12", "\0"])
TOKENIZER = Tokenizer.train(TEXTS, 600)
FAST = FastEncoder(TOKENIZER)


def assert_same(*texts):
    """Both give these texts the same ids."""
    found = [ids.tolist() for ids in FAST.encode(list(texts))]
    assert found == [TOKENIZER.encode(text).tolist() for text in texts]


@settings(max_examples=100, deadline=None)
@given(text=st.lists(PIECES | st.text(st.characters(exclude_categories=["Cs"]))).map("".join))
def test_gives_the_ids_of_tiktoken(text):
    assert_same(text, "", text[::2])


@pytest.mark.parametrize("pattern", [QWEN2_PATTERN, LLAMA3_PATTERN, QWEN35_PATTERN])
def test_gives_the_ids_of_tiktoken_for_words_of_others(pattern):
    tokenizer = Tokenizer(TOKENIZER.description | {"pre_tokenizer": cut_by(pattern)})
    fast = FastEncoder(tokenizer)
    assert fast.encoder

    @settings(max_examples=50, deadline=None)
    @given(text=st.lists(PIECES).map("".join))
    def check(text):
        assert fast.encode([text])[0].tolist() == tokenizer.encode(text).tolist()

    check()


def test_every_character_has_the_ids_of_tiktoken():
    planes = range(0x40000, 0x110000, 0x10000)  # whose characters differ in nothing
    for start in (*range(0, 0x40000, 0x1000), *planes):
        codes = (c for c in range(start, start + 0x1000) if not 0xD800 <= c < 0xE000)
        text = "".join(f"{chr(code)}'s\n" for code in codes)  # a word ends before 's, or before '
        assert_same(text)


def test_a_record_of_blanks_does_not_stall():
    assert_same("one", "x" + " " * 17_000_000 + "y", "\n" * 2_000_000 + "y")


def test_other_ids_end_the_work_before_they_are_written():
    other = FastEncoder(TOKENIZER)
    other.encoder = new_encoder(Tokenizer.train(TEXTS, 300))
    with pytest.raises(PrepareError, match="pip install -U gigatoken"):
        other.encode([prose()[:1000]])


@pytest.mark.parametrize("missing", ["gigatoken", "awkward"])
def test_the_folder_is_the_same_without_gigatoken_and_what_it_needs(tmp_path, missing):
    (tmp_path / "text.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    arguments = ["prepare_data.py", tmp_path / "text.txt", "--vocab_size", 400, "--out"]
    fast = ok(run_script(*arguments, tmp_path / "fast"))
    assert "with gigatoken" in fast.stdout
    code = f"import sys, runpy; sys.modules['{missing}'] = None; sys.argv = sys.argv[1:];"
    code += "runpy.run_path(sys.argv[0], run_name='__main__')"
    plain = ok(run_code(code, *arguments, tmp_path / "plain"))
    assert "with tiktoken" in plain.stdout
    assert sha(tmp_path / "fast") == sha(tmp_path / "plain")
