"""Several processes that train one run over gloo, started as torchrun does, or by torchrun."""

import os
import re
import signal
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hardware
import startup
from config import ConfigError
from formats import run_folder
from tests import warm_start
from tests.conftest import losses, train_command, trained, wait_until
from tests.training.conftest import (
    EXACT,
    assert_same_end,
    assert_same_losses,
    last_weights,
    ranks,
    run_ranks,
    start,
    torchrun,
    train_on,
)
from training import RunError, distributed

ENDLESS = [*EXACT, "--max_steps=1000000", "--eval_interval=0"]


def start_torchrun(processes, data, folder, *more):
    """torchrun with an endless run that has begun to log, and the process id of its rank 1."""
    process = start(data, folder, *ENDLESS, *more, launcher=torchrun(processes))
    wait_until(process, lambda: losses(folder)[0])
    for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
        if "\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_text():
            return process, int(pid)


@pytest.fixture(scope="module")
def alone(little_data, tmp_path_factory):
    """The losses of 50 steps in one process."""
    folder = tmp_path_factory.mktemp("ranks")
    trained(little_data, folder, *EXACT, "--max_steps=50")
    return losses(folder)


def test_two_processes_have_the_losses_of_one(little_data, tmp_path, alone):
    result = train_on(2, little_data, tmp_path / "run", "--max_steps=50", "--micro_batch_size=1")
    assert_same_losses(losses(tmp_path / "run"), alone)
    assert "finished: 50 steps" in result.stdout
    assert "2 x cpu" in result.stdout
    log = run_folder.read_log(tmp_path / "run")
    assert [r["step"] for r in log if "loss" in r] == list(range(1, 51))
    assert [r["processes"] for r in log if r.get("event") == "start"] == [2]
    # What is saved bears no wrapper's prefix.
    modules = {name.partition(".")[0] for name in last_weights(tmp_path / "run")}
    assert modules == {"wte", "wpe", "h", "ln_f", "lm_head"}


def test_a_run_goes_on_with_any_number_of_processes(little_data, tmp_path, alone):
    for processes, steps in ((2, 20), (1, 30), (2, 50)):
        result = train_on(processes, little_data, tmp_path / "run", f"--max_steps={steps}")
    assert "continues at step 30" in result.stdout
    assert_same_losses(losses(tmp_path / "run")[:1], alone[:1])


def test_dropout_differs_between_processes_and_resumes_as_it_was(char_data, tmp_path):
    for folder, stops in (("whole", [20]), ("part", [10, 20])):
        for steps in stops:
            more = [f"--max_steps={steps}", "--dropout=0.2"]
            train_on(2, char_data, tmp_path / folder, *more)
    assert_same_end(tmp_path / "whole", tmp_path / "part")


def assert_saved_once(folder, out):
    """Assert that one process of a run said that a signal came, and saved."""
    saved = re.findall(r"SIGTERM: step ([\d,]+) is saved", out)
    assert len(saved) == 1, out
    step = int(saved[0].replace(",", ""))
    assert run_folder.latest(folder)[1]["step"] == step


def test_a_signal_to_torchrun_saves_once_and_all_leave(char_data, tmp_path):
    process, _ = start_torchrun(2, char_data, tmp_path / "run")
    process.terminate()
    out, err = process.communicate(timeout=300)
    assert_saved_once(tmp_path / "run", out)
    assert 'train.py"' not in err, err  # no traceback of ours: torchrun's own is all there is


def test_a_signal_to_one_process_saves_once_and_all_leave(char_data, tmp_path):
    """During an evaluation, which both must end at the same batch."""
    evaluating = ["--eval_interval=1", "--micro_batch_size=1"]
    with ranks(2, *train_command(char_data, tmp_path, *ENDLESS, *evaluating)) as (first, second):
        wait_until(first, lambda: run_folder.steps(tmp_path))  # a save comes before it
        second.terminate()
        ended = [process.complete(timeout=300) for process in (first, second)]
    assert [result.returncode for result in ended] == [143, 143], ended
    assert_saved_once(tmp_path, ended[0].stdout + ended[1].stdout)
    assert not any(result.stderr for result in ended)


