"""generating/text.py: whole characters, stop texts, and no padded ids."""

import time

import torch

from generating import decode
from generating.text import Completion, complete
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer


def grown(tokenizer, text, most=99, stop=()):
    """The text after each token of a continuation that a model ends, and the Completion."""
    row, seen = Completion("", tokenizer, most, stop), []
    for next_id in [*tokenizer.encode(text).tolist(), tokenizer.eot_id]:
        row.add(next_id, seconds=len(seen) + 2.0)
        seen.append(row.text)
        if row.ended:
            break
    return seen, row


def test_characters_come_whole(byte_tokenizer):
    text = "Grüße, 世界 🙂!"
    seen, row = grown(byte_tokenizer, text)
    assert row.ended == "end of text"
    ids = byte_tokenizer.encode(text).tolist()
    whole = [byte_tokenizer.decode_bytes(ids[: n + 1]) for n in range(len(ids))]
    assert seen == [part.decode(errors="ignore") for part in whole] + [text]
    assert row.seconds == len(seen) + 1.0


def test_a_character_that_is_cut_is_left_out(byte_tokenizer):
    _, row = grown(byte_tokenizer, "ab🙂", most=5)
    assert row.text == "ab"
    assert row.ended == "length"


def test_a_character_that_the_model_broke_off_is_marked(byte_tokenizer):
    row = Completion("", byte_tokenizer, 9, [])
    a, *emoji, b = byte_tokenizer.encode("a🙂b").tolist()
    for next_id in (a, *emoji[:2], b):
        row.add(next_id, 1.0)
    assert row.text == "a\ufffdb"


def test_stop_texts_are_never_shown_not_even_in_part(byte_tokenizer):
    seen, row = grown(byte_tokenizer, "one\n\nUse\n\nUser: two", stop=["\n\nUser:", "zzz"])
    assert seen == ["o", "on", *["one"] * 6, *["one\n\nUse"] * 7]
    assert row.ended == "stop"


def test_of_several_stop_texts_in_a_token_the_first_ends_the_text():
    tokenizer = Tokenizer.train(["ab ab"], 258)
    for stop in (["a", "b"], ["b", "a"]):
        assert grown(tokenizer, "xab", stop=stop)[0] == ["x", "x"]


def test_what_is_held_back_for_a_stop_text_comes_after_all(byte_tokenizer):
    ids = byte_tokenizer.encode("one\n\nUse").tolist()
    for last, ended in ((byte_tokenizer.eot_id, "end of text"), (decode.NAN, "NaN")):
        row = Completion("", byte_tokenizer, 99, ["\n\nUser:"])
        for next_id in [*ids, last]:
            row.add(next_id, 1.0)
        assert (row.text, row.ended) == ("one\n\nUse", ended)


def test_a_text_that_has_ended_grows_no_more(byte_tokenizer, monkeypatch):
    end, (a, b) = byte_tokenizer.eot_id, byte_tokenizer.encode("ab").tolist()
    drawn = iter([[a, a], [end, b], [b, b], [a, a]])
    monkeypatch.setattr(decode, "generate", lambda *_, **settings: drawn)
    model = GPT(GPTConfig(258, 8, 1, 1, 8))
    started = time.perf_counter()
    *_, (short, long) = complete(model, byte_tokenizer, ["", ""], 3)
    assert long.seconds <= time.perf_counter() - started
    assert short.text == "a"
    assert long.text == "abb"
    assert next(drawn) == [a, a]  # nobody waits for more


def test_an_empty_prompt_is_the_start_of_a_document(byte_tokenizer):
    torch.manual_seed(0)
    model = GPT(GPTConfig(258, 32, 1, 2, 32, tie_weights=False)).eval()
    *_, (row,) = complete(model, byte_tokenizer, [""], 9, temperature=0)
    written = decode.generate(model, [[byte_tokenizer.eot_id]], 9, temperature=0)
    assert row.ids == [i for (i,) in written] != []


def test_a_repetition_penalty_spares_what_ends_a_text(byte_tokenizer):
    """A conversation has <|im_end|> in each turn, and an empty prompt is an end-of-text."""
    marker = 257
    for end, prompt in ((byte_tokenizer.eot_id, ""), (marker, [marker, 7])):
        model = GPT(GPTConfig(258, 16, 1, 1, 8, tie_weights=False)).eval()
        model.ln_f.weight.data.zero_()
        model.ln_f.bias.data.fill_(1.0)
        model.lm_head.weight.data.zero_()
        model.lm_head.weight.data[97] = 0.9
        model.lm_head.weight.data[end] = 1.0  # the likeliest
        settings = {"temperature": 0, "repetition_penalty": 2.0}
        settings["end_ids"] = [marker, 50256]  # GPT-2's, which the config of a small model may name
        *_, (row,) = complete(model, byte_tokenizer, [prompt], 5, **settings)
        assert (row.ids, row.ended) == ([], "end of text")


def test_padded_ids_are_never_written(byte_tokenizer):
    torch.manual_seed(0)
    model = GPT(GPTConfig(320, 64, 1, 2, 32)).eval()
    model.wte.weight.data[258:] *= 50  # the likeliest by far
    for rows in complete(model, byte_tokenizer, ["the"] * 4, 40, seed=1, temperature=2.0):
        assert all(i < 258 for row in rows for i in row.ids)
