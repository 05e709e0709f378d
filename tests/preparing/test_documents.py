"""From records to documents: marks of their ends, conversations in every form, what is noticed."""

import csv
import itertools
import json
import os
import random
import shlex
import subprocess

import pyarrow.parquet
import pytest

from preparing import InputError
from preparing.mistakes import (
    ADVICE,
    ANSWERS,
    BASE64,
    GUTENBERG,
    HEADING,
    HTML_CODES,
    REPEATED,
    SORTED,
)
from tests.conftest import fails_clearly, ok
from tests.preparing.conftest import documents, prepare, read
from tokenizer_bpe import EOT

MESSAGES = [f"Message {n}." for n in range(400)]
TIMES = "times of subtitles, or of the lines of a chat or a log"
LIGATURES = "ligatures such as ﬁ in one character, or soft hyphens, as PDFs have them"
COLUMNS = "columns with tabs between them, such as numbers before the lines"
IN_LINES = "<|endoftext|> within lines, taken as the end of a document"
SPECIAL = "special tokens, as letters"


@pytest.mark.parametrize("end", [EOT, f" {EOT} ", f"\n {EOT}\n", f"{EOT}\n", f"\r\n\t{EOT}\r\n"])
def test_a_mark_ends_a_document_wherever_it_is(tmp_path, end):
    texts, report = read(tmp_path / "a.txt", "".join(f"{text}{end}" for text in MESSAGES))
    assert [text.rstrip("\r\n") for text in texts] == MESSAGES
    assert (IN_LINES in report) == (end.strip(" ") == EOT)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.json"])
def test_a_mark_ends_the_text_of_a_record(tmp_path, name):
    texts = [f"{text}{EOT}" for text in MESSAGES] + [f"One.{EOT}Two.{EOT}"]
    if name == "a.csv":
        content = "\n".join(["text", *texts])
    else:
        content = "\n".join(json.dumps({"text": text}) for text in texts)
    found, report = read(tmp_path / name, content)
    assert found == [*MESSAGES, "One.", "Two."]
    assert report[IN_LINES]["documents"] == 1


QUOTED = [f'end = "{EOT}"', f"(b'{EOT}')", f"the mark `{EOT}`.", f"“{EOT}”", f'{{"end":"{EOT}"}}']


@pytest.mark.parametrize("text", QUOTED)
def test_a_mark_in_quotes_is_text(tmp_path, text):
    found, report = read(tmp_path / "a.txt", text)
    assert found == [text]
    assert report[SPECIAL] == {"documents": 1, "bytes": len(EOT), "examples": [text]}


def test_quotations_on_both_sides_of_a_mark_are_two_documents(tmp_path):
    assert read(tmp_path / "a.txt", f'"Hello."{EOT}"Bye."')[0] == ['"Hello."', '"Bye."']


