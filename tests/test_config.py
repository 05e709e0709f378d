"""config/: typed settings, presets, overrides, and what a mistake is answered with."""

from pathlib import Path

import pytest

import config
from config import ConfigError, loader

PRESETS = [path.as_posix() for path in loader.presets()]


def preset(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("path", PRESETS)
def test_every_preset_loads(path):
    assert config.load([path]).checkpoint_dir == f"checkpoints/{Path(path).stem}"


def test_the_command_line_overrides_the_preset_wherever_it_stands(tmp_path):
    path = preset(tmp_path, "learning_rate = 1e-3\nn_layer = 2 * 3\nsample_prompts = ['a']\n")
    for argv in ([path, "--learning_rate=5e-4"], ["--learning_rate=5e-4", path]):
        c = config.load(argv)
        assert (c.learning_rate, c.n_layer, c.sample_prompts) == (5e-4, 6, ["a"])


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("--max_steps=None", "max_steps", None),
        ("--max_steps=2e3", "max_steps", 2000),
        ("--max_steps=2_000", "max_steps", 2000),
        ("--compile=false", "compile", False),
        ("--compile=True", "compile", True),
        ("--epochs=2", "epochs", 2.0),
        ("--sample_prompts=Once", "sample_prompts", ["Once"]),
        ('--sample_prompts=["a", "b"]', "sample_prompts", ["a", "b"]),
        ("--batch-size=8", "batch_size", 8),
    ],
)
def test_values_are_read_in_their_type(text, name, value):
    got = getattr(config.load([text]), name)
    assert got == value and type(got) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--learning_rte=1", ["the command line", "'learning_rte'", "'learning_rate'"]),
        ("--compile=maybe", ["compile = 'maybe'", "True or False"]),
        ("--n_layer=six", ["n_layer = 'six'", "whole number"]),
        ("--n_layer=0", ["the command line: n_layer = 0", "at least 1"]),
        ("--n_layer=2.5", ["n_layer", "whole number"]),
        ("--learning_rate=nan", ["learning_rate", "a number"]),
        ("--learning_rate=inf", ["learning_rate", "a number"]),
        ("--dtype=bf16", ["dtype", "bfloat16"]),
        ("--batch_size", ["--batch_size has no value"]),
        ("--out_dir=a", ["'out_dir'", "'checkpoint_dir'"]),
        ("--always_save_checkpoint", ["'always_save_checkpoint' (python train.py --help"]),
        ("--micro_batch_size=5", ["micro_batch_size = 5", "batch_size = 32", "4"]),
        ("--batch_size=1e300", ["batch_size = 1000", "below 2**31 tokens"]),
        ("--min_lr=1", ["min_lr = 1.0", "learning_rate"]),
        ("--beta2=1", ["beta2 = 1.0", "below 1"]),
        ("--muon_momentum=1", ["muon_momentum = 1.0", "below 1"]),
        ("--decay_fraction=5", ["decay_fraction = 5.0", "at most 1"]),
        ("--sample_prompts=[1]", ["sample_prompts", "list of texts"]),
        ('--sample_prompts=["a"', ["sample_prompts", "list of texts"]),
        ("config/gpt2_smal.py", ["no preset config/gpt2_smal.py", "config/gpt2_small.py"]),
        ("config/demo.yaml", ["no preset config/demo.yaml; did you mean config/demo.py?"]),
        ("laptop", ["no preset laptop; did you mean config/laptop.py?"]),
        ("config/laptop", ["no preset config/laptop; did you mean config/laptop.py?"]),
        ("README.md", ["README.md: a preset is a Python file of assignments"]),
        ("--vocab_size=5000", ["comes from the data", "prepare_data.py --vocab_size"]),
        ("--init_from=scratch", ["leave init_from out", "new weights"]),
        ("--init_from=resume", ["leave init_from out", "continues it"]),
        ("--init_from=gpt2-xl", ["hf://openai-community/gpt2-xl"]),
        ("--mirror=https://host/runs", ["mirror = 'https://host/runs'", "s3://bucket/runs"]),
        ("--checkpoint_dir=s3://bucket/run", ["a folder of this machine", "mirror = s3://"]),
        ("--checkpoint_dir=~/runs/a", ["checkpoint_dir = ~/runs/a", "without ~"]),
        ("--mirror=checkpoints", ["mirror = checkpoints", "the run itself", "another disk"]),
        ("--mirror=checkpoints/run/copies", ["checkpoints/run/copies/run, would be", "inside it"]),
        (f"--mirror=file://{Path.cwd()}/checkpoints", ["the run itself"]),
        ("config/nothing_like_it.py", ["config/ has", "demo.py"]),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(text, words):
    with pytest.raises(ConfigError) as error:
        config.load([text])
    assert all(word in str(error.value) for word in words), error.value


