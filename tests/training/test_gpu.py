"""Checks that need a GPU. Run with `pytest -m gpu`."""

import contextlib
import gc
import json
import os
import shlex
from dataclasses import replace

import pytest
import torch

import config
import hardware
from formats import pretrained, run_folder
from formats.data_folder import read_meta
from model import GPT
from tests.conftest import losses, ok, run_script, train_command, wait_until
from tests.training.conftest import small_run, start, torchrun
from tools import size
from train import train, training_step
from training import dataset, profiling
from training.dataset import Dataset
from training.fit import apply_memory_options, fit_in_memory
from training.memory import memory
from training.setup import build
from training.start import model_shape

# cuBLAS repeats its sums bit by bit only with this, which it reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.gpu
DEVICE = "cuda"
PLACES = ["gpu", "ram", "mmap"]
VOCABULARY, BATCH = 32000, (16, 512)


def settings_for(data, folder, *more):
    """The small settings on the GPU."""
    return config.load(train_command(data, folder, f"--device={DEVICE}", *more)[1:])


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
    return {name: w.clone() for name, w in run.model.state_dict().items()}


def same(a, b):
    """True if two dictionaries hold the same tensors, bit by bit, on any device."""
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


def test_sizes_that_fit_a_gpu_are_shown_when_a_step_of_a_larger_one_does_not(
    bpe_data, tmp_path, monkeypatch, capsys
):
    """The weights of 16 layers x 512 fit, 200 MB, and with gradients and moments they do not."""
    monkeypatch.setattr(size, "WIDTHS", (64, 512))
    family = ["--n_layer=2", "--n_embd=64", "--block_size=32", "--batch_size=1", "--compile=False"]
    options = ["--hours", "10", "--out", str(tmp_path / "a.py"), "--epochs=1000"]
    with at_most(300 << 20):
        size.main([str(bpe_data), *options, *family, f"--device={DEVICE}"])
    said = capsys.readouterr().out
    assert "16 x 512 does not fit the memory" in said
    assert "4 x 64 <<" in said


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_precision_learns_as_the_cpu_does(char_data, tmp_path, dtype, compiled):
    on_cpu = ["--device=cpu", "--compile=False", "--dtype=float32"]
    train(settings_for(char_data, tmp_path / "cpu", "--max_steps=40", *on_cpu))
    on_gpu = [f"--dtype={dtype}", f"--compile={compiled}"]
    train(settings_for(char_data, tmp_path / "gpu", "--max_steps=40", *on_gpu))
    found, expected = (losses(tmp_path / name)[1][40] for name in ("gpu", "cpu"))
    assert found == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(
    ("preset", "options"),
    [
        ("gpt2_small", []),
        ("gpt2_small_modern", []),
        ("gpt2_small", ["--activation_checkpointing=True"]),
    ],
    ids=["gpt2", "modern", "low memory"],
)
def test_compiled_gradients_are_those_of_plain_pytorch(preset, options):
    """With enough rows for the compiler to fuse the sums over rows and columns of a norm."""
    c = config.load([f"config/{preset}.py", "--n_layer=2", *options])
    device = hardware.look_up(torch.device(DEVICE, 0), "auto")
    torch.manual_seed(0)
    model = GPT(model_shape(c, VOCABULARY)).to(device.torch)
    x, y = torch.randint(VOCABULARY, (2, *BATCH), device=device.torch)

    def gradients(forward):
        model.zero_grad()
        with hardware.autocast(device.torch, device.dtype):
            forward(x, y).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    plain = gradients(model)
    apply_memory_options(model, c, replace(device, memory=1 if options else None))
    compiled = gradients(torch.compile(model, dynamic=False))
    for name, gradient in plain.items():
        assert (compiled[name] - gradient).norm() < 0.05 * gradient.norm(), name


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
        "--dtype=bfloat16 --dropout=0.1",
        "--dtype=bfloat16 --loss_on=assistant",
    ],
)
def test_a_step_does_not_wait_for_the_gpu(chat_data, tmp_path, monkeypatch, settings, place):
    keep_tokens(monkeypatch, place)
    run = build(settings_for(chat_data, tmp_path, *settings.split()))
    assert fit_in_memory(run) is None
    training_step(run)
    with no_waiting():
        for _ in range(3):
            training_step(run)
        assert len(list(run.data.val.evaluation(8, 4))) == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_with_nan_leaves_the_weights(char_data, tmp_path, dtype, optimizer):
    run = build(settings_for(char_data, tmp_path, f"--dtype={dtype}", f"--optimizer={optimizer}"))
    training_step(run)
    before = weights(run)
    weight = run.model.lm_head.weight
    with torch.no_grad():
        good = weight[0, 0].item()
        weight[0, 0] = float("nan")
    with no_waiting():
        training_step(run)
    with torch.no_grad():
        weight[0, 0] = good
    assert same(weights(run), before)
    for _ in range(5):  # float16's scaler may skip the first of them
        training_step(run)
    assert not same(weights(run), before)
    assert all(w.isfinite().all() for w in weights(run).values())


def test_a_save_holds_its_step_while_training_continues(char_data, tmp_path):
    run = small_run(char_data, tmp_path, f"--device={DEVICE}")
    training_step(run)
    run.saver.save(run.step, run.snapshot)
    before = weights(run)
    for _ in range(5):
        training_step(run)
    run.saver.wait()
    saved = pretrained.load_tensors(tmp_path / "step_00000001" / "model.pt")
    assert same(saved, before)
    assert not same(weights(run), before)