NOTICED = {
    "<s>Hello.</s>\n<s>Bye.</s>": (SPECIAL, 14),
    "<|im_start|>user\nHello<|im_end|>": (SPECIAL, 22),
    "<BOS>Hello.<EOS>\n<sod>Bye.<eod>": (SPECIAL, 20),
    "[INST] Hello [/INST] <｜end▁of▁sentence｜>": (SPECIAL, 13 + 27),
    "a\0b\x1b[31mc\n\tand\n\f": ("control characters, such as NUL", 2),
    "a line\r\nand more\r\n": ("\\r, as in the line ends of Windows", 2),
    "caf\u00e9 and cafe\u0301": ("letters and accents apart (NFD)", 1),
    "\u1112\u1161\u11ab": ("letters and accents apart (NFD)", 6),
    "か\u3099": ("letters and accents apart (NFD)", 3),
    "и\u0306": ("letters and accents apart (NFD)", 2),
    "ا\u0653": ("letters and accents apart (NFD)", 2),
    "a caf\ufffd": ("U+FFFD, for characters that another program could not read", 3),
    "a \ufb01sh, an o\ufb03ce, Donau\u00addampf": (LIGATURES, 3 + 3 + 2),
    "one\n\ufefftwo\n": ("byte order marks within the text, as of joined files", 3),
    "a cafÃ© for Â£5 itâ€™s": ("UTF-8 that was read as another encoding, such as Ã© for é", 16),
    "Ð¼Ð¸Ñ\x80 и мир": ("UTF-8 that was read as another encoding, such as Ã© for é", 12),
    "<!DOCTYPE html>\n<p>Hello": ("HTML or XML with its markup", 24),
    "<!-- saved -->\n<html><p>Hello": ("HTML or XML with its markup", 29),
    '<mediawiki xmlns="http://www.mediawiki.org/"><page/>': ("HTML or XML with its markup", 52),
    '<?xml version="1.0"?>\n<TEI>Hello': ("HTML or XML with its markup", 32),
    '<doc id="7" title="A">\nA &lt; B': ("HTML or XML with its markup", 31),
    "<p>Why?</p>\n\n<pre>a &amp; b</pre>\n": ("HTML or XML with its markup", 34),
    "Salt &amp; pepper, it&#8217;s &quot;good&quot;\n": (HTML_CODES, 24),
    "Bad.<br /><br />Very bad. <br>\n": (HTML_CODES, 12),
    "F&uuml;r &Eacute;va &ndash; gro&szlig;\n": (HTML_CODES, 28),
    "A\n*** START OF THE PROJECT GUTENBERG EBOOK 7 ***\nHi\n*** END OF THE PROJECT": (
        "Project Gutenberg's notes before and after a book",
        14,
    ),
    '{"text": "Hello"}\n{"text": "Bye"}\n': ("JSON, as plain text", 34),
    '[\n {\n  "text": "Hello"\n }\n]\n': ("JSON, as plain text", 28),
    'window.YTD.tweets.part0 = [\n {\n  "tweet": {} } ]\n': ("JSON, as plain text", 49),
    "Anna Lena\nBo\n" * 50 + "Zoe\n\n": ("nothing but short lines, such as a list of names", 655),
    "7\tHello.\n" * 21: (COLUMNS, 21 * 9),
    "[31.12.24, 20:52:25] Bo: Hi\n" * 3: (TIMES, 3 * 16),
    "01/20/2019, 11:23 a. m. - Bo: Hi\n" * 3: (TIMES, 3 * 17),
    "2024-01-31 11:23:01,123 - INFO - start\n" * 3: (TIMES, 3 * 16),
    "1\n00:01:02,003 --> 00:01:04,000\nHi\n\n" * 3: (TIMES, 3 * 29),
    "WEBVTT\n\n" + "01:02.003 --> 01:04.000 align:start\nHi\n\n" * 3: (TIMES, 3 * 35),
    "2024년 1월 4일 오후 1:00, Bo : Hi\n" * 3: (TIMES, 3 * 29),  # KakaoTalk on a phone
    "[Bo] [오후 1:00] Hi\n" * 3: (TIMES, 3 * 18),  # and on a computer
    "Bo, [05.01.2024 10:15]\nHi\n\n" * 3: (TIMES, 3 * 21),  # copied from Telegram
    "2024/01/05(Fri)\n" + "10:15\tBo\tHi\n" * 3: (TIMES, 3 * 6),  # LINE
    "10:15 <@bo> Hi\n" * 3: (TIMES, 3 * 7),  # irssi
    "[10:15:11] <bo> Hi\n" * 3: (TIMES, 3 * 10),  # ZNC
    "Jan  5 10:15:11 host sshd[7]: Hi\n" * 3: (TIMES, 3 * 15),
    "May 17, 2022  5:29:42 PM (Read by you)\nBo\nHi\n" * 3: (TIMES, 3 * 21),  # iMessage
    "Dialogue: 0,0:01:02.00,0:01:04.00,Default,,0,0,0,,Hi\n" * 3: (TIMES, 3 * 19),  # ASS
    "[01:02.00]Hi\n" * 3: (TIMES, 3 * 10),  # LRC
    "[00:02.000 --> 00:04.000]   Hi\n" * 3: (TIMES, 3 * 25),  # Whisper
    "0:01\nHi\n" * 3: (TIMES, 3 * 4),  # copied from YouTube
    "Hi\n![](data:image/png;base64," + 200 * "Ab1/" + "==)\n": (BASE64, 8 + 802),
}


