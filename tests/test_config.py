"""config/: typed settings, presets, the settings of a run, overrides, and mistakes in them."""

import dataclasses
import json
from pathlib import Path

import pytest

import config
from config import SETTINGS, Config, ConfigError, loader
from model import GPTConfig
from tests.conftest import HOME
from tests.settings_page import page

PRESETS = [path.as_posix() for path in loader.presets()]


def preset(tmp_path, text):
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
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
        ("--compile='False'", "compile", False),  # as Windows' shell leaves it
        ('--batch_size="8"', "batch_size", 8),
        ("--batch_size=“8”", "batch_size", 8),  # as web pages and chats turn them
        ("--max_steps=none", "max_steps", None),
        ("--mirror=none", "mirror", None),
        ("--epochs=2", "epochs", 2.0),
        ("--sample_prompts=Once", "sample_prompts", ["Once"]),
        ('--sample_prompts=["a", "b"]', "sample_prompts", ["a", "b"]),
        ("--sample_prompts=['a', 'b']", "sample_prompts", ["a", "b"]),
        ("--batch_size=8", "batch_size", 8),
        ("--batch_size 8", "batch_size", 8),
        ("batch_size=8", "batch_size", 8),
        ("--compile false", "compile", False),
        ("--compile config/demo.py", "compile", True),
        ("--batch_size=8", "epochs", 1.0),  # where no length is given
        ("--n_kv_head=4", "n_kv_head", 4),
        ("--dry_run", "dry_run", True),
        ("--init_from=hf://gpt2@main", "init_from", "hf://gpt2@main"),  # a revision is no login
    ],
)
def test_values_are_read_in_their_type(text, name, value):
    got = getattr(config.load([text] if "[" in text else text.split()), name)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", ["Name a preset, ", " config/demo.py; config/ has chat.py, "]),
        ("config/demo.py config/chat.py", ["one preset, not config/demo.py and config/chat.py"]),
        ("config/demo.py --batch_size", ["--batch_size has no value", "--batch_size=VALUE"]),
        ("''", ["the command line: it is empty"]),
        ("--batch_size --compile=False", ["--batch_size has no value", "--batch_size=VALUE"]),
        ("--mirror=", ["--mirror has no value; write --mirror=VALUE"]),
        ("--data_dir=''", ["data_dir: it is empty; is a variable in it not set?"]),
        ("--wandb=''", ["wandb = '', but it must be a text that is not empty or None"]),
        ("--data_dir=~nobody_at_all/d", ["data_dir: ~nobody_at_all/d: there is no home"]),
        ("config/demo.py --sample_prompts=Hello, World", ["config/demo.py and World", "quotes"]),
        ("max_steps = 5", ["write --NAME=VALUE without blanks around the ="]),
        ("--wandb=False", ["wandb = False, but it must be a text that is not empty or None"]),
        ("--mirror=true", ["mirror = True, but it must be a text"]),
        ("--config=config/demo.py", ["'config'; here it is a word without --"]),
        ("max_step=5", ["'max_step'; did you mean 'max_steps'?"]),
        ("--eval=5", ["did you mean 'eval_interval' or 'eval_batches'?"]),
        ("--lr=1e-3", ["'lr'; here it is learning_rate"]),
        ("--learning_rte=1", ["the command line", "'learning_rte'", "'learning_rate'"]),
        ("--DATA_DIR=x", ["'DATA_DIR'; did you mean 'data_dir'?"]),
        ("--compile=maybe", ["compile = 'maybe'", "True or False"]),
        ("config/demo.py --compile no", ["compile = 'no'", "True or False"]),
        ("--compile 0 config/demo.py", ["compile = 0", "True or False"]),
        ("--dry_run=1", ["dry_run = 1", "True or False"]),
        ("--n_layer=six", ["n_layer = 'six'", "whole number"]),
        ("--n_layer=2.5", ["n_layer", "whole number"]),
        ("--n_layer=2000", ["n_layer = 2000", "from 1 to 1,000"]),
        ("--max_steps=1,000", ["max_steps = '1,000'", "a whole number"]),
        ("--max_steps=0", ["a whole number from 1 to 1,000,000,000 or None"]),
        ("--learning_rate=-1", ["learning_rate = -1.0", "a number from 0"]),
        ("--epochs=0", ["epochs = 0.0", "a number from 1e-06"]),
        ("--dtype=bf16", ["dtype", "bfloat16"]),
        ('--sample_prompts=["a"', ["sample_prompts", "list of texts"]),
        ("--learning_rate=nan", ["learning_rate = 'nan'", "a number from 0"]),
        ("--learning_rate=1e999", ["learning_rate = inf", "a number from 0"]),
        ("--learning_rate=" + "9" * 400, ["learning_rate = 9999", "a number from 0"]),
        ("--max_steps=" + "9" * 5000, ["max_steps = '9999", "a whole number"]),
        ("config/gpt2_smal.py", ["no preset or run config", "did you mean config/gpt2_small.py"]),
        ("config.demo", ["did you mean config/demo.py?"]),
        ("README.md", ["README.md is not a preset, which is a Python file of NAME = VALUE"]),
        ("laptop", ["did you mean config/laptop.py?"]),
        ("checkpoints/no_such_run", ["there is no preset or run", "config/ has", "demo"]),
        ("--min_lr=1", ["min_lr = 1.0", "learning_rate"]),
        ("--arch=qwen3 --embedding_lr=0.1", ["embedding_lr would also be the rate of the output"]),
        ("--max_cost=5", ["max_cost = 5.0 needs cost_per_hour"]),
        ("--checkpoint_dir=s3://bucket/run", ["a folder of this machine", "mirror = s3://"]),
        ("--checkpoint_dir=README.md", ["a folder of this machine"]),
        ("--mirror=checkpoints", ["mirror = checkpoints", "the run itself", "another disk"]),
        (f"--mirror={(Path() / 'checkpoints').absolute().as_uri()}", ["the run itself"]),
        ("--mirror=https://host/runs", ["mirror = https://host/runs", "s3://bucket/runs"]),
        ("--mirror=README.md", ["mirror = README.md: it must be a folder"]),
        ("--mirror=s3://me:secret@host/runs", ["a login in mirror", "environment"]),
        ("--init_from=https://me:secret@host/run", ["a login in mirror or init_from"]),
        # nanoGPT's names
        ("--init_from=scratch", ["leave it out to train new weights, and to continue a run"]),
        ("--init_from=gpt2-xl", ["init_from = gpt2-xl", "hf://openai-community/gpt2"]),
        ("--out_dir=out", ["'out_dir'; here it is checkpoint_dir"]),
        ("--decay_lr=False", ["'decay_lr'; here it is min_lr = learning_rate"]),
        ("--always_save_checkpoint=True", ["here it is save_interval"]),
        ("--eval_only", ["'eval_only'; here it is python -m tools.evaluate RUN"]),
        ("--vocab_size=50304", ["here it is python prepare_data.py --vocab_size"]),
        # nanochat's, Trainer's and a launcher's
        ("--device_batch_size=8", ["'device_batch_size'; here it is micro_batch_size"]),
        ("--save_steps=500", ["'save_steps'; here it is save_interval"]),
        ("--local_rank=0", ["here it is a variable that torchrun sets; write torchrun train.py"]),
    ],
)
def test_a_mistake_on_the_command_line_is_a_sentence(line, words):
    with pytest.raises(ConfigError) as error:
        config.load(line.split())
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("text", ["~/d", " ~/d\r\n", "'~/d'", '"~/d" '])
@pytest.mark.parametrize("name", ["data_dir", "checkpoint_dir", "mirror", "init_from"])
def test_a_path_is_one_as_shells_notebooks_and_presets_leave_it(tmp_path, monkeypatch, name, text):
    monkeypatch.setenv(HOME, "/home/me")
    for argv in ([f"--{name}={text}"], [preset(tmp_path, f"{name} = {text!r}\n")]):
        assert getattr(config.load(argv), name) == "/home/me/d"
    (tmp_path / "~").mkdir()
    monkeypatch.chdir(tmp_path)
    assert getattr(config.load([f"--{name}={text}"]), name) == "/home/me/d"


