"""The device, precision, memory and peak speed of this machine.

Knows no model and no data.
"""

import contextlib
import gc
import os
import re
import shutil
import sys
from dataclasses import dataclass

import torch

import processors
from command_line import UserError, our_file, plural, quote

# Figures of data sheets: dense TFLOP/s of matrix products in bf16 (in fp16 on V100 and T4), added
# up in float32, and GB of memory of the smallest variant. The first key found in a device's name
# counts; other GPUs have no MFU.
GPUS = {
    "H200": (989, 141),
    "H100 PCIe": (756, 80),
    "H100": (989, 80),
    "B200": (2250, 180),
    "A100": (312, 40),
    "L40S": (362, 48),
    "L4": (121, 24),
    "A10G": (70, 24),
    "A10": (125, 24),
    "A40": (150, 48),
    "A6000": (155, 48),
    "V100": (125, 16),
    "T4": (65, 16),
    "RTX PRO 6000 Blackwell": (504, 96),
    "RTX 5090": (210, 32),
    "RTX 4090": (165, 24),
    "RTX 3090": (71, 24),
    "MI300X": (1307, 192),
}
# Words after a key that make it another product, with another speed.
VARIANTS = "Ti|SUPER|D|Laptop|Max-Q|NVL|MIG"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
# The memory of control groups, by version: the controller, the files of the limit and of what is
# used, and how sums over a group and those below it begin in memory.stat.
# docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html
GROUP_FILES = (
    ("", "memory.max", "memory.current", ""),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
INSTALL = f"{quote(sys.executable)} -m pip install --force-reinstall torch --index-url"
BUILDS = "https://download.pytorch.org/whl"
# For GPUs from Turing on, on Linux with drivers of CUDA 12 too.
BUILD = "cu130" if os.name == "nt" else "cu129"


class DeviceError(UserError):
    """A device that cannot be used."""


@dataclass(frozen=True)
class Device:
    """The device of a run, and what is known of it.

    torch: PyTorch's name of it. dtype: of matrix products. name: for banners and logs. memory:
    bytes that a GPU may use. peak_flops: its floating-point operations per second, as sold; None if
    not known. Both are None on a CPU.
    """

    torch: torch.device
    dtype: torch.dtype
    name: str
    memory: int | None
    peak_flops: float | None

    @property
    def type(self) -> str:
        """cuda (also with an AMD GPU), xpu (Intel), mps (Apple) or cpu."""
        return self.torch.type


def look_up(device: torch.device, dtype: str) -> Device:
    """What is known of a device. dtype: the setting."""
    name = describe(device)
    return Device(
        torch=device,
        dtype=find_dtype(device, dtype),
        name=name,
        memory=gpu_memory(device),
        peak_flops=data_sheet_flops(name),
    )


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for a setting of `auto`, cuda, cuda:N, xpu, mps or cpu. Raises DeviceError.

    local_rank: the GPU that `cuda` and `auto` mean; GPU 0 if a launcher shows each process only
    its own. Whoever asks will compute: PyTorch's threads are limited to what a container may use.
    """
    limit_threads_to_cgroup()
    found = count_devices()
    fastest = next(iter(found))
    try:
        device = torch.device(fastest if name == "auto" else name)
    except RuntimeError:
        raise DeviceError(
            f"PyTorch has no device = {name!r}; use auto, cuda, cuda:1, xpu, mps or cpu"
        ) from None
    if fastest == "cpu" and (name == "auto" or device.type == "cuda"):
        _check_build()
    count = found.get(device.type, 0)
    if device.type in ("cuda", "xpu") and device.index is None:
        device = torch.device(device.type, 0 if count == 1 else local_rank)
    if (device.index or 0) >= count:
        advice = f"device = auto takes {fastest}"
        if count and local_rank:
            advice = "start no more processes here than that"
        raise DeviceError(f"device = {device}: {_found(count, f'{device.type} device')}; {advice}")
    if device.type == "cuda":
        _check_kernels(device)
    if device.type == "mps":
        _check_products()
    return device


def _found(count: int, noun: str) -> str:
    """How many devices PyTorch finds, and what may hide others."""
    text = f"PyTorch {torch.__version__} finds {count or 'no'} {noun}{'s' * (count > 1)}"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        text += f" with CUDA_VISIBLE_DEVICES={os.environ['CUDA_VISIBLE_DEVICES']}"
    return text


def count_devices() -> dict[str, int]:
    """How many devices of each kind PyTorch finds; `auto` takes the first kind."""
    gpu = torch.accelerator.current_accelerator(check_available=True)
    gpus = {gpu.type: torch.accelerator.device_count()} if gpu else {}
    return gpus | {"cpu": 1}


def unused_gpus(device: torch.device, processes: int) -> str:
    """Which GPUs `processes` processes on `device` do not use, and why, for banners; or ""."""
    found = count_devices()
    if device.type == "cuda" and found["cuda"] > processes:
        return f"one of {found['cuda']} GPUs; torchrun trains on more"
    if device.type != "cpu":
        return ""
    fastest = next(iter(found))
    if fastest == "cpu":
        return _found(0, "GPU")
    return f"not used: {fastest}; device = {fastest} uses it"


def _check_build():
    """Raises DeviceError if only PyTorch's build keeps an NVIDIA GPU from use."""
    # A notebook without a GPU may have nvidia-smi, but not the driver. WSL2 has Windows'.
    paths = ("proc/driver/nvidia/version", "dev/dxg")
    driver = os.name == "nt" or any((processors.SYSTEM / path).exists() for path in paths)
    # "", or what Slurm gives a job without GPUs; 0 is what it gives others.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    if driver and shutil.which("nvidia-smi") and not hidden:
        raise DeviceError(
            f"this machine has an NVIDIA driver, but {_found(0, 'GPU')}; another build may, a"
            " newer driver, or a restart if the machine has slept since it last found one:\n "
            f" {INSTALL} {BUILDS}/{BUILD}\ndevice = cpu trains without a GPU"
        )


def _check_kernels(device: torch.device) -> None:
    """Raises DeviceError if PyTorch's build has no kernels for an NVIDIA GPU."""
    own = torch.cuda.get_device_capability(device)
    # sm_86: machine code, for later ones of its generation too; compute_86: also for all later.
    listed = re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(torch.cuda.get_arch_list()))
    for kind, generation, minor in listed:
        built = (int(generation), int(minor))
        if built <= own and (kind == "compute" or built[0] == own[0]):
            return
    if listed:  # AMD's have other names
        build = "cu126" if own < (7, 5) else BUILD
        raise DeviceError(
            f"PyTorch {torch.__version__} has no kernels for {torch.cuda.get_device_name(device)},"
            f" of compute capability {own[0]}.{own[1]}; another build has:\n"
            f"  {INSTALL} {BUILDS}/{build}\ndevice = cpu trains without a GPU"
        )