@pytest.mark.parametrize(("text", "noticed"), NOTICED.items())
def test_text_that_was_probably_not_meant_is_kept_and_counted(tmp_path, text, noticed):
    found, report = read(tmp_path / "a.txt", text)
    assert found == [text]
    assert {rule: counts["bytes"] for rule, counts in report.items()} == dict([noticed])


ORDINARY = (
    "x[0] < 3 and a > b; <b>bold</b> [1], |x|> y; [SEE ALSO] <span> {x} [/index] (?P<s>.) list<s>"
    " x\u0304\u0301 não IRMÃ, âme ‘ÂME’ Ñandú à la “Ð”; мир\n"
    "2024-01-31 11:23 - a diary\n<!-- 1 --> 1.2.2024, a day\n- 3/4/2025 at 12:00\n"
) + "1:10 And God called the dry land Earth\nx[10:20]\n  input [31:16] a;\n" * 3


LONG = "<!-- a comment -->\n" * 40 + "<" + "a" * 200_000  # took longer than anyone waits


CODE = 'CODES = {"a": 1, "&": "&amp;"}\n'
POEM = "A line\n" * 99 + " \n" + "A line\n" * 99
MAKEFILE = "all: a\n\ta: b.o\n\tc:\td\n" * 20
README = "<p align=center><img src=a.png></p>\n\n# AT&T &c; (&amp;), as &gt;, &#62;,\n"


def test_records_that_are_lines_of_wikitext_are_noticed(tmp_path):
    rows = [" = Robert = \n", " = = Career = = \n", " In 2000 , x = y = 3 . \n", " a == b \n"]
    rows += [" = Robert = \n\n An actor . \n = = Notes = = \n", "=====\n"]
    lines = "\n".join(json.dumps({"text": row}) for row in rows)
    found, report = read(tmp_path / "a.jsonl", lines)
    assert found == rows
    assert {rule: counts["documents"] for rule, counts in report.items()} == {HEADING: 2}


def test_records_that_are_messages_of_conversations_are_noticed(tmp_path):
    rows = [{"text": "Hi", "parent_id": None}, {"text": "Yes?", "parent_id": "a"}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name in ("a.parquet", "a.jsonl"):
        found, report = read(tmp_path / name)
        assert found == ["Hi", "Yes?"]
        assert {rule: counts["documents"] for rule, counts in report.items()} == {ANSWERS: 1}


def test_short_texts_in_alphabetical_order_are_noticed(tmp_path):
    letters = itertools.product("abcDEF", repeat=3)
    words = sorted(map("".join, letters), key=str.lower)
    shuffled = random.Random(0).sample(words, len(words))
    longer = [f"{word} {'and more ' * 30}" for word in words]
    for texts in (words, shuffled, longer, MESSAGES, ["a word"] * 200):
        found, report = read(tmp_path / "a.json", json.dumps(texts))
        assert found == texts
        size = len("".join(words))
        noticed = {rule: counts["bytes"] for rule, counts in report.items()}
        assert noticed == ({SORTED: size} if texts is words else {})


@pytest.mark.parametrize("text", [ORDINARY, LONG, CODE, README, POEM, MAKEFILE])
def test_ordinary_text_is_not_counted(tmp_path, text):
    assert read(tmp_path / "a.txt", text) == ([text], {})


def test_the_summary_says_what_to_do_about_what_was_noticed(tmp_path, flags):
    (tmp_path / "a.txt").write_bytes(b"Hello.</s>\nBye.\0</s>\r\n")
    result = ok(prepare(tmp_path / "a.txt", **flags))
    kept = result.stdout.partition("though it may be a mistake:")[2]
    assert "such as NUL: 1 document, 1 byte; --clean removes them" in kept
    assert "letters: 1 document, 8 bytes; remove them, or write <|endoftext|> where" in kept
    assert "Windows: 1 document, 1 byte; --clean turns \\r\\n into \\n" in kept
    assert "left out" not in result.stdout
    assert "special tokens" in (tmp_path / "out/cleaning.json").read_text("utf-8")


def test_the_summary_only_names_what_is_rare(tmp_path, flags):
    rows = [json.dumps({"text": f"Number {i} is a number."}) for i in range(1001)]
    rows[7] = json.dumps({"text": "a &amp; b"})
    rows[8:10] = [json.dumps({"text": f"One{i}\0"}) for i in range(2)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows), "utf-8")
    kept = ok(prepare(tmp_path / "a.jsonl", **flags)).stdout.partition("may be a mistake:\n")[2]
    codes = f"  in less than 0.1% of the text, shown in {tmp_path / 'out/cleaning.json'}:"
    assert kept.splitlines()[0].startswith("  control characters, such as NUL: 2 documents")
    assert kept.splitlines()[-2:] == [codes, f"    {HTML_CODES}"]