def test_a_preset_is_also_found_in_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv(HOME, str(tmp_path))
    preset(tmp_path, "n_layer = 3\n")
    assert config.load(["~/mine.py"]).n_layer == 3


@pytest.mark.parametrize("file", ["meta.json", "state.json"])
def test_prepared_data_and_a_step_are_no_folder_for_a_run(tmp_path, file):
    (tmp_path / file).write_text("{}")
    with pytest.raises(ConfigError, match="holds prepared data or one step of a run"):
        config.load([f"--checkpoint_dir={tmp_path}"])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("n_layer = 2\nlearning_rte = 1e-3\n", ["mine.py: ", "'learning_rate'"]),
        ("max_iters = 9\nlr = 1e-3\n", ["it is max_steps\n  no setting is called 'lr'"]),
        ("n_layer = 2\nn_head = = 3\n", ["mine.py: SyntaxError: invalid syntax", "line 2"]),
        ("n_layer = 2\n\nn_head = undefined\n", ["mine.py: line 3: NameError: name 'undefined'"]),
        ("n_layer = 2\nn_head: 2\n", ["mine.py: line 2 sets nothing; write NAME = VALUE"]),
        ("if True:\n    n_head: 2\n", ["mine.py: line 2 sets nothing"]),
        ("learning_rate = 10**400\n", ["learning_rate = 1000", "a number from 0"]),
        ("data_dir = ''\n", ["data_dir = '', but it must be a text that is not empty"]),
        ("data_dir = ~/d\n", ["mine.py: SyntaxError"]),
        (
            "import numpy\nlearning_rate = numpy.logspace(-4, -3, 3)\n",
            ["learning_rate = array([0.0001", "a number from 0"],
        ),
        ("import torch\nn_layer = torch.ones(2)\n", ["n_layer = tensor([1., 1.])", "a whole"]),
        ("class Config:\n    n_layer = 2\n", ["mine.py sets nothing; write NAME = VALUE"]),
    ],
)
def test_a_mistake_in_a_preset_names_the_file(tmp_path, text, words):
    with pytest.raises(ConfigError) as error:
        config.load([preset(tmp_path, text)])
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("from pathlib import Path\ndata_dir = Path('a') / 'b'\n", "data_dir", str(Path("a/b"))),
        ("import numpy\nlearning_rate = 1e-3 * numpy.sqrt(4)\n", "learning_rate", 2e-3),
        ("import numpy\nn_layer = numpy.int64(3)\n", "n_layer", 3),
        ("sample_prompts = 'The', 'I'\n", "sample_prompts", ["The", "I"]),
    ],
)
def test_a_preset_may_give_values_as_python_has_them(tmp_path, text, name, value):
    found = getattr(config.load([preset(tmp_path, text)]), name)
    assert (type(found), found) == (type(value), value)


