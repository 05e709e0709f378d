"""The input of prepare_data.py: formats, folders, standard input, and mistakes in them."""

import gzip
import json
import os
import random
import shutil
import tarfile

import pytest

from command_line import quote
from formats.data_folder import read_meta
from preparing import InputError
from preparing.arguments import default_out
from preparing.chunks import Options, Position
from preparing.foreign import foreign
from preparing.readers import read_chunks
from preparing.sources import Source, find_sources
from preparing.tokenizers import without_long_words
from tests.conftest import fails_clearly, ok, prose
from tests.preparing.conftest import DOCUMENTS, documents, prepare, read, write, zstd
from tokenizer_bpe import Tokenizer, spell

FORMATS = ["txt", "jsonl", "txt.gz", "jsonl.gz", "txt.zst", "jsonl.zst", "parquet"]
FORMATS += ["csv", "csv.gz", "tsv", "json"]


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_gives_the_same_documents(tmp_path, flags, format):
    pytest.importorskip("pyarrow.parquet")
    write(tmp_path / f"a.{format}", format, DOCUMENTS)
    ok(prepare(tmp_path / f"a.{format}", **flags))
    got = [text.removesuffix("\n") for text in documents(tmp_path / "out")]
    assert sorted(got) == sorted(DOCUMENTS)


def test_folders_and_globs(tmp_path, tokenizer):
    (tmp_path / "in/deep").mkdir(parents=True)
    (tmp_path / "in/.venv").mkdir()
    write(tmp_path / "in/b.txt", "txt", DOCUMENTS[:50])
    write(tmp_path / "in/deep/a.jsonl.gz", "jsonl.gz", DOCUMENTS[50:])
    for name in ("picture.png", "table.parquet.gz", "deep/notes.md", ".venv/license.txt"):
        (tmp_path / "in" / name).write_bytes(b"not read")
    result = ok(prepare(tmp_path / "in", tokenizer=tokenizer, out=tmp_path / "folder"))
    assert len(documents(tmp_path / "folder")) == 200
    assert "2 files, skipping 1 .png, 1 .gz, 1 .md; to read other types" in result.stderr
    for glob in ("in/**.jsonl.gz", "in/**/*.jsonl.gz"):
        assert len(find_sources([f"{tmp_path}/{glob}"])) == 1
    ok(prepare(tmp_path / glob, tokenizer=tokenizer, out=tmp_path / "glob"))
    assert sorted(documents(tmp_path / "glob")) == sorted(DOCUMENTS[50:])


def test_standard_input_is_read_as_a_file_is(tmp_path, tokenizer):
    for format in ("jsonl", "csv"):
        write(tmp_path / f"a.{format}", format, DOCUMENTS)
        flags = {"stdin_format": format, "tokenizer": tokenizer, "val_fraction": 0}
        text = (tmp_path / f"a.{format}").read_text("utf-8")
        ok(prepare("-", text=text, out=tmp_path / format, **flags))
        assert documents(tmp_path / format) == DOCUMENTS


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_a_file_counts_once_however_many_ways_lead_to_it(tmp_path, flags):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.md").write_text(DOCUMENTS[0])
    (tmp_path / "in/circle").symlink_to(".")
    (tmp_path / "in/another.md").symlink_to("b.md")
    inputs = (tmp_path / "in/**/*.md", tmp_path / "in/../in/b.md")
    ok(prepare(*inputs, val_fraction=0, **flags))
    assert read_meta(tmp_path / "out").sources[0]["path"] == f"{tmp_path}/in/another.md"
    assert documents(tmp_path / "out") == DOCUMENTS[:1]


def test_names_of_files_need_not_be_utf_8(tmp_path, tokenizer):
    (tmp_path / "caf\udce9").mkdir()
    (tmp_path / "caf\udce9/\udcff.txt").write_bytes(b"caf\xe9 and more\n")
    flags = {"tokenizer": tokenizer, "out": tmp_path / "bad\udcff"}
    fails_clearly(prepare(tmp_path / "caf\udce9", **flags), "/caf\\udce9/\\udcff.txt: not UTF-8")
    ok(prepare(tmp_path / "caf\udce9", on_error="replace", **flags))
    found = read_meta(tmp_path / "bad\udcff").sources[0]["path"]
    assert found == f"{tmp_path}/caf\udce9/\udcff.txt"