@pytest.mark.skipif(os.name == "nt", reason="the advice is for sed")
def test_the_advice_for_base64_keeps_what_is_between_two_files():
    text = "![](data:image/png;base64,Ab+/=) a,data:image/png;base64,Ab==,b,data:a/b;base64,Ab,c\n"
    command = shlex.split(ADVICE[BASE64].partition(" FILE ")[0])
    kept = subprocess.run(command, input=text, stdout=-1, text=True).stdout
    assert kept == "![]() a,,b,,c\n"


@pytest.mark.skipif(os.name == "nt", reason="the advice is for sed")
def test_the_advice_for_project_gutenberg_keeps_the_books():
    start, end = (f"*** {what} OF THE PROJECT GUTENBERG EBOOK ***\n" for what in ("START", "END"))
    text = "One\n*** Some stars\n*** End of it\nThe end.\n"
    book = f"Title\n{start}{text}{end}*** START: FULL LICENSE ***\nTerms\n"
    command = shlex.split(ADVICE[GUTENBERG].partition(" FILE.txt")[0])
    kept = subprocess.run(command, input=2 * book, stdout=-1, text=True).stdout
    assert kept == 2 * text


@pytest.mark.skipif(os.name == "nt", reason="the advice is for sed")
def test_the_advice_for_codes_of_html_writes_the_characters():
    command = shlex.split(ADVICE[HTML_CODES].partition(" FILE ")[0])
    text = "1 &lt; 2 &amp;&amp; 2 &gt; 1, isn&#39;t<br />&apos;it&apos;?\n"
    fixed = subprocess.run(command, input=text, stdout=-1, text=True).stdout
    assert fixed == "1 < 2 && 2 > 1, isn't 'it'?\n"


@pytest.mark.skipif(os.name == "nt", reason="the advice is for awk")
def test_the_advice_for_repeated_text_keeps_one_of_equal_long_lines():
    command = shlex.split(ADVICE[REPEATED].partition("and ")[2].partition(" FILE ")[0])
    text = f"{'A review. ' * 4}\n\nGood.\n"
    kept = subprocess.run(command, input=2 * text, stdout=-1, text=True).stdout
    assert kept == f"{text}\nGood.\n"


TALK = "System: Be kind.\n\nUser: Hello?\n\nAssistant: Good day.\n\n"


def said(*roles, role="role", content="content", reply="Good day."):
    texts = ["Be kind.", "Hello?", reply][-len(roles) :]
    return [{role: name, content: text} for name, text in zip(roles, texts, strict=True)]


