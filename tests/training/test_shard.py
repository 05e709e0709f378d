"""Several processes that shard one model, started by torchrun: two to four, over gloo."""

import os
import re
import signal
import time

import pytest
import torch

from formats import run_folder, run_log
from tests.conftest import losses, run_script
from tests.training.test_ranks import EXACT, LIMITED, one_message, same, start, torchrun, train_on

STEPS = ["--batch_size=24", "--eval_interval=12"]
MODERN = ["--arch=qwen3", "--optimizer=muon", "--tie_weights=False"]


def train_alone(data, folder, *more):
    """Train the same model in one process, without sharding."""
    return run_script(
        "train.py", f"--data_dir={data}", f"--checkpoint_dir={folder}", *EXACT, *STEPS, *more
    )


def train_sharded(processes, data, folder, *more):
    """Train it sharded over that number of processes."""
    return train_on(processes, data, folder, *STEPS, "--shard=True", *more)


def tensors(folder, name):
    """The tensors of a step's file by name, and of an optimiser by number and name."""
    saved = run_folder.load_tensors(folder / name)
    if name == "model.pt":
        return saved
    states = saved["optimizer"]["state"].items()
    return {(number, k): v for number, state in states for k, v in state.items()}


def test_a_sharded_run_is_the_run_of_one_process(char_data, tmp_path):
    """Its losses, its checkpoints, and whoever continues it: three processes, one, then two."""
    sharded, alone = tmp_path / "sharded", tmp_path / "alone"
    result = train_alone(char_data, alone, "--max_steps=36")
    assert result.returncode == 0, result.stderr
    result = train_sharded(3, char_data, sharded, "--max_steps=12", "--micro_batch_size=2")
    assert result.returncode == 0, result.stderr
    assert "3 x cpu" in result.stdout and not result.stderr
    result = train_alone(char_data, sharded, "--max_steps=24")
    assert result.returncode == 0 and "continues at step 12" in result.stdout, result.stderr
    result = train_sharded(2, char_data, sharded, "--max_steps=36")
    assert result.returncode == 0 and "continues at step 24" in result.stdout, result.stderr
    assert same(losses(sharded), losses(alone))
    # The files are those of a run that shares nothing, and are read as such.
    for name in ("model.pt", "optimizer.pt"):
        ours, theirs = (tensors(f / "step_00000036", name) for f in (sharded, alone))
        assert ours.keys() == theirs.keys()
        for key, tensor in ours.items():
            assert type(tensor) is torch.Tensor and tensor.shape == theirs[key].shape
            assert torch.allclose(tensor, theirs[key], atol=1e-4), key
    result = run_script(
        "generate.py", "--checkpoint", sharded, "--prompt", "the ", "--max_new_tokens", 4
    )
    assert result.returncode == 0, result.stderr


def test_muon_has_whole_matrices_and_prompts_are_answered(char_data, tmp_path):
    more = [*MODERN, "--max_steps=30", "--eval_interval=30", "--sample_prompts=the "]
    for folder, result in (
        ("alone", train_alone(char_data, tmp_path / "alone", *more)),
        ("sharded", train_sharded(4, char_data, tmp_path / "sharded", *more)),
    ):
        assert result.returncode == 0, (folder, result.stderr)
    assert same(losses(tmp_path / "sharded"), losses(tmp_path / "alone"))
    answers = [r for r in run_log.read(tmp_path / "sharded") if "samples" in r]
    assert answers[0]["samples"][0]["text"]


SKIPS = """
import sys, config, torch, train
from training import distributed, shard
from training.setup import build
distributed.init()
run = build(config.load(sys.argv[1:]))
before = [shard.local_shard(p).clone() for p in run.state.model.parameters()]
weight = shard.local_shard(run.state.model.h[0].mlp.c_fc.weight.data)
if distributed.rank == 1:
    good, weight[0, 0] = weight[0, 0].item(), float("nan")
run.trainer.step()
if distributed.rank == 1:
    weight[0, 0] = good
after = [shard.local_shard(p) for p in run.state.model.parameters()]
same = all(torch.equal(a, b) for a, b in zip(before, after))
same = all(distributed.gather(same))
run.trainer.step()
moved = all(distributed.gather(any(not torch.equal(a, b) for a, b in zip(before, after))))
print("bad steps:", int(run.trainer.counts.bad_total), same, moved)
distributed.gather(0)
distributed.exit_process(0)
"""


