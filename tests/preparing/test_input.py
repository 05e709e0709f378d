"""The input of prepare_data.py: formats, folders, standard input, and mistakes in them."""

import gzip
import json
import random
import socket
import threading
from pathlib import Path

import pytest
from backports import zstd

from formats.data_folder import read_meta
from preparing import InputError, catalog
from preparing.arguments import default_out
from preparing.chunks import Options, Position
from preparing.readers import read_chunks
from preparing.sources import Source
from preparing.tokenizers import without_long_words
from tests.conftest import fails_clearly, prose, run_script
from tests.preparing.conftest import DOCUMENTS, command, documents, ok, prepare, sha, write
from tokenizer_bpe import Tokenizer

FORMATS = ["txt", "jsonl", "txt.gz", "jsonl.gz", "txt.zst", "jsonl.zst", "parquet"]
FORMATS += ["csv", "csv.gz", "tsv", "json"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path, tokenizer, format):
    pytest.importorskip("pyarrow.parquet")
    write(tmp_path / f"a.{format}", format, DOCUMENTS)
    ok(prepare(tmp_path / f"a.{format}", tokenizer=tokenizer, out=tmp_path / "out"))
    got = documents(tmp_path / "out")
    assert sorted(text.removesuffix("\n") if "txt" in format else text for text in got) == sorted(
        DOCUMENTS
    )


def test_conversations_are_written_with_the_documented_template(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Good day. "},
    ]
    lines = [json.dumps({"messages": messages, "n": n}) for n in range(3)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    out = tmp_path / "out"
    ok(prepare(tmp_path / "a.jsonl", tokenizer=tokenizer, val_fraction=0, out=out))
    assert documents(out) == ["User: Hello?\n\nAssistant: Good day.\n\n"] * 3


def test_folders_globs_and_standard_input(tmp_path, tokenizer):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    write(tmp_path / "in" / "b.txt", "txt", DOCUMENTS[:50])
    write(tmp_path / "in" / "deep" / "a.jsonl.gz", "jsonl.gz", DOCUMENTS[50:])
    (tmp_path / "in" / "picture.png").write_bytes(b"\x89PNG\xff")
    (tmp_path / "in" / "table.parquet.gz").write_bytes(b"which nothing reads")
    (tmp_path / "in" / ".venv").mkdir()
    write(tmp_path / "in" / ".venv" / "c.txt", "txt", DOCUMENTS[:5])  # no text of the user's
    ok(prepare(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "folder"))
    assert [s["path"].split("/")[-1] for s in read_meta(tmp_path / "folder").sources] == [
        "b.txt",
        "a.jsonl.gz",
    ]
    assert len(documents(tmp_path / "folder")) == 200
    (tmp_path / "in" / "deep" / "notes.md").write_text("some notes")
    again = ok(prepare(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "folder"))
    assert "2 files, skipping 1 .md, 1 .png, 1 .gz; a glob in quotes" in again.stderr
    assert f"'{tmp_path}/in/**/*.ENDING'" in again.stderr
    glob = tmp_path / "in" / "**" / "*.jsonl.gz"
    ok(prepare(glob, tokenizer=tokenizer, out=tmp_path / "glob"))
    assert sorted(documents(tmp_path / "glob")) == sorted(DOCUMENTS[50:])
    text = gzip.decompress((tmp_path / "in/deep/a.jsonl.gz").read_bytes()).decode()
    out = tmp_path / "stdin"
    ok(prepare("-", stdin_format="jsonl", tokenizer=tokenizer, out=out, text=text))
    assert sha(out) == sha(tmp_path / "glob")


def test_a_file_counts_once_however_many_ways_lead_to_it(tmp_path, tokenizer):
    deep = tmp_path / "in" / "deep"
    deep.mkdir(parents=True)
    for n, path in enumerate((tmp_path / "in/b.md", deep / "a.md", deep / "c.md")):
        path.write_text(DOCUMENTS[n])
    (deep / "circle").symlink_to("..")
    (tmp_path / "in/another.md").symlink_to("b.md")
    spelled = f"{tmp_path}/in/deep/../b.md"
    names = [f"{tmp_path}/in/{name}" for name in ("another.md", "deep/a.md", "deep/c.md")]
    flags = {"tokenizer": tokenizer, "val_fraction": 0}
    for inputs, paths in (
        ([f"{tmp_path}/in/**/*.md", spelled], names),
        ([spelled, tmp_path / "in/b.md"], [spelled]),
    ):
        ok(prepare(*inputs, out=tmp_path / "out", overwrite=True, **flags))
        assert [source["path"] for source in read_meta(tmp_path / "out").sources] == paths
        assert len(documents(tmp_path / "out")) == len(paths)


def test_names_of_files_need_not_be_utf_8(tmp_path, tokenizer):
    folder = tmp_path / "caf\udce9"
    folder.mkdir()
    write(folder / "\udcff.txt", "txt", DOCUMENTS)
    given = {"tokenizer": tokenizer, "on_error": "replace"}
    for _ in range(2):
        ok(prepare(folder, out=tmp_path / "bad\udcff", **given))
    assert read_meta(tmp_path / "bad\udcff").sources[0]["path"] == f"{folder}/\udcff.txt"
    (folder / "bad.txt").write_bytes(b"caf\xe9 and more\n")
    result = prepare(folder, out=tmp_path / "out", tokenizer=tokenizer)
    fails_clearly(result, "/caf\\udce9/bad.txt is not UTF-8")
    assert "bad.txt: caf" in ok(prepare(folder, out=tmp_path / "out", **given)).stdout


def test_a_record_is_sampled_whole(tmp_path):
    book = json.dumps({"text": prose() * 2})
    (tmp_path / "a.jsonl").write_text(book)  # of two slices, without a line end
    ok(prepare(tmp_path / "a.jsonl", vocab_size=600, val_fraction=0, out=tmp_path / "out"))
    assert documents(tmp_path / "out") == [prose() * 2]


LETTERS = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=800_000))


