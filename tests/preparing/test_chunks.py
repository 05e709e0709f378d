"""Cutting and sampling text: properties, on files."""

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preparing import InputError, chunks, readers
from preparing.chunks import Options, Position, together
from preparing.documents import Seen, documents_of, hash64
from preparing.encoder import encode_chunks
from preparing.readers import read_chunks
from preparing.sources import find_sources
from preparing.tokenizers import checked, spread_sample
from tests.conftest import prose
from tests.preparing.conftest import DOCUMENTS, write
from tokenizer_bpe import EOT, Tokenizer, TokenizerError

SPACES = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u2028", "\xa0", "\n    ", "\n\t"]
WORDS = [*SPACES, "a", "word", "12", "'s", "don't", ".", "...", "。", "，", "你好", "é", "e\u0301"]
WORDS += ["Привет", "हिन्दी", "🙂", "½", "_", EOT, f"\n{EOT}\n"]
WORDS = st.lists(st.sampled_from(WORDS))


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([prose(), "你好。你好，Привет Привет हिन्दी 🙂 " * 20], 700)


def read(path, start=None, encoding=None):
    """All chunks of a file, or of a folder's files, from `start` on."""
    sources, options = find_sources([str(path)]), Options(encoding=encoding)
    return list(read_chunks(sources, start or Position(), options, lambda n: sources[n].path))


def described(chunk):
    """A chunk, without the bytes on disk that happen to be read."""
    at = chunk.start
    return chunk.data, at.source, at.offset, at.line, at.inside, chunk.end.inside


def chunks_of(size, monkey):
    """Make chunks `size` bytes long."""
    monkey.setattr(readers, "CHUNK_BYTES", size)
    monkey.setattr(chunks, "CHUNK_BYTES", size)
    monkey.setattr(chunks, "UNCUT_BYTES", 16 * size)


def documents_in(text):
    """The documents of a text, between marks with the blanks around them."""
    found = re.split(rf"[ \t]{{0,50}}{re.escape(EOT)}[ \t\r]{{0,50}}\n?", text)
    return [document for document in found if document.strip()]


@settings(deadline=None, max_examples=200)
@given(WORDS.map("".join), st.sampled_from([1 << 6, 1 << 8]))
@example(f"{'word ' * 20}\n{EOT}\nshort\n{EOT}\nand another\n{EOT}\n", 1 << 6)
@example(f"{'word ' * 10}x{EOT}\nafter a mark at the end of a chunk\n", 1 << 6)
@example(f"{'word ' * 20}\n{EOT}\nan indented\n\t{EOT}\nand {EOT}\n", 1 << 8)
def test_chunks_hold_the_whole_text_and_encode_like_it(tokenizer, text, size):
    text += "x"
    with pytest.MonkeyPatch.context() as monkey, tempfile.TemporaryDirectory() as folder:
        chunks_of(size, monkey)
        path = Path(folder, "a.txt")
        path.write_bytes(text.encode())
        found = read(path)
    assert b"".join(chunk.data for chunk in found) == text.encode()
    expected = documents_in(text)
    if any(len(document.encode()) > 16 * size for document in expected):
        return  # it may be cut where a token crosses
    ids = []
    end = [tokenizer.eot_id]
    for chunk in found:
        for document in documents_of(chunk, Options())[0]:
            ids += [*tokenizer.encode(document.text).tolist(), *(end if chunk.whole else [])]
        if not chunk.whole and not chunk.end.inside and ids[-1:] != end:
            ids += end
    assert ids == [i for text in expected for i in (*tokenizer.encode(text).tolist(), *end)]


@pytest.mark.parametrize(
    ("format", "most"), [("txt", 4096), ("jsonl", 4096), ("parquet", 5000), ("csv", 5000)]
)
def test_chunks_are_about_as_large_as_asked(tmp_path, monkeypatch, format, most):
    chunks_of(1 << 12, monkeypatch)
    path = tmp_path / f"a.{format}"
    write(path, format, DOCUMENTS)
    sizes = [chunk.size for chunk in read(path)]
    assert max(sizes) <= most
    assert len(sizes) < 1.5 * sum(sizes) / (1 << 12)


def test_a_line_too_long_to_be_a_record_is_named(tmp_path, monkeypatch):
    chunks_of(1 << 12, monkeypatch)
    monkeypatch.setattr(readers, "LONGEST_RECORD", 1 << 20)
    (tmp_path / "a.jsonl").write_text("{}\n" * 3 + "[" * (2 << 20))
    with pytest.raises(InputError, match=r"a.jsonl, line 4: longer than 1 MB; .* \(jq -c"):
        read(tmp_path / "a.jsonl")