def _check_products() -> None:
    """Raises DeviceError for a PyTorch with wrong products of matrices on Apple's GPUs.

    On M1 and M2, one that adds up more than 32,766 numbers, such as those of a vocabulary, adds
    what else is in memory (github.com/pytorch/pytorch/issues/193487). Before 2.13, attention has
    faults, too (issues 181133, 195910).
    """
    if torch.__version__ < (2, 14):
        constraints = our_file("constraints.txt")
        raise DeviceError(
            f"PyTorch {torch.__version__} may compute wrong gradients on Apple GPUs; 2.14 does not:"
            f"\n  {quote(sys.executable)} -m pip install torch -c {constraints}\n"
            "device = cpu trains without a GPU"
        )


def find_dtype(device: torch.device, name: str) -> torch.dtype:
    """The dtype of matrix products for a setting of `auto`, bfloat16, float16 or float32.

    auto: bfloat16 if the hardware multiplies it (CPUs with AMX, AVX512-BF16 or ARM's FEAT_BF16;
    AMD's, Intel's and NVIDIA's GPUs from Ampere on), float16 on NVIDIA's older GPUs, float32 on
    other CPUs, and on Apple's GPUs, where bfloat16 is slower.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        return torch.float16
    if device.type == "mps":  # bfloat16 takes 17% longer: github.com/karpathy/nanochat/issues/685
        return torch.float32
    if device.type != "cpu":
        return torch.bfloat16
    multiplies = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    if torch.backends.mkldnn.is_available():  # which knows ARM's; older PyTorch does not tell
        arm = getattr(torch.cpu, "get_capabilities", dict)()
        multiplies = multiplies or arm.get("bf16")
    return torch.bfloat16 if multiplies else torch.float32


def autocast(device: torch.device, dtype: torch.dtype):
    """The context of a forward with matrix products in `dtype` and weights kept in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def limit_threads_to_cgroup() -> None:
    """At most as many threads as the container may use processors; PyTorch counts all it sees.

    As many compilers, too: each takes some 300 MB. What the user has set has the last word.
    """
    limit = processors.quota()
    if limit:
        os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(min(processors.usable(), 32)))
    if limit and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(min(torch.get_num_threads(), limit))


