"""What a run may not exceed: memory, bad steps, budgets; and its plan before it starts."""

import math
import resource
import weakref

import numpy as np
import pytest
import torch

from formats import files, run_folder, run_log
from hardware import out_of_memory
from tests.conftest import SMALL, fails_clearly, losses, run_script, train_small
from tests.training.conftest import small_run
from train import check_numbers
from training import RunError
from training.recorder import Recorder
from training.saver import Saver
from training.state import StepCounts

# -- memory ---------------------------------------------------------------------------------------


def test_the_allocators_error_is_recognised():
    limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, limit[1]))
    try:
        with pytest.raises(RuntimeError) as error:
            torch.empty(1 << 41, dtype=torch.uint8)
        assert out_of_memory(error.value)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert not out_of_memory(RuntimeError("shapes do not match"))


def under_a_limit(data, folder, limit, *more):
    """Train in a process that may take `limit` bytes beyond what it starts with.

    It prints how many it took at most.
    """
    code = (
        "import re, resource, sys, train\n"
        "def kilobytes(name): return int(re.search(name + r':\\s+(\\d+)',"
        " open('/proc/self/status').read())[1])\n"
        "begun = kilobytes('VmSize')\n"
        "limit = 1024 * begun + int(sys.argv[1])\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "train.main(sys.argv[2:])\n"
        "print('took', 1024 * (kilobytes('VmPeak') - begun))"
    )
    return run_script("-c", code, limit, f"--data_dir={data}", f"--checkpoint_dir={folder}", *more)