def test_ordinary_text_is_sampled_in_whole_documents():
    for text in (*DOCUMENTS, prose(), "汉字和かな、12 345。" * 900, "", "x" * 1024):
        assert list(without_long_words(text)) == [text]
    for length in (1025, 2047, 2048, 4096, 5000):
        words = ["x" * length, "1" * length, "-_" * (length // 2), "น้ำ" * (length // 3)]
        for word in (*words, "ACGT" * (length // 4)):
            parts = list(without_long_words(f"A word: {word}."))
            assert "".join(parts) == f"A word: {word}."
            assert max(map(len, parts)) < 2048 + len("A word: .")


def test_the_folder_is_named_after_the_input():
    for given, out in (
        ("texts/a.txt.gz", "data/a"),
        ("texts", "data/texts"),
        ("texts/*.txt", "data/texts"),
        ("texts/**/*.md", "data/texts"),
        ("texts/part-[0-9].txt", "data/part"),
        ("texts/wiki*.txt", "data/wiki"),
        ("wiki*/*.txt", "data/wiki"),
        ("hf://datasets/someone/books/**/*.parquet", "data/books"),
        ("/", "data/text"),
    ):
        assert default_out([given]) == out


GOOD_LINE = b'{"text": "good"}\n\n'
BAD = [
    ("a.txt", b"", "a.txt: the files are empty"),
    ("a.txt", b" \n\n ", "only white space"),
    ("a.txt", b"line\n" * 300_000 + b"<|endoftext|>\ncaf\xe9", "byte 0xe9 at offset 1,500,017"),
    ("a.jsonl", GOOD_LINE + b'{"text": "x"\n', "a.jsonl, line 3: not valid JSON"),
    ("a.jsonl", GOOD_LINE + b'{"body": 1}', "line 3: no field 'text', there is 'body'; name"),
    ("a.jsonl", b'{\n  "text": "pretty"\n}', "line 1: not valid JSON"),
    ("a.jsonl", b'{"input": "?", "output": "!"}', "there is 'input', 'output'; name"),
    ("a.jsonl", GOOD_LINE + b'{"text": 1}', "line 3: 'text' is 1, not a text"),
    ("a.jsonl", b'[{"role": "user"}]\n[]', "line 1: [{'role': 'user'}] is not an object"),
    ("a.jsonl", GOOD_LINE + b'"{\\"text\\": 1}"', "line 3: '{\"text\": 1}' is not an object"),
    ("a.jsonl", GOOD_LINE + b'{"text": "\xff"}', "line 3: not UTF-8: byte 0xff at offset 10;"),
    ("a.jsonl", b'{"text": "\\ud83d"}', "surrogate"),
    ("a.jsonl", b'{"messages": [{"role": "user"}]}', "a message of the role 'user' without"),
    ("a.txt.gz", gzip.compress(prose().encode())[:-100], "a.txt.gz is cut off or damaged"),
    ("a.jsonl.zst", zstd.compress(prose().encode())[:-100], "a.jsonl.zst is cut off or damaged"),
    ("a.txt.gz", b"Hello", "a.txt.gz: it is not compressed; let its name end without .gz"),
    ("a.jsonl.zst", GOOD_LINE, "a.jsonl.zst: it is not compressed; let its name end without .zst"),
    ("a.parquet", b"PAR1 no table", "a.parquet cannot be read as parquet"),
    (
        "a.csv",
        b"title,body\na,b\n",
        "a.csv has no column 'text'; it has 'title', 'body': name",
    ),
    (
        "a.csv",
        "问,答\n你好,你好\n".encode("gbk"),
        "a.csv: its first line is not UTF-8. If files are in another encoding",
    ),
    ("a.csv", "问,答\n你好,你好\n".encode(), "'问', '答': name one with --text_field, rename"),
    ("a.json", b'[{"text": "a"}, 1]', "a.json, row 2: 1 is not an object"),
    ("a.json", b'[{"text": "a"}, ', "a.json cannot be read as json: Expecting value, in row 2"),
    ("a.json", b'{"train": [{"text": "a"}], "test": [{"text": "b"}]}', "there is 'train', 'test'"),
    ("a.json", b"[1]\n[2]", "a.json cannot be read as json: text after its array"),
    ("a.tar.gz", gzip.compress(b"books"), "a.tar.gz is an archive; unpack it"),
]


@pytest.mark.parametrize(("name", "content", "words"), BAD, ids=[words for *_, words in BAD])
def test_bad_files_are_named(tmp_path, flags, name, content, words):
    (tmp_path / name).write_bytes(content)
    fails_clearly(prepare(tmp_path / name, **flags), words)
    assert not (tmp_path / "out").exists()


def test_bad_folders_and_globs_are_named(tmp_path, flags):
    def fails(given, *words, **more):
        fails_clearly(prepare(given, **flags | more), *words)

    for n in range(40):
        (tmp_path / f"{n}.txt").touch()
    fails(tmp_path / "none.txt", "no such file", "none.txt")
    with pytest.raises(InputError, match=r"4\.txt and 35 more: the files are empty"):
        find_sources([f"{tmp_path}/{n}.txt" for n in range(40)])
    fails("A text that is typed in place of a file. " * 200, "no such file or folder: A text that")
    fails(tmp_path / "*.csv", "no file matches")
    folder = tmp_path / "my [old] pictures"
    folder.mkdir()
    result = prepare(folder, **flags)
    fails_clearly(result, "or .parquet file")
    assert result.stderr.endswith("but nothing, hidden folders aside\n")
    advice = quote(f"{tmp_path}/my*/**/*.txt")
    fails(
        tmp_path / "my*", f"/my* matches folders only; write a pattern for files, such as {advice}"
    )
    (folder / "wiki_00").write_bytes(b"x")
    fails(
        folder,
        "but 1 without ending; to read",
        quote(f"{folder.parent.as_posix()}/my [[]old] pictures/**/*"),
    )
    (folder / "wiki_00").rename(folder / "a.pdf")
    fails(folder, "but 1 .pdf; .pdf is a PDF; pdftotext FILE FILE.txt converts it")
    (folder / "a.pdf").unlink()
    (folder / "a.png").write_bytes(b"x")
    (folder / "b.MD").write_bytes(b"x")
    fails(
        folder,
        "holds no .txt, .jsonl or .parquet",
        "1 .png, 1 .md",
        quote(f"{folder.parent.as_posix()}/my [[]old] pictures/**/*.ENDING"),
    )
    (source,) = find_sources([f"{tmp_path}/my [[]old] pictures/**/*.md"])
    assert source.path == f"{folder.as_posix()}/b.MD"
    (folder / "a.txt").write_text("Plain text.")
    fails(folder, "is in the input", out=tmp_path / "none/.." / folder.name / "out")
    fails(
        folder / "a.txt",
        "b.MD is a file, not a folder; give another --out",
        out=folder / "b.MD/out",
    )
    (tmp_path / "lost").symlink_to("/nowhere")
    fails(folder / "a.txt", "lost is a file, not a folder", out=tmp_path / "lost")
    fails(folder / "a.txt", "all of the input is plain text; let the", text_field="text")
    (folder / "a.jsonl").write_text("{}")
    fails(folder, "/a.jsonl", text_field="text")
    (folder / "b.txt").symlink_to("/nowhere")
    fails(folder / "b.txt", "no file matches")
    os.mkfifo(folder / "pipe.md")
    fails(folder / "pipe.md", "pipe.md is a pipe or a device; give - for standard input")


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_what_systems_hide_in_folders_is_no_text(tmp_path, flags):
    folder = tmp_path / "in"
    (folder / "__MACOSX").mkdir(parents=True)
    (folder / ".git").mkdir()
    fork = b"\0\5\26\7\0\2\0\0Mac OS X        \0\2"
    for name in ("._a.txt", "__MACOSX/a.txt", "~$a.txt", ".a.txt.swp", ".git/a.txt", ".DS_Store"):
        (folder / name).write_bytes(fork)
    (folder / "a.txt").write_text("Text of a file.")
    (folder / ".hidden.txt").write_text("Hidden text.")
    (folder / "b.txt").symlink_to("/nowhere")
    flags |= {"val_fraction": 0}
    result = ok(prepare(folder, **flags))
    assert "1 file, skipping 6 hidden, 1 broken link (b.txt)\n" in result.stderr
    assert documents(tmp_path / "out") == ["Text of a file."]
    for given in (f"{folder}/**/*.txt", f"{folder}/*"):
        assert [source.path for source in find_sources([given])] == [f"{folder}/a.txt"]
    for given in (f"{folder}/.h*", f"{folder}/.hidden*.txt"):  # named
        assert [source.path for source in find_sources([given])] == [f"{folder}/.hidden.txt"]
    assert read(folder / ".hidden.txt")[0] == ["Hidden text."]
    versions = folder.rename(tmp_path / "v3.11")  # the pattern's letters end before a point
    assert [source.path for source in find_sources([f"{tmp_path}/v3*/*"])] == [f"{versions}/a.txt"]


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("a/train.txt", "val/0.txt")])
def test_files_for_tests_in_a_folder_are_named(tmp_path, flags, names):
    for name in names:
        path = tmp_path / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "Latest or attested, 1, 2, 3."}')
    path.with_name("test_a.py").write_text("Code has its own tests, which are text, too.")
    flags |= {"overwrite": True}
    also = f"the model will also train on {tmp_path.as_posix()}/tests/{names[1]}; "
    for place in (tmp_path / "tests", tmp_path / "tests/**/*"):
        assert also in ok(prepare(place, **flags)).stderr
    for place in (tmp_path / "tests" / names[0], path.parent / "*" if "/" in names[1] else path):
        assert "will also" not in ok(prepare(place, **flags)).stderr


@pytest.mark.skipif(os.name == "nt", reason="needs links")
def test_linked_folders_are_followed_and_each_is_read_once(tmp_path):
    for name in ("in/own", "elsewhere/deep"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "a.txt").write_text(name)
    (tmp_path / "in/books").symlink_to("../elsewhere")
    (tmp_path / "in/again").symlink_to("../elsewhere/deep")
    (tmp_path / "in/own/circle").symlink_to("..")
    found = [source.path for source in find_sources([str(tmp_path / "in")])]
    assert found == [f"{tmp_path}/in/again/a.txt", f"{tmp_path}/in/own/a.txt"]


ZIP = b"PK\3\4\24\0\0\0\10\0" + bytes(16)
PNG = b"\x89PNG\r\n\x1a\n" + random.Random(1).randbytes(2000)
FOREIGN = [
    ("a.pdf", b"%PDF-1.5\n%\xe2\xe3", "a PDF; pdftotext"),
    ("a.txt", b"%PDF-1.5\n%\xe2\xe3", "a PDF; pdftotext"),
    ("a.docx", ZIP, "a Word document; pandoc -t plain --wrap=none "),
    ("a.csv", ZIP + b"xl/workbook.xml", "a spreadsheet; save it as CSV"),
    ("a.md", ZIP + b"mimetypeapplication/epub+zip", "an e-book; pandoc"),
    ("a.txt", ZIP + b"mimetypeapplication/vnd.oasis.opendocument.text", "an OpenDocument text"),
    ("a.text", b"\xd0\xcf\x11\xe0" + bytes(30), "a document of an older Office; soffice"),
    ("a.txt", b"{\\rtf1\\ansi Hello}", "an RTF document; pandoc"),
    ("a.jsonl", gzip.compress(b"{}", mtime=0), "compressed; unpack it"),
    ("a.txt", b"PAR1" + bytes(30), "a Parquet file; let its name"),
    ("a.mid", b"MThd" + bytes(4), "a MIDI file; midi2abc"),
    ("a.json", b'{\n "cells": [\n  {\n   "cell_type": "code"', "a notebook; jupyter nbconvert"),
    (
        "a.parquet",
        b"version https://git-lfs.github.com/spec/v1\n",
        "a pointer to a file in Git LFS",
    ),
    ("a.txt", PNG, "binary data, not text: "),
    ("a.bin", b"\x7fELF" + bytes(range(20)) * 9, "binary data, not text: "),
    ("a.txt", "Hällo, world\n".encode("utf-16-le"), "binary data, not text: .* UTF-16, give --enc"),
    ("a.csv", "Привет, мир\n".encode("utf-16-be"), "binary data, not text: .* UTF-16, give --enc"),
]


@pytest.mark.parametrize(("name", "content", "words"), FOREIGN)
def test_files_that_are_no_text_are_named_and_never_read(tmp_path, name, content, words):
    path = tmp_path / "in" / name
    path.parent.mkdir()
    path.write_bytes(content)
    for options in ({}, {"encoding": "latin-1"}):
        with pytest.raises(InputError, match=rf"in/{name}(:? it)? is {words}"):
            read(path, **options)
    if foreign(path.suffix):
        return
    for on_error in ("skip", "replace"):
        assert read(path, on_error=on_error)[0] == []


def test_an_encoding_is_for_the_files_that_are_not_utf_8(tmp_path, recwarn):
    for name, words in (
        ("koi8-r", "Привет, мир; как дела?"),
        ("cp1256", "مرحبا بالعالم، كيف الحال؟"),
        ("gb18030", "床前明月光，疑是地上霜。"),
        ("utf-16-le", "これは日本語の文章です。"),
    ):
        for encoding in (name, "utf-8"):
            (tmp_path / "a.txt").write_bytes(words.encode(encoding))
            assert read(tmp_path / "a.txt", encoding=name)[0] == [words]
    (tmp_path / "a.txt").write_bytes("茅\n".encode("gbk"))  # by chance é in UTF-8
    assert read(tmp_path / "a.txt", encoding="gbk")[0] == ["茅\n"]
    assert not recwarn.list  # such as an unclosed file


def test_text_that_begins_almost_as_another_format_is_text(tmp_path):
    """As a line of Shakespeare's has "mustard" where an archive has "ustar"."""
    for text in ("x" * 256 + "mustard, and some bread", "Rar! said the bear", "ARROW1 of five"):
        (tmp_path / "a.txt").write_text(text)
        assert read(tmp_path / "a.txt")[0] == [text]
    with tarfile.open(tmp_path / "b.txt", "w") as archive:
        archive.add(tmp_path / "a.txt")
    with pytest.raises(InputError, match="is an archive; unpack it"):
        read(tmp_path / "b.txt")


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.zst"])
def test_on_error_skip_leaves_out_a_file_that_is_named_as_compressed_but_is_not(tmp_path, name):
    assert read(tmp_path / name, GOOD_LINE, on_error="skip")[0] == []


def test_the_only_file_is_named_where_on_error_leaves_it_out(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"%PDF-1.5\n%\xe2\xe3")
    result = prepare(tmp_path / "a.txt", on_error="replace", out=tmp_path / "out")
    fails_clearly(result, "no document is left", "the first is a.txt: it is a PDF; pdftotext")


def test_zstd_with_a_long_window_and_several_frames(tmp_path):
    """As `zstd --long=28` writes from a pipe: a frame of unknown size, here one raw block of it."""
    text = b"Text of a frame.\n"
    block = (len(text) << 3 | 1).to_bytes(3, "little") + text
    long = b"\x28\xb5\x2f\xfd\0" + bytes([(28 - 10) << 3]) + block
    assert read(tmp_path / "a.txt.zst", long + zstd.compress(text))[0] == [text.decode() * 2]
    assert read(tmp_path / "a.txt.gz", gzip.compress(text) * 2)[0] == [text.decode() * 2]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"workers": 0}, "--workers: 0"),
        ({"vocab_size": 32000}, "the text supports --vocab_size"),
        ({"vocab_size": 100}, "at least 257"),
        ({"vocab_size": 300, "tokenizer": "char"}, "--vocab_size works only with --tokenizer bpe"),
        ({"encoding": "utf-61"}, "Python knows no encoding utf-61"),
        ({"encoding": "rot13"}, "Python knows no encoding rot13"),
        ({"encoding": "idna"}, "Python knows no encoding idna for text files"),
        ({"tokenizer": "none.json"}, "no tokenizer at none.json; give a path on this disk, or"),
        ({"tokenizer": "GPT2"}, "did you mean --tokenizer gpt2?"),
        ({"tokenizer": "characters"}, "did you mean --tokenizer char?"),
    ],
)
def test_bad_arguments_are_named(tmp_path, flags, words):
    (tmp_path / "a.txt").write_text(prose()[:5000], "utf-8")
    (tmp_path / "out").mkdir()
    fails_clearly(prepare(tmp_path / "a.txt", out=tmp_path / "out", **flags), words)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.txt", "out"]


