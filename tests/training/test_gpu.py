"""What only a GPU can show. Run with `pytest -m gpu`."""

import contextlib
import gc
import json
import os

import pytest
import torch
import torch.distributed as dist

import config
import hardware
from formats import run_folder, run_log
from formats.data_folder import read_meta
from generating import decode
from tests.conftest import SMALL, losses, run_script
from tests.generating.test_sampling import PROMPTS, without_cache
from tests.test_model import randomised
from tests.training.test_ranks import torchrun
from train import train
from training import profiling, shard
from training.dataset import Dataset
from training.saver import Saver
from training.setup import build

# cuBLAS repeats its sums bit by bit only with this, which it reads when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
pytestmark = pytest.mark.gpu
GPU = [*(s for s in SMALL if "device" not in s), "--device=cuda"]


def settings_for(data, folder, *more):
    """The small settings on the GPU."""
    return config.load([f"--data_dir={data}", f"--checkpoint_dir={folder}", *GPU, *more])


@pytest.fixture
def exact_products():
    """float32 products in float32: a run that was built in this process left TF32 switched on."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.fixture
def repeatable():
    """Kernels that give the same bits every time, where they have such a form."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def no_waiting():
    """What makes Python wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def at_most(size):
    """This process may take `size` bytes of the GPU."""
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
    """Whether two dictionaries hold the same tensors, bit by bit, wherever they lie."""
    return a.keys() == b.keys() and all(torch.equal(a[name].cpu(), b[name].cpu()) for name in a)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("compiled", [True, False])
def test_every_precision_learns_as_the_cpu_does(char_data, tmp_path, dtype, compiled):
    train(
        config.load(
            [
                f"--data_dir={char_data}",
                f"--checkpoint_dir={tmp_path / 'cpu'}",
                *SMALL,
                "--max_steps=40",
                "--dtype=float32",
            ]
        )
    )
    train(
        settings_for(
            char_data,
            tmp_path / "gpu",
            "--max_steps=40",
            f"--dtype={dtype}",
            f"--compile={compiled}",
        )
    )
    assert losses(tmp_path / "gpu")[1][40] == pytest.approx(
        losses(tmp_path / "cpu")[1][40], abs=0.05
    )


def test_batches_are_the_same_wherever_the_tokens_lie(char_data):
    meta, device = read_meta(char_data), torch.device("cuda")
    places = [
        Dataset(char_data, meta, "train", 32, device, place) for place in ("gpu", "ram", "mmap")
    ]
    for first in (0, 8, places[0].windows - 3):
        batches = [data.batch(first, 24, 7) for data in places]  # above 16 another kernel
        assert all(
            torch.equal(batches[0][i], b[i])
            and b[i].device.type == "cuda"
            and b[i].dtype == torch.int64
            for b in batches
            for i in (0, 1)
        )


def test_tokens_that_fit_lie_on_the_gpu(char_data):
    meta, device = read_meta(char_data), torch.device("cuda")
    data = Dataset(char_data, meta, "train", 32, device)
    assert data.location == "gpu" and data.tokens.device.type == "cuda"
    assert data.tokens.dtype == torch.int16


@pytest.mark.parametrize(
    "settings",
    [
        ["--dtype=bfloat16", "--data_location=gpu"],
        ["--dtype=float16", "--data_location=gpu"],
        ["--dtype=bfloat16", "--data_location=ram"],  # by pinned copies
        ["--dtype=bfloat16", "--data_location=mmap"],
        ["--dtype=bfloat16", "--data_location=gpu", "--optimizer=muon"],
        ["--dtype=bfloat16", "--data_location=gpu", "--batch_size=8", "--micro_batch_size=2"],
        ["--dtype=bfloat16", "--data_location=gpu", "--compile=True"],
    ],
    ids=["bfloat16", "float16", "ram", "mmap", "muon", "accumulation", "compiled"],
)
def test_a_step_does_not_wait_for_the_gpu(char_data, tmp_path, settings):
    run = build(settings_for(char_data, tmp_path, *settings))
    if run.compiles:
        assert run.trainer.compile() is None
    run.trainer.step()
    with no_waiting():
        for _ in range(3):
            run.trainer.step()
        assert len(list(run.data.val.evaluation(8, 4))) == 2


def test_training_evaluation_and_answers_share_one_compilation(char_data, tmp_path):
    settings = ["--max_steps=20", "--compile=True", '--sample_prompts=["The "]']
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(settings_for(char_data, tmp_path, *settings))
    log = run_log.read(tmp_path)
    assert len(losses(tmp_path)[1]) == 2 and [r for r in log if "samples" in r]


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_without_numbers_leaves_the_weights(char_data, tmp_path, dtype, optimizer):
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


def test_a_save_holds_its_step_while_training_goes_on(char_data, tmp_path):
    run = build(settings_for(char_data, tmp_path))
    tmp_path.mkdir(exist_ok=True)
    saver = Saver(run)
    saver.begin()
    run.trainer.step()
    saver.save()
    before = weights(run)
    for _ in range(5):
        run.trainer.step()
    saver.wait()
    saved = run_folder.load_tensors(tmp_path / "step_00000001" / "model.pt")
    assert same(saved, before) and not same(weights(run), before)


def test_memory_is_taken_in_segments_that_grow():
    code = (
        "import hardware, torch; device = hardware.find_device('cuda');"
        " kept = torch.ones(1 << 26, device=device);"
        " print(any(s['is_expandable'] for s in torch.cuda.memory_snapshot()))"
    )
    result = run_script("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "True"


def test_a_profile_of_the_gpu_counts_its_kernels(char_data, tmp_path):
    train(
        settings_for(
            char_data,
            tmp_path,
            "--max_steps=12",
            "--profile=True",
            "--data_location=gpu",
            "--n_embd=256",
            "--compile=True",
        )
    )
    seconds = next(
        r["seconds_a_step"] for r in run_log.read(tmp_path) if r.get("event") == "profile"
    )
    assert (
        min(seconds["data"], seconds["forward"], seconds["optimizer"]) > 0
        and seconds["backward"] > seconds["data"]
    )
    kernels = [
        e
        for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        if e.get("cat") == "kernel"
    ]
    assert sum(e["dur"] for e in kernels) / 1e6 / profiling.STEPS == pytest.approx(
        sum(seconds[part] for part in profiling.PARTS), rel=0.2
    )


@pytest.mark.parametrize("compiled", [True, False])
def test_out_of_memory_on_the_gpu_halves_the_micro_batch(char_data, tmp_path, compiled):
    big = [
        "--n_embd=512",
        "--n_head=8",
        "--n_layer=4",
        "--block_size=256",
        "--batch_size=64",
        "--max_steps=3",
        "--eval_interval=0",
        "--log_interval=1",
        "--dtype=float32",
        f"--compile={compiled}",
    ]
    train(settings_for(char_data, tmp_path / "free", *big))
    with at_most(1e9):
        train(settings_for(char_data, tmp_path / "run", *big))
    events = [r for r in run_log.read(tmp_path / "run") if r.get("event") == "out of memory"]
    free, run = losses(tmp_path / "free")[0], losses(tmp_path / "run")[0]
    assert events and run == pytest.approx(free, rel=1e-3)


def test_a_resumed_run_ends_with_the_same_bits(char_data, tmp_path, repeatable):
    settings = ["--max_steps=40", "--dtype=bfloat16"]
    train(settings_for(char_data, tmp_path / "whole", *settings))
    run = build(settings_for(char_data, tmp_path / "part", *settings))
    for _ in range(20):
        run.trainer.step()
    (tmp_path / "part").mkdir(exist_ok=True)
    assert Saver(run).save_now()
    train(settings_for(char_data, tmp_path / "part", *settings))
    ends = [tmp_path / name / "step_00000040" / "model.pt" for name in ("whole", "part")]
    assert same(*map(run_folder.load_tensors, ends))
    whole, part = losses(tmp_path / "whole")[0], losses(tmp_path / "part")[0]
    assert all(part[step] == whole[step] for step in (30, 35, 40))


@pytest.mark.parametrize("prompts", [[[7]], PROMPTS], ids=["one", "ragged"])
def test_generation_from_a_cuda_graph_is_that_of_whole_forwards(prompts, recwarn, exact_products):
    model = randomised()
    expected = without_cache(model, prompts, 100, temperature=0)
    assert list(decode.generate(model.cuda(), prompts, 100, temperature=0)) == expected
    assert not [w for w in recwarn if "CUDA graph" in str(w.message)]


def test_a_second_generation_repeats_the_first(recwarn):
    model = randomised().to("cuda", torch.bfloat16)
    first = list(decode.generate(model, PROMPTS, 60, temperature=0))
    list(decode.generate(model, [[7]], 60, temperature=0))  # another number of rows
    assert list(decode.generate(model, PROMPTS, 60, temperature=0)) == first
    assert not [w for w in recwarn if "CUDA graph" in str(w.message)]


@pytest.mark.parametrize(("processes", "sharded"), [(1, False), (2, False), (2, True)])
def test_processes_with_a_gpu_each_have_the_losses_of_one(char_data, tmp_path, processes, sharded):
    if torch.cuda.device_count() < processes:
        pytest.skip(f"needs {processes} GPUs")
    exact = ["--max_steps=40", "--dtype=float32", "--learning_rate=1e-3", "--compile=True"]
    train(settings_for(char_data, tmp_path / "alone", *exact))
    result = torchrun(
        processes,
        "train.py",
        f"--data_dir={char_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        *GPU,
        *exact,
        f"--shard={sharded}",
    )
    assert result.returncode == 0, result.stderr
    alone, run = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert run[0].keys() == alone[0].keys() and all(
        run[i][step] == pytest.approx(alone[i][step], abs=1e-3) for i in (0, 1) for step in alone[i]
    )


def test_a_model_sharded_on_one_gpu_has_the_same_gradients(exact_products):
    device = torch.device("cuda")
    plain, sharded = randomised(), randomised()
    plain.to(device)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        shard.shard_model(sharded, device)
        sharded.to(device)
        x, y = torch.randint(97, (2, 4, 32), device=device)
        found = [model(x, y) for model in (plain, sharded)]
        for loss in found:
            loss.backward()
        assert found[1].item() == pytest.approx(found[0].item(), abs=1e-5)
        for ours, whole in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(shard.full_tensor(ours.grad), whole.grad, atol=1e-5)
    finally:
        dist.destroy_process_group()


def test_the_gpu_is_known_or_its_mfu_is_not_claimed():
    device = hardware.find_device("auto")
    assert device.type == "cuda" and hardware.peak_flops(device, torch.bfloat16) > 0
    assert hardware.find_dtype(device, "auto") in (torch.bfloat16, torch.float16)
