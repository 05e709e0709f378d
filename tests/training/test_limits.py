"""The limits of a run: memory, bad steps, budgets."""

import bisect
import dataclasses
import functools
import math
import re
import shutil

import pytest
import torch
from torch.nn.attention import SDPBackend

import processors
from formats import pretrained, run_folder
from hardware import DeviceError
from tests.conftest import fails_clearly, losses, ok, run_code, train_command, train_small, trained
from tests.training.conftest import last_weights, small_run
from train import prepare, training_step
from training import RunError, distributed
from training.fit import try_step
from training.memory import largest_micro_batch, memory, micro_batch_to_try
from training.plan import banner
from training.recorder import Recorder
from training.run import LossSums
from training.schedule import MAX_BAD_STEPS

# -- memory ---------------------------------------------------------------------------------------

# train.py in a process that may take so many bytes beyond what it starts with.
LIMITED = """
import re, resource, sys, train
size = re.search(r'VmSize:\\s+(\\d+)', open('/proc/self/status').read())
limit = 1024 * int(size[1]) + 60_000_000
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
sys.exit(train.main())
"""
# train.py on a machine whose memory is full at some forwards.
FULL = """
import sys, train, model
from torch.nn.modules.module import register_module_forward_pre_hook
forwards = []
def check(module, inputs):
    if isinstance(module, model.GPT):
        forwards.append(inputs[0])
        if FULL:
            raise MemoryError
register_module_forward_pre_hook(check)
sys.exit(train.main())
"""


def train_by(code, data, folder, *more):
    """Train a small model by code that ends in train.main()."""
    return run_code(code, *train_command(data, folder, *more)[1:])


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else(char_data, tmp_path):
    more = ["--batch_size=64", "--dtype=float32", "--max_steps=10", "--log_interval=1"]
    trained(char_data, tmp_path / "free", *more)
    more_than_40 = FULL.replace("FULL", "len(inputs[0]) > 40")
    tight = ok(train_by(more_than_40, char_data, tmp_path / "tight", *more))
    assert "micro-batches of 64 sequences do not fit in memory; training with 32" in tight.stdout
    for a, b in zip(losses(tmp_path / "free"), losses(tmp_path / "tight"), strict=True):
        assert a == pytest.approx(b, rel=1e-4)
    events = [
        r for r in run_folder.read_log(tmp_path / "tight") if r.get("event") == "out of memory"
    ]
    assert [event["micro_batch"] for event in events] == [32]


@pytest.fixture
def set_free_ram(tmp_path, monkeypatch):
    """A function that sets the bytes of free RAM that Linux reports."""
    monkeypatch.setattr(processors, "SYSTEM", tmp_path)
    (tmp_path / "proc").mkdir()

    def set_to(size):
        (tmp_path / "proc/meminfo").write_text(f"MemAvailable: {size // 1024 + 1} kB")

    return set_to


def take_steps(run, count):
    """Prepare a run, take steps, and save the last; returns its weights."""
    prepare(run, Recorder(run))
    for _ in range(count):
        training_step(run)
    run.saver.finish(run.step, run.snapshot)
    return last_weights(run.folder)


def test_a_cpu_takes_the_micro_batch_that_fits_its_ram_and_keeps_it(
    char_data, tmp_path, set_free_ram, monkeypatch, capsys
):
    """Linux grants more than there is, and kills the process that uses it."""
    more = ["--batch_size=32", "--dropout=0.1", "--max_steps=4", "--dtype=float32"]

    def start(name, *others):
        return small_run(char_data, tmp_path / name, *more, *others)

    run = start("whole")
    planned = memory(run.config, run.model, run.optimizer, 8, run.device)
    needed = planned["peak"] + planned["activations"] + 8 * run.model.num_parameters()
    set_free_ram(needed)  # the weights are there, and a checkpoint's copy is three times as large
    whole = take_steps(run, 4)
    said = "micro-batches of 32 sequences do not fit in memory; training with 8, and the same"
    assert said in capsys.readouterr().out

    take_steps(start("stopped"), 2)
    set_free_ram(10**12)
    again = start("stopped")
    assert "micro-batches of 8 sequences" in banner(again)
    for less, size in ((0, 8), (2048, 4)):  # the moments are there, too
        set_free_ram(needed - 8 * run.model.num_parameters() - less)
        assert micro_batch_to_try(again) == size
    set_free_ram(10**12)
    stopped = take_steps(again, 2)
    assert all(torch.equal(whole[name], tensor) for name, tensor in stopped.items())

    assert start("stopped", "--micro_batch_size=16").micro_batch == 16
    free = start("free")
    set_free_ram(2 * needed)
    monkeypatch.setattr(distributed, "local_world_size", 4)
    assert micro_batch_to_try(free) < 8  # they share it
    monkeypatch.setattr(distributed, "local_world_size", 1)
    set_free_ram(10**12)
    assert not torch.equal(take_steps(free, 4)["wte.weight"], whole["wte.weight"])


