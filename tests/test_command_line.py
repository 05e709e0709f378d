"""command_line.py: what people type, in the parsers of all programs."""

from pathlib import Path

import pytest

import generating.terminal
import preparing.arguments
import tools.evaluate
import tools.export
from command_line import (
    duration,
    local_path,
    near,
    our_file,
    our_tool,
    place,
    plural,
    quote,
    short,
    si,
)
from tests.conftest import HOME, ROOT

PARSERS = {
    "generate.py": generating.terminal.parse_args,
    "prepare_data.py": preparing.arguments.parse,
    "tools.evaluate": tools.evaluate.parse_args,
    "tools.export": tools.export.parse_args,
}


def parse(line):
    """The arguments of a command line, whose words are separated by |."""
    program, *words = line.split("|")
    return PARSERS[program](words)


def test_a_name_that_exists_stays_as_it_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (" a ", "'b'", "~c", "~$d.txt"):
        (tmp_path / name).touch()
        assert place(name) == name
    assert str(local_path("texts/")) == "texts"
    assert place("~$new.txt") == "~$new.txt"
    assert place("s3://bucket/~/d") == "s3://bucket/~/d"


@pytest.mark.parametrize("name", ["模型", "café", "\U0001f600", "\udcff.txt"])
def test_a_name_is_taken_as_a_console_shows_it(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).touch()
    shown = name.encode("ascii", "backslashreplace").decode()
    assert place(f"./{shown}") == f"./{name}"
    assert place("\\xe9nothing") == "\\xe9nothing"


@pytest.mark.parametrize("typed", ["{}", "'{}'", " {}\r"])
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("generate.py|--checkpoint={}", "checkpoint"),
        ("prepare_data.py|--out={}", "out"),
        ("prepare_data.py|--verify={}", "verify"),
        ("prepare_data.py|--tokenizer={}", "tokenizer"),
        ("prepare_data.py|{}", "inputs"),
        ("tools.evaluate|run|--data={}", "data"),
        ("tools.evaluate|{}", "checkpoints"),
        ("tools.export|{}|--out=a", "checkpoint"),
        ("tools.export|run|--out={}", "out"),
        ("tools.export|run|--gguf={}", "gguf"),
    ],
)
def test_paths_are_meant_as_in_a_shell(monkeypatch, line, name, typed):
    monkeypatch.setenv(HOME, "/home/me")
    value = getattr(parse(line.format(typed.format("~/d.gguf"))), name)
    assert Path(value[0] if isinstance(value, list) else value) == Path("/home/me/d.gguf")


