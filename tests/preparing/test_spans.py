"""Spans, each read by itself, are together the file: properties, on files."""

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preparing import cutting, readers, spans
from preparing.inputs import find_sources
from preparing.options import Options
from preparing.pieces import Position
from preparing.readers import read_pieces, read_span
from preparing.records import documents_of
from preparing.spans import spans_of
from tests.preparing.conftest import DOCUMENTS, write
from tokenizer_bpe import EOT

LINES = st.sampled_from(
    ["a", "some words and more of them", "", "é。🙂 " * 9, f"no {EOT}", EOT, f"{EOT} \t"]
)
ENDS = st.sampled_from(["\n", "\n", "\n", "\r\n", "\n\n"])


def contents(pieces):
    """What the documents of some pieces are, and where those of several pieces are cut."""
    found = []
    for piece in pieces:
        documents, _ = documents_of(piece, Options())
        found += [(document.text, piece.begins, piece.ends) for document in documents]
    return found


def read_in_spans(sources, size, start=None):
    """The pieces of some sources, each span of `size` bytes read by itself."""
    found = []
    for span in spans_of(sources, start or Position(), Options(), size):
        found += read_span(span, Options())
    return found


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(LINES, ENDS)), st.booleans(), st.integers(1, 99), st.integers(64, 200))
def test_spans_of_text_are_together_the_file(lines, ended, size, piece):
    with pytest.MonkeyPatch.context() as monkey, tempfile.TemporaryDirectory() as folder:
        monkey.setattr(readers, "PIECE", piece)
        monkey.setattr(cutting, "PIECE", piece)
        monkey.setattr(cutting, "NO_CUT", 16 * piece)
        monkey.setattr(spans, "BLOCK", piece // 2)
        text = "".join(line + end for line, end in lines) + ("" if ended else "x")
        path = Path(folder, "a.txt")
        path.write_bytes(text.encode() or b"x")
        sources = find_sources([str(path)])
        whole = list(read_pieces(sources, Position(), Options()))
        assert contents(read_in_spans(sources, size)) == contents(whole)
        for n in (len(whole) // 3, len(whole) // 2):
            rest = read_in_spans(sources, size, whole[n].after)
            assert contents(rest) == contents(whole[n + 1 :])


@pytest.mark.parametrize("format", ["jsonl", "parquet", "jsonl.gz"])
@pytest.mark.parametrize("size", [100, 1 << 14, 1 << 22])
def test_spans_of_records_are_together_the_file(tmp_path, format, size):
    path = tmp_path / f"a.{format}"
    write(path, format, DOCUMENTS)
    sources = find_sources([str(path)])
    whole = list(read_pieces(sources, Position(), Options()))
    assert contents(read_in_spans(sources, size)) == contents(whole)
    part = read_in_spans(sources, size)
    for n in range(0, len(part), 50):
        rest = read_in_spans(sources, size, part[n].after)
        assert contents(rest) == contents(part[n + 1 :])


def test_a_line_is_named_by_where_its_span_begins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a report cuts long names
    lines = [json.dumps({"text": f"line {n} of the file"}) for n in range(100)]
    lines[97] = "{broken"
    path = Path("a.jsonl")
    path.write_text("\n".join(lines), newline="\n")
    span = list(spans_of(find_sources([str(path)]), Position(), Options(), 1000))[-1]
    (piece,) = read_span(span, Options())
    _, report = documents_of(piece, Options(on_error="skip"))
    (problem,) = report.rules["unusable records"][2]
    words = problem.replace(",", "").split()
    number, start = int(words[2]), int(words[5])
    assert path.read_text()[start:].splitlines()[number - 1] == "{broken", problem
