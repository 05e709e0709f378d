"""Checks that need a GPU. Run with `pytest -m gpu`."""

import contextlib
import gc
import json
import os
import shlex

import pytest
import torch

import config
from formats import run_folder, run_log
from formats.data_folder import read_meta
from tests.conftest import losses, run_script, train_command
from tests.training.conftest import small_run, torchrun
from train import train
from training import dataset, profiling
from training.dataset import Dataset
from training.setup import build

# cuBLAS repeats its sums bit by bit only with this, which it reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.gpu
PLACES = ["gpu", "ram", "mmap"]


def settings_for(data, folder, *more):
    """The small settings on the GPU."""
    return config.load(train_command(data, folder, "--device=cuda", *more)[1:])


@contextlib.contextmanager
def no_waiting():
    """Raise an error where Python waits for the GPU."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def at_most(size):
    """This process may take `size` bytes of the GPU."""
    gc.unfreeze()  # runs before this one, which train() has kept from the collector
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(size / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def weights(run):
    """A copy of a run's weights."""
    return {name: w.clone() for name, w in run.state.model.state_dict().items()}


def same(a, b):
    """True if two dictionaries hold the same tensors, bit by bit, on any device."""
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_precision_learns_as_the_cpu_does(char_data, tmp_path, dtype, compiled):
    on_cpu = ["--device=cpu", "--compile=False", "--dtype=float32"]
    train(settings_for(char_data, tmp_path / "cpu", "--max_steps=40", *on_cpu))
    on_gpu = [f"--dtype={dtype}", f"--compile={compiled}"]
    train(settings_for(char_data, tmp_path / "gpu", "--max_steps=40", *on_gpu))
    found, expected = (losses(tmp_path / name)[1][40] for name in ("gpu", "cpu"))
    assert found == pytest.approx(expected, abs=0.05)


def keep_tokens(monkeypatch, place):
    """Every data set keeps its tokens in this place."""
    monkeypatch.setattr(dataset, "find_location", lambda size, device: place)


def test_batches_are_the_same_wherever_the_tokens_are(char_data, monkeypatch):
    meta, device, batches = read_meta(char_data), torch.device("cuda"), []
    assert Dataset(char_data, meta, "train", 32, device).location == "gpu"  # as it fits there
    for place in PLACES:
        keep_tokens(monkeypatch, place)
        data = Dataset(char_data, meta, "train", 32, device)
        for first in (0, 8, data.windows - 3):
            batches.append(torch.stack(data.batch(first, 24, 7)))  # above 16 another kernel
    for batch, expected in zip(batches, 3 * batches[:3], strict=True):
        assert batch.device.type == "cuda"
        assert batch.dtype == torch.int64
        assert torch.equal(batch, expected)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "settings",
    [
        "--dtype=bfloat16",
        "--dtype=float16",
        "--dtype=bfloat16 --optimizer=muon",
        "--dtype=bfloat16 --micro_batch_size=2",
        "--dtype=bfloat16 --compile=True",
    ],
)
def test_a_step_does_not_wait_for_the_gpu(char_data, tmp_path, monkeypatch, settings, place):
    keep_tokens(monkeypatch, place)
    run = build(settings_for(char_data, tmp_path, *settings.split()))
    assert run.trainer.prepare(run.compiles) is None
    run.trainer.step()
    with no_waiting():
        for _ in range(3):
            run.trainer.step()
        assert len(list(run.data.val.evaluation(8, 4))) == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_with_nan_leaves_the_weights(char_data, tmp_path, dtype, optimizer):
    run = build(settings_for(char_data, tmp_path, f"--dtype={dtype}", f"--optimizer={optimizer}"))
    run.trainer.step()
    before = weights(run)
    weight = run.state.model.lm_head.weight
    with torch.no_grad():
        good = weight[0, 0].item()
        weight[0, 0] = float("nan")
    with no_waiting():
        run.trainer.step()
    with torch.no_grad():
        weight[0, 0] = good
    assert same(weights(run), before)
    for _ in range(5):  # float16's scaler may skip the first of them
        run.trainer.step()
    assert not same(weights(run), before)
    assert all(w.isfinite().all() for w in weights(run).values())


