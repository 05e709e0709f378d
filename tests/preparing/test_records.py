"""Tables as programs write them: separators, quotes, headers, encodings, JSON under other names."""

import csv
import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest

from preparing import InputError
from preparing.chunks import Options, Position
from preparing.documents import EMPTY, UNUSABLE
from preparing.mistakes import UNREAD
from preparing.readers import read_chunks
from preparing.sources import find_sources
from tests.conftest import fails_clearly, ok, prose
from tests.preparing.conftest import documents, prepare, read, write

SHAREGPT = [
    {
        "id": "identity_0",
        "conversations": [
            {"from": "human", "value": "Who are you?"},
            {"from": "gpt", "value": 'A model, "small".\nAnd you?'},
        ],
    },
    {
        "id": "Qx1_0",
        "conversations": [{"from": "human", "value": "2+2? "}, {"from": "gpt", "value": "4"}],
    },
]
ALPACA = [
    {"instruction": "Who are you?", "input": "", "output": 'A model, "small".\nAnd you?'},
    {"instruction": "2+2?", "input": None, "output": "4"},
]
# As on the Hub, where a field has the exchange as text, too.
RENDERED = [
    {**row, "text": f"### Instruction:\n{row['instruction']}\n\n### Response:\n{row['output']}"}
    for row in ALPACA
]
TEMPLATED = [  # as notebooks keep what apply_chat_template() gives
    {**row, "text": "".join(f"<s>{turn['value'].strip()}</s>\n" for turn in row["conversations"])}
    for row in SHAREGPT
]
ROWS = [f"{n},Row {n}." for n in range(1, 401)]
TEXTS = [f"Row {n}." for n in range(1, 401)]


def write_rows(path, rows):
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, rows[0])
        table.writeheader()
        for row in rows:
            cells = row.items()
            table.writerow({k: json.dumps(v) if isinstance(v, list) else v for k, v in cells})


def table(*rows, end="\n", last="\n"):
    return end.join(rows) + last