def test_a_bad_number_in_one_part_is_skipped_in_all(char_data, tmp_path):
    """By Muon, and by AdamW, which takes what is no matrix of a layer."""
    (tmp_path / "skips.py").write_text(SKIPS)
    result = torchrun(
        2,
        tmp_path / "skips.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *EXACT,
        *MODERN,
        "--max_steps=9",
        "--shard=True",
    )
    assert "bad steps: 1 True True" in result.stdout, (result.stdout, result.stderr)


def test_a_signal_saves_once_and_any_number_goes_on(char_data, tmp_path):
    process, _ = start(2, char_data, tmp_path / "run", *STEPS, "--shard=True")
    os.kill(process.pid, signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    saved = re.findall(r"SIGTERM: step ([\d,]+) is saved", out)
    assert len(saved) == 1, (out, err)
    step = int(saved[0].replace(",", ""))
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path / "run")] == [step]
    result = train_sharded(3, char_data, tmp_path / "run", f"--max_steps={step + 2}")
    assert result.returncode == 0 and f"continues at step {step:,}" in result.stdout, result.stderr


KILLED_IN_UPDATE = """
import os, sys, torch, train
from training import distributed
found = torch.nn.utils.get_total_norm
def killed(grads):
    if distributed.rank == 1:
        os.kill(os.getpid(), 9)
    return found(grads)
torch.nn.utils.get_total_norm = killed
train.main(sys.argv[1:])
"""


def test_a_process_killed_in_the_update_is_a_sentence_of_the_others(char_data, tmp_path):
    (tmp_path / "killed.py").write_text(KILLED_IN_UPDATE)
    settings = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}", "--shard=True"]
    result = torchrun(2, tmp_path / "killed.py", *EXACT, *settings, "--max_steps=9")
    assert result.returncode == 1 and "another process of the run ended" in result.stderr
    assert 'killed.py"' not in result.stderr, result.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_when_a_process_is_killed_the_last_checkpoint_stands(char_data, tmp_path, rank):
    folder = tmp_path / "run"
    process, ranks = start(2, char_data, folder, *STEPS, "--shard=True", "--save_interval=5")
    while process.poll() is None and not run_folder.steps(folder):
        time.sleep(0.05)
    os.kill(ranks[rank], signal.SIGKILL)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and 'train.py"' not in err, err
    last = run_folder.step_of(run_folder.steps(folder)[-1])
    if rank == 0:
        return  # which would have said so
    on_disk = f"step {last:,} is saved in {folder}"  # the step at which the other ended
    earlier = f"The last good checkpoint is {folder}/step_{last:08d}"
    assert on_disk in out or earlier in out, (out, err)
    result = train_alone(char_data, folder, f"--max_steps={last + 2}")
    assert result.returncode == 0 and f"continues at step {last:,}" in result.stdout, result.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_out_of_memory_in_one_process_ends_all_with_a_sentence(char_data, tmp_path, rank):
    (tmp_path / "limited.py").write_text(LIMITED.replace("'1'", f"'{rank}'"))
    result = torchrun(
        2,
        tmp_path / "limited.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *EXACT,
        "--n_embd=64",
        "--block_size=256",
        "--batch_size=256",
        "--max_steps=4",
        "--shard=True",
        timeout=60,
    )
    one_message(result, "a micro-batch of 128 sequences", "it continues with 64", status=1)


def test_where_compiling_fails_all_end_with_a_sentence(char_data, tmp_path):
    """A run that shares nothing goes on without; here no process can know of the others in time."""
    result = torchrun(
        2,
        "train.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *EXACT,
        "--compile=True",
        "--shard=True",
        CXX="/bin/false",
        TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
    )
    one_message(result, "could not be compiled", "compile = False", status=1)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [True, False])
def test_on_a_gpu_it_learns_the_same(char_data, tmp_path, compiled):
    """In one process, which is all that one GPU takes: the engine, with nobody to share with."""
    more = ["--device=cuda", f"--compile={compiled}", "--max_steps=24"]
    for folder, result in (
        ("alone", train_alone(char_data, tmp_path / "alone", *more)),
        ("sharded", train_sharded(1, char_data, tmp_path / "sharded", *more)),
    ):
        assert result.returncode == 0, (folder, result.stderr)
    (alone, _), (sharded, _) = (losses(tmp_path / folder) for folder in ("alone", "sharded"))
    assert sharded == pytest.approx(alone, abs=2e-3)  # products in TF32