def test_a_save_holds_its_step_while_training_continues(char_data, tmp_path):
    run = small_run(char_data, tmp_path, "--device=cuda")
    run.trainer.step()
    run.saver.save(run.snapshot())
    before = weights(run)
    for _ in range(5):
        run.trainer.step()
    run.saver.wait()
    saved = run_folder.load_tensors(tmp_path / "step_00000001" / "model.pt")
    assert same(saved, before)
    assert not same(weights(run), before)


def test_a_profile_of_the_gpu_counts_its_kernels(char_data, tmp_path):
    more = ["--max_steps=12", "--profile=True", "--n_embd=256", "--compile=True"]
    train(settings_for(char_data, tmp_path, *more))
    (record,) = (r for r in run_log.read(tmp_path) if r.get("event") == "profile")
    seconds = record["seconds_a_step"]
    assert min(seconds[part] for part in profiling.PARTS) > 0
    assert seconds["backward"] > seconds["data"]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = sum(event["dur"] for event in trace if event.get("cat") == "kernel")
    found = sum(seconds[part] for part in profiling.PARTS)
    assert found == pytest.approx(kernels / 1e6 / profiling.STEPS, rel=0.2)


@pytest.mark.parametrize("compiled", [True, False])
def test_out_of_memory_on_the_gpu_halves_the_micro_batch(char_data, tmp_path, compiled):
    big = shlex.split(
        "--n_embd=512 --n_head=8 --n_layer=4 --block_size=256 --batch_size=64 --max_steps=3"
        " --eval_interval=0 --log_interval=1 --dtype=float32"
    )
    big.append(f"--compile={compiled}")
    train(settings_for(char_data, tmp_path / "free", *big))
    with at_most(1e9):
        train(settings_for(char_data, tmp_path / "full", *big))
    assert any(r.get("event") == "out of memory" for r in run_log.read(tmp_path / "full"))
    free, full = losses(tmp_path / "free")[0], losses(tmp_path / "full")[0]
    assert full == pytest.approx(free, rel=1e-3)


@pytest.fixture
def repeatable():
    """Kernels that give the same bits every time, where they have such a form."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_a_resumed_run_ends_with_the_same_bits(char_data, tmp_path, repeatable):
    settings = ["--device=cuda", "--max_steps=40", "--dtype=bfloat16"]
    train(settings_for(char_data, tmp_path / "whole", *settings))
    run = small_run(char_data, tmp_path / "part", *settings)
    for _ in range(20):
        run.trainer.step()
    run.saver.finish(run.step, run.snapshot)
    train(settings_for(char_data, tmp_path / "part", *settings))
    ends = [tmp_path / name / "step_00000040" / "model.pt" for name in ("whole", "part")]
    assert same(*map(run_folder.load_tensors, ends))
    whole, part = losses(tmp_path / "whole")[0], losses(tmp_path / "part")[0]
    assert [part[step] for step in (30, 35, 40)] == [whole[step] for step in (30, 35, 40)]


def test_processes_with_a_gpu_each_have_the_losses_of_one(char_data, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    exact = ["--max_steps=40", "--dtype=float32", "--learning_rate=1e-3", "--compile=True"]
    train(settings_for(char_data, tmp_path / "alone", *exact))
    both = train_command(char_data, tmp_path / "both", "--device=cuda", *exact)
    result = run_script(*torchrun(2), *both)
    assert result.returncode == 0, result.stderr
    for alone, both in zip(losses(tmp_path / "alone"), losses(tmp_path / "both"), strict=True):
        assert both == pytest.approx(alone, abs=1e-3)
