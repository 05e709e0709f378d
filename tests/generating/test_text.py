"""generating/text.py: whole characters, stop texts, and one prompt completed."""

import time

import torch

from generating.text import complete
from model import GPT, GPTConfig


def says(tokenizer, ids):
    """A model that continues end-of-text with `ids`, greedily.

    Each position's vector is the embedding of the token that it predicts.
    """
    model = GPT(
        GPTConfig(
            tokenizer.vocab_size,
            block_size=len(ids) + 2,
            n_layer=1,
            n_head=1,
            n_embd=tokenizer.vocab_size,
            tie_weights=False,
        )
    ).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
        model.ln_f.weight.fill_(1)
        model.lm_head.weight.copy_(torch.eye(tokenizer.vocab_size))
        for position, i in enumerate(ids):
            model.wpe.weight[position, i] = 1
    return model


def pieces(tokenizer, text, **settings):
    """The text as it grew while a model said it, token by token."""
    ids = tokenizer.encode(text).tolist()
    seen = []
    for rows in complete(
        says(tokenizer, [*ids, tokenizer.eot_id]),
        tokenizer,
        [""],
        len(ids) + 5,
        temperature=0,
        **settings,
    ):
        seen.append(rows[0].text)
    return seen, rows[0]


def test_characters_come_whole(byte_tokenizer):
    text = "Grüße, 世界 🙂!"
    started = time.perf_counter()
    seen, row = pieces(byte_tokenizer, text)
    assert row.text == text and row.ended == "end of text"
    assert 0 < row.first_s <= row.seconds < time.perf_counter() - started
    ids = byte_tokenizer.encode(text).tolist()
    whole = [byte_tokenizer.decode_bytes(ids[: n + 1]) for n in range(len(ids))]
    assert seen == [part.decode(errors="ignore") for part in whole] + [text]
    ids = byte_tokenizer.encode("ab🙂").tolist()
    *_, rows = complete(
        says(byte_tokenizer, ids), byte_tokenizer, [""], len(ids) - 1, temperature=0
    )
    assert rows[0].text == "ab" and rows[0].ended == "length"  # the cut character is left out


def test_stop_texts_are_never_shown_not_even_in_part(byte_tokenizer):
    text = "one\n\nUse\n\nUser: two"
    seen, row = pieces(byte_tokenizer, text, stop=["\n\nUser:", "zzz"])
    assert row.text == "one\n\nUse" and row.ended == "stop"
    assert all(row.text.startswith(part) for part in seen)
    seen, row = pieces(byte_tokenizer, "one\n\nUse", stop=["\n\nUser:"])
    assert (
        row.text == "one\n\nUse" and row.ended == "end of text"
    )  # what was held back comes after all


def test_padded_ids_are_never_written(byte_tokenizer):
    torch.manual_seed(0)
    model = GPT(GPTConfig(320, 64, 1, 2, 32)).eval()
    model.wte.weight.data[258:] *= 50  # the likeliest by far
    for rows in complete(model, byte_tokenizer, ["the"] * 4, 40, seed=1, temperature=2.0):
        assert all(i < 258 for row in rows for i in row.ids)