@pytest.mark.parametrize("word, vocab_size", [(LETTERS, 32000), (" " * 500_000, 600)])
def test_a_long_word_does_not_stall_the_training_of_a_tokenizer(tmp_path, word, vocab_size):
    write(tmp_path / "a.txt", "txt", [*DOCUMENTS, f"Word: {word}."])
    words = command(tmp_path / "a.txt", vocab_size=vocab_size, out=tmp_path / "out")[1:]
    ok(run_script(*words, timeout=100))


def test_ordinary_text_is_sampled_in_whole_documents():
    for text in (*DOCUMENTS, prose(), "汉字和かな、12 345。" * 900, "", "x" * 1024):
        assert list(without_long_words(text)) == [text]
    for length in (1025, 2047, 2048, 4096, 5000):
        for word in ("x" * length, "ACGT" * (length // 4), "1" * length, "-_" * (length // 2)):
            parts = list(without_long_words(f"A word: {word}."))
            assert "".join(parts) == f"A word: {word}."
            assert max(map(len, parts)) < 2048 + len("A word: .")


def test_the_folder_is_named_after_the_input(tmp_path):
    for given, out in (
        ("texts/a.txt.gz", "data/a"),
        ("texts", "data/texts"),
        ("texts/*.txt", "data/texts"),
        ("texts/**/*.md", "data/texts"),
        ("texts/part-[0-9].txt", "data/part"),
        ("texts/wiki*.txt", "data/wiki"),
        ("wiki*/*.txt", "data/wiki"),
        ("hf://datasets/someone/books/**/*.parquet", "data/books"),
    ):
        assert default_out([given]) == out
    (tmp_path / "loop").symlink_to("loop")
    assert default_out([str(tmp_path / "loop")]) == "data/loop"
    assert default_out(["/"]) == default_out(["*"]).replace(Path.cwd().name, "text")


def test_a_download_that_breaks_off_is_named(tmp_path, monkeypatch):
    def half(server):
        connection, _ = server.accept()
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nFirst Citizen:")
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=half, args=(server,), daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}/input.txt"
        monkeypatch.setattr(catalog, "SHAKESPEARE_URL", url)
        monkeypatch.setattr(catalog, "SHAKESPEARE_FILE", tmp_path / "shakespeare.txt")
        with pytest.raises(InputError, match="could not be downloaded"):
            catalog.shakespeare()
    assert not list(tmp_path.iterdir())


def test_bad_input_is_named(tmp_path, tokenizer):
    def fails(*words, status=2, **flags):
        result = prepare(*inputs, **{"tokenizer": tokenizer, "out": tmp_path / "out"} | flags)
        fails_clearly(result, *words, status=status)
        return result.stderr

    (tmp_path / "links").mkdir()
    (tmp_path / "links/a.txt").symlink_to("/nowhere")
    inputs = [tmp_path / "links"]
    fails("links/a.txt cannot be read: No such file")
    bad = tmp_path / "bad.txt"
    inputs = [bad]
    fails("no such file", "bad.txt")
    bad.write_bytes(b"")
    fails("bad.txt: the files are empty")
    bad.write_bytes(b" \n\n ")
    fails("only white space")
    bad.write_bytes(b"x" * 1_500_000 + b"caf\xe9" + b"y" * 100)
    fails("bad.txt is not UTF-8", "offset 1,500,003", "--on_error")
    bad.write_bytes(gzip.compress(b"text"))
    inputs = [tmp_path / "bad.jsonl"]
    for line, words in (
        (b'{"text": "x"', ["not valid JSON", "a record takes one line"]),
        (b'{"body": 1}', ["no field 'text'", "'body'", "--text_field"]),
        (b'{"text": 1}', ["'text' is 1, not a text"]),
        (b"[]", ["[] is not an object"]),
        (b'{"text": "\xff"}', ["not UTF-8 at byte 10;"]),
    ):
        inputs[0].write_bytes(b'{"text": "good"}\n\n' + line + b"\n")
        fails("bad.jsonl, line 3", *words)
    inputs[0].write_bytes(b'{"text": "\\ud83d"}\n')
    fails("surrogate")
    for packing, name in ((gzip.compress, "cut.txt.gz"), (zstd.compress, "cut.jsonl.zst")):
        inputs = [tmp_path / name]
        inputs[0].write_bytes(packing(json.dumps({"text": prose()}).encode())[:-100])
        fails(name, "cut off or damaged")
    inputs = [tmp_path / "cut.parquet"]
    inputs[0].write_bytes(b"PAR1 no table")
    fails("cut.parquet cannot be read as parquet")
    inputs = [tmp_path / "my pictures"]
    inputs[0].mkdir()
    (inputs[0] / "a.png").write_bytes(b"x")
    (inputs[0] / "b.md").write_bytes(b"x")
    fails("holds no .txt, .jsonl or .parquet", "1 .png, 1 .md", f"'{inputs[0]}/**/*.ENDING'")
    inputs = [tmp_path / "*.csv"]
    fails("no file matches")
    inputs = [tmp_path / "table.csv"]
    inputs[0].write_text("title,body\na,b\n")
    fails("table.csv has no column 'text'; it has title, body", "--text_field")
    inputs = [tmp_path / "settings.json"]
    inputs[0].write_text('{"text": "one object"}')
    fails("settings.json is no array of objects", ".jsonl")
    inputs = [tmp_path / "books.tar.gz"]
    inputs[0].write_bytes(gzip.compress(b"books"))
    fails("books.tar.gz is an archive; unpack it")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/a.txt").write_text("Plain text.")
    inputs = [tmp_path / "folder"]
    fails("is in the input", out=tmp_path / "folder/out")
    inputs = [tmp_path / "plain.txt"]
    inputs[0].write_text("Plain text.")
    fails("all of the input is plain text", text_field="text")


def test_bad_arguments_are_named(tmp_path, tokenizer):
    out = tmp_path / "out"
    fails_clearly(prepare(tokenizer=tokenizer, out=out, workers=0), "--workers: 0")
    good = tmp_path / "good.txt"
    good.write_text(prose()[:5000])
    fails_clearly(prepare(good, vocab_size=32000, out=out), "the text supports --vocab_size")
    fails_clearly(prepare(good, vocab_size=100, out=out), "at least 257")
    good.write_text("x")
    tiny = prepare(good, out=out)
    fails_clearly(tiny, "supports --vocab_size 257 at most, not 1024: use --tokenizer char")
    fails_clearly(prepare(good, encoding="utf-61", out=out), "utf-61 is no encoding")
    good.write_text(prose()[:5000])
    other = tmp_path / "other.json"
    Tokenizer.characters("abc").save(other)
    fails_clearly(
        prepare(good, tokenizer=other, out=out), "good.txt", "is not among the 3 characters"
    )
    fails_clearly(prepare(good, tokenizer=tmp_path / "none.json", out=out), "no tokenizer at")


def test_on_error_skip_and_replace(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_bytes(
        b"good document one\n<|endoftext|>\nbad caf\xe9 here\n<|endoftext|>\ngood document two\n"
    )
    flags = {"tokenizer": tokenizer, "val_fraction": 0}
    ok(prepare(tmp_path / "a.txt", on_error="skip", out=tmp_path / "skip", **flags))
    assert documents(tmp_path / "skip") == ["good document one\n", "good document two\n"]
    ok(prepare(tmp_path / "a.txt", on_error="replace", out=tmp_path / "replace", **flags))
    assert documents(tmp_path / "replace")[1] == "bad caf\ufffd here\n"
    lines = ['{"text": "good document"}', "{broken", '{"other": 1}', '"\\ud83d"']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    result = ok(prepare(tmp_path / "b.jsonl", on_error="skip", out=tmp_path / "lines", **flags))
    assert (
        documents(tmp_path / "lines") == ["good document"]
        and "unusable records: 3 documents" in result.stdout
    )
    (tmp_path / "c.jsonl").write_text('{"text": "a \\ud83d b"}')
    result = ok(prepare(tmp_path / "c.jsonl", on_error="replace", out=tmp_path / "c", **flags))
    assert documents(tmp_path / "c") == ["a \ufffd b"] and "1 document, 3 bytes" in result.stdout


def test_characters_are_those_of_whole_documents(tmp_path):
    book = "x y " * 375_000 + "z"  # two chunks
    (tmp_path / "book.txt").write_text(book)
    flags = {"tokenizer": "char", "val_fraction": 0, "out": tmp_path / "out"}
    ok(prepare(tmp_path / "book.txt", gigabytes=0.001, **flags))
    assert documents(tmp_path / "out") == [book]


def test_what_opens_an_address_is_in_no_chunk(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    source = Source("https://me:secret@host/a.txt?token=secret", "txt", "", 4, 0)
    chunk = next(read_chunks([source], Position(0), Options(), lambda index: tmp_path / "a.txt"))
    assert chunk.data == b"text" and "secret" not in chunk.path
