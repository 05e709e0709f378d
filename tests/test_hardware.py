"""hardware.py: this machine, and what the files of other machines say."""

from pathlib import Path

import pytest
import torch

import hardware

CPU = torch.device("cpu")


def write(path, text=""):
    """A file, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def system(monkeypatch, tmp_path):
    """The root of a Linux that has no files."""
    monkeypatch.setattr(hardware, "SYSTEM", tmp_path)
    return tmp_path


# -- device and precision --------------------------------------------------------------------------


def test_a_cpu_is_described():
    device = hardware.open_device("cpu", "auto")
    assert device.torch == CPU
    assert device.dtype == hardware.find_dtype(CPU, "auto")
    assert device.name == f"cpu, {torch.get_num_threads()} threads"
    assert device.memory is None
    assert device.peak_flops is None


@pytest.mark.parametrize(
    ("name", "words"),
    [("gpu", "knows no device = 'gpu'; use auto"), ("cuda:99", "device = cuda:99: .* finds")],
)
def test_a_device_that_is_not_there_is_a_sentence(name, words):
    with pytest.raises(hardware.DeviceError, match=words):
        hardware.find_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch finds the GPU")
def test_an_nvidia_gpu_that_pytorch_cannot_use_is_named(system, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(system))
    assert hardware.find_device("auto") == CPU
    write(system / "nvidia-smi")
    (system / "nvidia-smi").chmod(0o755)
    assert hardware.find_device("auto") == CPU  # as a notebook without a GPU, which has no driver
    write(system / "proc/driver/nvidia/version")
    with pytest.raises(
        hardware.DeviceError, match=r"an NVIDIA driver(.|\n)*pip install .*/cu126\n"
    ):
        hardware.find_device("auto")
    assert hardware.find_device("cpu") == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert hardware.find_device("auto") == CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_says_so():
    assert "finds no GPU" in hardware.unused_gpus(CPU, 1)


@pytest.mark.gpu
def test_a_gpu_that_is_not_used_is_named():
    assert hardware.unused_gpus(CPU, 1) == "not used: cuda; device = cuda uses it"
    assert hardware.unused_gpus(torch.device("cuda"), torch.cuda.device_count()) == ""


def test_a_short_run_on_a_cpu_is_not_compiled():
    assert not hardware.should_compile(CPU, 8e12)
    assert hardware.should_compile(CPU, 1e15)
    assert not hardware.should_compile(torch.device("cuda"), 1e14)
    assert hardware.should_compile(torch.device("cuda"), 1e16)


# -- speed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA RTX A6000", 155),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504),
        ("NVIDIA B200", 2250),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("AMD Instinct MI300X", 1307),
    ],
)
def test_a_gpu_is_known_by_its_name(name, tflops):
    assert hardware.data_sheet_flops(name) == tflops * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "GeForce RTX 3090 Ti",
        "GeForce RTX 4090 Laptop GPU",
        "GeForce RTX 4090 D",
        "A100-SXM4-40GB MIG 1g.5gb",
        "H100 NVL",
        "GB10",
        "RTX A4000",
        "T400",
    ],
)
def test_a_gpu_with_a_similar_name_is_not_taken_for_another(name):
    assert hardware.data_sheet_flops(f"NVIDIA {name}") is None


# -- memory and processors -------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="Linux says what is free")
def test_free_memory_is_more_than_none():
    assert 1 << 20 < hardware.free_ram() < 1 << 50


def test_a_container_has_what_its_limit_leaves(system):
    write(system / "proc/meminfo", "MemAvailable:   64000000 kB\n")
    group = system / "sys/fs/cgroup"
    write(group / "memory.max", "32000\n")
    write(group / "memory.current", "31000\n")
    write(group / "memory.stat", "anon 900\ninactive_file 20000\nactive_file 1\n")
    assert hardware.free_ram() == 21_001


@pytest.mark.parametrize("files", [{}, {"memory.max": "max\n"}], ids=["no group", "no limit"])
def test_without_a_limit_all_that_is_available_is_free(system, files):
    write(system / "proc/meminfo", "MemAvailable:   64000 kB\n")
    for name, text in files.items():
        write(system / "sys/fs/cgroup" / name, text)
    assert hardware.free_ram() == 64_000 * 1024


def test_a_system_without_proc_does_not_say_what_is_free(system):
    assert hardware.free_ram() is None


@pytest.mark.parametrize(
    ("limit", "threads"), [("max 100000", 4), ("250000 100000", 3), ("50000 100000", 1)]
)
def test_a_container_with_fewer_processors_gets_fewer_threads(system, monkeypatch, limit, threads):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        write(system / "sys/fs/cgroup/cpu.max", f"{limit}\n")
        hardware.limit_threads_to_cgroup()
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
