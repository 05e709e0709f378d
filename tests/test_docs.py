"""The documentation against the code: links, commands, settings and tests that it names exist.

Reads Markdown and source as text and imports nothing but config, so it takes no time.
"""

import ast
import dataclasses
import re
import shlex
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import config

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "benchmarks/README.md",
    ROOT / "tests/README.md",
]
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
DIFF = re.compile(r"^```diff\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PYTHON = re.compile(r"^(?:\S*/)?python[0-9.]*$")
# Modules of others that commands may name, and the script that the tutorial lets you write.
FOREIGN = {"pip", "pytest", "venv", "data/conversations.py"}
SETTINGS = {field.name for field in dataclasses.fields(config.Config)}
SHELL = {"|", "||", "&&", ";", ">", "<"}
# Words and openings that readers stumbled over; a plainer or more usual one exists for each.
STUMBLING = re.compile(
    r"\b(stands?|lies|beside|behind|anew|by itself|so many|heeds?|tells? of|from nothing"
    r"|is (?:said|named|a line))\b|(?:^|[.:?!] |\| |\*\* ?)(?:Of|What) [a-z]"
)
# The package that runs the repository, whose help texts and messages users read.
SOURCES = [
    file
    for file in sorted(ROOT.glob("**/*.py"))
    if not {"tests", "data", "checkpoints"} & set(file.relative_to(ROOT).parts)
    and not file.relative_to(ROOT).parts[0].startswith(".")
]


class Command(NamedTuple):
    """A script or module of a command, and the words behind it. script: a path or a dotted name."""

    script: str
    arguments: list[str]


# -- reading ---------------------------------------------------------------------------------------


@cache
def text_of(page: Path) -> str:
    """A file as text."""
    return page.read_text(encoding="utf-8")


def prose(page: Path) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", text_of(page))


def spans(page: Path) -> list[str]:
    """The code spans in a page's prose."""
    return SPAN.findall(prose(page))


def code_lines(page: Path) -> list[str]:
    """The lines of a page's code blocks, and its code spans."""
    blocks = FENCE.findall(text_of(page))
    return [line for block in blocks for line in block.splitlines()] + spans(page)


def anchors(page: Path) -> set[str]:
    """What GitHub makes of a page's headings: `## A *title*, long` is #a-title-long."""
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        found.add(words.replace(" ", "-"))
    return found


def words_of(line: str) -> list[str]:
    """A line of shell as words; none where it is no shell, such as a line of output."""
    try:
        lexer = shlex.shlex(line.replace("\\", "/"), posix=True, punctuation_chars="|&;<>")
        lexer.whitespace_split = True
        return list(lexer)
    except ValueError:  # an apostrophe, say
        return []


def commands(line: str) -> list[Command]:
    """The Python scripts and modules that a line runs, through python or torchrun.

    `python -m tools.NAME` is none: a name in capitals stands for any.
    """
    words, found = words_of(line), []
    for at, word in enumerate(words):
        if PYTHON.match(word):
            rest = words[at + 1 :]
        elif word == "torchrun":
            rest = words[at + 1 :]
            while rest and rest[0].startswith("--"):  # torchrun's own
                rest = rest[1:]
        else:
            continue
        end = next((n for n, w in enumerate(rest) if w in SHELL), len(rest))
        rest = rest[:end]
        if rest[:1] == ["-m"] and rest[1:] and not rest[1].endswith("NAME"):
            found.append(Command(rest[1], rest[2:]))
        elif rest and rest[0].endswith(".py"):
            found.append(Command(rest[0], rest[1:]))
    return found


@cache
def file_of(script: str) -> Path | None:
    """The file that a script or a dotted name stands for; None where there is none."""
    path = ROOT / (script if script.endswith(".py") else script.replace(".", "/") + ".py")
    main = path.with_suffix("") / "__main__.py"
    return next((p for p in (path, main) if p.is_file()), None)


@cache
def options_in(file: Path) -> set[str]:
    """The names of the options that a file adds to an argparse parser, without the dashes."""
    names = set()
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.Dict):  # a table of options
            keys = [key.value for key in node.keys if isinstance(key, ast.Constant)]
            names |= {key[2:] for key in keys if isinstance(key, str) and key.startswith("--")}
        if not isinstance(node, ast.Call):
            continue
        called = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if called not in ("add", "add_argument", "add_number"):
            continue
        given = [a.value for a in node.args if isinstance(a, ast.Constant)]
        flags = {a[2:] for a in given if isinstance(a, str) and a.startswith("--")}
        if "BooleanOptionalAction" in ast.unparse(node):
            flags |= {f"no-{flag}" for flag in flags}
        names |= flags
    return names


