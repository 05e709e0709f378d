"""train.py: whole runs as a user starts them, and what goes wrong with them."""

import dataclasses
import importlib.util
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import config
import model
from command_line import quote
from config import Config, ConfigError
from formats import files, pretrained, run_folder
from formats.run_folder import CheckpointError
from generating.load import open_checkpoint
from model import GPTConfig
from tests.conftest import (
    ROOT,
    fails_clearly,
    losses,
    ok,
    prepare,
    run_code,
    run_script,
    train_command,
    train_small,
    trained,
    wait_until,
)
from tests.training.conftest import (
    WITH_ITS_COMPILER,
    assert_same_end,
    last_weights,
    small_run,
    start,
)
from training import distributed
from training.compiling import compiler_obstacle, should_compile
from training.distributed import StopFlag, signals_restored
from training.fit import fit_in_memory
from training.plan import banner
from training.run import code_versions
from training.schedule import Counters, count_steps
from training.start import differences, from_scratch, shape_settings

# -- whole runs -----------------------------------------------------------------------------------


WHOLE = ["--dropout=0.1", "--weight_decay=None", "--sample_prompts=The "]
WHOLE += ["--log_interval=4", "--cost_per_hour=8"]


@pytest.fixture(scope="module")
def finished(little_data, tmp_path_factory):
    """A small run of 40 steps, with dropout, samples, and a second epoch."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    result = trained(little_data, folder, *WHOLE, "--max_steps=40")
    return folder, result.stdout + result.stderr


def test_a_run_learns_and_logs_its_losses_and_saves_when_it_should(finished):
    loss, val = losses(finished[0])
    saves = [r["step"] for r in run_folder.read_log(finished[0]) if r.get("event") == "save"]
    assert list(loss) == list(range(4, 41, 4))
    assert list(val) == saves == [10, 20, 30, 40]
    assert val[40] < val[10] < math.log(100)


def test_a_log_begins_with_what_trains_where(finished):
    first = run_folder.read_log(finished[0])[0]
    assert first.keys() >= {"torch", "processes", "device", "data"}
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (first["commit"] or "").removesuffix("-dirty") == head


def test_evaluations_and_saves_do_not_count_in_the_speed_of_training(finished):
    first, *lines = [r for r in run_folder.read_log(finished[0]) if "loss" in r]
    seconds = sum(4 * 8 * 32 / line["tokens_per_second"] for line in lines)
    assert seconds == pytest.approx(lines[-1]["elapsed_s"] - first["elapsed_s"], abs=0.003)


def test_weights_that_are_loaded_are_not_drawn_before(finished, little_data):
    """Which takes seconds for a large model."""
    run = small_run(little_data, finished[0], *WHOLE, "--max_steps=50")
    assert torch.get_rng_state().equal(torch.Generator().manual_seed(run.config.seed).get_state())


def test_each_evaluation_logs_an_answer_to_each_prompt(finished):
    answers = [r["samples"] for r in run_folder.read_log(finished[0]) if "samples" in r]
    assert [answer["prompt"] for (answer,) in answers] == ["The "] * 4
    assert all(answer["text"] for (answer,) in answers)


def test_a_run_leaves_its_settings_and_its_last_checkpoints(finished):
    folder, _ = finished
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    names = {p.name for p in folder.iterdir()} - {".lock"}
    assert names == {"best.json", "config.json", "log.jsonl", "step_00000030", "step_00000040"}
    names = {p.name for p in (folder / "step_00000040").iterdir()}
    assert names == {"model.pt", "optimizer.pt", "state.json", "tokenizer.json"}
    state = run_folder.read_state(folder / "step_00000040")
    assert state["step"] == 40
    assert state["tokens"] == 40 * 8 * 32


def test_a_run_says_what_it_is_and_how_to_use_it(finished):
    folder, out = finished
    line = (
        r"step 10 of 40, epoch 0\.\d\d: training loss [\d.]+, validation loss [\d.]+, [\d.]+ bits"
        r" per byte, best [\d.]+, [\d,]+ tokens/s, cost [\d.]+, \d+ s left\n  \| The"
    )
    assert re.search(line, out)
    report = f"python -m tools.report {folder}\n"
    best = f"kept in {run_folder.find(folder)}"
    for words in (
        "256 tokens = 8 x 32",
        "40 steps",
        "for validation",
        "python generate.py",
        report,
    ):
        assert words in out
    assert best in out
    assert "\r" not in out
    assert "\x1b" not in out


def test_the_commands_that_a_run_prints_work_in_the_folder_it_was_started_in(finished, tmp_path):
    result = ok(run_script(ROOT / "train.py", finished[0], cwd=tmp_path))
    commands = re.findall("^  python (.*)$", result.stdout, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        more = ["--dry_run"] if "train.py" in command else ["--max_new_tokens=1"]
        ok(run_script(*shlex.split(command), *more, cwd=tmp_path))


def test_a_run_leaves_no_lock_where_processes_start_without_fork(char_data, tmp_path):
    """As on macOS, and on Linux from Python 3.14 on: the end said that a semaphore was leaked."""
    code = "import multiprocessing, runpy, sys; multiprocessing.set_start_method('spawn');"
    code += " sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    result = run_script("-c", code, *train_command(char_data, tmp_path, "--max_steps=1"))
    assert result.returncode == 0 and "leaked" not in result.stderr, result.stderr


def test_a_finished_run_says_so_and_changes_nothing(finished, little_data):
    folder, _ = finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"}
    result = trained(little_data, folder, *WHOLE, "--max_steps=40")
    assert "already finished" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"} == before


def test_with_its_newest_step_damaged_a_run_ends_in_the_same_weights_and_the_same_log(
    finished, little_data, tmp_path
):
    """It goes on at step 30, in the middle of an epoch and between log lines."""
    part = shutil.copytree(finished[0], tmp_path / "part")
    file = part / "step_00000040" / "optimizer.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    result = trained(little_data, part, *WHOLE, "--max_steps=40")
    assert "skipping damaged checkpoint" in result.stdout
    assert "optimizer.pt is damaged" in result.stdout
    assert "continues at step 30" in result.stdout
    assert_same_end(finished[0], part)
    elapsed = [r["elapsed_s"] for r in run_folder.read_log(part) if "loss" in r]
    assert elapsed == sorted(elapsed)  # of all starts
    assert len(list(part.glob("damaged_*"))) == 1


def test_progress_that_only_a_later_version_knows_is_a_sentence(finished, little_data, tmp_path):
    run = shutil.copytree(finished[0], tmp_path / "run")
    state = run_folder.read_state(run / "step_00000040")
    state["progress"]["skips"] = 3
    files.write_checked(run / "step_00000040/state.json", state)
    with pytest.raises(CheckpointError, match="this one does not know its skips"):
        small_run(little_data, run, *WHOLE, "--max_steps=50")


def test_each_step_drops_other_activations(tmp_path):
    """Text of one letter and weights that stay: nothing else differs between the steps."""
    (tmp_path / "a.txt").write_text("a" * 5000)
    data = prepare(tmp_path / "a.txt", tmp_path / "data", "--tokenizer", "char")
    frozen = ["--learning_rate=1e-20", "--min_lr=0", "--dtype=float32", "--log_interval=1"]
    for dropout, different in ((0.0, 1), (0.5, 5)):
        run = tmp_path / f"run_{dropout}"
        trained(data, run, *frozen, f"--dropout={dropout}", "--max_steps=5")
        assert len(set(losses(run)[0].values())) == different


def test_muon_and_the_modern_model_resume_to_the_same_weights(char_data, tmp_path):
    modern = ["--optimizer=muon", "--lr_schedule=wsd", "--arch=qwen3", "--zero_init=True"]
    modern += ["--tie_weights=False", "--induction_init=True"]
    trained(char_data, tmp_path / "whole", *modern, "--max_steps=20")
    embedding = last_weights(tmp_path / "whole")["wte.weight"]
    assert embedding[:, 0].std() < 0.1 < embedding[:, 1].std()  # a channel that all tokens share
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "step_00000020")
    result = trained(char_data, tmp_path / "part", *modern, "--max_steps=20")
    assert "continues at step 10" in result.stdout
    assert_same_end(tmp_path / "whole", tmp_path / "part")
    result = train_small(char_data, tmp_path / "part", *modern, "--optimizer=adamw")
    fails_clearly(result, "optimizer: muon in the checkpoint, adamw now")


def test_dropout_may_be_another_than_that_of_the_weights(finished, little_data, tmp_path):
    for given in ([finished[0], "--max_steps=50"], [tmp_path, f"--init_from={finished[0]}"]):
        run = small_run(little_data, *given, *WHOLE, "--dropout=0.3")
        assert run.model.h[0].dropout.p == run.model.config.dropout == 0.3


def test_weights_start_a_changed_model_whose_own_are_new(
    finished, little_data, tmp_path, monkeypatch, capsys
):
    class Gated(model.Attention):
        def __init__(self, *args):
            super().__init__(*args)
            self.gate = torch.nn.Parameter(torch.tensor(0.5))
            self.added = torch.nn.Linear(64, 64, bias=False)

    monkeypatch.setattr("model.Attention", Gated)
    run = small_run(little_data, tmp_path, f"--init_from={finished[0]}", *WHOLE)
    assert run.model.h[1].attn.gate == 0.5
    assert run.model.h[1].attn.added.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(run.model.wte.weight, last_weights(finished[0])["wte.weight"])
    assert "new in this run: h.0.attn.gate, h.0.attn.added.weight" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="needs signals to other processes")
@pytest.mark.parametrize(
    ("name", "status"),
    [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129), ("SIGUSR1", 138), ("SIGXCPU", 152)],
)
def test_a_signal_saves_and_leaves(char_data, tmp_path, name, status):
    signum = getattr(signal, name)
    endless = ["--max_steps=100000", "--eval_interval=0"]
    heard = {signum: signal.SIG_DFL}  # nohup and & have it ignored
    process = start(char_data, tmp_path, *endless, handlers=heard)
    wait_until(process, lambda: losses(tmp_path)[0])
    process.send_signal(signum)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, err
    assert not err
    step = int(re.search(rf"{name}: step ([\d,]+) is saved", out)[1].replace(",", ""))
    assert run_folder.read_state(tmp_path / f"step_{step:08d}")["step"] == step


def test_a_run_imports_nothing_after_its_first_step(char_data, tmp_path):
    """Or an update of PyTorch or of this code ends it, before it has saved a step."""
    code = """