def test_a_profile_of_the_gpu_counts_its_kernels(char_data, tmp_path):
    more = ["--max_steps=12", "--profile=True", "--n_embd=256", "--compile=True"]
    train(settings_for(char_data, tmp_path, *more))
    (record,) = (r for r in run_folder.read_log(tmp_path) if r.get("event") == "profile")
    seconds = record["seconds_a_step"]
    assert min(seconds[part] for part in profiling.PARTS) > 0
    assert seconds["backward"] > seconds["data"]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = sum(event["dur"] for event in trace if event.get("cat") == "kernel")
    found = sum(seconds[part] for part in profiling.PARTS)
    assert found == pytest.approx(kernels / 1e6 / profiling.STEPS, rel=0.2)


@pytest.mark.parametrize("preset", ["gpt2_small", "gpt2_small_modern"])
def test_the_plan_foresees_the_memory_of_a_step(char_data, tmp_path, preset):
    settings = [f"config/{preset}.py", "--n_layer=4", "--batch_size=16"]
    paths = [f"--data_dir={char_data}", f"--checkpoint_dir={tmp_path}"]
    gc.unfreeze()  # runs before this one, which train() has kept from the collector
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()  # of other tests; the plan counts this one's
    before = torch.cuda.memory_allocated()
    run = build(config.load([*settings, *paths]))
    run.compiles = True
    assert fit_in_memory(run) is None
    torch.cuda.reset_peak_memory_stats()
    training_step(run)
    taken = torch.cuda.max_memory_allocated() - before
    planned = memory(run.config, run.model, run.optimizer, run.micro_batch, run.device)["peak"]
    assert taken < planned < 1.5 * taken


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
    assert any(r.get("event") == "out of memory" for r in run_folder.read_log(tmp_path / "full"))
    free, full = losses(tmp_path / "free")[0], losses(tmp_path / "full")[0]
    assert full == pytest.approx(free, rel=1e-3)


@pytest.fixture
def repeatable():
    """Kernels that give the same bits every time, where they have such a form."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("more", [[], ["--dropout=0.1", "--compile=True"]], ids=["", "dropout"])
def test_a_resumed_run_ends_with_the_same_bits(char_data, tmp_path, repeatable, more):
    settings = [f"--device={DEVICE}", "--max_steps=40", "--dtype=bfloat16", *more]
    train(settings_for(char_data, tmp_path / "whole", *settings))
    run = small_run(char_data, tmp_path / "part", *settings)
    assert fit_in_memory(run) is None  # compiled code draws other numbers for dropout
    for _ in range(20):
        training_step(run)
    run.saver.finish(run.step, run.snapshot)
    train(settings_for(char_data, tmp_path / "part", *settings))
    ends = [tmp_path / name / "step_00000040" / "model.pt" for name in ("whole", "part")]
    assert same(*map(pretrained.load_tensors, ends))
    whole, part = losses(tmp_path / "whole")[0], losses(tmp_path / "part")[0]
    assert [part[step] for step in (30, 35, 40)] == [whole[step] for step in (30, 35, 40)]


def test_samples_on_the_way_leave_training_as_it_is(char_data, tmp_path, repeatable):
    for name, prompts in (("with", '["The", "In the "]'), ("without", "[]")):
        more = ["--max_steps=40", "--dtype=bfloat16", "--compile=True"]
        train(settings_for(char_data, tmp_path / name, *more, f"--sample_prompts={prompts}"))
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    samples = [r["samples"] for r in run_folder.read_log(tmp_path / "with") if "samples" in r]
    assert len(samples) == 4
    assert all(sample["text"] for of_step in samples for sample in of_step)


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
def test_cudnns_attention_trains_as_the_others_do(char_data, tmp_path, arch):
    more = ["--n_embd=128", "--block_size=128", "--dtype=bfloat16", f"--arch={arch}"]
    mean_losses = {}
    for cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(cudnn)
        try:
            run = small_run(char_data, tmp_path / str(cudnn), f"--device={DEVICE}", *more)
            for _ in range(20):
                training_step(run)
            mean_losses[run.attention_backend()] = run.loss_sums.pop()["loss"]
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
    if "cudnn" not in mean_losses:
        pytest.skip("PyTorch does not choose cuDNN's attention here")
    one, other = mean_losses.values()
    assert one == pytest.approx(other, abs=0.02)


def test_the_scripts_work_on_a_gpu(char_data, tmp_path):
    on = f"--device={DEVICE}"
    process = start(char_data, tmp_path / "run", on, "--max_steps=1000000", "--eval_interval=0")
    wait_until(process, lambda: losses(tmp_path / "run")[0])
    process.terminate()
    out, err = process.communicate(timeout=120)
    assert process.returncode == 143, err
    assert "SIGTERM" in out
    given = ["--checkpoint", tmp_path / "run", on]
    for script in (
        ["generate.py", *given, "--prompt", "The", "--max_new_tokens", 40, "--num_samples", 2],
        ["-m", "tools.evaluate", tmp_path / "run", on],
    ):
        result = ok(run_script(*script))
        assert "no CUDA graph" not in result.stderr


def test_processes_with_a_gpu_each_have_the_losses_of_one(char_data, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    exact = ["--max_steps=40", "--dtype=float32", "--learning_rate=1e-3", "--compile=True"]
    train(settings_for(char_data, tmp_path / "alone", *exact))
    both = train_command(char_data, tmp_path / "both", f"--device={DEVICE}", *exact)
    ok(run_script(*torchrun(2), *both))
    for alone, both in zip(losses(tmp_path / "alone"), losses(tmp_path / "both"), strict=True):
        assert both == pytest.approx(alone, abs=1e-3)