PARTS = [{"type": "text", "text": "Good "}, {"type": "text", "text": "day."}]
CONVERSATIONS = {
    "OpenAI": {"messages": said("developer", "USER", "Assistant ")},
    "ShareGPT": {"conversations": said("system", "human", "gpt", role="from", content="value")},
    "ShareGPT, its system apart": {
        "system": "Be kind.",
        "conversations": said("human", "gpt", role="from", content="value"),
    },
    "OpenAssistant": {"messages": said("system", "prompter", "assistant", content="text")},
    "bots": {"conversation": said("system", "user", "bot")},
    "Gemini": {"text": "", "messages": said("system", "user", "model")},
    "a text in JSON": {"messages": json.dumps(said("system", "user", "assistant"))},
    "OpenAI's parts": {"messages": said("system", "user", "assistant", reply=PARTS)},
    "marks": {"messages": said("system", "user", "gpt", reply=f"Good day.{EOT}")},
    "Alpaca": {"system": "Be kind.", "instruction": "Hello?", "input": "", "output": "Good day."},
    "TRL": {"prompt": said("system", "user", "assistant")[:2], "completion": said("assistant")},
    "capitals": {"ID": 1, "System": "Be kind.", "Question": "Hello?", "Answer": "Good day."},
    "MetaMath": {"text": None, "system": "Be kind.", "query": "Hello?", "response": "Good day."},
    "OpenOrca": {
        "id": 1,
        "system_prompt": "Be kind.",
        "question": "Hello?",
        "response": "Good day.",
    },
}


