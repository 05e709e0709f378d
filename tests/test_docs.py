"""The pages against the code: links, commands, options, files and numbers.

Command lines of the pages go through the scripts' own parsers.
"""

import ast
import json
import re
import shlex
import shutil
import subprocess
import sys
from functools import cache

import pyarrow.parquet
import pytest

import config
from generating.terminal import parse_args
from preparing.arguments import parse
from tests.conftest import ROOT
from tokenizer_bpe import EOT

PAGES = ["README.md", "CONTRIBUTING.md"]
PAGES += sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("docs/*.md"))
FENCE = re.compile(r"^```.*?\n(.*?)^```", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A command of this repository: a script or a module, and what follows up to the next command.
COMMAND = re.compile(r"(?:python[\d.]*|torchrun[^#\n]*?) (?:-m )?([\w./]+) ?([^#|;<>&`\n]*)")
OTHERS = {"pip", "pytest", "venv", "ray", "data/conversations.py"}  # not this repository's
PARSERS = {"train.py": config.load, "prepare_data.py": parse, "generate.py": parse_args}


@cache
def text_of(file):
    return (ROOT / file).read_text(encoding="utf-8")


def prose(page):
    """A page without its code blocks."""
    return FENCE.sub("", text_of(page))


@cache
def options():
    """The options of all scripts, without their dashes, and the settings."""
    found = set(config.SETTINGS)
    for path in ROOT.glob("[a-z]*/**/*.py"):
        found.update(re.findall(r'"--(\w+)"', path.read_text(encoding="utf-8")))
    return found


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


def anchors(page):
    """A page's headings as GitHub's anchors: `## A *title*, long` is #a-title-long."""
    headings = re.findall(r"^#+ +(.+?) *$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.fixture(params=PAGES)
def page(request):
    """Each page in turn."""
    return request.param


def test_the_first_page_links_to_all_others():
    linked = {link.partition("#")[0] for link in LINK.findall(text_of("README.md"))}
    assert set(PAGES) - {"README.md"} <= linked


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


def test_pages_and_headings_in_the_code_exist():
    for path in [*ROOT.glob("*.py"), *ROOT.glob("[a-z]*/**/*.py"), ROOT / "colab.ipynb"]:
        for page, anchor in re.findall(r"\b(docs/[\w-]+\.md)(?:#([\w-]+))?", text_of(path)):
            assert (ROOT / page).exists(), path
            assert not anchor or anchor in anchors(page), (path, anchor)


def test_commands_parse(page):
    for script, arguments in commands(page):
        file = script if script.endswith(".py") else script.replace(".", "/") + ".py"
        assert (ROOT / file).is_file(), script
        for option in re.findall(r"--([a-z]\w+)", arguments):
            assert option in options(), (script, option)
        try:
            words = shlex.split(arguments)
        except ValueError:  # a quotation with a # or | in it
            words = arguments.split()
        of_a_run = "RUN" in arguments or words[:1] and words[0].startswith("checkpoints/")
        if script in PARSERS and "--help" not in arguments and not of_a_run:
            PARSERS[script](words)


def test_no_comment_follows_a_command(page):
    """zsh, macOS' shell, takes its words as arguments, a > as a file, and a ' as a quotation."""
    for block in re.findall(r"^```\n(.*?)^```", text_of(page), re.MULTILINE | re.DOTALL):
        assert not re.search(r"^[^#\n].* # ", block, re.MULTILINE), block


def test_zsh_runs_what_bash_runs(page):
    """It reads the quotes of comments, and expands ! within double quotes."""
    for block in FENCE.findall(text_of(page)):
        assert not re.search(r"^#[^\n]*'|python -c \"[^\"]*!(?![\s=])", block, re.MULTILINE), block


def test_presets_options_and_settings_exist(page):
    for preset in re.findall(r"\bconfig/[a-z]\w*\.py", text_of(page)):
        assert (ROOT / preset).is_file()
    for span in spans(page):
        for option in re.findall(r"^--([a-z]\w*)", span):
            assert option in options(), span
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


TELEGRAM = [
    {"from": "Bo", "text": "Hi"},
    {"from": "Anna", "text": ["a ", {"text": "link"}]},
    {"from": "Bo", "text": "", "photo": "a.jpg"},
    {},
]
NAME = '\ue200entity\ue202["city","Rome","the capital"]\ue201'
CHATGPT = {  # a tree: the assistant replied twice to c, and d is not shown
    name: {
        "parent": parent,
        "message": role and {"author": {"role": role}, "recipient": "all", "content": content},
    }
    for name, parent, role, content in (
        ("a", None, None, None),
        ("b", "a", "system", {"parts": [""]}),
        ("c", "b", "user", {"parts": [{"image": 1}, "Hi"]}),
        ("d", "c", "assistant", {"parts": ["No"]}),
        ("e", "c", "assistant", {"thoughts": []}),
        ("f", "e", "assistant", {"parts": ['{"prompt": "a hat"}']}),
        ("g", "f", "assistant", {"parts": [f"{NAME} is. \ue200cite\ue202turn0search0\ue201"]}),
    )
}
CHATGPT["f"]["message"]["recipient"] = "dalle.text2im"
CLAUDE = [
    {"sender": "human", "text": "Hi", "content": [{"type": "text", "text": "Hi"}]},
    {
        "sender": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm"},
            {"type": "text", "text": "a"},
            {"type": "tool_use", "input": {}},
            {"type": "text", "text": "b"},
        ],
    },
    {"sender": "human", "text": "", "content": []},
]
EXPORTS = {  # the comment above a command: the file that it reads, and what it writes
    "WhatsApp": (
        "[31.12.24, 20:52:25] +49 1: Hi\r\n\u200e[9/22/26, 10:17:02\u202fAM] Bo: Two\nlines\n"
        "15.04.2016, 15:04 - Anna-Lea: Hey [1]\n"
        "\u200e[9/22/26, 10:17:02\u202fAM] Bo: \u200eimage omitted\r\n"
        "15.04.2016, 15:04 - Bo: <Medien ausgeschlossen>\n01/20/2019, 11:23 a. m. - Bo: - x\n"
        "[1/1/26, 1:02:03 AM] Bo: a.pdf • \u200e2 Seiten \u200eDokument weggelassen\n"
        "[1/1/26, 1:02:03 AM] Bo: I <3 it \u200e<This message was edited>\n",
        "+49 1: Hi\r\nBo: Two\nlines\nAnna-Lea: Hey [1]\nBo: - x\nBo: I <3 it\n",
    ),
    "Telegram": (json.dumps({"messages": TELEGRAM}), "Bo: Hi\nAnna: a link\n"),
    "Telegram:": (
        json.dumps({"chats": {"list": [{"messages": TELEGRAM[:1]}, {"messages": TELEGRAM}]}}),
        "Bo: Hi\nBo: Hi\nAnna: a link\n",
    ),
    "iMessage": (
        "May 17, 2022  5:29:42 PM (Read by you after 1 hour)\nMe\nHi\n\n"
        "May 17, 2022 10:01:02 AM\n+49 1\nTwo\nlines\n\n",
        "Me: Hi\n+49 1: Two\nlines\n",
    ),
    "KakaoTalk": (
        "[Bo] [오후 1:00] Hi\r\n--------------- 2024년 1월 4일 목요일 ---------------\r\n"
        "2024년 1월 4일 오후 1:00\n2024년 1월 4일 오후 1:00, Bo : a, b\nc\n"
        "2024. 1. 4. 오후 1:00, Bo : d : e\n",
        "Bo: Hi\nBo: a, b\nc\nBo: d : e\n",
    ),
    "Discord": (
        '{"messages": [{"author": {"name": "Bo"}, "content": "Hi"}, {"content": ""}]}',
        "Bo: Hi\n",
    ),
    "Facebook": (
        r'{"messages": [{"sender_name": "Zo\u00c3\u00ab", "content": "b"}, {}, {"content": "a"}]}',
        "null: a\nZoë: b\n",
    ),
    "encrypted chats": (
        '{"messages": [{"senderName": "Zoë", "text": "Hi", "type": "text"}, '
        '{"senderName": "Bo", "text": "", "type": "media"}, '
        '{"senderName": "Bo", "text": "User unsent a message", "type": "placeholder"}]}',
        "Zoë: Hi\n",
    ),
    "a channel": (
        '[{"user_profile": {"real_name": "Bo"}, "text": "a &lt;b&gt;\\nc"}, {"text": "joined"}]',
        "Bo: a <b>\nc\n",
    ),
    "one of these chats": (
        "Bo: Hi: you\nPS: a\nAnna: Hey\n",
        '{"messages": [{"role": "user", "content": "Hi: you\\nPS: a\\n"}, '
        '{"role": "assistant", "content": "Hey\\n"}]}\n',
    ),
    "conversations with": (
        json.dumps([{"current_node": "g", "mapping": CHATGPT}]),
        '{"messages":[{"role":"user","content":"Hi"},{"role":"assistant","content":"Rome is."}]}\n',
    ),
    "conversations with Claude": (
        json.dumps([{"chat_messages": CLAUDE}]),
        r'{"messages":[{"role":"human","content":"Hi"},{"role":"assistant","content":"a\n\nb"}]}'
        "\n",
    ),
    "a chat of": (
        '{"user_name": "Bo"}\n{"is_user": false, "mes": "Hi"}\n{"is_user": true, "mes": "Hey"}\n'
        '{"is_system": true, "mes": "help"}\n',
        '{"messages":[{"role":"assistant","content":"Hi"},{"role":"user","content":"Hey"}]}\n',
    ),
    "mail": (
        "From a Mon Jan  1 00:00:00 2024\nSubject: x\nContent-Transfer-Encoding: quoted-printable\n"
        "Content-Type: text/plain; charset=latin-1\n\nCaf=E9\n> b\n>\n>From here\n>I\n\n"
        "From b Mon Jan  1 00:00:00 2024\nContent-Type: text/html\n\n<p>Hi\n\n"
        "From b Mon Jan  1 00:00:00 2024\nContent-Type: text/plain; charset=unknown\n\nHi\n\n"
        "From b Mon Jan  1 00:00:00 2024\n\nHi\n",
        '{"text": "Caf\\u00e9\\nFrom here\\n"}\n{"text": "Hi\\n"}\n',
    ),
    "your posts": (
        'window.YTD.tweets.part0 = [ {"tweet": {"full_text": "Fish &amp; chips\\n[2]"}},\n'
        '{"tweet": {"full_text": "RT @bo: Hi"}} ]',
        '{"text":"Fish & chips\\n[2]"}\n',
    ),
    "subtitles": (
        "\ufeff1\r\n00:00:01,000 --> 00:00:02,000\r\n{\\an8}- <i>Hello</i>,\r\nyou 2!\r\n\r\n"
        "2\r\n00:00:02,000 --> 00:00:03,000\r\nyou 2!\r\n",
        "- Hello,\nyou 2!\n",
    ),
    "subtitles,": (  # as YouTube makes them
        "WEBVTT\nKind: captions\nLanguage: en\n\n00:00:01.000 --> 00:00:03.000 align:start\n \n"
        "to<00:00:01.500><c> all</c>\n\n00:00:03.000 --> 00:00:03.010 align:start\nto all\n \n\n"
        "00:00:03.010 --> 00:00:05.000 align:start\nto all\nof<00:00:04.000><c> you</c>\n",
        "to all\nof you\n",
    ),
    "the times that": (
        "[00:01.50]a 1:30\n\n0:07\n10:15\tBo\tb\n[10:15:11] <bo> c\n[00:01.5 --> 00:02.5]   d\n",
        "a 1:30\n\nBo\tb\n<bo> c\nd\n",
    ),
    "prose with": (
        "One or\r\ntwo well-\r\nknown li-\r\nnes, well-known to A-\r\nB.\r\n\r\n\fOh\u00ad\nne.\n",
        "One or two well-known lines, well-known to A- B.\n\nOhne.\n",
    ),
    "notes in": (
        "\ufeff---\r\ntags: [a]\r\n---\r\n# A\n\n---\nb\n",
        f"# A\n\n---\nb\n\n{EOT}\n",
    ),
    "notes in Markdown": ("---\na rule\n", f"---\na rule\n\n{EOT}\n"),
    "records whose": ('[{"paragraphs": ["a", "b"]}]', '{"text":"a\\nb"}\n'),
    "a text in": ("Bo\r\nBo\n", 2 * '{"text":"Bo"}\n'),
    "a question, a tab": ("Go.\tVa !\tCC-BY\n", "question\tanswer\nGo.\tVa !\n"),
    "texts with": ("a\n%\r\n5 % b\n", "a\n<|endoftext|>\n5 % b\n"),
    "the moves of chess": (
        '[Event "a"]\n[Result "*"]\r\n\r\n1. e4 { [%clk 0:03:00] } 1... e5 $1 { [%eval 0.2]\n'
        '[%clk 0:03:00] }\n2. d4 *\n\n[Event "b"]\n\n1. d4 *\n',
        "\n<|endoftext|>\n1. e4 e5 2. d4 * \n<|endoftext|>\n1. d4 * ",
    ),
    "DNA or": (">a\nACG\nTn\n>b\r\nAC\r\n", '{"text":"ACGTN"}\n{"text":"AC"}\n'),
    "several columns": (
        '\ufeff,title,directions\n1,Soup,"[""Boil."",\n""Serve.""]"\n2,Tea\n',
        '{"text": "Soup\\n\\n[\\"Boil.\\",\\n\\"Serve.\\"]"}\n{"text": "Tea\\n\\n"}\n',
    ),
    "several fields": (
        '[{"country": "Italy", "points": 87, "description": "Dry."}]',
        '{"text":"Italy: Dry."}\n',
    ),
    "WikiText": (
        ["", " = A = \n", "", " One \n", " = = B = = \n", " Two \n", " = C = \n", " = 3 \n"],
        f"{EOT}\n = A = \n One \n = = B = = \n Two \n{EOT}\n = C = \n = 3 \n\n",
    ),
    "OpenAssistant": (
        '{"message_id": "a", "parent_id": null, "role": "prompter", "text": "Hi"}\n'
        '{"message_id": "b", "parent_id": "a", "role": "assistant", "text": "No", "rank": 1}\n'
        '{"message_id": "c", "parent_id": "b", "role": "prompter", "text": "Why?", "rank": 0}\n'
        '{"message_id": "d", "parent_id": "a", "role": "assistant", "text": "Yes", "rank": 0}\n',
        '{"messages": [{"role": "prompter", "content": "Hi"},'
        ' {"role": "assistant", "content": "Yes"}]}\n',
    ),
    "a column with": (
        'Id,Body\n1,"<p>1 &lt; 2</p><a href=""x"">b</a>"\n',
        '{"text": "1 < 2\\nb"}\n',
    ),
}


@pytest.mark.skipif(not shutil.which("jq"), reason="needs jq")
@pytest.mark.parametrize("what", EXPORTS)
def test_commands_make_text_of_other_programs(tmp_path, what):
    page = text_of("docs/other-programs.md")
    command = re.search(rf"^# {what}.*\n([^#]*?)^[#`]", page, re.MULTILINE)[1]
    kinds = "jsonl?|js|srt|pgn|txt|fa|csv|md|parquet"
    read = re.search(rf"[\w/*]+\.({kinds})|inbox.mbox|jokes", command)[0]
    written = command.split()[-1]
    content, expected = EXPORTS[what]
    (tmp_path / read).parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, list):
        pyarrow.parquet.write_table(pyarrow.table({"text": content}), tmp_path / read)
    else:
        (tmp_path / read).write_bytes(content.encode())
    python = f'python() {{ {shlex.quote(sys.executable)} "$@"; }}\n'
    subprocess.run(["sh", "-c", python + command], cwd=tmp_path, check=True)
    assert (tmp_path / written).read_bytes().decode() == expected


