"""Text in every script and encoding: it comes back whole, or the run says what is broken."""

import json

import pytest

from formats.data_folder import read_meta
from preparing import InputError
from preparing.chunks import CHUNK_BYTES, Options, Position
from preparing.readers import read_chunks
from preparing.sources import find_sources
from tests.conftest import fails_clearly, ok, prose
from tests.preparing.conftest import DOCUMENTS, documents, prepare, read, sha, write
from tests.preparing.test_chunks import chunks_of

LINE = "The line is English so far, until it says after quite a long time: Über Brücken führt es. "
TEXT = LINE * 40
SCRIPTS = [
    "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。",
    "学而时习之，不亦说乎？有朋自远方来，不亦乐乎？",
    "나라의 말이 중국과 달라 한자와 서로 통하지 아니하므로",
    "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता प्राप्त है।",
    "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق، وقد وُهبوا عقلًا وضميرًا.",
    "Все счастливые семьи похожи друг на друга, каждая несчастливая по-своему.",
    "👩🏽‍🚀 und 🏳️‍🌈, dann 🇯🇵 👨‍👩‍👧‍👦 1️⃣ ✅ 🫠!",
]
BROKEN = {ord("Ü"): "\ufffd", ord("ü"): "\ufffd"}
ENCODINGS = ("utf-16-be", "latin-1")  # without a byte order mark


@pytest.mark.parametrize("kind", ["bpe", "char", "given"])
def test_text_of_every_script_decodes_to_itself(tmp_path, tokenizer, kind):
    texts = [text * 100 for text in SCRIPTS]
    write(tmp_path / "a.txt", "txt", texts)
    flags = {"tokenizer": tokenizer if kind == "given" else kind}  # which has only met English
    if kind == "bpe":
        flags["vocab_size"] = 300
    ok(prepare(tmp_path / "a.txt", val_fraction=0, out=tmp_path / "out", **flags))
    assert [text.rstrip("\n") for text in documents(tmp_path / "out")] == texts


