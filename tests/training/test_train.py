"""train.py: whole runs as a user starts them, and what goes wrong with them."""

import json
import math
import os
import re
import shutil
import signal
import subprocess

import numpy as np
import pytest

from config import Config
from formats import run_folder, run_log
from tests.conftest import ROOT, fails_clearly, losses, run_script, train_small
from tests.training.conftest import last_weights, same_weights, start, wait_until
from training.setup import count_steps
from training.state import Counters

# -- whole runs -----------------------------------------------------------------------------------


WHOLE = ["--dropout=0.1", "--input_noise=0.1", "--sample_prompts=The "]


@pytest.fixture(scope="module")
def finished(char_data, tmp_path_factory):
    """A small run of 40 steps, with dropout, noise and samples."""
    folder = tmp_path_factory.mktemp("runs") / "finished"
    result = train_small(char_data, folder, *WHOLE, "--max_steps=40")
    assert result.returncode == 0, result.stderr
    return folder, result.stdout


def test_a_run_learns_and_leaves_what_the_design_says(finished):
    folder, out = finished
    loss, val = losses(folder)
    assert list(loss) == list(range(5, 41, 5)) and list(val) == [10, 20, 30, 40]
    assert val[40] < val[10] < math.log(100)
    log = run_log.read(folder)
    git = ["git", "rev-parse", "--short=12", "HEAD"]
    head = subprocess.run(git, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert (log[0]["commit"] or "").removesuffix("-dirty") == head
    line = next(r for r in log if "loss" in r)
    fields = "step tokens epoch loss lr grad_norm tokens_per_second mfu elapsed_s"
    assert line.keys() >= set(fields.split())
    assert line["tokens"] == 5 * 8 * 32
    assert line["mfu"] is None
    samples = [r["samples"] for r in log if "samples" in r]
    assert len(samples) == 4
    assert samples[0][0]["prompt"] == "The "
    assert samples[0][0]["text"]
    assert json.loads((folder / "config.json").read_text())["dropout"] == 0.1
    names = {p.name for p in folder.iterdir()} - {".lock"}
    assert names == {"best.json", "config.json", "log.jsonl", "step_00000030", "step_00000040"}
    names = {p.name for p in (folder / "step_00000040").iterdir()}
    assert names == {"model.pt", "optimizer.pt", "state.json", "tokenizer.json"}
    state = run_folder.read_state(folder / "step_00000040")
    assert state["step"] == 40
    assert state["tokens"] == 40 * 8 * 32
    assert state["files"]["model.pt"]["sha256"]
    for words in ("256 tokens = 8 x 32", "40 steps", str(folder), "python generate.py"):
        assert words in out


def test_weights_bear_no_prefix_of_a_wrapper(finished):
    modules = {name.partition(".")[0] for name in last_weights(finished[0])}
    assert modules == {"wte", "wpe", "h", "ln_f", "lm_head"}


def test_a_finished_run_says_so_and_changes_nothing(finished, char_data):
    folder, _ = finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"}
    result = train_small(char_data, folder, *WHOLE, "--max_steps=40")
    assert result.returncode == 0 and "already finished" in result.stdout
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.name != ".lock"} == before


def test_a_resumed_run_ends_in_the_same_weights_and_the_same_log(finished, char_data, tmp_path):
    """Stopped at 23, in the middle of an epoch and between log lines, then continued to 40."""
    whole, part = finished[0], tmp_path / "part"
    more = [*WHOLE, "--save_interval=23"]
    process = start(char_data, part, *more, "--max_steps=40")
    wait_until(process, (part / "step_00000023").exists)
    process.kill()
    process.communicate()
    for step in run_folder.steps(part):
        if run_folder.step_of(step) > 23:
            (step / "state.json").unlink()
    result = train_small(char_data, part, *more, "--max_steps=40")
    assert result.returncode == 0, result.stderr
    assert "continues at step 23" in result.stdout
    assert losses(part) == losses(whole)
    assert same_weights(part, whole)
    logs = (run_log.read(folder) for folder in (whole, part))
    texts, expected = ([r["samples"] for r in log if "samples" in r] for log in logs)
    assert texts == expected


def test_muon_and_the_modern_model_resume_to_the_same_weights(char_data, tmp_path):
    modern = [
        "--optimizer=muon",
        "--lr_schedule=wsd",
        "--arch=qwen3",
        "--zero_init=True",
        "--tie_weights=False",
    ]
    result = train_small(char_data, tmp_path / "whole", *modern, "--max_steps=20")
    assert result.returncode == 0, result.stderr
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    shutil.rmtree(tmp_path / "part" / "step_00000020")
    result = train_small(char_data, tmp_path / "part", *modern, "--max_steps=20")
    assert result.returncode == 0 and "continues at step 10" in result.stdout, result.stderr
    assert same_weights(tmp_path / "part", tmp_path / "whole")
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    result = train_small(char_data, tmp_path / "part", *modern, "--optimizer=adamw")
    fails_clearly(result, "optimizer: muon in the checkpoint, adamw now")