def test_where_compilation_fails_the_micro_batch_is_that_of_an_uncompiled_step(
    char_data, tmp_path, set_free_ram, monkeypatch, capsys
):
    def broken(*_):
        raise RuntimeError("the compiler is broken")

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=broken))
    more = ["--compile=True", "--batch_size=32", "--max_steps=4", "--dtype=float32"]
    run = small_run(char_data, tmp_path, *more)
    compiled = memory(run.config, run.model, run.optimizer, 8, run.device)["peak"]
    set_free_ram(compiled + 8 * run.model.num_parameters())  # a checkpoint's copy, not the weights
    assert micro_batch_to_try(run) == 8
    take_steps(run, 1)
    said = capsys.readouterr().out
    assert "torch.compile failed: " in said
    assert "micro-batches of 32 sequences do not fit in memory; training with 4" in said


def test_an_apple_gpu_gets_no_more_tokens_than_it_adds_up_correctly(char_data, tmp_path):
    run = small_run(char_data, tmp_path / "run", "--batch_size=32768", "--block_size=32")
    assert run.micro_batch == 32768
    apple = dataclasses.replace(run.device, torch=torch.device("mps"))
    assert dataclasses.replace(run, device=apple).micro_batch == 512  # 16,384 tokens
    run.config = dataclasses.replace(run.config, block_size=40_960)
    assert dataclasses.replace(run, device=apple).micro_batch == 1


def test_a_gpu_is_asked_from_twice_the_planned_micro_batch_on(char_data, tmp_path):
    """Each that does not fit costs a compilation."""
    run = small_run(char_data, tmp_path / "run", "--batch_size=64")

    def fits(size):
        return largest_micro_batch(run, dataclasses.replace(run.device, memory=size))

    for planned, tried in ((0, 2), (4, 8), (32, 64), (64, 64)):
        size = bisect.bisect_left(range(1, 10**8), planned, key=fits) + 1
        run.device = dataclasses.replace(run.device, memory=size)
        assert micro_batch_to_try(run) == tried


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (LIMITED, "weights, optimizer and data take too much of it"),
        (FULL.replace("FULL", "True"), "a single sequence of 256 tokens"),
    ],
)
def test_a_model_that_does_not_fit_is_a_sentence(char_data, tmp_path, code, words):
    larger = ["--n_embd=512", "--n_layer=8", "--block_size=256"]
    result = train_by(code, char_data, tmp_path / "run", *larger)
    fails_clearly(result, "out of memory", words, "n_layer", status=1)