def test_a_step_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="one step of a run; the run is"):
        config.load([f"--checkpoint_dir={tmp_path}"])


def test_a_bare_flag_is_true():
    assert config.load(["--dry_run", "--tie-weights"]).dry_run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_layer = 2\nlearning_rte = 1e-3\n", ["mine.py, line 2", "'learning_rate'"]),
        ("n_layer = '2'\n", ["mine.py, line 1", "n_layer = '2'", "whole number"]),
        ("compile = 1\n", ["mine.py, line 1", "True or False"]),
        ("n_layer = 2\nn_head = = 3\n", ["mine.py, line 2: SyntaxError: invalid syntax"]),
        ("n_layer = 2\nvocab_size = 5000\n", ["mine.py, line 2", "prepare_data.py --vocab_size"]),
        ("n_layer = 2\n\nn_head = undefined\n", ["mine.py, line 3: NameError", "undefined"]),
        ("n_layer = 2\nn_head: 2\n", ["mine.py, line 2", "write n_head = VALUE"]),
        ("if True:\n    n_head: 2\n", ["mine.py, line 2", "write n_head = VALUE"]),
        (
            "n_layer = 2\nfor n_head in [1]:\n    n_hed = 3\n",
            ["mine.py, line 3", "'n_hed'", "'n_head'"],
        ),
        ("n_layer = 2\nn_layer = '3'\n", ["mine.py, line 2", "n_layer = '3'"]),
    ],
)
def test_a_mistake_in_a_preset_names_the_file(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        config.load([preset(tmp_path, text)])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_preset_may_begin_with_a_byte_order_mark(tmp_path, encoding):
    path = tmp_path / "mine.py"
    path.write_text("n_layer = 3\n", encoding=encoding)
    assert config.load([str(path)]).n_layer == 3
    path.write_text("n_layr = 3\n", encoding=encoding)
    with pytest.raises(ConfigError, match=r"mine.py, line 1: no setting is called 'n_layr'"):
        config.load([str(path)])


def test_without_arguments_it_says_how_to_choose_a_preset():
    with pytest.raises(
        ConfigError, match=r"Name a preset, .* config/demo.py; config/ has chat.py, "
    ):
        config.load([])


def test_a_value_after_a_space_is_no_preset():
    with pytest.raises(ConfigError, match=r"--batch_size has no value; write --batch_size=VALUE"):
        config.load([*PRESETS[:1], "--batch_size", "8"])


def test_a_preset_is_also_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.load(["config/demo.py"]).checkpoint_dir == "checkpoints/demo"


@pytest.mark.parametrize(
    ("argument", "epochs", "max_steps"),
    [
        ("--n_layer=2", 8.0, 500),
        ("--epochs=2", 2.0, None),
        ("--max_steps=20", None, 20),
        ("--max_steps=None", 8.0, None),
    ],
)
def test_a_length_on_the_command_line_replaces_both_of_a_preset(
    tmp_path, argument, epochs, max_steps
):
    c = config.load([preset(tmp_path, "epochs = 8\nmax_steps = 500\n"), argument])
    assert (c.epochs, c.max_steps) == (epochs, max_steps)


def test_a_run_of_no_given_length_is_an_epoch():
    assert config.load(["--n_layer=2"]).epochs == 1.0


def test_two_presets_are_refused():
    with pytest.raises(ConfigError, match="one preset"):
        config.load(PRESETS[:2])


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as exit_:
        config.load(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0 and all(f"--{name}=" in text for name in config.SETTINGS)