GOOD = {
    "semicolons, decimal commas": ("a.csv", table("id;text", "1,5;a, b", "2,0;c"), ["a, b", "c"]),
    "tabs in a .csv": ("a.csv", table("id\ttext", "1\ta, b", '2\tc"'), ["a, b", 'c"']),
    "commas in a .tsv": ("a.tsv", table("id,text", '1,"a\tb"'), ["a\tb"]),
    "bars": ("a.csv", table("id|text|n", "1|a, b|2"), ["a, b"]),
    "Excel's own line": ("a.csv", table("sep=;", "text;n", "a,b;1"), ["a,b"]),
    "blanks after the commas": ("a.csv", table("id, text", '1, "a, b"', "2, c"), ["a, b", "c"]),
    "one column": (
        "a.csv",
        table("text", "Hello, world", '"a, ""b"""'),
        ["Hello, world", 'a, "b"'],
    ),
    "a cell of several lines": ("a.csv", table("id,text", '1,"a,\n2 b\n\nc"'), ["a,\n2 b\n\nc"]),
    "several lines between tabs": ("a.tsv", table("id\ttext", '1\t"a\nb"', "2\tc"), ["a\nb", "c"]),
    "the number of the next row in a cell": (
        "a.csv",
        table("id,text", '1,"Steps:\n2, stop, end"', "2,b", '3,"To do:\n4,x\n5,y"', "4,c"),
        ["Steps:\n2, stop, end", "b", "To do:\n4,x\n5,y", "c"],
    ),
    "the same between tabs": (
        "a.tsv",
        table("id\ttext", '1\t"a\nb\tc"', '2\t"Steps:\n3\td"', "3\te"),
        ["a\nb\tc", "Steps:\n3\td", "e"],
    ),
    "code between tabs": (
        "a.tsv",
        table("name\ttext", 'a\t"def f():\n\treturn 1"', "b\tplain", end="\r\n"),
        ["def f():\n\treturn 1", "plain"],
    ),
    "quotes doubled": (
        "a.csv",
        table("id,text", '1,"He said ""no"", twice"'),
        ['He said "no", twice'],
    ),
    "quotes after backslashes": ("a.csv", table("id,text", r'1,"\"No\", twice"'), ['"No", twice']),
    "quotes within cells": ("a.csv", table("id,text", '1,a "b" c', '2,5"'), ['a "b" c', '5"']),
    "no quotes in one column": ("a.tsv", table("text", '"a" b', '"c'), ['"a" b', '"c']),
    "no quotes between tabs": ("a.tsv", table("id\ttext", '1\t"a" b', '2\t"c'), ['"a" b', '"c']),
    "quotes between tabs that seem to be closed in the next row": (
        "a.tsv",
        table("id\ttext", '1\t"a" b', '5\t"c', '9\td"'),
        ['"a" b', '"c', 'd"'],
    ),
    "the same among quotes within cells": (
        "a.tsv",
        table("id\ttext", 'a\the said "no" twice', 'b\t"c', 'd\te"'),
        ['he said "no" twice', '"c', 'e"'],
    ),
    "the same after much text without quotes": (
        "a.tsv",
        table("id\ttext", *[f"1\t{'a' * 999}"] * 1100, 'b\t"c', 'd\te"'),
        ["a" * 999] * 1100 + ['"c', 'e"'],
    ),
    "a byte order mark": ("a.csv", b"\xef\xbb\xbftext,id\na,1\n", ["a"]),
    "the ends of Windows": ("a.csv", table("id,text", "1,a", "2,b", end="\r\n"), ["a", "b"]),
    "the ends of old Macs": ("a.csv", table("id,text", "1,a", "2,b", end="\r"), ["a", "b"]),
    "empty lines": ("a.csv", table("", "id,text", "1,a", "", "2,b", "", ""), ["a", "b"]),
    "no end of the last line": ("a.csv", table("id,text", '1,"a"', last=""), ["a"]),
    "a cell above 128 KB": ("a.csv", table("id,text", f'1,"{"a " * 100_000}"'), ["a " * 100_000]),
    "UTF-16": ("a.csv", table("id\ttext", "1\tä").encode("utf-16"), ["ä"]),
    "UTF-16, packed": (
        "a.tsv.gz",
        gzip.compress(table("id\ttext", "1\tä").encode("utf-16")),
        ["ä"],
    ),
    "rare line ends": ("a.csv", table("id,text", "1,a\u2028b\x85c"), ["a\u2028b\x85c"]),
    "JSON lines in a .json": ("a.json", '{"text": "a"}\r\n\n{"text": "b"}\n', ["a", "b"]),
    "objects one after the other": ("a.json", '{\n"text": "a"}\n{\n"text": "b"}', ["a", "b"]),
    "an array in a .jsonl": ("a.jsonl", '\n[ {"text": "a"},\n{"text": "b"}]\n', ["a", "b"]),
    "an array with a comma at its end": ("a.json", '[{"text": "a"}, {"text": "b"},\n]', ["a", "b"]),
    "an array within an object": ("a.json", '{"n": 1, "data": [{"text": "a"}]}', ["a"]),
    "an object": ("a.json", '{"text": "a",\n "id": 1}', ["a"]),
    "UTF-16 JSON": ("a.json", '[{"text": "ä"}]'.encode("utf-16"), ["ä"]),
    "UTF-32 JSON lines": ("a.jsonl", '{"text": "ä"}\n{"text": "b"}'.encode("utf-32"), ["ä", "b"]),
    "byte order marks of files that were put together": (
        "a.jsonl",
        b'\xef\xbb\xbf{"text": "a"}\n\xef\xbb\xbf{"text": "b"}',
        ["a", "b"],
    ),
    "a byte order mark before JSON": (
        "a.json",
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}',
        ["a", "b"],
    ),
}


def test_an_array_is_read_as_far_as_it_is_needed(tmp_path):
    """Its last object is longer than a block."""
    texts = [*(f"{n} 🦊 {prose()}" for n in range(20)), prose() * 8]
    write(tmp_path / "a.json", "json", texts)
    (source,) = find_sources([str(tmp_path / "a.json")])
    chunks = read_chunks([source], Position(), Options(), lambda n: source.path)
    assert next(chunks).end.on_disk < source.size / 2
    assert read(tmp_path / "a.json")[0] == texts


def test_texts_without_a_field_are_documents(tmp_path):
    texts = ["One.", "Two\nlines, {so}.", 'x = {"a": 1}']
    assert read(tmp_path / "a.json", json.dumps(texts)) == (texts, {})
    assert read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, texts))) == (texts, {})


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    "fields", [f'"text": {DEEP}', f'"messages": "{DEEP}"', f'"prompt": "a", "history": "{DEEP}"']
)
def test_json_that_is_nested_too_deeply_is_left_out(tmp_path, fields):
    lines = '{"text": "a"}\n{"answer": "b", ' + fields + '}\n{"text": "c"}'
    texts, rules = read(tmp_path / "a.jsonl", lines, on_error="skip")
    assert texts == ["a", "c"]
    assert rules[UNUSABLE]["documents"] == 1