@pytest.mark.parametrize("record", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversations_in_every_form_become_one(tmp_path, record):
    assert read(tmp_path / "a.jsonl", json.dumps(record)) == ([TALK], {})


def test_conversations_of_questions_and_answers_are_read_from_tables(tmp_path, flags):
    (tmp_path / "a.csv").write_text("instruction,input,output,n\nAdd:,1 2,It is 3.,1\n")
    flags |= {"val_fraction": 0}
    result = ok(prepare(tmp_path / "a.csv", **flags))
    assert documents(tmp_path / "out") == ["User: Add:\n\n1 2\n\nAssistant: It is 3.\n\n"]
    assert "tokens in replies" in result.stdout


BAD = [
    ({"messages": said("narrator", "user")}, "role 'narrator', which is not one of system,"),
    ({"messages": "User: Hello?"}, "'messages' is 'User: Hello\\?', not a list of messages"),
    ({"messages": [{"role": "user", "content": None}]}, "has a message of the role 'user' without"),
    ({"messages": {"role": ["user"]}}, "is {'role': .*, not a text or a list of messages"),
    ({"messages": [["user", "Hello?"]]}, "is not a list of"),
    ({"messages": [{"role": "gpt", "content": "", "tool_calls": [1]}]}, "with tool_calls, which"),
    (
        {"messages": [{"role": "gpt", "content": "4", "reasoning_content": "2 + 2"}]},
        "with reasoning_content, which is not in its text",
    ),
    ({"question": "a", "reasoning": "b", "answer": "c"}, "with reasoning, which is not in"),
    (
        {"question": "a", "answer": "b", "history": [{"role": "user"}]},
        "'history' is .*, not a list",
    ),
    ({"Question": "a", "QUESTION": "b", "Answer": "c"}, "no field 'text', there is 'Question', "),
    (
        {"title": "a", "mapping": {}},
        "'mapping'; name .*, or make text of several fields with a command of docs/",
    ),
    ({"prompt": [{"role": "user"}], "completion": "x"}, "'prompt' is .*, not a text"),
]


@pytest.mark.parametrize(("record", "words"), BAD)
def test_a_conversation_that_is_none_is_named(tmp_path, record, words):
    good = json.dumps({"messages": said("user", "assistant")})
    with pytest.raises(InputError, match=f"line 2: .*{words}"):
        read(tmp_path / "a.jsonl", f"{good}\n{json.dumps(record)}\n")
    texts, report = read(tmp_path / "a.jsonl", on_error="skip")
    assert len(texts) == 1
    assert report["unusable documents"]["documents"] == 1


def test_what_a_tool_answers_is_a_turn_of_its_own(tmp_path):
    record = {"messages": [*said("user", "tool"), *said("assistant")]}
    texts, _ = read(tmp_path / "a.jsonl", json.dumps(record))
    assert texts == ["User: Hello?\n\nTool: Good day.\n\nAssistant: Good day.\n\n"]


def test_the_text_field_decides_between_fields(tmp_path, flags):
    record = {"text": "a", "body": "the body", "messages": said("user", "assistant")}
    (tmp_path / "a.jsonl").write_text(json.dumps(record))
    flags |= {"val_fraction": 0, "overwrite": True}
    for field, text in (("body", "the body"), ("messages", TALK.partition("\n\n")[2])):
        ok(prepare(tmp_path / "a.jsonl", text_field=field, **flags))
        assert documents(tmp_path / "out") == [text]
    for value, text in (('["a", "b"]', '["a", "b"]'), (json.dumps(said("user", "gpt")), TALK[18:])):
        record = json.dumps({"text": "a", "Body": value})
        assert read(tmp_path / "b.jsonl", record, text_field="Body")[0] == [text]
    result = prepare(tmp_path / "a.jsonl", text_field="none", **flags)
    fails_clearly(result, "line 1: no field 'none', there is 'text', 'body', 'messages'; name")


def test_of_many_fields_a_message_shows_a_few(tmp_path):
    record = {f"column {n} {'x' * 90}": n for n in range(300)}
    rows = [",".join(record), ",".join(map(str, record.values()))]
    for name, content in (("a.jsonl", json.dumps(record)), ("a.csv", "\n".join(rows))):
        with pytest.raises(InputError, match=r"'column 0 x+', .*and 295 more") as caught:
            read(tmp_path / name, content)
        assert len(str(caught.value)) < 600


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_the_history_of_a_question_comes_before_it(tmp_path, name):
    """As in LLaMA-Factory's form of Alpaca."""
    pairs = [["Hi.", "Hello!"], ["How?", "Fine."]]
    row = {"instruction": "And you?", "input": "", "output": "Fine, too.", "history": pairs}
    if name == "a.parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / name)
    elif name == "a.csv":
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows([row, [*list(row.values())[:3], json.dumps(pairs)]])
    else:
        (tmp_path / name).write_text(json.dumps(row))
    earlier = "User: Hi.\n\nAssistant: Hello!\n\nUser: How?\n\nAssistant: Fine.\n\n"
    asked = "User: And you?\n\nAssistant: Fine, too.\n\n"
    assert read(tmp_path / name) == ([earlier + asked], {})


def test_an_empty_reply_is_counted(tmp_path):
    """As in ShareGPT, where the model learned to say nothing."""
    record = {"messages": [*said("user", "gpt"), *said("user", "gpt", reply=" ")]}
    texts, report = read(tmp_path / "a.jsonl", json.dumps(record))
    assert len(texts) == 1
    assert list(report) == ["conversations with an empty reply"]


def test_conversations_without_a_reply_are_counted(tmp_path):
    for record in ({"messages": said("user")}, {"question": "Good day.", "answer": ""}):
        texts, report = read(tmp_path / "a.jsonl", json.dumps(record))
        assert texts == ["User: Good day.\n\n"]
        assert list(report) == ["conversations in which the assistant says nothing"]


@pytest.mark.parametrize("field", ["weight", "train", "loss_mask"])
def test_replies_that_others_would_not_train_on_are_counted(tmp_path, field):
    messages = [message | {field: message["role"] != "user"} for message in said("user", "gpt")]
    last = {"role": "assistant", "content": "Wrong."}
    rows = [{"messages": [*messages, last | {field: counts}]} for counts in (0, 1)]
    found, report = read(tmp_path / "a.jsonl", "\n".join(map(json.dumps, rows)))
    assert len(found) == 2
    counts = {"documents": 1, "bytes": 6, "examples": ["Wrong."]}
    rule = "replies that are marked as not to be trained on, which count like others"
    assert report == {rule: counts}
