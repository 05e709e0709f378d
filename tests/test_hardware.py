"""hardware.py: this machine, and what the files of other machines say."""

import os
import re
import sys

import pytest
import torch
from torch.torch_version import TorchVersion

import hardware
import processors
from command_line import quote
from preparing.arguments import parse
from tools import command
from training import RunError

CPU = torch.device("cpu")
PIP = re.escape(f"{quote(sys.executable)} -m pip")


def write(path, text=""):
    """A file, with the folders that it needs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def system(monkeypatch, tmp_path):
    """The root of a Linux that has no files."""
    monkeypatch.setattr(processors, "SYSTEM", tmp_path)
    return tmp_path


# -- device and precision --------------------------------------------------------------------------


@pytest.fixture
def finds(monkeypatch):
    """A function that makes PyTorch find as many devices of a kind."""

    def find(kind, count=1):
        found = torch.device(kind) if count else None
        for name, answer in (("current_accelerator", found), ("device_count", count)):
            monkeypatch.setattr(torch.accelerator, name, lambda answer=answer, **_: answer)

    return find


@pytest.mark.parametrize("name", ["gpu", "", "None", "cuda:"])
def test_a_device_that_pytorch_does_not_know_is_a_sentence(name):
    with pytest.raises(hardware.DeviceError, match=f"has no device = '{name}'; use auto, cuda"):
        hardware.find_device(name)


@pytest.mark.parametrize(
    ("name", "kind", "count", "rank", "words"),
    [
        ("cuda", "cuda", 0, 0, "cuda:0: .* finds no cuda device; device = auto takes cpu"),
        ("xpu", "cuda", 0, 0, "xpu:0: .* finds no xpu device; device = auto takes cpu"),
        ("cuda", "mps", 1, 0, "cuda:0: .* finds no cuda device; device = auto takes mps"),
        ("cuda:9", "cuda", 2, 0, "cuda:9: .* finds 2 cuda devices; device = auto takes cuda"),
        (
            "auto",
            "cuda",
            2,
            3,
            "cuda:3: .* finds 2 cuda devices; start no more processes here than that",
        ),
    ],
)
def test_a_device_that_is_not_there_is_a_sentence(
    finds, system, monkeypatch, name, kind, count, rank, words
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    finds(kind, count)
    with pytest.raises(hardware.DeviceError, match=f"device = {words}$"):
        hardware.find_device(name, rank)


@pytest.mark.parametrize("hidden", ["", "7"])
def test_gpus_that_a_variable_hides_are_named_with_it(finds, monkeypatch, hidden):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    finds("cuda", 0)
    words = f"finds no .* with CUDA_VISIBLE_DEVICES={hidden}"
    with pytest.raises(hardware.DeviceError, match=words):
        hardware.find_device("cuda")
    assert hardware.find_device("auto") == CPU
    assert re.search(words, hardware.unused_gpus(CPU, 1))


def test_a_pytorch_with_wrong_products_on_apple_gpus_is_refused(finds, monkeypatch):
    finds("mps")
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    words = r"2\.13\.0 may compute wrong gradients(.|\n)*pip install torch -c \S*constraints\.txt\n"
    for name in ("auto", "mps"):
        with pytest.raises(hardware.DeviceError, match=words):
            hardware.find_device(name)
    assert hardware.find_device("cpu") == CPU
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    assert hardware.find_device("auto").type == "mps"


@pytest.mark.skipif(os.name == "nt", reason="it tells by Linux's files whether there is a driver")
@pytest.mark.parametrize("driver", ["proc/driver/nvidia/version", "dev/dxg"])
@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_an_nvidia_gpu_that_pytorch_cannot_use_is_named(finds, system, monkeypatch, name, driver):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(system))
    finds("cuda", 0)
    write(system / "nvidia-smi")
    (system / "nvidia-smi").chmod(0o755)
    assert hardware.find_device("auto") == CPU  # as a notebook without a GPU, which has no driver
    write(system / driver)
    words = rf"an NVIDIA driver(.|\n)*{PIP} install .*/{hardware.BUILD}\n"
    with pytest.raises(hardware.DeviceError, match=words):
        hardware.find_device(name)
    assert hardware.find_device("cpu") == CPU
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # as Slurm sets it
    words = "an NVIDIA driver, but .* finds no GPU with CUDA_VISIBLE_DEVICES=0; another build may"
    with pytest.raises(hardware.DeviceError, match=words):
        hardware.find_device(name)
    for hidden in ("", "NoDevFiles"):  # the latter is what Slurm gives a job without GPUs
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert hardware.find_device("auto") == CPU
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    (system / "nvidia-smi").unlink()  # another maker's GPU under WSL2
    assert hardware.find_device("auto") == CPU


CUDA_13 = "sm_75 sm_80 sm_86 sm_90 sm_100 sm_120"
CUDA_12 = "sm_50 sm_60 sm_70 sm_75 sm_80 sm_86 sm_90"


@pytest.mark.parametrize(
    ("capability", "built", "build"),
    [
        ((7, 0), CUDA_13, "cu126"),  # V100
        ((6, 1), CUDA_13, "cu126"),  # GTX 1080
        ((7, 5), CUDA_13, None),  # T4
        ((8, 9), CUDA_13, None),  # RTX 4090
        ((12, 0), CUDA_13, None),
        ((12, 1), CUDA_13, None),
        ((6, 1), CUDA_12, None),
        ((12, 0), CUDA_12, hardware.BUILD),  # RTX 5090
        ((12, 0), f"{CUDA_12} compute_90", None),
        ((11, 0), "gfx90a gfx1100", None),  # AMD's
        ((8, 0), "", None),
    ],
)
def test_a_gpu_without_kernels_in_pytorchs_build_is_named(
    finds, monkeypatch, capability, built, build
):
    finds("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_arch_list", built.split)
    if build is None:
        assert hardware.find_device("auto") == torch.device("cuda", 0)
        return
    words = rf"has no kernels for A GPU(.|\n)*{PIP} install .*/{build}\n"
    with pytest.raises(hardware.DeviceError, match=words):
        hardware.find_device("auto")


@pytest.mark.parametrize(
    ("kind", "capability", "dtype"),
    [
        ("cuda", (7, 5), torch.float16),
        ("cuda", (8, 0), torch.bfloat16),
        ("xpu", None, torch.bfloat16),
        ("mps", None, torch.float32),
    ],
)
def test_auto_is_the_fastest_precision_of_a_gpu(monkeypatch, kind, capability, dtype):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert hardware.find_dtype(torch.device(kind), "auto") == dtype
    assert hardware.find_dtype(torch.device(kind), "float16") == torch.float16


@pytest.mark.parametrize("has", [None, "_is_amx_tile_supported", "_is_avx512_bf16_supported"])
def test_auto_is_bfloat16_on_a_cpu_that_multiplies_it(monkeypatch, has):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)  # it knows ARM's
    for name in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"):
        monkeypatch.setattr(torch.cpu, name, lambda name=name: name == has)
    assert hardware.find_dtype(CPU, "auto") == (torch.bfloat16 if has else torch.float32)


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
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA GeForce RTX 3090", 71e12),
        ("Tesla V100-SXM2-16GB", 125e12),
        ("Tesla T4", 65e12),
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


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), True),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.05 GiB, other"), True),
        (RuntimeError("Invalid buffer size: 24.00 GiB"), True),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RunError("out of memory with a single sequence"), False),  # ours, which says more
    ],
)
def test_an_error_of_full_memory_is_known(error, full):
    assert hardware.out_of_memory(error) == full
    assert ("out of memory" in (command.explain(error) or "")) == full


@pytest.mark.parametrize(
    ("driver", "limits"),
    [("proc/driver/nvidia/version", [0.69] if os.name == "nt" else []), ("dev/dxg", [0.69])],
)
def test_windows_does_not_move_what_a_gpu_cannot_hold_to_ram(system, monkeypatch, driver, limits):
    write(system / driver)
    asked, answers = [], {"mem_get_info": (8, 12), "memory_reserved": 1}
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, answer=answer: answer)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, _: asked.append(share)
    )
    hardware.stay_in_memory(torch.device("cuda", 0))
    assert asked == pytest.approx(limits)


AVAILABLE = {"proc/meminfo": "MemAvailable:   64000000 kB\n"}
NO_LIMIT = {"sys/fs/cgroup/memory.max": "max\n"}
LIMIT = {
    "sys/fs/cgroup/memory.max": "32000\n",
    "sys/fs/cgroup/memory.current": "31000\n",
    "sys/fs/cgroup/memory.stat": "anon 900\ninactive_file 20000\nactive_file 1\n",
}
JOB = "sys/fs/cgroup/system.slice/job_1"  # its task is in a group of its own, without a limit
JOBS = {name.replace("sys/fs/cgroup", JOB): text for name, text in LIMIT.items()}
JOBS |= {"proc/self/cgroup": "1:name=systemd:/\n0::/system.slice/job_1/task_0\n"}
JOBS |= {f"{JOB}/task_0/memory.max": "max\n"}
ROOT_1 = "sys/fs/cgroup/memory"  # of version 1; what it says where there is no limit
NO_LIMIT_1 = {
    f"{ROOT_1}/memory.limit_in_bytes": "9223372036854771712\n",
    f"{ROOT_1}/memory.usage_in_bytes": "31000\n",
    f"{ROOT_1}/memory.stat": "inactive_file 7\nactive_file 7\ntotal_inactive_file 8\n",
}
LIMIT_1 = {
    f"{ROOT_1}/slurm/job_1/memory.limit_in_bytes": "32000\n",
    f"{ROOT_1}/slurm/job_1/memory.usage_in_bytes": "31000\n",
    f"{ROOT_1}/slurm/job_1/memory.stat": "inactive_file 7\ntotal_inactive_file 20000\n"
    "total_active_file 1\n",
    "proc/self/cgroup": "5:cpuset:/slurm\n4:memory:/slurm/job_1/task_0\n0::/\n",
}


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({}, None),
        (AVAILABLE, 64_000_000 * 1024),
        (AVAILABLE | NO_LIMIT, 64_000_000 * 1024),
        (AVAILABLE | LIMIT, 21_001),
        (AVAILABLE | JOBS, 21_001),
        (AVAILABLE | LIMIT | JOBS | {f"{JOB}/memory.current": "31500\n"}, 20_501),
        (AVAILABLE | NO_LIMIT | {"proc/self/cgroup": "0::/elsewhere\n"}, 64_000_000 * 1024),
        (AVAILABLE | NO_LIMIT_1, 64_000_000 * 1024),
        (AVAILABLE | NO_LIMIT_1 | LIMIT_1, 21_001),
    ],
)
def test_what_is_free_is_what_linux_and_the_container_leave(system, files, free):
    for name, text in files.items():
        write(system / name, text)
    assert hardware.free_ram() == free


@pytest.mark.parametrize(
    ("limit", "asked", "threads", "compilers"),
    [
        ("max 100000", None, "4 threads", None),
        ("250000 100000", None, "3 threads", "3"),
        ("4000000 100000", None, "4 threads", "32"),
        ("100000 100000", None, "1 thread", "1"),
        ("250000 100000", "4", "4 threads", "3"),
    ],
)
def test_a_container_with_fewer_processors_gets_fewer_threads_and_compilers(
    system, monkeypatch, limit, asked, threads, compilers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "")  # to be restored in the end
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        write(system / "sys/fs/cgroup/cpu.max", f"{limit}\n")
        assert hardware.describe(hardware.find_device("cpu")) == f"cpu, {threads}"
        assert os.environ.get("TORCHINDUCTOR_COMPILE_THREADS") == compilers
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("limit", "workers"), [("max 100000", 64), ("250000 100000", 3), ("9000000 100000", 64)]
)
def test_a_container_with_fewer_processors_gets_fewer_workers(system, monkeypatch, limit, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    write(system / "sys/fs/cgroup/cpu.max", f"{limit}\n")
    assert parse(["text.txt"]).workers == workers


@pytest.mark.parametrize(("time", "workers"), [("-1", 64), ("250000", 3), ("9000000", 64)])
@pytest.mark.parametrize("own", ["4:cpu,cpuacct:/slurm/job_1", "4:cpuacct,cpu:/slurm/job_1/task_0"])
def test_a_job_with_fewer_processors_gets_fewer_workers_in_groups_of_version_1(
    system, monkeypatch, own, time, workers
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    write(system / "proc/self/cgroup", f"5:cpuset:/elsewhere\n{own}\n0::/\n")
    for group, limit in (("", "-1"), ("/slurm/job_1", time)):
        write(system / f"sys/fs/cgroup/cpu{group}/cpu.cfs_quota_us", f"{limit}\n")
        write(system / f"sys/fs/cgroup/cpu{group}/cpu.cfs_period_us", "100000\n")
    assert parse(["text.txt"]).workers == workers


def test_a_job_with_fewer_processors_gets_fewer_workers(system, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(64), raising=False)
    write(system / "proc/self/cgroup", JOBS["proc/self/cgroup"])
    write(system / JOB / "task_0/cpu.max", "max 100000\n")
    for group, workers in ((JOB, 7), ("sys/fs/cgroup/system.slice", 5)):
        write(system / group / "cpu.max", f"{workers}00000 100000\n")
        assert parse(["text.txt"]).workers == workers
