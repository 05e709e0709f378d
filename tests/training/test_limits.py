"""The limits of a run: memory, bad steps, budgets; and its plan before it starts."""

import math
import resource

import numpy as np
import pytest
import torch

from formats import run_folder, run_log
from hardware import out_of_memory
from tests.conftest import SMALL, fails_clearly, losses, run_script, train_small
from tests.training.conftest import small_run
from training import RunError
from training.recorder import Recorder
from training.schedule import MAX_BAD_STEPS
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
    """Train in a process that may take `limit` bytes beyond what it starts with."""
    code = (
        "import re, resource, sys, train\n"
        "size = re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())\n"
        "limit = 1024 * int(size[1]) + int(sys.argv.pop(1))\n"
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "sys.exit(train.main())"
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


# A machine whose memory takes 20 sequences in a forward.
SMALL_MEMORY = """
import sys, train, model
from torch.nn.modules.module import register_module_forward_pre_hook
def check(module, inputs):
    if isinstance(module, model.GPT) and len(inputs[0]) > 20:
        raise MemoryError
register_module_forward_pre_hook(check)
sys.exit(train.main())
"""


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(char_data, tmp_path):
    def train(code, name):
        options = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / name}", *BIG]
        return run_script(*code, *options)

    free, tight = train(["train.py"], "free"), train(["-c", SMALL_MEMORY], "tight")
    assert free.returncode == 0 and tight.returncode == 0, tight.stderr
    assert "out of memory with a micro-batch of 64 sequences; training with 16" in tight.stdout
    for a, b in zip(losses(tmp_path / "free"), losses(tmp_path / "tight"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    events = [r for r in run_log.read(tmp_path / "tight") if r.get("event") == "out of memory"]
    assert [event["micro_batch"] for event in events] == [16]


def test_when_one_sequence_does_not_fit_it_says_what_would(char_data, tmp_path):
    result = under_a_limit(
        char_data, tmp_path / "run", 60_000_000, *BIG, "--n_embd=512", "--n_layer=8"
    )
    fails_clearly(result, "out of memory", status=1)


# Other programs take the memory after six forwards: one of the trial, five of steps.
TAKEN = """
import sys, train, model
from torch.nn.modules.module import register_module_forward_pre_hook
forwards = []
def check(module, inputs):
    if isinstance(module, model.GPT):
        forwards.append(1)
        if len(forwards) > 6:
            raise MemoryError
register_module_forward_pre_hook(check)
sys.exit(train.main())
"""


def test_when_memory_runs_out_the_steps_so_far_are_saved(char_data, tmp_path):
    options = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path / 'run'}", *SMALL]
    taken = run_script("-c", TAKEN, *options)
    assert taken.returncode == 1, taken.stderr
    assert "memory ran out: step 5 is saved" in taken.stdout
    again = run_script("train.py", *options)
    assert again.returncode == 0 and "continues at step 5" in again.stdout, again.stderr


# -- numbers --------------------------------------------------------------------------------------


def set_weight(run, value):
    """Set one weight; returns what it was."""
    weight = run.state.model.lm_head.weight
    with torch.no_grad():
        before, weight[0, 0] = weight[0, 0].item(), value
    return before


def test_a_single_bad_step_is_skipped_and_counted(char_data, tmp_path, capsys):
    run = small_run(char_data, tmp_path / "run")
    recorder = Recorder(run)
    before = {k: v.clone() for k, v in run.state.model.state_dict().items()}
    good = set_weight(run, math.nan)
    run.trainer.step()
    set_weight(run, good)
    assert all(torch.equal(before[k], v) for k, v in run.state.model.state_dict().items())
    run.trainer.check_finite()
    run.trainer.step()
    recorder.step(seconds=1.0)
    assert "left, 1 skipped for NaN or infinity" in capsys.readouterr().out
    logged = run_log.read(run.folder)[-1]
    assert logged["bad_steps"] == 1 and logged["step"] == 2 and np.isfinite(logged["loss"])


def test_many_bad_steps_in_a_row_end_the_run(char_data, tmp_path):
    run = small_run(char_data, tmp_path / "run")
    good = set_weight(run, math.nan)
    for _ in range(MAX_BAD_STEPS):
        run.trainer.step()
    set_weight(run, good)
    run.trainer.step()  # a good one between the last and the look does not hide them
    with pytest.raises(RunError, match="10 steps in a row, up to step 11") as error:
        run.trainer.check_finite()
    assert "learning_rate" in str(error.value)


def test_a_run_continues_after_the_cause_of_many_bad_steps_is_mended(char_data, tmp_path):
    saved = [0.0, 0.0, 13.0, 13.0]  # what a run has that was stopped in the midst of them
    run = small_run(char_data, tmp_path / "run")
    run.trainer.counts = StepCounts(saved, torch.device("cpu"))
    run.trainer.step()
    run.trainer.check_finite()
    run.trainer.counts = StepCounts(saved, torch.device("cpu"))
    run.trainer.counts.add(torch.tensor(math.nan), torch.tensor(False))
    with pytest.raises(RunError, match="14 steps in a row"):
        run.trainer.check_finite()


def test_a_step_that_is_evaluated_has_one_line(char_data, tmp_path, capsys):
    run = small_run(char_data, tmp_path / "run")
    recorder = Recorder(run)
    for step, printed in ((10, False), (11, True)):
        run.state.counters.step = step
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
    assert "stopped at max_cost = 8.0" in result.stdout
    assert run_folder.read_state(run_folder.steps(tmp_path / "run")[-1])["step"] > 0
    assert [r["cost"] for r in run_log.read(tmp_path / "run") if "loss" in r][-1] > 1
    fails_clearly(train_small(char_data, tmp_path / "other", "--max_cost=5"), "cost_per_hour")
