"""hardware.py: the device, and what is asked of threads and allocators."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hardware
from tests.conftest import ROOT
from training import fp8
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


@pytest.fixture
def without_gpu(monkeypatch, tmp_path):
    """A Linux without GPUs, whose files are below tmp_path."""
    monkeypatch.setattr(hardware, "SYSTEM", tmp_path)
    for name in hardware.HIDING:
        monkeypatch.delenv(name, raising=False)


def pretend(monkeypatch, kind, name="", hip=None, capability=(8, 0), count=1, **properties):
    """Have PyTorch answer as on a machine with `count` GPUs of a kind."""
    found = SimpleNamespace(name=name, total_memory=16 << 30, **properties)
    answers = {
        "is_available": True,
        "device_count": count,
        "get_device_name": name,
        "get_device_properties": found,
        "get_device_capability": capability,
        "recommended_max_memory": 12 << 30,
        "get_arch_list": [],
        "synchronize": None,
    }
    for call, answer in answers.items():
        monkeypatch.setattr(getattr(torch, kind), call, lambda *_, a=answer: a, raising=False)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: kind == "mps")


def put(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def test_a_build_that_cannot_use_the_gpu_is_named(without_gpu, monkeypatch, tmp_path):
    put(tmp_path / "dev/kfd")
    memory = tmp_path / "sys/class/drm/card1/device/mem_info_vram_total"
    put(memory, str(512 << 20))  # an AMD processor's own GPU, which ROCm does not know
    assert hardware.find_device("auto").type == "cpu"
    put(memory, str(16 << 30))
    with pytest.raises(hardware.DeviceError, match=r"an AMD GPU(.|\n)*made for C(.|\n)*/rocm7.2\n"):
        hardware.find_device("auto")
    monkeypatch.setattr(torch.version, "hip", "7.2")
    with pytest.raises(hardware.DeviceError, match=r"usermod -aG render"):
        hardware.find_device("auto")
    put(tmp_path / "proc/driver/nvidia/version")
    put(tmp_path / "nvidia-smi")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(hardware.DeviceError, match=r"an NVIDIA driver(.|\n)*/cu126\n"):
        hardware.find_device("auto")
    assert hardware.find_device("cpu").type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.find_device("auto").type == "cpu"
    assert "finds no GPU, as CUDA_VISIBLE" in hardware.left_aside(torch.device("cpu"), 1)


@pytest.mark.parametrize(
    ("gpu", "dtype", "compiled"),
    [
        ({"kind": "cuda", "name": "Tesla T4", "capability": (7, 5)}, "float16", True),
        ({"kind": "cuda", "name": "NVIDIA B200", "capability": (10, 0)}, "bfloat16", True),
        (
            {"kind": "cuda", "name": "MI300X", "hip": "7.2", "gcnArchName": "gfx942:x"},
            "bfloat16",
            True,
        ),
        ({"kind": "cuda", "name": "RX", "hip": "7.2", "gcnArchName": "gfx1100"}, "bfloat16", True),
        ({"kind": "cuda", "name": "RX", "hip": "7.2", "gcnArchName": "gfx1030"}, "float16", True),
        ({"kind": "xpu", "name": "Intel(R) Arc(TM) B580 Graphics"}, "bfloat16", True),
        ({"kind": "mps"}, "bfloat16", False),
    ],
)
def test_each_kind_of_gpu_is_found_and_asked(without_gpu, monkeypatch, gpu, dtype, compiled):
    pretend(monkeypatch, **gpu)
    monkeypatch.setattr(torch.xpu, "is_bf16_supported", lambda including_emulation: True)
    device = hardware.find_device("auto")
    assert device.type == gpu["kind"] and (device.index == 0 or device.type == "mps")
    assert hardware.find_dtype(device, "auto") == hardware.DTYPES[dtype]
    gib = 12 if device.type == "mps" else 16
    assert hardware.gpu_memory(device) == gib << 30
    assert hardware.describe(device) == f"{gpu.get('name', 'mps')}, {gib} GiB"
    assert hardware.should_compile(device, 1) == compiled
    assert hardware.synchronize(device)
    if gpu.get("hip"):
        assert "sm_89" in fp8.why_not(device, torch.bfloat16, 64, 64, 64)


def test_what_is_not_used_is_said(without_gpu, monkeypatch):
    assert "finds no GPU" in hardware.left_aside(torch.device("cpu"), 1)
    pretend(monkeypatch, "xpu")
    pretend(monkeypatch, "cuda", count=8)
    gpu, aside = hardware.find_device("auto", 3), hardware.left_aside
    assert str(gpu) == "cuda:3"
    assert aside(torch.device("cpu"), 1) == "not used: cuda, xpu; device = cuda uses it"
    assert aside(gpu, 8) == "not used: xpu; device = xpu uses it"
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 0)
    assert aside(gpu, 8) == "" and aside(gpu, 1) == "one of 8 GPUs; torchrun trains on more"


def test_a_gpu_is_known_by_its_whole_name():
    known = {
        "NVIDIA RTX 6000 Ada Generation": 364,
        "NVIDIA RTX A6000": 155,
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 504,
        "NVIDIA GeForce RTX 4070 Ti": 80,
        "NVIDIA GB200": 2500,
        "NVIDIA B200": 2250,
        "NVIDIA H100 PCIe": 756,
        "NVIDIA A100-SXM4-80GB": 312,
        "AMD Instinct MI300X": 1307,
    }
    for name, tflops in known.items():
        assert hardware.sold_flops(name) == tflops * 1e12
    for name in ("4070 Ti SUPER", "4070", "3080 Ti", "4080 Laptop GPU", "4090 D"):
        assert hardware.sold_flops(f"NVIDIA GeForce RTX {name}") is None
    for name in ("A100-SXM4-40GB MIG 1g.5gb", "H100 NVL", "GB10", "RTX A4000", "T400"):
        assert hardware.sold_flops(f"NVIDIA {name}") is None
    assert hardware.measured_flops(torch.device("cpu"), torch.float32, 256) > 1e9


def test_arm_processors_are_asked_for_bf16(monkeypatch):
    for call in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, call, lambda: False)
    cpu = torch.device("cpu")
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        answer = {"architecture": "aarch64", "bf16": has}
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda a=answer: a, raising=False)
        assert hardware.find_dtype(cpu, "auto") == dtype


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_after_out_of_memory_a_gpu_gives_its_memory_back(monkeypatch, kind):
    given_back = []
    monkeypatch.setattr(getattr(torch, kind), "empty_cache", lambda: given_back.append(kind))
    release(torch.device(kind))
    release(torch.device("cpu"))
    assert given_back == [kind]


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


@pytest.mark.parametrize("version", [1, 2])
def test_what_a_container_has_cached_is_free(tmp_path, monkeypatch, version):
    contents = {"proc/meminfo": "MemAvailable:   64000000 kB\n"}
    if version == 1:
        group = "sys/fs/cgroup/memory/memory."
        contents |= {f"{group}limit_in_bytes": "32000\n", f"{group}usage_in_bytes": "31000\n"}
        contents[f"{group}stat"] = "active_file 7\ntotal_inactive_file 20000\ntotal_active_file 1\n"
    else:
        group = "sys/fs/cgroup/memory."
        contents |= {f"{group}max": "32000\n", f"{group}current": "31000\n"}
        contents[f"{group}stat"] = "anon 900\ninactive_file 20000\nactive_file 1\n"
    for name, text in contents.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(hardware, "SYSTEM", tmp_path)
    assert hardware.free_ram() == 21_001
    (tmp_path / f"{group}stat").unlink()
    assert hardware.free_ram() == 1000


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