def test_when_a_process_dies_the_others_save_what_they_have(char_data, tmp_path):
    process, rank_1 = start_torchrun(3, char_data, tmp_path / "run", "--batch_size=24")
    os.kill(rank_1, signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    step = re.search(r"another process of the run has ended: step ([\d,]+) is saved", out)[1]
    assert process.returncode == 1, err
    assert 'train.py"' not in err, err
    longer = f"--max_steps={int(step.replace(',', '')) + 10}"
    result = trained(char_data, tmp_path / "run", "--dtype=float32", longer)
    assert f"continues at step {step}" in result.stdout


def run_with_hook(data, folder, register, hook, *more):
    """Two processes with Muon, whose matrices they share, and a global hook of torch in rank 1.

    hook: the lines of a function that counts its calls.
    """
    (folder / "hooked.py").write_text(
        "import os, signal, sys, time, train\n"
        f"from {register.__module__} import {register.__name__}\n"
        "calls = []\n"
        "def hook(*_):\n"
        "    calls.append(1)\n"
        f"    {hook}\n"
        "if os.environ['RANK'] == '1':\n"
        f"    {register.__name__}(hook)\n"
        "sys.exit(train.main())"
    )
    command = train_command(data, folder / "run", "--optimizer=muon", "--max_steps=20", *more)
    return run_ranks(2, folder / "hooked.py", *command[1:])


def test_when_a_process_dies_in_an_update_the_last_checkpoint_counts(char_data, tmp_path):
    """The update of the others waits for what never comes."""
    dies = "len(calls) > 5 and os.kill(os.getpid(), signal.SIGKILL)"
    hooked = (register_optimizer_step_pre_hook, dies)
    left, dead = run_with_hook(char_data, tmp_path, *hooked, "--save_interval=4")
    assert (left.returncode, dead.returncode) == (1, -signal.SIGKILL)
    assert "step 6 could not be completed" in left.stderr
    assert "is saved" not in left.stdout
    assert [run_folder.step_of(p) for p in run_folder.steps(tmp_path / "run")] == [4]


def test_when_memory_runs_out_in_one_process_all_end_and_the_step_is_saved(char_data, tmp_path):
    full = "if len(calls) > 300: raise MemoryError"
    hooked = (register_module_forward_pre_hook, full)
    first, second = run_with_hook(char_data, tmp_path, *hooked, "--eval_interval=0")
    assert (first.returncode, second.returncode) == (1, 1), (first, second)
    assert re.search(r"another process of the run has ended: step \d+ is saved", first.stdout)
    assert second.stderr == "process 1: memory ran out\n"


def test_a_dry_run_ends_where_one_process_is_slower_than_the_other(char_data, tmp_path):
    """Each forward of the trial ends in its own time, and the updates wait for each other."""
    slow = "len(calls) == 1 and time.sleep(1)"
    hooked = (register_module_forward_pre_hook, slow)
    ended = run_with_hook(char_data, tmp_path, *hooked, "--dry_run=True")
    assert [result.returncode for result in ended] == [0, 0], ended
    assert "with micro-batch 4" in ended[0].stdout


def test_a_dry_run_ends_where_one_process_lacks_the_memory(char_data, tmp_path):
    hooked = (register_module_forward_pre_hook, "raise MemoryError")
    ended = run_with_hook(char_data, tmp_path, *hooked, "--dry_run=True")
    assert [result.returncode for result in ended] == [0, 0], ended
    assert "does not fit in the memory" in ended[0].stdout


def test_compiled_and_in_bf16_one_process_and_two_learn_as_one_that_is_neither(
    little_data, tmp_path, alone
):
    """In micro-batches of 4, so that both compile the same code, once."""
    more = ["--compile=True", "--dtype=bfloat16", "--max_steps=50", "--micro_batch_size=4"]
    for count in (1, 2):
        result = train_on(count, little_data, tmp_path / str(count), *more)
        assert re.search(r"compiling \.\.\. [\d.]+ s\n", result.stdout)
    one, two = losses(tmp_path / "1"), losses(tmp_path / "2")
    for found, exact, reference in zip(two, one, alone, strict=True):
        assert found == pytest.approx(exact, abs=1e-4)
        assert exact == pytest.approx(reference, abs=0.01)


def test_muon_split_has_the_losses_of_one_process(char_data, tmp_path):
    more = ["--optimizer=muon", "--max_steps=20", "--arch=qwen3", "--eval_batches=3"]
    more.append("--n_layer=3")  # so that one gets a matrix more than the other
    for count in (1, 2):
        train_on(count, char_data, tmp_path / str(count), *more)
    assert_same_losses(losses(tmp_path / "1"), losses(tmp_path / "2"))


@pytest.mark.gpu
def test_a_process_that_sees_one_gpu_takes_it(monkeypatch):
    if torch.cuda.device_count() > 1:
        pytest.skip("this process sees several")
    assert hardware.find_device("auto", 3) == torch.device("cuda", 0)


def test_a_name_that_is_not_utf_8_is_printed_nowhere_by_the_others(char_data, tmp_path):
    train_on(2, char_data, tmp_path / "run\udcff", "--max_steps=2")


def test_an_error_is_said_once(char_data, tmp_path):
    ended = run_ranks(2, *train_command(char_data, tmp_path / "run", "--batch_size=7"))
    assert [result.returncode for result in ended] == [2, 2]
    said = "".join(result.stderr for result in ended)
    assert "Traceback" not in said, said
    assert said.count("train.py: ") == 1, said
    assert "batch_size = 7 cannot be shared by 2 processes; the next larger that can is 8" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("option", "words", "status"),
    [
        ("f'--seed={rank}'", "do not see the same settings", 1),
        ("'--data_dir=nodata' if rank else '--seed=1337'", "nodata holds no prepared data", 2),
    ],
)
def test_what_differs_or_fails_in_one_process_ends_all(char_data, tmp_path, option, words, status):
    (tmp_path / "other.py").write_text(
        "import os, sys, train\n"
        "rank = int(os.environ['RANK'])\n"
        f"sys.argv.append({option})\n"
        "sys.exit(train.main())"
    )
    command = train_command(char_data, tmp_path / "run")
    ended = run_ranks(2, tmp_path / "other.py", *command[1:])
    said = "".join(result.stderr for result in ended)
    assert status in [result.returncode for result in ended]
    assert all(result.returncode for result in ended)
    assert words in said
    assert said.count("train.py: ") == 1, said
    assert "Traceback" not in said, said