def test_a_preset_may_begin_with_a_byte_order_mark(tmp_path):
    assert config.load([preset(tmp_path, "\ufeffn_layer = 3\n")]).n_layer == 3


def test_a_preset_in_utf_16_is_a_sentence(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("n_layer = 3\n", encoding="utf-16")
    with pytest.raises(ConfigError, match=r"mine.py: its encoding is UTF-16; save it as UTF-8"):
        config.load([str(path)])


def recorded_run(tmp_path, **changes):
    """The folder of a run that has recorded its settings."""
    first = config.load([preset(tmp_path, "n_layer = 3\nepochs = 2\n"), "--resume=never"])
    run = tmp_path / "moved"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(first.recorded() | changes))
    return run


def test_the_folder_of_a_run_stands_for_its_settings(tmp_path):
    run = recorded_run(tmp_path)
    c = config.load([str(run)])
    assert (c.n_layer, c.epochs) == (3, 2.0)
    assert c.checkpoint_dir == str(run)  # wherever it was when it was recorded
    assert c.resume == "auto"


def test_a_run_without_its_config_json_stands_for_the_settings_of_its_newest_step(tmp_path):
    """As where only a step was copied, or where the folder was moved while the run trained."""
    run = recorded_run(tmp_path)
    expected, settings = config.load([str(run)]), json.loads((run / "config.json").read_text())
    for step, layers in ((3, 5), (20, 3)):
        folder = run / f"step_{step:08d}"
        folder.mkdir()
        state = {"step": step, "settings": settings | {"n_layer": layers}}
        (folder / "state.json").write_text(json.dumps(state))
    (run / "config.json").unlink()
    assert config.load([str(run)]) == expected
    (run / "step_00000020/state.json").write_text("{")
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        config.load([str(run)])