def test_a_tokenizer_whose_model_cannot_be_trained_is_warned_of(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(prose()[:5000], "utf-8")
    shutil.copy(tokenizer, tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    result = ok(prepare(tmp_path / "a.txt", tokenizer=tmp_path, out=tmp_path / "out"))
    assert "warning: training cannot start from its model" in result.stderr
    assert "the architecture 'qwen2'; only" in result.stderr


def test_a_character_that_the_tokenizer_lacks_is_named_with_the_file(tmp_path):
    (tmp_path / "a.txt").write_text("abcd")
    Tokenizer.characters("abc").save(tmp_path / "abc.json")
    flags = {"tokenizer": tmp_path / "abc.json", "out": tmp_path / "out"}
    fails_clearly(prepare(tmp_path / "a.txt", **flags), "a.txt, from", "among the 3 characters")
    (tmp_path / "a.txt").write_text("abcabcabcabc" * 20 + "\x04")
    description = json.loads(Tokenizer.train(["abc"], 257).to_json())
    del description["model"]["vocab"][spell(b"\x04")]
    (tmp_path / "abc.json").write_text(json.dumps(description))
    words = ["a.txt, from", "lacks the byte 0x04; --on_error replace removes such characters"]
    fails_clearly(prepare(tmp_path / "a.txt", **flags), *words)


def test_on_error_decides_about_characters_that_the_tokenizer_lacks(tmp_path):
    Tokenizer.characters("User: Asitan\nyobc").save(tmp_path / "abc.json")
    chat = [{"role": "user", "content": "abcd"}, {"role": "assistant", "content": "cab"}]
    records = [{"text": "abc"}, {"text": "ab\x13c bad"}, {"text": "dd"}, {"messages": chat}]
    lines = "\n".join(map(json.dumps, records))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.txt").write_text("c " * 600_000 + "d" + " c" * 600_000)  # in parts
    flags = {"tokenizer": tmp_path / "abc.json", "val_fraction": 0}
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    result = ok(prepare(*inputs, on_error="skip", out=tmp_path / "skip", **flags))
    first, long = documents(tmp_path / "skip")
    assert first == "abc" and set(long) == {"c", " "} and 200_000 < len(long) < 2_000_000
    assert "unusable documents: 4 documents" in result.stdout
    assert "a.jsonl, line 2: the character" in result.stdout
    result = ok(prepare(*inputs, on_error="replace", out=tmp_path / "replace", **flags))
    texts = ["abc", "abc ba", "User: abc\n\nAssistant: cab\n\n", "c " * 600_000 + " c" * 600_000]
    assert documents(tmp_path / "replace") == texts
    assert "the tokenizer lacks: removed: 4 documents" in result.stdout


@pytest.mark.parametrize(
    ("name", "content", "skipped", "replaced", "reports"),
    [
        (
            "a.txt",
            b"one\n<|endoftext|>\nbad caf\xe9\n<|endoftext|>\ntwo\n",
            ["one\n", "two\n"],
            ["one\n", "bad caf\ufffd\n", "two\n"],
            (
                "unusable documents: 1 document, 9 bytes",
                "not UTF-8: taken with U+FFFD: 1 document, 1 byte",
            ),
        ),
        (
            "a.jsonl",
            b'{"text": "one"}\n{broken\n{"messages": [{"role": 1}]}\n{"messages": ["Hello"]}\n'
            b'{"text": "a \\ud83d, \\ud83d"}\n{"text": "caf\xe9"}',
            ["one"],
            ["one", "a \ufffd, \ufffd", "caf\ufffd"],
            ("unusable documents: 5 documents", "lone surrogates: taken as U+FFFD: 1 document, 6"),
        ),
        (
            "a.json",
            b'[{"text": "one"}, {"text": 1}, {"text": "two"}]',
            ["one", "two"],
            ["one", "two"],
            ("unusable documents: 1 document, 0 bytes", "unusable documents: 1 document, 0 bytes"),
        ),
    ],
)
def test_on_error_skip_and_replace(tmp_path, tokenizer, name, content, skipped, replaced, reports):
    (tmp_path / name).write_bytes(content)
    flags = {"tokenizer": tokenizer, "val_fraction": 0}
    result = ok(prepare(tmp_path / name, on_error="skip", out=tmp_path / "skip", **flags))
    assert documents(tmp_path / "skip") == skipped
    assert reports[0] in result.stdout
    result = ok(prepare(tmp_path / name, on_error="replace", out=tmp_path / "replace", **flags))
    assert documents(tmp_path / "replace") == replaced
    assert reports[1] in result.stdout


def test_characters_are_those_of_whole_documents(tmp_path):
    book = "x y " * 375_000 + "z"  # two chunks
    (tmp_path / "book.txt").write_text(book)
    flags = {"tokenizer": "char", "val_fraction": 0, "out": tmp_path / "out"}
    ok(prepare(tmp_path / "book.txt", gigabytes=0.001, **flags))
    assert documents(tmp_path / "out") == [book]


def test_what_opens_an_address_is_in_no_chunk(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    source = Source("https://me:secret@host/a.txt?token=secret", "txt", "", 4, "")
    chunk = next(read_chunks([source], Position(0), Options(), lambda index: tmp_path / "a.txt"))
    assert "secret" not in chunk.path
