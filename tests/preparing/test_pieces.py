"""Where text is cut, and what is sampled of it: properties, on files."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from preparing import cutting, near, readers
from preparing.encoder import encode
from preparing.inputs import find_sources
from preparing.options import Options
from preparing.pieces import Position
from preparing.readers import read_pieces
from preparing.records import documents_of
from preparing.seen import Seen
from preparing.tokenizers import spread_sample
from tests.conftest import prose, run_script
from tokenizer_bpe import EOT, Tokenizer, safe_cut

SPACES = [" ", "  ", "\n", "\n\n", "\r\n", "\t", "\u2028", "\xa0"]
WORDS = st.lists(
    st.sampled_from(
        [
            *SPACES,
            "a",
            "word",
            "12",
            "'s",
            "don't",
            ".",
            "...",
            "。",
            "，",
            "你好",
            "é",
            "e\u0301",
            "Привет",
            "हिन्दी",
            "🙂",
            "½",
            "_",
            EOT,
            f"\n{EOT}\n",
        ]
    )
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train([prose(), "你好。你好，Привет Привет हिन्दी 🙂 " * 20], 700)


def read(path, piece, monkey):
    """All pieces of a file, pieces being `piece` bytes."""
    monkey.setattr(readers, "PIECE", piece)
    monkey.setattr(cutting, "PIECE", piece)
    monkey.setattr(cutting, "NO_CUT", 16 * piece)
    return list(read_pieces(find_sources([str(path)]), Position(), Options()))


@settings(deadline=None, max_examples=300)
@given(WORDS.map("".join), st.integers(0, 60))
def test_encoding_both_sides_of_a_cut_is_encoding_the_whole(tokenizer, text, limit):
    cut = safe_cut(text, min(limit, len(text)))
    assert 0 <= cut <= limit
    assert [*tokenizer.encode(text[:cut]), *tokenizer.encode(text[cut:])] == tokenizer.encode(
        text
    ).tolist()


@settings(deadline=None, max_examples=200)
@given(WORDS.map("".join), st.sampled_from([1 << 6, 1 << 8]))
def test_pieces_hold_the_whole_text_and_encode_like_it(tokenizer, text, size):
    with pytest.MonkeyPatch.context() as monkey, tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.txt"
        path.write_bytes((text + "x").encode())
        pieces = read(path, size, monkey)
        assert b"".join(p.data for p in pieces) == (text + "x").encode()
        documents, parts = [], []
        for piece in pieces:
            texts = [document.text for document in documents_of(piece, Options())[0]]
            if piece.begins and piece.ends:
                documents += [tokenizer.encode(t).tolist() for t in texts]
            else:
                parts += [i for t in texts for i in tokenizer.encode(t).tolist()]
                if piece.ends:
                    documents.append(parts)
                    parts = []
        lines, expected = (text + "x").split("\n"), [[]]
        for n, line in enumerate(lines):
            if line.rstrip(" \t\r") == EOT:
                expected.append([])
            else:
                expected[-1].append(line + ("\n" if n + 1 < len(lines) else ""))
        whole = [tokenizer.encode("".join(e)).tolist() for e in expected if "".join(e).strip()]
        if not any(
            len("".join(e).encode()) > 16 * size for e in expected
        ):  # such a long one may be cut where a token crosses
            assert documents == whole


@pytest.mark.parametrize("size", [1 << 10, 1 << 14])
def test_reading_on_from_any_piece_gives_the_same_pieces(tmp_path, monkeypatch, size):
    (tmp_path / "a.txt").write_text(
        prose()[:100_000] + f"\n{EOT}\nshort\n{EOT}\n" + prose()[100_000:], newline="\n"
    )
    whole = read(tmp_path / "a.txt", size, monkeypatch)
    for n in range(1, len(whole), 7):
        again = list(
            read_pieces(find_sources([str(tmp_path / "a.txt")]), whole[n - 1].after, Options())
        )
        assert [(p.data, p.begins, p.ends) for p in again] == [
            (p.data, p.begins, p.ends) for p in whole[n:]
        ]


def test_a_long_text_encodes_in_parts_like_in_one(tokenizer):
    text = prose() * 16
    assert len(text) > 3_000_000
    assert encode(tokenizer, text).tolist() == tokenizer.encode(text).tolist()


def test_a_sample_is_bounded_and_comes_from_everywhere(tmp_path):
    lines = [f"line {n} {'x' * 90}\n" for n in range(100_000)]
    (tmp_path / "a.txt").write_text("".join(lines), newline="\n")
    pieces = list(read_pieces(find_sources([str(tmp_path / "a.txt")]), Position(), Options()))
    sample = spread_sample(pieces, 3_000_000)
    found = np.array(
        [int(line.split()[1]) for part in sample for line in part.data.decode().splitlines()]
    )
    assert 1_500_000 <= sum(part.size for part in sample) <= 3_000_000
    assert (np.histogram(found, 5, (0, 100_000))[0] > 1000).all()
    assert b"".join(part.data for part in spread_sample(pieces, 10**9)) == "".join(lines).encode()


def test_seen_documents_are_known_again_after_a_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(Seen, "RUN", 64)
    random = np.random.default_rng(0)
    values = random.integers(0, 3000, 5000).astype(np.uint64)
    known, seen = set(), Seen(tmp_path, "seen", 0)
    for n, part in enumerate(np.split(values, 50)):
        if n % 10 == 9:
            seen.log.close()
            seen = Seen(tmp_path, "seen", seen.count)
        expected = [not (v in known or known.add(v)) for v in part.tolist()]
        assert seen.first(part[:, None]).tolist() == expected
    assert seen.count == len(known)


def test_a_document_of_several_keys_is_new_if_none_of_them_came_before(tmp_path):
    seen = Seen(tmp_path, "near", 0)
    keys = np.array([[1, 2], [3, 4], [2, 5], [5, 6]], np.uint64)
    # The third shares a key with the first; it is no document that counts, so the fourth is new.
    assert seen.first(keys).tolist() == [True, True, False, True]
    assert seen.count == 6


def test_near_copies_share_a_key_and_other_documents_none():
    texts = [prose()[n * 5000 :][:5000] for n in range(40)]
    edited = [text.replace(text.split()[100], "otherwise", 1) for text in texts]
    keys = near.band_keys(texts)
    assert (keys == near.band_keys(edited)).any(1).all()
    for n, row in enumerate(keys):
        assert not np.isin(row, np.delete(keys, n, 0)).any()
    assert near.band_keys(["", "one", "\u4e2d" * 1000]).shape == (3, near.BANDS)


def test_preparing_does_without_torch():
    result = run_script("-c", "import prepare_data, sys; print('torch' in sys.modules)")
    assert result.stdout == "False\n", result.stderr