@pytest.mark.skipif(os.name == "nt", reason="needs signals to other processes")
@pytest.mark.parametrize(("name", "status"), [("SIGTERM", 143), ("SIGINT", 130), ("SIGHUP", 129)])
def test_a_signal_saves_and_leaves(char_data, tmp_path, name, status):
    signum = getattr(signal, name)
    process = start(
        char_data,
        tmp_path,
        "--max_steps=100000",
        "--eval_interval=0",
        preexec_fn=lambda: signal.signal(signum, signal.SIG_DFL),  # nohup and & have it ignored
    )
    wait_until(process, lambda: losses(tmp_path)[0])
    process.send_signal(signum)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status, err
    assert not err
    step = int(re.search(r"step ([\d,]+) is saved", out)[1].replace(",", ""))
    assert run_folder.read_state(tmp_path / f"step_{step:08d}")["step"] == step


def test_the_folder_of_a_run_stands_for_its_settings(finished, tmp_path):
    folder = shutil.copytree(finished[0], tmp_path / "run")
    result = run_script("train.py", folder, "--max_steps=50")
    assert result.returncode == 0, result.stderr
    changed = result.stdout.partition("device")[0].splitlines()[1:]
    assert [row.split() for row in changed] == [["max_steps", "40", "50"]]
    assert "continues at step 40" in result.stdout
    fails_clearly(run_script("train.py", tmp_path), "is no run with its settings")


def test_epochs_and_the_position_follow_a_changed_batch_size(char_data, tmp_path):
    assert train_small(char_data, tmp_path / "run", "--max_steps=20").returncode == 0
    result = train_small(
        char_data, tmp_path / "run", "--max_steps=30", "--batch_size=16", "--learning_rate=1e-3"
    )
    assert result.returncode == 0, result.stderr
    last = [r for r in run_log.read(tmp_path / "run") if "loss" in r][-1]
    assert last["tokens"] == (20 * 8 + 10 * 16) * 32 and last["lr"] == pytest.approx(1e-4)


def test_of_epochs_and_steps_what_is_reached_first_ends_the_run():
    counters = Counters(step=10, sequences=40)
    for epochs, max_steps, end in ((2.0, 30, 30), (2.0, 50, 50), (2.0, 500, 50), (None, 500, 500)):
        config = Config(epochs=epochs, max_steps=max_steps, batch_size=4)
        assert count_steps(config, counters, windows=100) == end


def test_compiled_and_in_bf16_it_learns_the_same(char_data, tmp_path, finished):
    settings = ["--compile=True", "--dtype=bfloat16", "--max_steps=40"]
    result = train_small(char_data, tmp_path, *settings)
    assert result.returncode == 0, result.stderr
    assert re.search(r"compiling \.\.\. [\d.]+ s", result.stdout)
    assert losses(tmp_path)[1][40] == pytest.approx(losses(finished[0])[1][40], abs=0.1)


def test_where_compilation_fails_training_goes_on_and_says_why(char_data, tmp_path):
    broken = {"CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    result = train_small(char_data, tmp_path / "run", "--compile=True", "--max_steps=10", **broken)
    assert result.returncode == 0, result.stderr
    line = r"compiling \.\.\. torch.compile failed: .*; training continues without it\n"
    assert re.search(line, result.stdout)
    assert losses(tmp_path / "run")[1]


# -- what goes wrong ------------------------------------------------------------------------------


def test_no_data(tmp_path):
    fails_clearly(
        train_small(tmp_path / "none", tmp_path / "run"),
        "none holds no prepared data",
        "python prepare_data.py",
    )
    spaced = train_small(tmp_path / "my data", tmp_path / "run")
    fails_clearly(spaced, f"--out '{tmp_path}/my data'", f"prepared in {ROOT / 'data'}")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--n_hed=3"], ["'n_hed'", "'n_head'"]),
        (["--n_head=3"], ["n_head = 3", "n_embd = 32"]),
        (["--device=cuda:7"], ["cuda:7", "device = auto"]),
        (["--device=tpu9"], ["tpu9"]),
        (["--block_size=100000"], ["too few", "block_size"]),
        (["--resume=must"], ["resume = must", "no checkpoint at"]),
        (["--sample_prompts=snow ☃"], ["sample_prompts", "U+2603"]),
        (["--seed=99999999999999999999"], ["seed", "from 0 to 4,294,967,295"]),
        (["--checkpoint_dir=train.py"], ["checkpoint_dir = train.py", "folder"]),
    ],
)
def test_a_mistake_is_a_sentence_and_writes_nothing(char_data, tmp_path, arguments, words):
    fails_clearly(train_small(char_data, tmp_path / "run", *arguments), *words)
    assert not (tmp_path / "run").exists()