def test_a_gpu_on_which_nothing_runs_is_a_sentence(char_data, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("HIP error: invalid device function\nHIP kernel errors might be ...")

    monkeypatch.setattr(torch, "zeros", fails)
    words = (
        "device = cpu does not work: HIP error: invalid device function. See the causes in docs/"
    )
    with pytest.raises(DeviceError, match=words):
        small_run(char_data, tmp_path)


def test_when_memory_runs_out_the_steps_so_far_are_saved(char_data, tmp_path):
    """Other programs take it after six forwards: one of the trial, five of steps."""
    taken = FULL.replace("FULL", "len(forwards) > 6")
    result = train_by(taken, char_data, tmp_path / "run", "--max_steps=20")
    assert result.returncode == 1, result.stderr
    assert "memory ran out: step 5 is saved" in result.stdout
    again = trained(char_data, tmp_path / "run", "--max_steps=20")
    assert "continues at step 5" in again.stdout


def test_a_run_that_lacks_only_its_last_evaluation_finds_what_fits(char_data, tmp_path):
    run = small_run(char_data, tmp_path / "run", "--compile=True")
    run.schedule.total_steps = run.step  # the evaluation of step 0 is due

    def full(model, arguments):
        if len(arguments[0]) > 2:
            raise MemoryError

    run.model.register_forward_pre_hook(full)
    prepare(run, Recorder(run))
    assert run.micro_batch == 2
    assert run.compiled is run.model  # it would not be worth the time


@pytest.mark.parametrize("error", [MemoryError, RuntimeError("CUDA out of memory")])
def test_when_memory_runs_out_in_an_update_the_step_is_not_saved(char_data, tmp_path, error):
    """A run saves after a RuntimeError or MemoryError, which leave the weights of a whole step."""
    run = small_run(char_data, tmp_path / "run")

    def full(*_):
        raise error

    run.optimizer.register_step_post_hook(full)
    with pytest.raises(RunError, match=r"step 1 could not .* continues from the last checkpoint"):
        training_step(run)
    assert not issubclass(RunError, RuntimeError | MemoryError)


# -- numbers --------------------------------------------------------------------------------------


def set_weight(run, value):
    """Set one weight; returns what it was."""
    weight = run.model.lm_head.weight
    with torch.no_grad():
        before, weight[0, 0] = weight[0, 0].item(), value
    return before


def add_bad_step(run):
    """Count a step whose loss and gradients are NaN."""
    nan = torch.tensor(math.nan)
    run.loss_sums.add(nan, nan, good=torch.tensor(False))


def test_a_single_bad_step_is_skipped_and_counted(char_data, tmp_path, capsys):
    run = small_run(char_data, tmp_path / "run")
    recorder = Recorder(run)
    before = {k: v.clone() for k, v in run.model.state_dict().items()}
    good = set_weight(run, math.nan)
    training_step(run)
    set_weight(run, good)
    assert all(torch.equal(before[k], v) for k, v in run.model.state_dict().items())
    run.check_finite()
    training_step(run)
    recorder.step(seconds=1.0)
    assert "left, 1 skipped for NaN or infinity" in capsys.readouterr().out
    logged = run_folder.read_log(run.folder)[-1]
    assert logged["bad_steps"] == 1
    assert logged["step"] == 2
    assert math.isfinite(logged["loss"])


def test_many_bad_steps_in_a_row_end_the_run(char_data, tmp_path):
    run = small_run(char_data, tmp_path / "run")
    good = set_weight(run, math.nan)
    for _ in range(MAX_BAD_STEPS):
        training_step(run)
    set_weight(run, good)
    training_step(run)  # a good one between the last and the look does not hide them
    with pytest.raises(RunError, match=r"10 steps in a row, up to step 11.* learning_rate"):
        run.check_finite()


def test_many_bad_steps_with_cudnns_attention_name_it(char_data, tmp_path, monkeypatch):
    run = small_run(char_data, tmp_path / "run")
    run.loss_sums = LossSums([0.0, 0.0, 10.0, 10.0], torch.device("cpu"))
    add_bad_step(run)
    choices = {SDPBackend.CUDNN_ATTENTION: True, SDPBackend.MATH: False, None: False}
    for backend, named in choices.items():
        device = torch.device("cuda" if backend else "mps")
        run.device = dataclasses.replace(run.device, torch=device)

        def choose(*_, b=backend, **__):
            if b is None:
                raise NotImplementedError("not implemented for the MPS device")
            return b.value

        monkeypatch.setattr(torch, "empty", lambda *_, **__: None)
        monkeypatch.setattr(torch, "_fused_sdp_choice", choose)
        with pytest.raises(RunError) as error:
            run.check_finite()
        assert ("variable TORCH_CUDNN_SDPA_DEPRIORITIZED=1" in str(error.value)) == named


def test_the_trial_takes_the_memory_of_a_step(char_data, tmp_path, monkeypatch):
    """The optimizer's state from its first forward on, and the gradients several processes keep.

    In the second of two micro-batches, those of the first.
    """
    run = small_run(char_data, tmp_path / "run", "--micro_batch_size=2")
    parameters, gradients, states = list(run.model.parameters()), [], []

    def look(*_):
        gradients.append(sum(p.grad.nbytes for p in parameters if p.grad is not None))
        states.append([run.optimizer.state[p].get("exp_avg_sq") is not None for p in parameters])

    run.model.register_forward_pre_hook(look)
    for world_size, times in ((1, 0), (2, 1)):
        monkeypatch.setattr(distributed, "world_size", world_size)
        gradients.clear()
        assert try_step(run) is None
        whole = sum(p.nbytes for p in parameters)
        assert gradients == [times * whole, whole]
        assert all(p.grad is None for p in parameters)
    assert all(states[0])


def test_a_validation_loss_of_nan_is_never_the_best(char_data, tmp_path, capsys):
    run = small_run(char_data, tmp_path / "run")
    for best, shown in ((None, []), (2.5, ["best 2.5000"])):
        run.saver.best = best
        Recorder(run).evaluation(math.nan)
        said = capsys.readouterr().out
        assert "validation loss nan" in said
        assert re.findall(r"best [\w.]+", said) == shown


def test_a_run_continues_after_the_cause_of_many_bad_steps_is_mended(char_data, tmp_path):
    saved = [0.0, 0.0, 13.0, 13.0]  # what a run has that was stopped in the midst of them
    run = small_run(char_data, tmp_path / "run")
    run.loss_sums = LossSums(saved, torch.device("cpu"))
    training_step(run)
    run.check_finite()
    run.loss_sums = LossSums(saved, torch.device("cpu"))
    add_bad_step(run)
    with pytest.raises(RunError, match="14 steps in a row"):
        run.check_finite()


@pytest.fixture
def half_run(char_data, tmp_path):
    """half_run(scale) is a run in float16 at step 10, with another scale of its gradients."""
    trained(char_data, tmp_path, "--dtype=float16", "--max_steps=10")

    def rescaled(scale):
        step = tmp_path / "step_00000010"
        state, tokenizer = run_folder.read_state(step), (step / "tokenizer.json").read_text("utf-8")
        model, optimizer = (
            pretrained.load_tensors(step / f"{n}.pt") for n in ("model", "optimizer")
        )
        optimizer["scaler"]["scale"] = scale
        shutil.rmtree(step)
        run_folder.save(tmp_path, state, model, optimizer, tokenizer)
        return tmp_path

    return rescaled


def test_float16_continues_with_the_scale_of_its_gradients(char_data, half_run):
    """With one at which all of them overflow, the next steps are skipped, and are no bad ones."""
    run = half_run(2.0**90)
    before = last_weights(run)
    trained(char_data, run, "--dtype=float16", "--max_steps=20")
    assert all(torch.equal(before[name], weight) for name, weight in last_weights(run).items())
    assert not any(record.get("bad_steps") for record in run_folder.read_log(run))


def test_gradients_that_overflow_float16_at_any_scale_end_the_run(char_data, half_run):
    result = train_small(char_data, half_run(1e-4), "--dtype=float16", "--max_steps=20")
    fails_clearly(result, "overflow float16 at any scale", "dtype = float32", status=1)


# -- budgets --------------------------------------------------------------------------------------


def test_a_budget_stops_the_run_with_a_save(char_data, tmp_path):
    budget = ["--cost_per_hour=3600", "--max_cost=8"]
    endless = ["--max_steps=1000000", "--eval_interval=0"]
    result = trained(char_data, tmp_path, *budget, *endless)
    assert "stopped at max_cost = 8.0" in result.stdout
    assert run_folder.read_state(run_folder.steps(tmp_path)[-1])["step"] > 0
    assert [r["cost"] for r in run_folder.read_log(tmp_path) if "loss" in r][-1] > 1
