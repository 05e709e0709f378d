"""hardware.py: the device, and what is asked of threads and allocators."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hardware
from tests.conftest import ROOT
from training.memory import release


def allocator_settings(**environment):
    """What a process that imports hardware.py asks PyTorch's allocator for, by variable."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    code = (
        "import os, torch, hardware;"
        f" print({{name: os.environ[name] for name in {names} if name in os.environ}})"
    )
    command = [sys.executable, "-c", code]
    return ast.literal_eval(
        subprocess.run(
            command, cwd=ROOT, env=clean | environment, check=True, capture_output=True, text=True
        ).stdout
    )


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PyTorch has them on Linux")
def test_gpu_memory_is_taken_in_segments_that_grow_unless_the_user_says_otherwise():
    assert allocator_settings() == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        own = {name: "expandable_segments:False"}
        assert allocator_settings(**own) == own


def test_pytorch_reads_the_allocators_setting_after_it_is_imported():
    code = (
        "import os, torch; os.environ['PYTORCH_ALLOC_CONF'] = 'garbage_collection_threshold:7';"
        " torch._C._accelerator_setAllocatorSettings('expandable_segments:True')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "threshold is invalid" in result.stderr


def test_after_out_of_memory_a_mac_gives_its_memory_back_too(monkeypatch):
    given_back = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: given_back.append("mps"))
    release(torch.device("mps"))
    release(torch.device("cpu"))
    assert given_back == ["mps"]


def test_a_device_is_looked_up_once():
    device = hardware.open_device("cpu", "auto")
    assert device.torch == torch.device("cpu") and device.type == "cpu"
    assert device.dtype == hardware.find_dtype(device.torch, "auto")
    assert device.name == f"cpu, {torch.get_num_threads()} threads"
    assert device.memory is None and device.peak_flops is None
    assert hardware.synchronize(device.torch, 1)
    with pytest.raises(hardware.DeviceError, match=r"knows no device = 'gpu'; use auto"):
        hardware.open_device("gpu", "auto")
    with pytest.raises(hardware.DeviceError, match=r"device = cuda:99: .* finds"):
        hardware.open_device("cuda:99", "auto")


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says what is free")
def test_free_memory_is_more_than_none():
    assert 1 << 20 < hardware.free_ram() < 1 << 50


def test_a_container_with_fewer_processors_gets_fewer_threads(tmp_path, monkeypatch):
    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    try:
        for text, threads in (("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1)):
            (tmp_path / "cpu.max").write_text(text + "\n")
            hardware.limit_threads_to_cgroup(str(tmp_path / "cpu.max"))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)


def test_a_short_run_on_a_cpu_is_not_compiled():
    cpu = torch.device("cpu")
    assert not hardware.should_compile(cpu, 8e12) and hardware.should_compile(cpu, 1e15)
    assert hardware.should_compile(torch.device("cuda"), 1)


def test_large_tensors_lie_in_large_pages():
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not choice.exists() or "[never]" in choice.read_text():
        pytest.skip("this system gives none")
    code = (
        "import hardware, torch; a = torch.ones(1 << 25); print(*(line.split()[1] for line in"
        " open('/proc/self/smaps_rollup') if 'AnonHugePages' in line))"
    )
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    assert int(result.stdout) > 64_000  # kB of 131,072