def test_files_may_come_before_and_after_options():
    plan = parse("prepare_data.py|a.txt|--out|data/a|b.txt")
    assert plan.inputs == ["a.txt", "b.txt"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("generate.py|--checkpoint=", "argument --checkpoint: it is empty"),
        ("generate.py|--device= ", "argument --device: it is empty"),
        ("prepare_data.py|--out=", "argument --out: it is empty; is a variable in it not set?"),
        ("prepare_data.py|", "argument INPUT: it is empty"),
        ("prepare_data.py|a.txt|--ray=", "argument --ray: it is empty"),
        ("prepare_data.py|--text_field=", "argument --text_field: it is empty"),
        ("prepare_data.py|--out=~nobody_at_all/d", "there is no home folder ~nobody_at_all here"),
        ("tools.export|run|--gguf=", "argument --gguf: it is empty"),
        # A folder named hf: was written, with status 0.
        ("tools.export|run|--out=hf://me/name", "--out: hf://me/name: it must be a path on this"),
        ("prepare_data.py|a.txt|--out=s3://me:key@b/d", "--out: s3://b/d: it must be a path on"),
        # Names that are nearly right.
        ("generate.py|--n|5", "unknown --n; did you mean --num_samples?"),
        ("generate.py|-p|TEXT", "unknown -p; did you mean --prompt?"),
        ("generate.py|--max_tokens|5", "did you mean --max_new_tokens?"),
        ("generate.py|--model|run", "did you mean --checkpoint?"),
        ("generate.py|--start=The", "unknown --start=The; did you mean --prompt?"),
        ("generate.py|--promt=x", "unknown --promt=x; did you mean --prompt?"),
        ("generate.py|--temp=1", "did you mean --temperature?"),
        ("generate.py|Once upon", f"unknown Once upon; write --prompt {quote('Once upon')}"),
        ("prepare_data.py|a.txt|--vocab|300", "did you mean --vocab_size?"),
        ("prepare_data.py|a.txt|--output|d", "did you mean --out?"),
        ("tools.export|run|more|--out=a", "unknown more; a value with blanks needs quotes"),
        ("generate.py|--stop|---", "one that begins with a dash is written --option=-value"),
        # Numbers and texts.
        ("generate.py|--stop=", "an empty text would stop before the first token"),
        ("generate.py|--seed=18446744073709551616", "--seed: 18446744073709551616: it must be"),
        ("generate.py|--temperature=inf", "--temperature: inf: it must be a number"),
        ("generate.py|--temperature=-1", "--temperature: -1: it must be a number of at least 0"),
        ("generate.py|--temperature=nan", "--temperature: nan: it must be a number of at least 0"),
        ("generate.py|--top_p=1.1", "--top_p: 1.1: it must be a number of at least 0 and at most"),
        ("generate.py|--num_samples=0", "--num_samples: 0: it must be a whole number of at least"),
        ("generate.py|--num_samples|999999999999", "at least 1 and at most 1000000"),
        ("generate.py|--max_new_tokens|many", "--max_new_tokens: many: it must be a whole number"),
        ("generate.py|--repetition_penalty=0", "penalty: 0: it must be a number of at least 0.01"),
        ("generate.py|--json=true", "--json: it takes no value"),
        ("generate.py|--system|Be brief.", "--system is for conversations; add --chat"),
        ("generate.py|--top_k=1e3", "--top_k: 1e3: it must be a whole number of at least 0"),
        ("prepare_data.py|--gigabytes=0", "--gigabytes: 0: it must be a number above 0"),
        ("prepare_data.py|--sample_bytes=1e999", "--sample_bytes: 1e999: it must be a number"),
    ],
)
def test_a_mistake_is_answered_in_a_sentence(line, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse(line)
    assert end.value.code == 2
    usage, sentence = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: ") and words in sentence


def test_names_that_begin_alike_are_nearer_than_similar_ones():
    known = ["eval_interval", "eval_batches", "learning_rate", "n_layer"]
    assert near("eval", known) == ["eval_interval", "eval_batches"]
    assert near("n_layers", known) == ["n_layer"]
    assert near("learning_rte", known) == ["learning_rate"]
    assert near("zzz", known) == []


def test_our_files_are_typed_with_their_folder_unless_it_is_the_current_one(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert (our_file("train.py"), our_tool("report")) == ("train.py", "-m tools.report")
    (tmp_path / "train.py").touch()  # another program's, such as nanoGPT's
    monkeypatch.chdir(tmp_path)
    assert our_file("train.py") == (ROOT / "train.py").as_posix()
    assert our_tool("report") == (ROOT / "tools" / "report.py").as_posix()


def test_words_are_quoted_as_the_shells_of_a_system_read_them():
    assert quote("my texts/**/*.md", windows=False) == "'my texts/**/*.md'"
    assert quote("my texts/**/*.md", windows=True) == '"my texts/**/*.md"'
    assert quote(r"C:\texts\a-1.txt", windows=True) == r"C:\texts\a-1.txt"
    assert quote(r"C:\Users\A B\python.exe", windows=True) == r'"C:\Users\A B\python.exe"'


def test_durations_in_words():
    shown = {42.2: "42 s", 61: "1 min 1 s", 3599: "59 min 59 s", 7800: "2 h 10 min"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


def test_quantities_have_units():
    shown = {2.35e19: "23.5 EFLOP", 999.9e6: "1 GFLOP", 450_000: "450 kFLOP", 0: "0 FLOP"}
    assert {number: si(number, "FLOP") for number in shown} == shown
    counts = {2.5e9: "2.5B", 134_612_000: "135M", 999_999: "1M", 7200: "7.2k", 999: "999", 0: "0"}
    assert {number: short(number) for number in counts} == counts
    assert [plural(n, "file") for n in (0, 1, 1000)] == ["0 files", "1 file", "1,000 files"]
