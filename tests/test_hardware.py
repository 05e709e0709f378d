"""hardware.py: this machine, and what the files of other machines say."""

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
    words = r"an NVIDIA driver(.|\n)*pip install .*/cu126\n"
    with pytest.raises(hardware.DeviceError, match=words):
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


# -- speed -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA RTX A6000", 155e12),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 504e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA T400", None),
    ],
)
def test_a_gpu_is_known_by_its_name_and_not_by_a_similar_one(name, flops):
    assert hardware.data_sheet_flops(name) == flops


# -- memory and processors -------------------------------------------------------------------------


AVAILABLE = {"proc/meminfo": "MemAvailable:   64000000 kB\n"}
NO_LIMIT = {"sys/fs/cgroup/memory.max": "max\n"}
LIMIT = {
    "sys/fs/cgroup/memory.max": "32000\n",
    "sys/fs/cgroup/memory.current": "31000\n",
    "sys/fs/cgroup/memory.stat": "anon 900\ninactive_file 20000\nactive_file 1\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (AVAILABLE, 64_000_000 * 1024),
        (AVAILABLE | NO_LIMIT, 64_000_000 * 1024),
        (AVAILABLE | LIMIT, 21_001),
    ],
)
def test_what_is_free_is_what_linux_and_the_container_leave(system, files, free):
    for name, text in files.items():
        write(system / name, text)
    assert hardware.free_ram() == free


@pytest.mark.parametrize(("limit", "threads"), [("max 100000", 4), ("250000 100000", 3)])
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