@cache
def imported_files(file: Path) -> set[Path]:
    """The files of this repository that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(text_of(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return {path for path in map(file_of, names) if path}


def is_script(file: Path) -> bool:
    """Whether a file is run by itself, with options of its own."""
    return 'if __name__ == "__main__"' in text_of(file)


@cache
def options_of(file: Path) -> set[str]:
    """The options of a script: those in it and in what it is made of, other scripts left out.

    Settings of a run are options of train.py, and of benchmarks that hand what they do not know on.
    """
    found, parts, to_read = {"help"}, {file}, [file]
    while to_read:
        part = to_read.pop()
        found |= options_in(part)
        new = {p for p in imported_files(part) - parts if not is_script(p)}
        parts |= new
        to_read += new
    takes_settings = file == ROOT / "train.py" or "parse_known_args" in text_of(file)
    return found | (SETTINGS if takes_settings else set())


@cache
def all_options() -> set[str]:
    """The options of all scripts, and all settings."""
    files = [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/*.py"), *ROOT.glob("[a-z]*/*/*.py")]
    return SETTINGS.union({"help"}, *map(options_in, files))


def new_settings(page: Path) -> set[str]:
    """The settings that a page's diffs add."""
    diffs = "".join(DIFF.findall(text_of(page)))
    return set(re.findall(r"^\+    (\w+): .* = setting\(", diffs, re.MULTILINE))


def option_names(words: list[str]) -> list[str]:
    """The names of the options among words, as in `[--data data/NAME]` or `--seed=1`."""
    bare = [word.strip("[]()`'\"") for word in words]
    return [re.split(r"[=\s]", word[2:])[0] for word in bare if re.match(r"--\w", word)]


# -- tests -----------------------------------------------------------------------------------------