def test_what_a_run_recorded_counts_as_given(tmp_path):
    given = config.load([str(recorded_run(tmp_path, block_size=16))]).given
    assert "block_size" in given
    assert "max_steps" not in given  # it is None


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_a_run_records_that_its_architecture_has_no_biases(arch):
    assert config.load([f"--arch={arch}"]).recorded()["bias"] is False
    assert config.load([f"--arch={arch}", "--bias"]).bias is False


def test_a_model_of_another_program_is_no_run(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2", "n_layer": 2}')
    with pytest.raises(ConfigError, match=r"is not the folder of a run.*\n.*--init_from="):
        config.load([str(tmp_path)])


def test_settings_of_a_run_that_are_gone_are_left_out(tmp_path):
    assert config.load([str(recorded_run(tmp_path, data_location="ram"))]).n_layer == 3


def test_recorded_settings_are_checked(tmp_path):
    run = recorded_run(tmp_path, n_layer="3")
    with pytest.raises(ConfigError, match=r"config.json: n_layer = '3', but it must be"):
        config.load([str(run)])
    (run / "config.json").write_text('{"checkpoint_dir": ')
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        config.load([str(run)])


def test_a_preset_may_compute_with_functions_of_its_own_and_others(tmp_path):
    text = "from math import sqrt\ndef half(n):\n    return n // 2\nn_layer = half(int(sqrt(64)))\n"
    assert config.load([preset(tmp_path, text)]).n_layer == 4
    with pytest.raises(ConfigError, match=r"mine.py: line 2: SystemExit: 3"):
        config.load([preset(tmp_path, "import sys\nsys.exit(3)\n")])


def test_a_preset_is_also_found_from_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert config.load(["config/demo.py"]).checkpoint_dir == "checkpoints/demo"


def test_a_run_whose_preset_is_gone_continues_by_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "checkpoints/medium_char"
    run.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"no preset .*\n.*\n.*train.py checkpoints/medium_char$"):
        config.load(["config/medium_char.py"])


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


@pytest.mark.parametrize(
    ("line", "folder"),
    [
        ("--seed=1", "checkpoints/run"),
        ("config/demo.py --checkpoint_dir=None", "checkpoints/demo"),
        ("config/demo.py --checkpoint_dir=a/b", "a/b"),
    ],
)
def test_a_run_without_a_folder_is_called_after_its_preset(line, folder):
    assert config.load(line.split()).checkpoint_dir == folder


def test_help_lists_every_setting_with_its_default(capsys):
    with pytest.raises(SystemExit) as exit_:
        config.load(["--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert [name for name in SETTINGS if f"  --{name}" not in text] == []
    known = "grad_clip=1.0 learning_rate=0.0003 weight_decay=0.1 beta2=0.95 dropout=0.0 keep_last=2"
    known += " save_minutes=15.0 resume=auto dtype=auto bias=True tie_weights=True seed=1337"
    known += " optimizer=adamw lr_schedule=cosine warmup_steps=200 batch_size=32 beta1=0.9"
    known += " muon_lr=0.02 muon_momentum=0.95 eval_interval=500 eval_batches=20 save_interval=1000"
    assert [words for words in known.split() if f"--{words} " not in text] == []


def test_the_page_of_the_settings_is_up_to_date():
    written = Path("docs/settings.md").read_text(encoding="utf-8")
    assert written == page(), "python -m tests.settings_page > docs/settings.md"


def test_a_copy_of_the_settings_keeps_what_was_given():
    c = dataclasses.replace(config.load(["--n_layer=2"]), n_head=2)
    assert "n_layer" in c.given
    assert "given" not in c.recorded()


def test_the_shape_and_the_settings_have_the_same_defaults():
    shape, settings = {f.name: f.default for f in dataclasses.fields(GPTConfig)}, Config()
    shared = shape.keys() & SETTINGS.keys()
    assert {"n_head", "tie_weights", "block_size"} <= shared
    assert {name: shape[name] for name in shared} == {n: getattr(settings, n) for n in shared}