def test_a_text_that_begins_with_many_brackets_is_a_text(tmp_path):
    line = json.dumps({"body": DEEP})
    assert read(tmp_path / "a.jsonl", line, text_field="body")[0] == [DEEP]


@pytest.mark.parametrize(("name", "content", "texts"), GOOD.values(), ids=GOOD)
def test_a_table_is_read_as_it_was_meant(tmp_path, name, content, texts):
    assert read(tmp_path / name, content) == (texts, {})


@pytest.mark.parametrize("separator", [",", "\t", ";"])
def test_a_quote_that_stays_open_takes_no_other_row(tmp_path, separator):
    open_quote = ["id,text", '1,"It was dark.', *ROWS[1:]]
    path = tmp_path / "a.csv"
    path.write_text(table(*open_quote).replace(",", separator))
    if separator == "\t":
        assert read(path) == (['"It was dark.', *TEXTS[1:]], {})
        return
    with pytest.raises(InputError, match=r"a\.csv, line 2: a quote is open.*--on_error skip"):
        read(path)
    for on_error in ("skip", "replace"):
        texts, report = read(path, on_error=on_error)
        assert texts == TEXTS[1:]
        assert report["unusable documents"]["documents"] == 1


BAD_ROWS = {
    '7,"It was dark.\n8,A screen of 5"': "a quote is open, and the next row is within it",
    '7,"a" b': "a quote is open",
    "7,Well, then": "a row of 3 cells, where the header has 2; put cells that hold ',' in quotes",
    "7": "a row of 1 cell, .*; put cells with line breaks in quotes, and ',' after empty ones",
}


@pytest.mark.parametrize(("row", "words"), BAD_ROWS.items())
def test_a_row_that_does_not_fit_is_named_or_left_out(tmp_path, row, words):
    content = table("id,text", '1,"a\nb"', row, "9,c")
    with pytest.raises(InputError, match=rf"a\.csv, line 4: {words}"):
        read(tmp_path / "a.csv", content)
    texts, report = read(tmp_path / "a.csv", on_error="skip")
    assert [texts[0], texts[-1]] == ["a\nb", "c"]
    assert report["unusable documents"]["documents"] == 1


def test_a_row_that_does_not_fit_leaves_the_quotes_of_the_others(tmp_path):
    content = table("name\ttext", "a\tb\tc", 'd\t"e\n\tf"', "g\th")
    texts, report = read(tmp_path / "a.tsv", content, on_error="skip")
    assert texts == ["e\n\tf", "h"]
    assert report["unusable documents"]["documents"] == 1


BAD_HEADERS = [
    (
        "1,It was dark\n2,b\n",
        "no column 'text'; it has '1', 'It was dark': .* begin with a line of names",
    ),
    ("My export\nid,text\n1,a\n", "no column 'text'; it has 'My export'"),
    ("text,id,text\na,1,b\n", "2 columns 'text'; rename"),
]


@pytest.mark.parametrize(("content", "words"), BAD_HEADERS)
def test_a_header_that_names_no_text_is_explained(tmp_path, content, words):
    with pytest.raises(InputError, match=words):
        read(tmp_path / "a.csv", content)