@pytest.fixture(params=PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def page(request):
    """Each page in turn."""
    return request.param


def test_links_lead_somewhere(page):
    broken = []
    for link in LINK.findall(prose(page)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_scripts_modules_and_presets_of_commands_exist(page):
    missing = []
    for line in code_lines(page):
        for script, _ in commands(line):
            if script not in FOREIGN and not file_of(script):
                missing.append(script)
        presets = re.findall(r"\bconfig/[a-z]\w*\.py", line)
        missing += [preset for preset in presets if not (ROOT / preset).is_file()]
    assert not missing


def test_options_of_commands_are_options_of_what_they_run(page):
    unknown = []
    for line in code_lines(page):
        for script, arguments in commands(line):
            if script in FOREIGN or not file_of(script):
                continue
            known = options_of(file_of(script)) | new_settings(page)
            unknown += [f"{script} --{o}" for o in option_names(arguments) if o not in known]
    assert not unknown


def test_options_and_settings_named_in_the_text_exist(page):
    unknown = []
    for span in spans(page):
        words = span.split()
        if words[0].startswith("--") or words[0] == "...":
            unknown += [f"--{o}" for o in option_names(words) if o not in all_options()]
        if (setting := re.match(r"([a-z]\w*) = ", span)) and setting[1] not in SETTINGS:
            unknown.append(span)
    assert not unknown


def test_settings_that_the_text_gives_a_value_take_it(page):
    for span in spans(page):
        if re.match(r"[a-z]\w* = ", span):
            name, value = span.split(" = ")
            # cost_per_hour, because a budget in money needs it
            config.load(["--cost_per_hour=1", f"--{name}={ast.literal_eval(value)}"])


def test_tables_of_settings_name_settings(page):
    for table in re.findall(
        r"^\| setting \|.*\n\|[-|]+\n((?:\|.*\n)+)", text_of(page), re.MULTILINE
    ):
        for row in table.splitlines():
            names = SPAN.findall(row.split("|")[1])
            assert names and set(names) <= SETTINGS, row


def test_files_named_in_the_text_exist(page):
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"data", "checkpoints"}
    missing = []
    for span in spans(page):
        first, slash, rest = span.partition("/")
        plain = re.fullmatch(r"[\w./-]*", rest)
        if slash and plain and first in folders and not (ROOT / span).exists():
            missing.append(span)
        if re.fullmatch(r"\w+\.py", span) and not (ROOT / span).is_file():
            missing.append(span)
    assert not missing


def test_tests_named_in_the_text_exist(page):
    source = "\n".join(text_of(file) for file in sorted((ROOT / "tests").rglob("test_*.py")))
    named = [span for span in spans(page) if re.fullmatch(r"test_\w+", span)]
    assert not [name for name in named if f"def {name}(" not in source]


def test_what_the_text_names_in_a_file_is_there(page):
    missing = []
    for span in spans(page):
        named = re.fullmatch(r"(\w[\w/]*\.py):([\w.]+)", span)
        for name in named[2].split(".") if named else []:
            there = rf"^ *(def|class) {name}\b|^{name} = "
            if not re.search(there, text_of(ROOT / named[1]), re.MULTILINE):
                missing.append(span)
    assert not missing


def test_diffs_apply(page):
    for file in "".join(DIFF.findall(text_of(page))).split("--- a/")[1:]:
        name, _, *hunks = re.split(r"^(?:\+\+\+|@@) .*\n", file, flags=re.MULTILINE)
        for hunk in hunks:
            before = [line[1:] for line in hunk.splitlines() if not line.startswith("+")]
            assert text_of(ROOT / name.strip()).count("\n".join(before) + "\n") == 1, name + hunk


def test_targets_of_make_exist(page):
    makefile = text_of(ROOT / "Makefile")
    for line in code_lines(page):
        words = words_of(line)
        if words[:1] == ["make"] and words[1:]:
            assert re.search(rf"^(\.PHONY:.*)?{re.escape(words[1])}\b.*:", makefile, re.MULTILINE)


def test_the_readme_is_short():
    assert len(text_of(ROOT / "README.md").splitlines()) <= 120


def test_pages_use_plain_words(page):
    paragraphs = re.split(r"\n\s*\n|\n(?=[-|#] ?)", SPAN.sub("code", prose(page)))
    lines = [" ".join(paragraph.split()) for paragraph in paragraphs]
    assert [line for line in lines if STUMBLING.search(line)] == []


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_help_and_messages_use_plain_words(file):
    tree = ast.parse(text_of(file))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    found = []
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and " " in text and id(node) not in docstrings:
            found += [text] if STUMBLING.search(text) else []
    assert found == []


def test_tests_are_named_on_one_page(page):
    if page.name != "faults.md" and page.parent.name != "tests":
        assert [span for span in spans(page) if span.startswith("test_")] == []


def test_every_page_is_linked_from_the_readme():
    linked = {link.partition("#")[0] for link in LINK.findall(text_of(ROOT / "README.md"))}
    assert {page.relative_to(ROOT).as_posix() for page in PAGES[1:]} <= linked


def test_what_commands_look_like():
    line = "!cd gpt2 && OMP=1 .venv/bin/python train.py config/a.py --dry_run | tee log"
    assert commands(line) == [Command("train.py", ["config/a.py", "--dry_run"])]
    line = "torchrun --standalone --nproc_per_node=2 -m benchmarks.plan   # two processes"
    assert commands(line) == [Command("benchmarks.plan", [])]
    assert commands("step 150: that's no command of python") == []
    assert option_names(["--a=1", "[--b", "--c_d]", "-n", "x"]) == ["a", "b", "c_d"]


def test_the_workflow_runs_what_make_demo_runs():
    import yaml

    text = text_of(ROOT / ".github/workflows/test.yml")
    steps = [step.get("run", "") for step in yaml.safe_load(text)["jobs"]["test"]["steps"]]
    demo = text_of(ROOT / "Makefile").partition("\ndemo:")[2].partition("\n\n")[0]
    commands = re.findall(r"\$\(PY\) (.+)", demo)
    assert len(commands) == 4
    for command in commands:
        assert any(step.startswith(f"python {command}") for step in steps), command
