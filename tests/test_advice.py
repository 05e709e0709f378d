"""The commands that messages print: each is run, or parsed, on a case that prints it."""

import re
import shlex
import shutil
from pathlib import Path

import pytest

import config
import generating.terminal
import preparing.arguments
from config import ConfigError, loader
from formats import data_folder, run_folder
from formats.data_folder import DataError, read_meta
from formats.run_folder import CheckpointError
from tests.conftest import ROOT, ok, run_script, trained

COMMAND = re.compile(r"^  (?:.*: )?python (.+)$|: python ([^;\n]+)", re.MULTILINE)
EXAMPLE = ["--max_steps=2", "--sample_prompts=- The"]


def commands(message):
    """The commands in a message, each as a list of words."""
    return [shlex.split(a or b) for a, b in COMMAND.findall(message)]


@pytest.fixture(scope="module")
def told(char_data, tmp_path_factory):
    """What a run in a folder with a blank and a quote prints at its end, and when started again."""
    folder = tmp_path_factory.mktemp("advice") / "it's mine"
    result = trained(char_data, folder, *EXAMPLE)
    return commands(result.stdout), commands(trained(char_data, folder, *EXAMPLE).stdout)


def test_what_a_run_prints_at_its_end_works(told):
    at_the_end, again = told
    assert [words[0] for words in at_the_end] == ["generate.py", "-m"]
    assert [words[0] for words in again] == ["train.py", "generate.py"]
    for words in (*at_the_end, again[0]):
        ok(run_script(*words))


def raised(error, function, *arguments):
    with pytest.raises(error) as caught:
        function(*arguments)
    return str(caught.value)


def test_a_run_that_has_not_saved_names_the_command_that_continues_it(told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = Path("my run")
    shutil.copytree(told[0][0][2], run, ignore=shutil.ignore_patterns("step_*"))
    ((script, *words),) = commands(raised(CheckpointError, run_folder.find, run))
    assert script == (ROOT / "train.py").as_posix()  # it is not in this folder
    assert config.load(words).checkpoint_dir == "my run"


def test_a_folder_without_data_is_named_with_what_prepares_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for made, missing, inputs, out in (
        ("data", "my data", ["YOUR_TEXT"], "my data"),
        ("my data", "my data", ["my data"], "data/NAME"),
        ("data", "data", ["YOUR_TEXT"], "data/NAME"),
    ):
        Path(made).mkdir(exist_ok=True)
        ((script, *words),) = commands(raised(DataError, read_meta, missing))
        plan = preparing.arguments.parse(words)
        assert (plan.inputs, plan.out.as_posix()) == (inputs, out)
        assert script == (ROOT / "prepare_data.py").as_posix()
    Path("data/half/.partial").mkdir(parents=True)
    assert "repeat the command that prepares it" in raised(DataError, read_meta, "data/half")


def test_data_without_replies_is_named_with_what_prepares_some(char_data):
    message = raised(DataError, data_folder.check_masked, "my data", read_meta(char_data))
    ((script, *words),) = commands(message)
    assert script == "prepare_data.py"
    assert preparing.arguments.parse(words).tokenizer == "my data"


def test_weights_given_as_a_run_are_named_with_what_trains_them(tmp_path):
    folder = tmp_path / "the weights"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    ((script, *words),) = commands(raised(ConfigError, config.load, [str(folder)]))
    assert script == "train.py"
    assert config.load(words).init_from == folder.as_posix()


@pytest.mark.parametrize("path", loader.presets(), ids=lambda path: path.stem)
def test_the_commands_at_the_top_of_a_preset_fit_it(path):
    lines = path.read_text(encoding="utf-8").splitlines()
    comment = "\n".join(line[2:] for line in lines if line.startswith("#"))
    found = commands(comment.replace("\\\n", ""))  # a command may go on in the next line
    assert found
    preset = config.load([str(path)])
    for script, *words in found:
        if script == "prepare_data.py":
            assert preparing.arguments.parse(words).out.as_posix() == preset.data_dir
        elif script == "train.py":
            assert config.load(words).data_dir == preset.data_dir
        else:
            assert generating.terminal.parse_args(words).checkpoint == preset.checkpoint_dir
