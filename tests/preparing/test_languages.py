"""Text in other scripts than Latin: prepared, and decoded back to the character."""

import pytest

from tests.preparing.conftest import documents, ok, prepare
from tokenizer_bpe import EOT

TEXTS = {
    "Chinese": "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？",
    "Japanese": "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "Korean": "나라의 말이 중국과 달라 한자와 서로 통하지 아니하므로",
    "Hindi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "Arabic": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وقد وُهبوا عقلًا وضميرًا.",
    "Russian": "Все счастливые семьи похожи друг на друга, каждая несчастливая по-своему.",
    "emoji": "👩🏽‍🚀 und 🏳️‍🌈, dann 🇯🇵 👨‍👩‍👧‍👦 1️⃣ ✅ 🫠!",
}


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("kind", ["bpe", "char", "given"])
def test_text_of_every_script_decodes_to_itself(tmp_path, tokenizer, script, kind):
    text = "".join(f"{n}. {TEXTS[script]}\n" for n in range(300))
    (tmp_path / "a.txt").write_text(f"{text}\n{EOT}\n{TEXTS[script]}", encoding="utf-8")
    flags = {"tokenizer": tokenizer if kind == "given" else kind}  # which has only met English
    if kind == "bpe":
        flags["vocab_size"] = 300
    ok(prepare(tmp_path / "a.txt", val_fraction=0, out=tmp_path / "out", **flags))
    assert documents(tmp_path / "out") == [f"{text}\n", TEXTS[script]]


def test_a_long_text_without_spaces_is_cut_between_characters(tmp_path, tokenizer):
    text = TEXTS["Japanese"] * 25_000  # 2.6 MB, in three chunks
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    ok(prepare(tmp_path / "a.txt", tokenizer=tokenizer, val_fraction=0, out=tmp_path / "out"))
    assert documents(tmp_path / "out") == [text]