def test_numbers_are_those_of_the_benchmarks():
    def measured(name):
        return json.loads(text_of(f"benchmarks/results/{name}.json"))

    speed = measured("throughput_134m_cpu")["figures"]
    patched = "nanoGPT with bf16 autocast"
    large = measured("prepare_12gb_cpu")["figures"]
    generation = measured("generate_cpu")["figures"]
    loss = measured("time_to_loss_shakespeare_cpu")
    names = ("nanoGPT", "GPT-2", "modern")
    seconds, figures = loss["seconds_to_aim"], loss["figures"]
    shares = [figures[f"{name}: share of nanoGPT's time"] for name in names]
    medians = [sorted(seconds[name])[1] for name in names]
    laptop = measured("time_to_loss_laptop_cpu")["figures"]
    sources = measured("time_to_loss_sources_cpu")["seconds_to_aim"]
    cells = [
        f"| 134M | `train.py` | {speed['ours']:,.0f} |",
        f"bfloat16 | {speed[patched]:.0f} | {speed[f'ours, times {patched}']:.2f} |",
        f"stock nanoGPT | {speed['nanoGPT']:.0f} | {speed['ours, times nanoGPT']:.2f} |",
        f"loss, median | {medians[0]:.0f} | {medians[1]:.0f} | {medians[2]:.1f} |",
        f"time, median | {shares[0]:.0f} | {shares[1]:.2f} | {shares[2]:.2f} |",
        f"loss of 4.26 | {sources['GPT-2'][0]:.0f} | {sources['modern'][0]:.0f} |",
        f"| gigatoken | {large['tokenising, MB/s']:.0f} |",
        f"| `generate.py` with 16-bit weights | {generation['from 16 tokens: ours']:.0f} | |",
        f"| `config/laptop.py` | {laptop['config/laptop.py: bits per byte at the end']:.3f} |",
    ]
    assert [cell for cell in cells if cell not in text_of("docs/results.md")] == []
    steps = [f"| {1000 * rung['step_s']:,.0f} |" for rung in measured("ladder_cpu")["rungs"]]
    assert [cell for cell in steps if cell not in text_of("docs/experiments.md")] == []
    readme = " ".join(text_of("README.md").split())
    assert f"trains for {medians[0]:.0f} s on Shakespeare" in readme
    assert f"in {medians[2]:.0f} s on the same two cores" in readme