def data_sheet_flops(name: str) -> float | None:
    """Floating-point operations per second, by a GPU's data sheet; None if not known."""
    for key, (tflops, _) in GPUS.items():
        if re.search(rf"\b{key}\b(?!.*\b({VARIANTS})\b)", name):
            return tflops * 1e12
    return None


def gpu_memory(device: torch.device) -> int | None:
    """Bytes that a GPU may use; None for a CPU. On a Mac: up to where macOS would swap."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return torch.get_device_module(device).get_device_properties(device).total_memory


def stay_in_memory(device: torch.device) -> None:
    """Raise an error where a system would move to RAM or disk what the GPU's memory cannot hold.

    A step would then take many times as long. Windows does so, also under WSL2 (nvidia.custhelp.com
    answer 5490, github.com/microsoft/WSL/issues/11050), and macOS.
    """
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(1.0)
    if device.type == "cuda" and (os.name == "nt" or (processors.SYSTEM / "dev/dxg").exists()):
        free, total = torch.cuda.mem_get_info(device)
        ours = free + torch.cuda.memory_reserved(device)  # by an earlier run of this process
        # The limit is of tensors; CUDA loads its kernels into the rest.
        torch.cuda.set_per_process_memory_fraction(0.92 * ours / total, device)


def free_ram() -> int | None:
    """Bytes of RAM that can be had without swapping; None if the system does not say.

    A container or a job has at most what its limit leaves.
    """
    try:
        meminfo = (processors.SYSTEM / "proc/meminfo").read_text()
        free = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", meminfo)[1])
        for controller, most, used, sums in GROUP_FILES:
            for group, limit in processors.group_limits(most, controller).items():
                room = int(limit) - int((group / used).read_text())
                # Bytes of files: counted as used, but given back on demand.
                statistics = (group / "memory.stat").read_text()
                cached = re.findall(rf"^{sums}(?:in)?active_file (\d+)", statistics, re.MULTILINE)
                free = min(free, room + sum(map(int, cached)))
        return free
    except (OSError, TypeError):
        return None


def describe(device: torch.device) -> str:
    """The device in a few words, for banners and logs."""
    if device.type == "cpu":
        return f"cpu, {plural(torch.get_num_threads(), 'thread')}"
    name = "mps"
    if device.type != "mps":
        name = torch.get_device_module(device).get_device_name(device)
    return f"{name}, {gpu_memory(device) / 2**30:.0f} GiB"


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all its work."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def release_memory(device: torch.device) -> None:
    """Give back the memory of tensors that nothing refers to; peak_memory_gb begins again."""
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_gb(device: torch.device) -> float | None:
    """Gigabytes that this process's tensors took at most on an NVIDIA or AMD GPU; else None."""
    if device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated(device) / 1e9, 2)


def out_of_memory(error: BaseException) -> bool:
    """True if an error means that the memory of the device or the machine is full.

    Some of PyTorch's show it in their text alone; they are RuntimeErrors, as RunError is not.
    """
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    signs += ("DefaultCPUAllocator: not enough memory",)  # on Windows
    signs += ("can't start new thread",)  # for its stack of 8 MB
    signs += ("OUT_OF_DEVICE_MEMORY", "OUT_OF_RESOURCES")  # Intel's
    signs += ("Invalid buffer size",)  # Apple's (github.com/pytorch/pytorch/issues/187567)
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
