"""The pages against the code: links, commands, options, files, numbers, plain words and length.

Reads Markdown, JSON and source; runs the command lines of the pages through the scripts' parsers.
"""

import ast
import json
import re
import shlex
from functools import cache

import pytest

import config
from generating.arguments import parse_args
from preparing.arguments import parse
from tests.conftest import ROOT

# Each page and its words; a tenth more is allowed.
BUDGETS = {
    "README.md": 650,
    "docs/tutorial.md": 850,
    "docs/install.md": 800,
    "docs/data.md": 1430,
    "docs/training.md": 1900,
    "docs/safety.md": 800,
    "docs/fine-tuning.md": 650,
    "docs/many-gpus.md": 600,
    "docs/models.md": 1300,
    "docs/troubleshooting.md": 1500,
    "docs/results.md": 1700,
    "CONTRIBUTING.md": 1200,
}
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A command of this repository: a script or a module, and what follows up to the next command.
COMMAND = re.compile(r"(?:python\S*|torchrun[^#\n]*?) (?:-m )?([\w./]+) ?([^#|;<>&`\n]*)")
OTHERS = {"pip", "pytest", "venv", "ray", "data/conversations.py"}  # not this repository's
PARSERS = {"train.py": config.load, "prepare_data.py": parse, "generate.py": parse_args}
# Words and openings that readers stumbled over; a plainer or more usual one exists for each.
STUMBLING = re.compile(
    r"\b(stands?|lies?|beside|behind|anew|by itself|so many|heeds?|tells? of|from nothing|goes on"
    r"|by heart|is (?:said|named|a line))\b|(?:^|[.:?!] |\| |\*\* ?)(?:Of|What) [a-z]"
)
# The package that runs the repository, whose help texts and messages users read.
SOURCES = [
    file
    for file in sorted(ROOT.glob("**/*.py"))
    if not {"tests", "data", "checkpoints"} & set(file.relative_to(ROOT).parts)
    and not file.relative_to(ROOT).parts[0].startswith(".")
]


@cache
def text_of(file):
    return (ROOT / file).read_text(encoding="utf-8")


def prose(page):
    """A page without its code blocks."""
    return FENCE.sub("", text_of(page))


def spans(page):
    """The code spans in a page's prose."""
    return SPAN.findall(prose(page))


def commands(page):
    """(script or module, its arguments) of each command in a page."""
    lines = [line for block in FENCE.findall(text_of(page)) for line in block.splitlines()]
    for line in lines + spans(page):
        for script, arguments in COMMAND.findall(line):
            if script not in OTHERS and not script.endswith(".NAME"):
                yield script, arguments


def file_of(script):
    return script if script.endswith(".py") else script.replace(".", "/") + ".py"


def anchors(page):
    """A page's headings as GitHub's anchors: `## A *title*, long` is #a-title-long."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def has_option(name, *more):
    """True if a setting has this name, or a source, or one of these files, names the option."""
    sources = [*SOURCES, *more]
    return name in config.SETTINGS or any(f'"--{name}"' in text_of(file) for file in sources)


@pytest.fixture(params=BUDGETS)
def page(request):
    """Each page in turn."""
    return request.param


def test_the_pages_are_these():
    there = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md")}
    assert there == {page for page in BUDGETS if page.startswith("docs/")}
    linked = {link.partition("#")[0] for link in LINK.findall(text_of("README.md"))}
    assert BUDGETS.keys() - {"README.md"} <= linked


def test_a_page_keeps_to_its_words(page):
    words = [word for word in text_of(page).split() if any(map(str.isalnum, word))]
    assert len(words) <= 1.1 * BUDGETS[page]


def test_links_resolve(page):
    broken = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        if re.match("https?:", link):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert not broken


def test_commands_parse(page):
    for script, arguments in commands(page):
        file = file_of(script)
        assert (ROOT / file).is_file(), script
        for option in re.findall(r"--([a-z]\w+)", arguments):
            assert has_option(option, file), (script, option)
        try:
            words = shlex.split(arguments)
        except ValueError:  # a quotation with a # or | in it
            words = arguments.split()
        of_a_run = "RUN" in arguments or words[:1] and words[0].startswith("checkpoints/")
        if script in PARSERS and "--help" not in words and not of_a_run:
            PARSERS[script](words)


def test_presets_options_and_settings_exist(page):
    for preset in re.findall(r"\bconfig/[a-z]\w*\.py", text_of(page)):
        assert (ROOT / preset).is_file()
    for span in spans(page):
        for option in re.findall(r"^--([a-z]\w*)", span):
            assert has_option(option), span
        if re.match(r"[a-z]\w* = ", span):
            name, value = span.split(" = ")
            config.load(["--cost_per_hour=1", f"--{name}={ast.literal_eval(value)}"])


def test_files_and_their_parts_exist(page):
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"data", "checkpoints"}
    for span in spans(page):
        if re.fullmatch(r"[\w./-]+", span) and span.partition("/")[0] in folders and "/" in span:
            assert (ROOT / span).exists(), span
        named = re.fullmatch(r"(\w[\w/]*\.py):([\w.]+)", span)
        for name in named[2].split(".") if named else []:
            there = rf"^ *(def|class) {name}\b|^{name} = "
            assert re.search(there, text_of(named[1]), re.MULTILINE), span


THEIR_SHARE = "{}: share of nanoGPT's time"


def test_numbers_are_those_of_the_benchmarks():
    def measured(name):
        return json.loads(text_of(f"benchmarks/results/{name}.json"))

    speed, loss = measured("throughput_134m_cpu"), measured("time_to_loss_shakespeare_cpu")
    large, generation = measured("prepare_12gb_cpu"), measured("generate_cpu")
    speed, large, generation = speed["figures"], large["figures"], generation["figures"]
    seconds, shares = loss["seconds_to_aim"], loss["figures"]
    patched = "nanoGPT with bf16 autocast"
    expected = [
        f"| {speed['ours']:.0f} | {speed[patched]:.0f}: {speed[f'ours, times {patched}']:.2f}x",
        f"{speed['nanoGPT']:.0f}: {speed['ours, times nanoGPT']:.2f}x",
        f"| GPT-2 recipe | {min(seconds['GPT-2']):.0f} to {max(seconds['GPT-2']):.0f} | "
        + f"{shares[THEIR_SHARE.format('GPT-2')]:.2f} ",
        f"| modern recipe | {min(seconds['modern']):.1f} to {max(seconds['modern']):.1f} | "
        + f"{shares[THEIR_SHARE.format('modern')]:.2f} ",
        f"| {large['seconds']:.0f} s, {large['MB of memory']:.0f} MB",
        f"| `generate.py` (16-bit weights) | {generation['from 16 tokens: ours']:.0f} ",
    ]
    assert [text for text in expected if text not in text_of("docs/results.md")] == []
    nanogpt = sorted(seconds["nanoGPT"])[1]
    assert f"after {min(seconds['modern']):.0f} seconds instead of {nanogpt:.0f}" in text_of(
        "README.md"
    )


def test_targets_of_make_exist(page):
    for target in re.findall(r"(?:^|`|&& )make ([\w./]+)", text_of(page), re.MULTILINE):
        makefile = text_of("Makefile")
        assert re.search(rf"^(\.PHONY:.*)?{re.escape(target)}\b.*:", makefile, re.MULTILINE)


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
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if " " in node.value and id(node) not in docstrings
    ]
    assert [text for text in texts if STUMBLING.search(text)] == []