def test_a_run_is_not_written_into_prepared_data(char_data):
    fails_clearly(train_small(char_data, char_data), "holds prepared data")


def test_a_run_whose_checkpoints_are_gone_keeps_its_log(char_data, tmp_path):
    assert train_small(char_data, tmp_path, "--max_steps=10").returncode == 0
    log = (tmp_path / "log.jsonl").read_text()
    for step in run_folder.steps(tmp_path):
        shutil.rmtree(step)
    result = train_small(char_data, tmp_path, "--max_steps=10")
    assert result.returncode == 0 and "the checkpoints of this run are gone" in result.stdout
    (aside,) = tmp_path.glob("log_before_*.jsonl")
    assert aside.read_text() == log


def test_a_run_that_ends_no_better_than_guessing_says_so(char_data, tmp_path):
    wild = ["--max_steps=20", "--learning_rate=30", "--grad_clip=0", "--warmup_steps=0"]
    result = train_small(char_data, tmp_path, *wild)
    assert "no better than guessing" in result.stdout, result.stdout + result.stderr


def test_another_shape_or_other_data_lists_every_difference(finished, char_data, bpe_data):
    folder = finished[0]
    fails_clearly(
        train_small(char_data, folder, "--max_steps=50", "--n_layer=3", "--seed=5"),
        "n_layer: 2 in the checkpoint, 3 now",
        "seed: 1337 in the checkpoint, 5 now",
    )
    other = train_small(bpe_data, folder, "--max_steps=50", "--n_layer=3")
    fails_clearly(other, "n_layer: 2 in the checkpoint, 3 now", "data: other tokenizer_sha256")


def test_a_run_does_not_continue_on_the_same_lines_in_another_order(text_file, tmp_path):
    lines = text_file.read_text().splitlines(keepends=True)
    prepare = ["--tokenizer", "char", "--val_fraction", 0.1, "--out", tmp_path / "data"]
    (tmp_path / "text.txt").write_text("".join(lines))
    assert run_script("prepare_data.py", tmp_path / "text.txt", *prepare).returncode == 0
    assert train_small(tmp_path / "data", tmp_path / "run", "--max_steps=10").returncode == 0

    shutil.rmtree(tmp_path / "data")
    (tmp_path / "text.txt").write_text("".join([lines[1], lines[0], *lines[2:]]))
    assert run_script("prepare_data.py", tmp_path / "text.txt", *prepare).returncode == 0
    fails_clearly(train_small(tmp_path / "data", tmp_path / "run", "--max_steps=20"), "data: ")


def test_a_changed_checksum_in_meta_json_is_noticed(char_data, tmp_path):
    data = shutil.copytree(char_data, tmp_path / "data")
    assert train_small(data, tmp_path / "run", "--max_steps=10").returncode == 0
    meta = json.loads((data / "meta.json").read_text())
    checksum = meta["splits"]["val"]["sha256"]
    meta["splits"]["val"]["sha256"] = ("1" if checksum[0] == "0" else "0") + checksum[1:]
    (data / "meta.json").write_text(json.dumps(meta))
    result = train_small(data, tmp_path / "run", "--max_steps=20")
    fails_clearly(result, "val.bin is damaged")


def test_never_refuses_to_write_over_a_run(finished, char_data):
    fails_clearly(train_small(char_data, finished[0], "--resume=never"), "already holds a run")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (
            lambda d: (d / "train.bin").write_bytes((d / "train.bin").read_bytes()[:-100]),
            ["train.bin", "bytes", "cut off"],
        ),
        (lambda d: (d / "tokenizer.json").unlink(), ["no tokenizer at"]),
        (
            lambda d: (d / "tokenizer.json").write_text((d / "tokenizer.json").read_text() + "\n"),
            ["not the tokenizer that made"],
        ),
        (
            lambda d: np.full((d / "train.bin").stat().st_size // 2, 60000, np.uint16).tofile(
                d / "train.bin"
            ),
            ["train.bin is damaged"],
        ),
    ],
)
def test_damaged_data_is_named(char_data, tmp_path, damage, words):
    data = shutil.copytree(char_data, tmp_path / "data")
    damage(data)
    result = train_small(data, tmp_path / "run", "--max_steps=2", "--eval_interval=0")
    fails_clearly(result, *words)
    assert not run_folder.steps(tmp_path / "run")