def test_the_pages_count_the_lines_of_the_code():
    walk = text_of("docs/code.md").partition("The row of ids")[0]
    training = [path.relative_to(ROOT).as_posix() for path in ROOT.glob("training/*.py")]
    for page, words, files in (
        ("README.md", r"([\d,]+) of them are the model", {"model.py", "train.py", *training}),
        ("docs/code.md", r"have about ([\d,]+) lines", set(re.findall(r"`([\w/]+\.py)", walk))),
    ):
        lines = sum(text_of(file).count("\n") for file in files)
        stated = re.search(words, text_of(page))[1]
        assert int(stated.replace(",", "")) == pytest.approx(lines, rel=0.1), page


def test_the_explained_preset_is_the_file():
    (explained,) = re.findall(r"^```python\n(.*?)^```", text_of("docs/training.md"), re.M | re.S)
    assert ast.dump(ast.parse(explained)) == ast.dump(ast.parse(text_of("config/laptop.py")))


def test_targets_of_make_exist(page):
    for target in re.findall(r"(?:^|`|&& )make ([\w./]+)", text_of(page), re.MULTILINE):
        makefile = text_of("Makefile")
        assert re.search(rf"^(\.PHONY:.*)?{re.escape(target)}\b.*:", makefile, re.MULTILINE)