@pytest.mark.parametrize("format", ["txt", "jsonl", "jsonl.gz", "parquet", "csv"])
def test_reading_on_from_any_chunk_gives_the_same_chunks(tmp_path, monkeypatch, format):
    chunks_of(1 << 12, monkeypatch)
    for name in ("a", "b"):
        write(tmp_path / f"{name}.{format}", format, [*DOCUMENTS, prose()[:50_000]])
    both = tmp_path / f"*.{format}"
    whole = read(both)
    assert len(whole) > 40
    on_disk = [chunk.end.on_disk for chunk in whole]
    assert on_disk == sorted(on_disk)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert 0.95 * size < on_disk[-1] <= size  # parquet's end is no rows
    for n in range(1, len(whole), 6):
        again = read(both, whole[n - 1].end)
        assert list(map(described, again)) == list(map(described, whole[n:]))
        assert again[-1].end.on_disk == on_disk[-1]


def test_small_files_are_together_and_the_same_after_any_of_their_lists(tmp_path, monkeypatch):
    chunks_of(1 << 12, monkeypatch)
    for n, document in enumerate(DOCUMENTS):
        (tmp_path / f"{n:03}.txt").write_text(document)
    (tmp_path / "-1.txt").write_text("a")  # the next file's first part would have room for it
    (tmp_path / "-2.txt").write_text(prose()[:10_000], "utf-8")  # one document, in parts
    whole = read(tmp_path)
    found = list(together(whole))
    assert [chunk for chunks in found for chunk in chunks] == whole
    assert all(len(chunks) == 1 or all(chunk.whole for chunk in chunks) for chunks in found)
    sizes = [sum(chunk.size for chunk in chunks) for chunks in found]
    assert max(sizes) <= 1 << 12 and len(found) < len(whole) / 3
    lists = [list(map(described, chunks)) for chunks in found]
    for n in range(1, len(found)):
        again = together(read(tmp_path, found[n - 1][-1].end))
        assert [list(map(described, chunks)) for chunks in again] == lists[n:]


def test_reading_on_in_another_encoding_gives_the_same_chunks(tmp_path):
    (tmp_path / "a.txt").write_bytes(("Über die Brücke. " + prose() * 16).encode("utf-16"))
    _, second, third, last = read(tmp_path / "a.txt", encoding="utf-16")
    again = read(tmp_path / "a.txt", second.end, encoding="utf-16")
    assert list(map(described, again)) == list(map(described, [third, last]))


def test_cleaning_keeps_the_last_part_of_a_long_document_however_short_it_is(tmp_path, monkeypatch):
    chunks_of(1 << 12, monkeypatch)
    text = "a line of text\n" * 273 + "The end of it."
    (tmp_path / "a.txt").write_text(text, newline="\n")
    parts = [documents_of(chunk, Options(clean=True))[0] for chunk in read(tmp_path / "a.txt")]
    assert [len(part.text) for (part,) in parts] == [4095, 14]


def test_a_sample_is_bounded_and_comes_from_everywhere(tmp_path, monkeypatch):
    chunks_of(1 << 17, monkeypatch)
    lines = [f"line {n} {'x' * 90}\n" for n in range(100_000)]
    (tmp_path / "a.txt").write_text("".join(lines), newline="\n")
    found = read(tmp_path / "a.txt")
    sample = spread_sample(found, 3_000_000)
    assert 1_500_000 <= sum(part.size for part in sample) <= 3_000_000
    begins = [part.start.offset / sum(map(len, lines)) for part in sample]
    assert min(np.histogram(begins, 5, (0, 1))[0]) > 1
    assert spread_sample(found, 10**9) == found


def test_sampling_ends_at_the_first_text_if_that_cannot_be_read(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "a"}\n')
    (tmp_path / "b.jsonl").write_text('{"body": "b"}\n')
    sources = find_sources([str(tmp_path)])
    found = read_chunks(sources, Position(), Options(), lambda n: sources[n].path)
    with pytest.raises(InputError, match=r"a\.jsonl, line 1: no field 'text'"):
        spread_sample(checked(found, Options()), 10**6)
    assert next(found).path == sources[1].path


def test_copies_are_equal_up_to_the_white_space_at_their_end():
    assert hash64(b"A line.\n \t\n") == hash64(b"A line.")
    others = (b" A line.", b"a line.", b"A  line.", b"A line. A line.", b"A line")
    assert hash64(b"A line.") not in map(hash64, others)


def test_seen_documents_are_known_again_after_a_restart(tmp_path):
    seen = Seen(tmp_path / "seen.bin", 0)
    assert seen.first(np.array([7, 7, 8], np.uint64)).tolist() == [True, False, True]
    count = seen.save()
    seen.first(np.array([9], np.uint64))
    seen.save()  # the journal still has the former count
    seen = Seen(tmp_path / "seen.bin", count)
    assert seen.first(np.array([8, 9, 9], np.uint64)).tolist() == [False, True, False]


def test_a_character_without_an_id_is_named_with_its_place(tmp_path):
    (tmp_path / "a.txt").write_text(f"a\n{EOT}\nab\n{EOT}\nbax\n", newline="\n")
    (tmp_path / "b.jsonl").write_text('{"text": "a"}\n{"text": "x"}\n')
    for name, place in (("a.txt", "from offset 33"), ("b.jsonl", "line 2")):
        with pytest.raises(TokenizerError, match=f"{name}, {place}: the character 'x'"):
            encode_chunks(Tokenizer.characters("ab\n"), Options(), read(tmp_path / name))
