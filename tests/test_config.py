"""config/: typed settings, presets, the settings of a run, overrides, and mistakes in them."""

import dataclasses
import json
from pathlib import Path

import pytest

import config
from config import SETTINGS, Config, ConfigError, loader
from model import GPTConfig

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
        ("--batch_size=8", "batch_size", 8),
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
        ("--n_layer=0", ["the command line: n_layer = 0", "a whole number from 1 to 1,000"]),
        ("--n_layer=2.5", ["n_layer", "whole number"]),
        ("--n_layer=2000", ["n_layer = 2000", "from 1 to 1,000"]),
        ("--learning_rate=nan", ["learning_rate", "a number"]),
        ("--learning_rate=inf", ["learning_rate", "a number"]),
        ("--dtype=bf16", ["dtype", "bfloat16"]),
        ("--batch_size", ["--batch_size has no value"]),
        ("--batch_size=1e300", ["batch_size = 1000", "from 1 to 1,048,576"]),
        ("--min_lr=1", ["min_lr = 1.0", "learning_rate"]),
        ("--beta2=1", ["beta2 = 1.0", "a number from 0 to 0.99999"]),
        ("--dropout=1", ["dropout = 1.0", "a number from 0 to 0.9"]),
        ("--max_steps=0", ["a whole number from 1 to 1,000,000,000 or None"]),
        ("--epochs=0", ["epochs = 0.0", "a number from 1e-06"]),
        ("--learning_rate=-1", ["learning_rate = -1.0", "a number from 0"]),
        ("--dry_run=1", ["dry_run = 1", "True or False"]),
        ('--n_layer=["a"]', ["n_layer = ['a']", "whole number"]),
        ("--sample_prompts=[1]", ["sample_prompts", "list of texts"]),
        ('--sample_prompts=["a"', ["sample_prompts", "list of texts"]),
        ("config/gpt2_smal.py", ["config/gpt2_smal.py is no preset", "config/gpt2_small.py"]),
        ("config/dmo.py", ["config/dmo.py is no preset", "did you mean config/demo.py?"]),
        ("config/demo.yaml", ["config/demo.yaml is no preset", "did you mean config/demo.py?"]),
        ("config/laptop", ["did you mean config/laptop.py?"]),
        ("config.demo", ["did you mean config/demo.py?"]),
        ("laptop", ["did you mean config/laptop.py?"]),
        ("README.md", ["README.md is no preset and no run"]),
        ("checkpoints/no_such_run", ["no preset and no run"]),
        ("config/nothing_like_it.py", ["config/ has", "demo"]),
        ("--init_from=scratch", ["init_from = scratch: leave it out to train new weights"]),
        ("--init_from=resume", ["init_from = resume: leave it out", "to continue a run"]),
        ("--init_from=gpt2-xl", ["init_from = gpt2-xl", "hf://openai-community/gpt2"]),
        ("--checkpoint_dir=s3://bucket/run", ["a folder of this machine", "mirror = s3://"]),
        ("--mirror=checkpoints", ["mirror = checkpoints", "the run itself", "another disk"]),
        ("--mirror=s3://me:secret@host/runs", ["a login in mirror", "environment"]),
        ("--init_from=https://me:secret@host/run", ["a login in mirror or init_from"]),
        ("--max_cost=5", ["max_cost = 5.0 needs cost_per_hour"]),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(text, words):
    with pytest.raises(ConfigError) as error:
        config.load([text])
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("out_dir", "checkpoint_dir"),
        ("dataset", "data_dir"),
        ("max_iters", "max_steps"),
        ("gradient_accumulation_steps", "batch_size / micro_batch_size"),
        ("wandb_log", "wandb = PROJECT"),
        ("always_save_checkpoint", "save_interval"),
        ("eval_only", "python -m tools.evaluate"),
        ("vocab_size", "python prepare_data.py --vocab_size"),
    ],
)
def test_a_name_of_nanogpts_is_answered_with_ours(theirs, ours):
    with pytest.raises(ConfigError, match=f"no setting is called '{theirs}'; here it is {ours}"):
        config.load([f"--{theirs}=1"])


def test_a_revision_of_a_repository_is_no_login():
    assert config.load(["--init_from=hf://openai-community/gpt2@main"]).init_from


def test_a_step_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds prepared data or one step of a run"):
        config.load([f"--checkpoint_dir={tmp_path}"])