BIG = [
    "--n_layer=2",
    "--n_head=2",
    "--n_embd=64",
    "--block_size=256",
    "--batch_size=64",
    "--compile=False",
    "--device=cpu",
    "--dtype=float32",
    "--eval_interval=4",
    "--eval_batches=1",
    "--log_interval=1",
    "--max_steps=4",
    "--warmup_steps=1",
]


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(char_data, tmp_path):
    big = [*BIG, "--batch_size=128"]
    free = under_a_limit(char_data, tmp_path / "free", 1 << 40, *big)
    assert free.returncode == 0, free.stderr
    limit = int(0.85 * int(free.stdout.split()[-1]))  # half the sequences take less
    tight = under_a_limit(char_data, tmp_path / "tight", limit, *big)
    assert tight.returncode == 0, tight.stderr
    assert "out of memory with a micro-batch of 128 sequences; continuing with" in tight.stdout
    for a, b in zip(losses(tmp_path / "free"), losses(tmp_path / "tight"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    events = [r for r in run_log.read(tmp_path / "tight") if r.get("event") == "out of memory"]
    assert events and files.read_json(tmp_path / "tight" / "memory.json")["micro_batch"] < 128
    again = under_a_limit(char_data, tmp_path / "tight", limit, *big, "--max_steps=6")
    # Near the limit a second start may have to halve once more, but it never repeats what is
    # recorded as too much.
    assert (
        again.returncode == 0
        and "micro-batch of 128" not in again.stdout
        and "micro-batches of" in again.stdout
    )


def test_halving_frees_the_memory_of_the_attempt(char_data, tmp_path):
    run, held = small_run(char_data, tmp_path / "run"), []

    def attempt():
        activations = torch.ones(8)
        held.append(weakref.ref(activations))
        raise MemoryError

    try:
        attempt()
    except MemoryError as error:
        run.trainer.halve(error)
        assert held[0]() is None and run.micro_batch.size == run.micro_batch.batch // 2


def test_what_fitted_is_remembered_until_another_size_is_asked_for(char_data, tmp_path):
    run = small_run(char_data, tmp_path / "run")
    run.micro_batch.size = 2
    files.write_json(tmp_path / "run/memory.json", run.micro_batch.to_json())
    assert small_run(char_data, tmp_path / "run").micro_batch.size == 2
    again = small_run(char_data, tmp_path / "run", "--micro_batch_size=4")
    assert again.micro_batch.size == 4


def test_when_one_sequence_does_not_fit_it_says_what_would(char_data, tmp_path):
    result = under_a_limit(
        char_data, tmp_path / "run", 60_000_000, *BIG, "--n_embd=512", "--n_layer=8"
    )
    fails_clearly(result, "out of memory", status=1)


# Other programs take the memory after five micro-batches.
TAKEN = """
import sys, train, model
from torch.nn.modules.module import register_module_forward_pre_hook
forwards = []
def check(module, inputs):
    if isinstance(module, model.GPT):
        forwards.append(1)
        if len(forwards) > 5:
            raise MemoryError
register_module_forward_pre_hook(check)
train.main(sys.argv[1:])
"""


def test_when_memory_runs_out_for_good_the_steps_so_far_are_saved(char_data, tmp_path):
    options = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}", *SMALL]
    taken = run_script("-c", TAKEN, *options)
    fails_clearly(taken, "out of memory", status=1)
    assert "memory ran out; step 5 is saved" in taken.stdout
    again = run_script("train.py", *options)
    assert again.returncode == 0 and "continues at step 5" in again.stdout, again.stderr


# -- numbers --------------------------------------------------------------------------------------


def test_a_single_bad_step_is_skipped_and_counted_and_many_stop_the_run(
    char_data, tmp_path, capsys
):
    run = small_run(char_data, tmp_path / "run", "--max_bad_steps=3")
    saver, recorder = Saver(run), Recorder(run)
    recorder.open_bar()
    before = {k: v.clone() for k, v in run.state.model.state_dict().items()}
    weight = run.state.model.lm_head.weight
    with torch.no_grad():
        good, weight[0, 0] = weight[0, 0].item(), float("nan")
    run.trainer.step()
    with torch.no_grad():
        weight[0, 0] = good
    assert all(torch.equal(before[k], v) for k, v in run.state.model.state_dict().items())
    check_numbers(run, recorder, saver)
    run.trainer.step()
    recorder.step(seconds=1.0)
    assert "left, 1 skipped for NaN or infinity" in capsys.readouterr().out
    logged = run_log.read(run.folder)[-1]
    assert logged["bad_steps"] == 1 and logged["step"] == 2 and np.isfinite(logged["loss"])
    with torch.no_grad():
        weight[0, 0] = float("nan")
    for _ in range(3):
        run.trainer.step()
    with torch.no_grad():
        weight[0, 0] = good
    run.trainer.step()  # a good one between the third and the look does not hide them
    with pytest.raises(RunError, match="3 steps in a row, by step 6") as error:
        check_numbers(run, recorder, saver)
    assert "learning_rate" in str(error.value)
    assert run_log.read(run.folder)[-1]["event"] == "diverged"


def test_a_run_goes_on_after_the_cause_of_many_bad_steps_is_mended(char_data, tmp_path):
    saved = [0.0, 0.0, 13.0, 13.0]  # what a run has that was stopped in the midst of them
    run = small_run(char_data, tmp_path / "run", "--max_bad_steps=10")
    run.trainer.counts = StepCounts(saved, torch.device("cpu"))
    run.trainer.step()
    assert run.trainer.bad_numbers() is None
    run.trainer.counts = StepCounts(saved, torch.device("cpu"))
    run.trainer.counts.add(torch.tensor(math.nan), torch.tensor(False))
    said = run.trainer.bad_numbers()
    assert "14 steps in a row" in said and "max_bad_steps = 10" in said


def test_a_step_that_is_evaluated_has_one_line(char_data, tmp_path, capsys):
    run = small_run(char_data, tmp_path / "run")
    recorder = Recorder(run)
    recorder.open_bar()
    for step, printed in ((10, False), (11, True)):
        run.state.progress.step = step
        recorder.show_step(loss=1.0, mfu=None, bad_steps=0)
        assert ("loss 1.0000" in capsys.readouterr().out) == printed


# -- budgets --------------------------------------------------------------------------------------


def test_a_budget_stops_the_run_with_a_save(char_data, tmp_path):
    result = train_small(
        char_data,
        tmp_path / "run",
        "--max_steps=1000000",
        "--cost_per_hour=3600",
        "--max_cost=8",
        "--eval_interval=0",
    )
    assert result.returncode == 0, result.stderr
    assert "stopped by max_cost = 8.0" in result.stdout
    assert run_folder.read_state(run_folder.steps(tmp_path / "run")[-1])["step"] > 0
    assert [r["cost"] for r in run_log.read(tmp_path / "run") if "loss" in r][-1] > 1
    fails_clearly(train_small(char_data, tmp_path / "other", "--max_cost=5"), "cost_per_hour")