LATIN = [f"A café {n}." for n in range(300)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv", "a.tsv.gz", "a.json"])
def test_broken_bytes_are_treated_alike_in_every_format(tmp_path, name):
    if "json" in name:
        text = "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in LATIN)
    else:
        text = "\n".join(["text", *LATIN] if "sv" in name else LATIN)
    data = text.encode("cp1252")
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    with pytest.raises(InputError, match=r"byte 0xe9 .*--on_error replace.*--encoding cp1252"):
        read(path)
    assert "\n".join(read(path, encoding="cp1252")[0]) == "\n".join(LATIN)
    texts, report = read(path, on_error="replace")
    assert "\n".join(texts) == "\n".join(LATIN).replace("é", "\ufffd")
    assert report["not UTF-8: taken with U+FFFD"]["bytes"] == 300
    assert read(path, on_error="skip")[0] == []


def test_the_options_for_text_reach_every_table(tmp_path, flags):
    (tmp_path / "a.csv").write_bytes(b"body,text\nA caf\xe9.,x\n")
    flags |= {"text_field": "body", "val_fraction": 0}
    fails_clearly(prepare(tmp_path / "a.csv", **flags), "a.csv, line 2: not")
    ok(prepare(tmp_path / "a.csv", encoding="cp1252", **flags))
    assert documents(tmp_path / "out") == ["A café."]


def test_a_record_whose_text_is_empty_is_left_out_and_counted(tmp_path):
    write(tmp_path / "a.parquet", "parquet", ["one", None, "", "two"])
    lines = '{"text": "one"}\n{"text": null, "id": 1}\n{"text": ""}\n{"text": "two"}\n'
    for path, content in ((tmp_path / "a.parquet", None), (tmp_path / "a.jsonl", lines)):
        found, report = read(path, content)
        assert found == ["one", "two"]
        assert list(report) == [EMPTY]
        assert report[EMPTY]["documents"] == 2


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv"])
def test_fields_that_hold_more_than_the_text_are_named(tmp_path, name):
    rows = [
        {"id": "00a9-0b8c", "label": "copyright sign", "text": "©", "date": "2024-01-01 10:00:00"},
        {"id": "00ae-0b8d", "label": "red heart", "text": "", "date": "2024-01-01 10:00:00"},
        {"id": "00af-0b8e", "label": "a heart", "text": "A red heart.", "date": "2024-01-01"},
        {"id": "00af-0b8f", "label": None, "text": "♥", "date": "2024-01-01"},
    ]
    path = tmp_path / name
    if name == "a.csv":
        write_rows(path, rows)
    else:
        lines = [json.dumps(row) for row in rows]
        path.write_text("\n".join([*lines, ""]) if name == "a.jsonl" else json.dumps(rows))
    texts, report = read(path)
    assert texts == ["©", "A red heart.", "♥"]
    assert report[UNREAD] == {"documents": 3, "bytes": 23, "examples": ["'label'"]}
    assert UNREAD not in read(path, text_field="text")[1]


def test_fields_that_are_long_in_some_records_or_the_same_in_many_are_not_named(tmp_path):
    said = [{"speaker": "Captain Picard", "text": f"Yes, {n}."} for n in range(100)]
    reviews = [{"title": "As always, good", "text": "Good."}, {"title": "So", "text": prose()}]
    for records in (said, reviews):
        assert read(tmp_path / "a.json", json.dumps(records))[1] == {}


def test_bytes_in_parquet_are_text(tmp_path):
    broken = pyarrow.array([b"a caf\xe9", b"b"]).cast(pyarrow.string(), safe=False)
    pyarrow.parquet.write_table(pyarrow.table({"text": broken}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"parquet, row 1: not UTF-8"):
        read(tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet", on_error="replace")[0] == ["a caf\ufffd", "b"]
    pyarrow.parquet.write_table(pyarrow.table({"text": [b"a", b"b"]}), tmp_path / "a.parquet")
    assert read(tmp_path / "a.parquet")[0] == ["a", "b"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet"])
@pytest.mark.parametrize(
    "records",
    [SHAREGPT, TEMPLATED, ALPACA, RENDERED],
    ids=["ShareGPT", "ShareGPT with a text", "Alpaca", "Alpaca with a text"],
)
def test_known_sets_of_conversations_are_read_from_every_table(tmp_path, records, name):
    path = tmp_path / name
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    elif name == "a.csv":
        write_rows(path, records)
    else:
        lines = [json.dumps(row) for row in records]
        path.write_text("\n".join(lines) if name == "a.jsonl" else json.dumps(records, indent=2))
    assert read(path)[0] == [
        'User: Who are you?\n\nAssistant: A model, "small".\nAnd you?\n\n',
        "User: 2+2?\n\nAssistant: 4\n\n",
    ]


def test_a_text_that_is_more_than_a_question_and_its_answer_stays(tmp_path):
    rows = [
        {"text": "What? This. And more.", "question": "What?", "answer": "This."},
        {"text": "This.", "question": "What?", "answer": "This."},
        {"text": "What? This.", "question": "What?", "answer": ""},
        {"text": "What? This.", "question": "What?", "answer": ["This."]},
        {"text": "4\n2+2?", **SHAREGPT[1]},
        {"text": "Say 2", "question": "Say 2", "answer": "2"},
        {"text": "2+2? 5", "system": "Be kind.", **SHAREGPT[1]},
        {"text": "What? This.", "conversation": ["a text", "b"]},
        {"text": "2+2? That is 4.", "messages": [{"role": "user", "content": "2+2?"}]},
    ]
    content = "".join(json.dumps(row) + "\n" for row in rows)
    assert read(tmp_path / "a.jsonl", content)[0] == [row["text"] for row in rows]
    rendered = "".join(json.dumps(row) + "\n" for row in RENDERED)
    texts = read(tmp_path / "a.jsonl", rendered, text_field="text")[0]
    assert texts == [row["text"] for row in RENDERED]