def test_a_bare_flag_is_true():
    assert config.load(["--dry_run", "--tie_weights"]).dry_run


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_layer = 2\nlearning_rte = 1e-3\n", ["mine.py: ", "'learning_rate'"]),
        ("n_layer = '2'\n", ["mine.py: n_layer = '2'", "whole number"]),
        ("compile = 1\n", ["mine.py: ", "True or False"]),
        ("n_layer = 2\nn_head = = 3\n", ["mine.py: SyntaxError: invalid syntax", "line 2"]),
        ("n_layer = 2\n\nn_head = undefined\n", ["mine.py: NameError: name 'undefined'"]),
    ],
)
def test_a_mistake_in_a_preset_names_the_file(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        config.load([preset(tmp_path, text)])
    assert all(word in str(error.value) for word in words), error.value


def test_a_preset_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("n_layer = 3\n", encoding="utf-8-sig")
    assert config.load([str(path)]).n_layer == 3


def recorded_run(tmp_path, **changes):
    """The folder of a run that has recorded its settings."""
    first = config.load([preset(tmp_path, "n_layer = 3\nepochs = 2\n"), "--dry_run"])
    run = tmp_path / "moved"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(first.recorded() | changes))
    return run


def test_the_folder_of_a_run_stands_for_its_settings(tmp_path):
    run = recorded_run(tmp_path)
    c = config.load([str(run)])
    assert (c.n_layer, c.epochs) == (3, 2.0)
    assert c.checkpoint_dir == str(run)  # wherever it was when it was recorded
    assert not c.dry_run


def test_the_command_line_overrides_the_settings_of_a_run(tmp_path):
    c = config.load([str(recorded_run(tmp_path)), "--max_steps=50"])
    assert (c.n_layer, c.max_steps, c.epochs) == (3, 50, None)


def test_what_a_run_recorded_counts_as_given(tmp_path):
    given = config.load([str(recorded_run(tmp_path, block_size=16))]).given
    assert "block_size" in given and "max_steps" not in given  # it is None


def test_qwen3_records_that_it_has_no_biases():
    assert config.load(["--arch=qwen3"]).recorded()["bias"] is False
    assert config.load(["--arch=qwen3", "--bias"]).bias is False


def test_settings_of_a_run_that_are_gone_are_left_out(tmp_path):
    assert config.load([str(recorded_run(tmp_path, data_location="ram"))]).n_layer == 3


def test_a_folder_without_recorded_settings_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is no run with its settings"):
        config.load([str(tmp_path)])


def test_recorded_settings_are_checked(tmp_path):
    with pytest.raises(ConfigError, match=r"config.json: n_layer = '3', but it takes"):
        config.load([str(recorded_run(tmp_path, n_layer="3"))])


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


@pytest.mark.parametrize(
    ("argv", "folder"),
    [
        ([], "checkpoints/run"),
        (["config/demo.py"], "checkpoints/demo"),
        (["config/demo.py", "--checkpoint_dir=a/b"], "a/b"),
    ],
)
def test_a_run_without_a_folder_is_called_after_its_preset(argv, folder):
    assert config.load([*argv, "--seed=1"]).checkpoint_dir == folder
    if "a/b" not in folder:
        assert config.load([*argv, "--checkpoint_dir=None"]).checkpoint_dir == folder


def test_two_presets_are_refused():
    with pytest.raises(ConfigError, match="one preset"):
        config.load(PRESETS[:2])


def test_help_lists_every_setting(capsys):
    with pytest.raises(SystemExit) as exit_:
        config.load(["--help"])
    text = capsys.readouterr().out
    assert exit_.value.code == 0 and all(f"--{name}=" in text for name in config.SETTINGS)


def test_a_copy_of_the_settings_keeps_what_was_given():
    c = dataclasses.replace(config.load(["--n_layer=2"]), n_head=2)
    assert "n_layer" in c.given and "given" not in c.recorded()


def test_the_shape_and_the_settings_have_the_same_defaults():
    shape, settings = dataclasses.asdict(GPTConfig(vocab_size=1)), Config()
    shared = shape.keys() & SETTINGS.keys()
    assert {"n_head", "tie_weights", "block_size"} <= shared
    assert {name: shape[name] for name in shared} == {n: getattr(settings, n) for n in shared}
