"""hardware.py: the device, and what is asked of threads and allocators."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import hardware
from tests.conftest import ROOT
from training.memory import release


def settings_of_allocators(code="", **environment):
    """The lines that a process prints: its setting for GPU memory, and what `code` prints."""
    code = f"import os, torch, hardware; print(os.environ.get('PYTORCH_ALLOC_CONF')); {code}"
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    clean = {name: value for name, value in os.environ.items() if name not in names}
    command = [sys.executable, "-c", code]
    return subprocess.check_output(command, cwd=ROOT, env=clean | environment, text=True).split()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PyTorch has them on Linux")
def test_gpu_memory_grows_in_segments_and_large_tensors_have_large_pages():
    choice = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    offered = choice.exists() and "[never]" not in choice.read_text()
    code = (
        "a = torch.ones(1 << 25); print(*(line.split()[1] for line in"
        " open('/proc/self/smaps_rollup') if 'AnonHugePages' in line))"
    )
    segments, *kilobytes = settings_of_allocators(code if offered else "")
    assert segments == "expandable_segments:True"
    assert not offered or int(kilobytes[0]) > 64_000  # of 131,072
    assert settings_of_allocators(PYTORCH_CUDA_ALLOC_CONF="backend:native") == ["None"]


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
