"""What only a GPU can show. Run with `pytest -m gpu`."""

import json

import pytest
import torch

import config
import hardware
from formats import run_folder
from formats.data_folder import read_meta
from generating import decode
from tests.conftest import SMALL, losses
from tests.generating.test_sampling import PROMPTS, without_cache
from tests.test_model import randomised
from tests.training.test_ranks import torchrun
from train import train
from training import profiling
from training.checkpointer import Checkpointer
from training.dataset import Dataset
from training.setup import build

pytestmark = pytest.mark.gpu
GPU = [*(s for s in SMALL if "device" not in s), "--device=cuda"]


def settings_for(data, folder, *more):
    """The small settings on the GPU."""
    return config.load([f"--data_dir={data}", f"--checkpoint_dir={folder}", *GPU, *more])


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
        batches = [data.batch(first, 8, 7) for data in places]
        assert all(
            torch.equal(batches[0][i], b[i])
            and b[i].device.type == "cuda"
            and b[i].dtype == torch.int64
            for b in batches
            for i in (0, 1)
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_step_does_not_wait_for_the_gpu(char_data, tmp_path, dtype):
    run = build(settings_for(char_data, tmp_path, f"--dtype={dtype}", "--data_location=gpu"))
    run.trainer.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            run.trainer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


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
        r["seconds_a_step"] for r in run_folder.read_log(tmp_path) if r.get("event") == "profile"
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


def test_out_of_memory_on_the_gpu_halves_the_micro_batch(char_data, tmp_path):
    big = [
        "--n_embd=512",
        "--n_head=8",
        "--n_layer=8",
        "--block_size=256",
        "--batch_size=512",
        "--max_steps=3",
        "--eval_interval=0",
        "--log_interval=1",
    ]
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(6e9 / total)
    try:
        train(settings_for(char_data, tmp_path / "run", *big))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    events = [r for r in run_folder.read_log(tmp_path / "run") if r.get("event") == "out of memory"]
    assert events and len(losses(tmp_path / "run")[0]) == 3


def test_a_resumed_run_goes_on_with_the_same_losses(char_data, tmp_path):
    train(settings_for(char_data, tmp_path / "whole", "--max_steps=40"))
    run = build(settings_for(char_data, tmp_path / "part", "--max_steps=40"))
    for _ in range(20):
        run.trainer.step()
    assert Checkpointer(run).save_now()
    train(settings_for(char_data, tmp_path / "part", "--max_steps=40"))
    whole, part = losses(tmp_path / "whole")[0], losses(tmp_path / "part")[0]
    assert all(part[step] == pytest.approx(whole[step], rel=1e-3) for step in (30, 35, 40))


@pytest.mark.parametrize("prompts", [[[7]], PROMPTS], ids=["one", "ragged"])
def test_generation_from_a_cuda_graph_is_that_of_whole_forwards(prompts, recwarn):
    model = randomised()
    expected = without_cache(model, prompts, 100, temperature=0)
    assert list(decode.generate(model.cuda(), prompts, 100, temperature=0)) == expected
    assert not [w for w in recwarn if "CUDA graph" in str(w.message)]


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_with_a_gpu_each_have_the_losses_of_one(char_data, tmp_path, processes):
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
    )
    assert result.returncode == 0, result.stderr
    alone, run = losses(tmp_path / "alone"), losses(tmp_path / "run")
    assert run[0].keys() == alone[0].keys() and all(
        run[i][step] == pytest.approx(alone[i][step], abs=1e-3) for i in (0, 1) for step in alone[i]
    )


def test_the_gpu_is_known_or_its_mfu_is_not_claimed():
    device = hardware.find_device("auto")
    assert device.type == "cuda" and (hardware.peak_flops(device) or 0) >= 0
    assert hardware.find_dtype(device, "auto") in (torch.bfloat16, torch.float16)