LAUNCHED = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE = 'x', which must be a number"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE = '0', which must be a number from 1"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE = '', which"),
        ({"RANK": None}, "WORLD_SIZE = 2, but no RANK; torchrun --nproc_per_node=N train.py"),
        ({"RANK": "2"}, "RANK = '2', which must be a number from 0 to 1"),
        ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
        ({"LOCAL_WORLD_SIZE": "x"}, "LOCAL_WORLD_SIZE = 'x'"),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT = '99999'"),
        ({}, "but no MASTER_PORT"),
    ],
)
def test_an_environment_that_torchrun_did_not_set_is_a_sentence(monkeypatch, changes, words):
    monkeypatch.setattr(distributed, "world_size", 1)
    for name, value in (LAUNCHED | changes).items():
        if value is not None:
            monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError) as error:
        distributed.init()
    assert words in str(error.value)


def test_a_single_process_needs_no_other_variables(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")
    distributed.init()
    assert distributed.local_world_size == 1


@pytest.mark.parametrize("count", ["1", "4"])
def test_processes_that_nothing_joins_are_told_of_torchrun(tmp_path, monkeypatch, count):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", count)
    words = {"1": "stop that one first", "4": "srun starts separate runs; torchrun starts the"}
    held, error = distributed.locked(tmp_path), pytest.raises(RunError, match=words[count])
    with held, error, distributed.locked(tmp_path):
        pass


def join_alone():
    """Join as the only process, and look how long it would wait for the others."""
    os.environ |= LAUNCHED | {"WORLD_SIZE": "1", "MASTER_PORT": "0"}
    distributed.join()
    gloo = torch.distributed.group.WORLD._get_backend(torch.device("cpu"))
    assert gloo.options._timeout >= timedelta(hours=2)


def test_a_process_waits_for_hours_for_an_upload_of_the_first():
    process = warm_start.context.Process(target=join_alone)
    process.start()
    process.join(60)
    assert process.exitcode == 0


def wait_for_rank_1(port):
    """What rank 0 does whose rank 1 never comes."""
    os.environ |= LAUNCHED | {"MASTER_PORT": str(port)}
    startup.begin("torch")
    distributed.init()


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process_that_waits_for_the_others(signum):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = warm_start.context.Process(target=wait_for_rank_1, args=(port,))
    process.start()
    while process.is_alive():  # until it waits
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.01)
    os.kill(process.pid, signum)
    process.join(60)
    assert process.exitcode == -signum