import pathlib, runpy, sys
log = pathlib.Path(sys.argv.pop(1), "log.jsonl")

def hook(event, details):
    late = event == "import" and details[0] not in sys.modules
    if late and log.exists() and '"loss"' in log.read_text():
        raise ImportError(details[0])

sys.addaudithook(hook)
runpy.run_path("train.py", run_name="__main__")
"""
    more = ["--max_steps=20", "--sample_prompts=The ", f"--mirror={tmp_path / 'mirror'}"]
    _, *words = train_command(char_data, tmp_path / "run", *more)
    ok(run_code(code, tmp_path / "run", *words))


@pytest.mark.skipif(os.name != "nt", reason="Ctrl-Break is Windows'")
def test_ctrl_break_asks_a_run_to_stop():
    with signals_restored():  # by raising it: Wine ends a process to which it is sent
        stop = StopFlag()
        signal.raise_signal(signal.SIGBREAK)
        assert stop.signum == signal.SIGBREAK


@pytest.mark.skipif(os.name == "nt", reason="needs signals to other processes")
def test_a_signal_cuts_an_evaluation_short(char_data, tmp_path):
    slow = ["--eval_batches=0", "--micro_batch_size=1", "--block_size=8", "--max_steps=100000"]
    process = start(char_data, tmp_path, *slow)
    wait_until(process, lambda: run_folder.steps(tmp_path))  # a save comes before an evaluation
    process.terminate()
    out, err = process.communicate(timeout=300)
    assert process.returncode == 143, err
    assert "step 10 is saved" in out
    assert not losses(tmp_path)[1]


def test_the_folder_of_a_run_stands_for_its_settings(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    result = ok(run_script("train.py", folder, "--max_steps=50"))
    changed = result.stdout.partition("device")[0].splitlines()[1:]
    assert [row.split() for row in changed] == [["max_steps", "40", "50"]]
    assert "continues at step 40" in result.stdout
    fails_clearly(
        run_script("train.py", tmp_path), "is not the folder of a run", "config.json", "preset"
    )


def test_a_run_names_what_another_version_of_the_code_changes(
    finished, little_data, tmp_path, capsys
):
    run = shutil.copytree(finished[0], tmp_path / "run")
    state = run_folder.read_state(run / "step_00000040")
    state["settings"]["input_noise"] = 0.05  # no longer a setting
    del state["settings"]["muon_momentum"]  # not yet one
    state["versions"]["commit"] = "0123456789ab"
    files.write_checked(run / "step_00000040/state.json", state)
    small_run(little_data, run, *WHOLE, "--max_steps=40", "--muon_momentum=0.9")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["input_noise", "0.05", "removed"] in rows
    assert ["muon_momentum", "0.95", "0.9"] in rows
    assert ["commit", "0123456789ab", str(code_versions()["commit"])] in rows


def test_epochs_and_the_position_follow_a_changed_batch_size(char_data, tmp_path):
    trained(char_data, tmp_path, "--max_steps=20")
    other = ["--max_steps=30", "--batch_size=16", "--learning_rate=1e-3"]
    trained(char_data, tmp_path, *other)
    last = [r for r in run_folder.read_log(tmp_path) if "loss" in r][-1]
    assert last["tokens"] == (20 * 8 + 10 * 16) * 32
    assert last["lr"] == pytest.approx(1.0355e-4, rel=1e-4)  # 24 of 25 steps to a tenth


def test_of_epochs_and_steps_what_is_reached_first_ends_the_run():
    counters = Counters(step=10, sequences=40)
    for epochs, max_steps, end in ((2.0, 30, 30), (2.0, 50, 50), (2.0, 500, 50), (None, 500, 500)):
        config = Config(epochs=epochs, max_steps=max_steps, batch_size=4)
        assert count_steps(config, counters, windows=100) == end
    config = Config(epochs=2.0, batch_size=4)  # the last step may begin the epoch after
    assert count_steps(config, counters, windows=99) == 50


@pytest.mark.parametrize(
    ("kind", "dtype", "short", "long"),
    [
        ("cpu", torch.bfloat16, 8e12, 3e13),
        ("cpu", torch.float32, 3e13, 1e15),
        ("cuda", torch.bfloat16, 1e14, 1e16),
    ],
)
def test_a_long_run_is_compiled(char_data, tmp_path, monkeypatch, kind, dtype, short, long):
    run = small_run(char_data, tmp_path)
    config = dataclasses.replace(run.config, compile=None)
    device = dataclasses.replace(run.device, torch=torch.device(kind), dtype=dtype)
    step = run.model.flops_per_token() * config.tokens_per_step
    for flops, compiled in ((short, False), (long, True)):
        total_steps = round(flops / step)
        assert should_compile(config, run.model, device, total_steps) == compiled
    assert not should_compile(run.config, run.model, device, total_steps)  # compile = False
    monkeypatch.setattr(distributed, "world_size", 1000)  # each does so little of it
    assert not should_compile(config, run.model, device, total_steps)


def test_a_compiled_copy_of_transposed_matrices_is_exact():
    """GCC 12 makes it garbage for a CPU with AMX, without an option in startup.tune_environment."""

    def values(rows):  # of query, key and value of 4 heads: transposed, and a part of them
        v = rows.view(8, 512, 12, 64)[:, :, 8:].transpose(1, 2)
        return v.mT.contiguous(), v[:, :, :256].mT.contiguous()

    rows = torch.randn(8 * 512, 12 * 64).bfloat16()
    for compiled, exact in zip(torch.compile(values)(rows), values(rows), strict=True):
        assert compiled.equal(exact)


def test_where_compilation_fails_training_goes_on_and_says_why(char_data, tmp_path):
    """Code that a kill has left empty is not loaded by the next start."""
    names = {"ab/c.main.so": b"", "bc/d.py": b"", "de/f.main.so": b"a library"}
    code = {tmp_path / "cache" / name: content for name, content in names.items()}
    for path, content in code.items():
        path.parent.mkdir(parents=True)
        path.write_bytes(content)
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ]\n")
    compiler.chmod(0o755)
    broken = {"CXX": str(compiler), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    more = ["--n_layer=1", "--compile=True", "--max_steps=10"]
    command = train_command(char_data, tmp_path / "run", *more)
    result = ok(run_code(WITH_ITS_COMPILER, *command[1:], **broken))
    line = r"compiling \.\.\. torch.compile failed: .*; training continues without it\n"
    assert re.search(line, result.stdout)
    assert losses(tmp_path / "run")[1]
    assert [path.exists() for path in code] == [False, False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="names Linux' compilers")
@pytest.mark.parametrize(
    ("device", "variables", "words"),
    [
        ("cpu", {"CXX": "/nowhere/c++"}, "no compiler /nowhere/c++; on Debian: apt-get install"),
        ("cpu", {"PATH": "/nowhere"}, "there is no compiler"),
        ("cuda", {"PATH": "/nowhere"}, "there is no compiler"),
        ("cpu", {"TORCHINDUCTOR_CACHE_DIR": "/a b"}, "/a b has a blank or a quote in its path"),
        ("cpu", {"TORCHINDUCTOR_CACHE_DIR": "/it's"}, "/it's has a blank or a quote in its path"),
        ("cuda", {"TORCHINDUCTOR_CACHE_DIR": "/a b"}, ""),
        ("mps", {"PATH": "/nowhere"}, ""),
        ("cpu", {}, ""),
    ],
)
def test_what_torch_compile_lacks_is_known_before_it_is_tried(
    monkeypatch, device, variables, words
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = compiler_obstacle(device)
    assert words in found
    assert bool(words) == bool(found)


@pytest.mark.skipif(sys.platform != "linux", reason="os.ST_NOEXEC")
def test_a_disk_that_runs_no_code_is_known_before_torch_compile_is_tried(monkeypatch, tmp_path):
    mounted = SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_NOSUID)
    for folder in (tmp_path, tmp_path / "new"):
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        assert not compiler_obstacle("cpu")
        with monkeypatch.context() as patch:
            patch.setattr(os, "statvfs", {tmp_path: mounted}.get)
            found = compiler_obstacle("cpu")
        assert f"the disk of {folder}, as it is mounted noexec" in found


@pytest.mark.parametrize("there", [True, False])
def test_triton_which_pytorch_lacks_on_windows_is_asked_for_before_it_is_tried(monkeypatch, there):
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: there or None)
    assert there != ("pip install triton-windows" in compiler_obstacle("cuda"))


def test_a_run_without_a_compiler_is_not_compiled_and_says_why(little_data, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "/nowhere/c++")
    run = small_run(little_data, tmp_path, "--compile=True")
    assert not run.compiles
    assert ", not compiled" in banner(run)
    assert "torch.compile cannot work: there is no compiler /nowhere/c++" in banner(run)


# -- what goes wrong ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--n_head=3", ["n_head = 3", "n_embd = 32"]),
        ("--n_kv_head=1", ["gpt2 has no n_kv_head"]),
        ("--device=cuda:7", ["cuda:7", "device = auto"]),
        ("--block_size=100000", ["too few", "block_size"]),
        ("--resume=must", ["resume = must", "no checkpoint at"]),
        ("--sample_prompts=snow ☃", ["sample_prompts", "U+2603"]),
        ("--init_from=nothing/here", [f"at {Path('nothing/here')}", "--init_from=RUN"]),
        (
            "--data_dir=my data",
            ["my data holds no prepared data", f"--out {quote('my data')}", "where it is now"],
        ),
        ("--loss_on=assistant", ["no mask", "python prepare_data.py CONVERSATIONS.jsonl"]),
    ],
)
def test_a_mistake_is_a_sentence_and_writes_nothing(char_data, tmp_path, argument, words):
    fails_clearly(train_small(char_data, tmp_path / "run", argument), *words)
    assert not (tmp_path / "run").exists()


def test_a_mistake_leaves_an_empty_folder_as_it_was(tmp_path):
    with pytest.raises(ConfigError), distributed.locked(tmp_path):
        raise ConfigError
    assert list(tmp_path.iterdir()) == []


def test_a_typo_in_the_model_shows_its_line_and_holds_no_memory(char_data, tmp_path, monkeypatch):
    seen = []

    def forward(self, x, rotary, cache):
        seen.append(weakref.ref(x))
        return self.c_atn(x)

    monkeypatch.setattr(model.Attention, "forward", forward)
    with pytest.raises(AttributeError, match="c_atn") as error:
        fit_in_memory(small_run(char_data, tmp_path))
    assert any("self.c_atn(x)" in str(entry.statement) for entry in error.traceback)
    assert seen[0]() is None


def test_a_run_whose_checkpoints_are_gone_keeps_its_log(char_data, tmp_path):
    trained(char_data, tmp_path, "--max_steps=10")
    log = (tmp_path / "log.jsonl").read_text()
    for step in run_folder.steps(tmp_path):
        shutil.rmtree(step)
    result = trained(char_data, tmp_path, "--max_steps=10")
    assert "the checkpoints of this run are gone" in result.stdout
    (aside,) = tmp_path.glob("log_before_*.jsonl")
    assert aside.read_text() == log


def test_another_shape_or_other_data_lists_every_difference(finished, little_data, bpe_data):
    folder = finished[0]
    fails_clearly(
        train_small(
            little_data, folder, "--n_layer=3", "--n_kv_head=1", "--seed=5", "--loss_on=assistant"
        ),
        "n_layer: 2 in the checkpoint, 3 now",
        "n_kv_head: None in the checkpoint, 1 now",
        "seed: 1337 in the checkpoint, 5 now",
        "loss_on: all in the checkpoint, assistant now",
    )
    other = train_small(bpe_data, folder, "--max_steps=50", "--n_layer=3")
    fails_clearly(other, "n_layer: 2 in the checkpoint, 3 now", "data: other tokenizer_sha256")


@pytest.mark.parametrize(
    ("heads", "groups", "given", "differ"),
    [
        (24, 12, 12, []),  # the default of n_head is 12
        (9, 9, 9, []),
        (32, 32, 12, ["  n_kv_head: None in the weights, 12 now"]),
        (9, 3, 12, ["  n_kv_head: 3 in the weights, 12 now"]),
    ],
)
def test_heads_of_keys_are_compared_with_those_of_the_weights(heads, groups, given, differ):
    shape = GPTConfig(512, 32, 2, heads, 64 * heads, arch="llama", n_kv_head=groups)
    trained = shape_settings(shape)
    c = config.load(["--arch=llama", f"--n_kv_head={given}"])
    assert differences(c, trained, c.given, "the weights") == differ


def test_a_new_run_with_as_many_heads_of_keys_as_of_queries_records_no_groups():
    c = config.load(["--arch=llama", "--n_head=6", "--n_kv_head=6"])
    assert from_scratch(c, vocab_size=512).config.n_kv_head is None


@pytest.mark.parametrize(
    ("step_read_by", "place", "name"),
    [
        (lambda data, run: small_run(data, run, "--dry_run=True").step, run_folder, "sha256"),
        (lambda data, run: run_folder.latest(run)[1]["step"], run_folder, "sha256"),
        (
            lambda data, run: open_checkpoint(run, torch.device("cpu")).source.state["step"],
            pretrained,
            "load_tensors",
        ),
    ],
)
def test_a_step_that_is_rotated_away_while_it_is_read_makes_way_for_the_newest(
    bpe_run, bpe_data, tmp_path, monkeypatch, step_read_by, place, name
):
    """As of a run that trains at the moment: its newest step 10 becomes step 20."""
    run = shutil.copytree(bpe_run, tmp_path / "run")
    newer = (run / "step_00000020").rename(tmp_path / "newer")
    (run / "best.json").unlink()
    load = getattr(place, name)

    def load_late(path):
        if newer.exists():
            shutil.rmtree(run / "step_00000010")
            newer.rename(run / "step_00000020")
        return load(path)

    monkeypatch.setattr(place, name, load_late)
    assert step_read_by(bpe_data, run) == 20


def test_a_run_does_not_continue_on_the_same_lines_in_another_order(
    finished, little_data, tmp_path
):
    text = (little_data.parent / "little.txt").read_text("utf-8")
    first, second, *rest = text.splitlines(keepends=True)
    (tmp_path / "text.txt").write_text("".join([second, first, *rest]), "utf-8")
    data = prepare(tmp_path / "text.txt", tmp_path / "data", "--tokenizer", "char")
    result = train_small(data, finished[0], *WHOLE, "--max_steps=50")
    fails_clearly(result, "data: other sha256 than in the checkpoint")
    advice = result.stderr.splitlines()[-1].replace("checkpoints/NAME", str(tmp_path / "tuned"))
    small = ["--max_steps=1", "--batch_size=8", "--compile=False"]
    tuned = run_script(*shlex.split(advice)[1:], *small)
    assert "the weights of" in tuned.stdout, tuned.stderr


def test_a_text_that_was_added_is_trained_on_as_the_error_says(bpe_run, text_file, tmp_path):
    data = prepare(text_file, tmp_path / "data", "--vocab_size", 300)
    result = train_small(data, bpe_run, "--max_steps=30")
    fails_clearly(result, "other tokenizer_sha256", "only on the data that it was trained on")
    *_, how_to_prepare, how_to_train = result.stderr.splitlines()
    for line, more in ((how_to_prepare, []), (how_to_train, ["--max_steps=1", "--compile=False"])):
        line = line.replace("TEXT", str(text_file)).replace("data/NAME", str(tmp_path / "new"))
        line = line.replace("checkpoints/NAME", str(tmp_path / "tuned"))
        ok(run_script(*shlex.split(line)[1:], *more))


def test_never_refuses_to_write_over_a_run(finished, little_data):
    fails_clearly(train_small(little_data, finished[0], "--resume=never"), "already holds a run")


@pytest.mark.parametrize(
    ("name", "damage", "words"),
    [
        ("train.bin", lambda content: content[:-100], ["train.bin has", "cut off"]),
        ("train.bin", lambda content: content[:-1] + b"\xff", ["train.bin is damaged"]),
        ("val.bin", lambda content: content[:-1] + b"\xff", ["val.bin is damaged"]),
        ("tokenizer.json", lambda content: content + b"\n", ["not the tokenizer that made"]),
        ("meta.json", lambda content: content[:-100], ["meta.json cannot be used"]),
    ],
)
def test_damaged_data_is_named(char_data, tmp_path, name, damage, words):
    data = shutil.copytree(char_data, tmp_path / "data")
    (data / name).write_bytes(damage((data / name).read_bytes()))
    fails_clearly(train_small(data, tmp_path / "run", "--max_steps=2"), *words)
    assert not run_folder.steps(tmp_path / "run")