@pytest.fixture
def files(tmp_path):
    """A folder with a file of each encoding, and a file of UTF-8 outside of it."""
    (tmp_path / "in").mkdir()
    for name in ENCODINGS:
        (tmp_path / "in" / f"{name}.txt").write_bytes(TEXT.encode(name))
    (tmp_path / "plain.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


def test_another_encoding_is_an_error_and_replacing_it_is_reported(files, tokenizer):
    flags = {"tokenizer": tokenizer, "val_fraction": 0}
    result = prepare(files / "in/utf-16-be.txt", out=files / "out", **flags)
    fails_clearly(result, "be.txt: it is binary data, not text", "--encoding utf-16-le or")
    result = prepare(files / "in/latin-1.txt", out=files / "out", **flags)
    advice = "--on_error skip", "If files are in another encoding", "--encoding cp1252"
    fails_clearly(result, "latin-1.txt: not UTF-8: byte 0x", *advice)
    for way in ({"on_error": "replace"}, {"clean": True}):
        out = files / next(iter(way))
        rule = "not UTF-8: taken with U+FFFD"
        assert f"{rule}: 1 document" in ok(prepare(files / "in", out=out, **way, **flags)).stdout
        report = json.loads((out / "cleaning.json").read_text("utf-8"))
        example = TEXT[37:97].translate(BROKEN)
        assert report[rule]["examples"][0] == f"latin-1.txt: {example}"


@pytest.mark.parametrize("encoding", ["gb18030", "cp1251", "cp932", "cp949"])
def test_text_in_another_encoding_is_never_taken_for_broken_utf_8(tmp_path, encoding):
    """As GBK whose invalid bytes are dropped gives other letters, and cp1251 only the blanks."""
    words = {"gb18030": SCRIPTS[1], "cp932": SCRIPTS[0], "cp949": SCRIPTS[2]}
    data = words.get(encoding, SCRIPTS[5]).encode(encoding) * 9
    for options in ({"on_error": "replace"}, {"on_error": "replace", "clean": True}):
        found, report = read(tmp_path / "a.txt", data, **options)
        assert found == []
        (example,) = report["unusable documents"]["examples"]
        assert "of its bytes are not UTF-8. If files are in another encoding" in example
    (tmp_path / "a.csv").write_bytes(b"text\n" + data + b"\n")
    assert read(tmp_path / "a.csv", **options)[0] == []


def test_a_named_encoding_gives_what_utf_8_gives(files, tokenizer):
    flags = {"tokenizer": tokenizer, "val_fraction": 0}
    ok(prepare(files / "plain.txt", out=files / "plain", **flags))
    assert "encoding" not in read_meta(files / "plain").settings
    for name in ENCODINGS:
        path, out = files / "in" / f"{name}.txt", files / name
        ok(prepare(path, encoding=name.upper(), out=out, **flags))
        assert sha(out) == sha(files / "plain")
        assert read_meta(out).settings["encoding"]
    (files / "a.jsonl").write_bytes(json.dumps({"text": LINE}).encode("utf-16"))
    ok(prepare(files / "a.jsonl", encoding="utf-16", out=files / "json", **flags))
    assert documents(files / "json") == [LINE]


def test_a_byte_order_mark_names_the_encoding(files, tokenizer):
    """Whatever --encoding says of the other files."""
    for name in ("utf-8-sig", "utf-16", "utf-32"):
        (files / "in" / f"{name}.txt").write_bytes(TEXT.encode(name))
    (files / "in/utf-16-be.txt").unlink()
    flags = {"encoding": "latin-1", "tokenizer": tokenizer, "val_fraction": 0}
    ok(prepare(files / "in", out=files / "out", **flags))
    assert documents(files / "out") == [TEXT] * 4


def test_a_wrong_encoding_is_an_error_and_replace_is_reported(files, tokenizer):
    plain = {"tokenizer": tokenizer, "out": files / "out"}
    path = files / "in" / "latin-1.txt"
    fails_clearly(
        prepare(path, encoding="ascii", **plain), "latin-1.txt: not ascii: a byte at offset 67,"
    )
    fails_clearly(prepare(path, encoding="utf-16", **plain), "latin-1.txt is not utf-16: ")
    replaced = ok(prepare(path, encoding="ascii", on_error="replace", **plain))
    assert "not ascii: taken with U+FFFD: 1 document, 120 bytes" in replaced.stdout


ADVISED = {
    "cp932": "①髙橋㈱",  # Python's shift_jis lacks characters that Windows writes
    "euc-jp": "辞書 /dictionary/",
    "big5hkscs": "臺灣、喺嗰度",  # gb18030 would read other characters, without an error
}


@pytest.mark.parametrize(("encoding", "text"), ADVISED.items())
def test_east_asian_text_is_read_as_the_error_advises(tmp_path, encoding, text):
    with pytest.raises(InputError, match=rf"\b{encoding}\b"):
        read(tmp_path / "a.txt", text.encode(encoding))
    assert read(tmp_path / "a.txt", encoding=encoding)[0] == [text]


def test_broken_utf_16_is_treated_as_broken_utf_8_is(tmp_path):
    """Half a character, as where a file was cut, and half a pair."""
    data = "one\n".encode("utf-16") + b"\x00\xd8" + "two\n".encode("utf-16-le") + b"x"
    with pytest.raises(InputError, match=r"a\.txt: not utf-16: a byte at offset 4,"):
        read(tmp_path / "a.txt", data)
    assert read(tmp_path / "a.txt", on_error="replace")[0] == ["one\n\ufffd\ufffdtwo\n\ufffd"]
    assert read(tmp_path / "a.txt", on_error="skip")[0] == []


@pytest.mark.parametrize("format", ["txt", "jsonl", "csv"])
@pytest.mark.parametrize(
    ("encoding", "broken"),
    [
        ("utf-16-be", b"\xd8\x3d"),  # half a pair; the bytes as UTF-8, with their upper bit: ؽ
        ("euc_kr", b"\xc9\xa1"),
        ("iso8859-8", b"\xc2\xbf"),
        ("ascii", b"\xc3\x9c"),
    ],
)
def test_bytes_that_are_broken_together_never_become_a_letter(tmp_path, encoding, broken, format):
    before, after = {"txt": ("", ""), "jsonl": ('{"text": "', '"}')}.get(format, ("text\n", ""))
    data = f"{before}Hi ".encode(encoding) + broken + f"!{after}".encode(encoding)
    with pytest.raises(InputError, match=f"not {encoding}: a byte at offset"):
        read(tmp_path / f"a.{format}", data, encoding=encoding)
    found, rules = read(tmp_path / f"a.{format}", encoding=encoding, on_error="replace")
    assert found == ["Hi \ufffd\ufffd!"]  # a third of it, but a few bytes
    assert rules[f"not {encoding}: taken with U+FFFD"]["bytes"] == 2
    assert read(tmp_path / f"a.{format}", encoding=encoding, on_error="skip")[0] == []


def test_a_byte_order_mark_is_no_text_in_any_chunk(tmp_path, tokenizer):
    text = prose() * 12
    assert len(text) > 2 * CHUNK_BYTES
    for name, mark in (("plain", b""), ("marked", b"\xef\xbb\xbf")):
        (tmp_path / f"{name}.txt").write_bytes(mark + text.encode())
        ok(prepare(tmp_path / f"{name}.txt", tokenizer=tokenizer, workers=2, out=tmp_path / name))
    assert sha(tmp_path / "plain") == sha(tmp_path / "marked")


def test_lines_are_counted_beyond_the_first_megabyte(tmp_path, flags):
    lines = [json.dumps({"text": "x" * 1000}) for _ in range(4000)]
    lines[3500] = "{"  # in a chunk that begins with an even line
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    result = prepare(tmp_path / "a.jsonl", **flags)
    fails_clearly(result, "a.jsonl, line 3,501: not valid JSON")


def test_a_character_of_four_bytes_at_a_cut_stays_whole(tmp_path, monkeypatch):
    """A text without a place to cut is cut after 16 chunks, between characters."""
    chunks_of(1 << 12, monkeypatch)
    text = "🙂" * (5 << 12)
    for offset in range(4):
        path = tmp_path / f"{offset}.txt"
        path.write_text("x" * offset + text, encoding="utf-8")
        sources = find_sources([str(path)])
        found = list(read_chunks(sources, Position(), Options(), lambda _, path=path: path))
        assert len(found) == 2
        assert all(chunk.data.decode() for chunk in found)


@pytest.mark.parametrize(("format", "run"), [("txt", "\n"), ("jsonl", " "), ("txt", "=")])
def test_a_long_run_of_one_kind_of_character_is_text(tmp_path, flags, format, run):
    texts = [*DOCUMENTS[:20], f"start{run * (1_200_000 // len(run))}end"]
    write(tmp_path / f"a.{format}", format, texts)
    flags |= {"val_fraction": 0, "on_error": "skip"}
    ok(prepare(tmp_path / f"a.{format}", **flags))
    assert [text.strip("\n") for text in documents(tmp_path / "out")] == texts
