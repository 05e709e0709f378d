"""What the machine offers: device, precision, memory, speed as sold.

Knows no model and no data.
"""

import contextlib
import math
import os
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

# As sold: dense TFLOP/s of matrix products in bf16 (in fp16 on V100 and T4), and GB of memory (of
# the smallest variant). The first key found in a device's name counts.
GPUS = {
    "H200": (989, 141),
    "H100 PCIe": (756, 80),
    "H100": (989, 80),
    "H800": (989, 80),
    "GH200": (989, 96),
    "B200": (2250, 180),
    "A100": (312, 40),
    "A800": (312, 40),
    "L40S": (362, 48),
    "L4": (121, 24),
    "A10G": (70, 24),
    "A10": (125, 24),
    "A40": (150, 48),
    "A6000": (155, 48),
    "V100": (125, 16),
    "T4": (65, 16),
    "RTX 4090": (165, 24),
    "RTX 3090": (71, 24),
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CUDA_12 = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"

# Both are read when PyTorch first allocates, which is after this module's import.
# Large pages for tensors of megabytes on Linux: 5% off a CPU's step (benchmarks/README.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# GPU memory in segments that grow: a halved micro-batch leaves no fragments that fit nothing. The
# second name is the older one, which a user may have set.
if sys.platform.startswith("linux") and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")


class DeviceError(ValueError):
    """A device that cannot be used, in a sentence for the user."""


@dataclass(frozen=True)
class Device:
    """The device of a run, and what is known of it; open_device looks it up once.

    torch: PyTorch's name of it. dtype: of matrix products. name: for banners and logs. memory:
    bytes that a GPU has. peak_flops: floating-point operations a second, as sold. Both are None
    where they are not known.
    """

    torch: torch.device
    dtype: torch.dtype
    name: str
    memory: int | None
    peak_flops: float | None

    @property
    def type(self) -> str:
        """cuda, mps or cpu."""
        return self.torch.type


def open_device(name: str, dtype: str, local_rank: int = 0) -> Device:
    """The Device for the settings `device` and `dtype`. Raises DeviceError.

    local_rank: the GPU that `cuda` and `auto` stand for.
    """
    limit_threads_to_cgroup()
    device = find_device(name, local_rank)
    return Device(
        torch=device,
        dtype=find_dtype(device, dtype),
        name=describe(device),
        memory=gpu_memory(device),
        peak_flops=peak_flops(device),
    )


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for a setting of `auto`, cuda, cuda:N, mps or cpu. Raises DeviceError.

    local_rank: as of open_device; GPU 0 where a launcher shows each process only its own.
    """
    if name == "auto":
        name = _best_device()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(
            f"PyTorch knows no device = {name!r}; use auto, cuda, cuda:1, mps or cpu"
        ) from None
    counts = {"cuda": torch.cuda.device_count(), "mps": torch.backends.mps.is_available(), "cpu": 1}
    count = int(counts.get(device.type, 0))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0 if count == 1 else local_rank)
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device = {device}: PyTorch {torch.__version__} finds {count} of that kind on this"
            f" machine; device=auto takes {find_device('auto')}"
        )
    if device.type == "cuda":
        _check_generation(device)
    return device


def _best_device():
    """cuda, mps or cpu. Raises DeviceError where only the installation keeps a GPU from use."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    hidden = "CUDA_VISIBLE_DEVICES" in os.environ
    # A notebook without a GPU may have nvidia-smi, but not the driver.
    driver = os.name == "nt" or Path("/proc/driver/nvidia/version").exists()
    if shutil.which("nvidia-smi") and driver and not hidden:
        made_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"
        raise DeviceError(
            f"this machine has an NVIDIA driver, but PyTorch {torch.__version__}, made for"
            f" {made_for}, finds no GPU; one that may:\n  {CUDA_12}\n"
            "device = cpu does without a GPU"
        )
    return "cpu"


def _check_generation(gpu):
    """Raises DeviceError for a GPU older than those that PyTorch was built for."""
    major, minor = torch.cuda.get_device_capability(gpu)
    built_for = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))
    if 10 * major + minor < min(map(int, built_for), default=0):
        raise DeviceError(
            f"PyTorch {torch.__version__} no longer supports {torch.cuda.get_device_name(gpu)};"
            f" one made for CUDA 12 does:\n  {CUDA_12}"
        )


def find_dtype(device: torch.device, name: str) -> torch.dtype:
    """The dtype of matrix products for a setting of `auto`, bfloat16, float16 or float32.

    auto: bfloat16 where the hardware multiplies it (Ampere and later; CPUs with AMX or
    AVX512-BF16), float16 on older GPUs, else float32.
    """
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if ampere else torch.float16
    if device.type == "cpu":
        multiplies = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        return torch.bfloat16 if multiplies else torch.float32
    return torch.float32


def autocast(device: torch.device, dtype: torch.dtype):
    """The context of a forward with matrix products in `dtype` and weights kept in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def should_compile(device: torch.device, flops: float) -> bool:
    """Whether compiling a model pays for a run of `flops` floating-point operations.

    On a CPU, compiling a small model takes half a minute and a sixth off each step: 4e13 operations
    pay for it (benchmarks/README.md). PyTorch's compiler for mps is a prototype.
    """
    if device.type == "cpu":
        return flops > 4e13
    return device.type == "cuda"


def limit_threads_to_cgroup(path: str = "/sys/fs/cgroup/cpu.max") -> None:
    """At most as many threads as the container may use processors; PyTorch counts all it sees.

    OMP_NUM_THREADS has the last word.
    """
    if "OMP_NUM_THREADS" in os.environ:
        return
    try:
        quota, period = Path(path).read_text().split()
        if quota != "max":
            processors = math.ceil(int(quota) / int(period))
            torch.set_num_threads(max(1, min(torch.get_num_threads(), processors)))
    except (OSError, ValueError):
        return  # no such limits on this system


def peak_flops(device: torch.device) -> float | None:
    """Floating-point operations a second that a GPU is sold with; None if not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, (tflops, _) in GPUS.items():
        if re.search(rf"\b{key}\b", name):
            return tflops * 1e12
    return None


def gpu_memory(device: torch.device) -> int | None:
    """Bytes that a GPU has; None for another device."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def free_ram() -> int | None:
    """Bytes of RAM that can be had without swapping; None where the system does not say."""
    try:
        available = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        free = 1024 * int(available[1])
        # The limit of a container, in the two versions of Linux's control groups.
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
        ):
            limit, used = Path("/sys/fs/cgroup", limit), Path("/sys/fs/cgroup", used)
            if limit.exists() and used.exists() and limit.read_text().strip() != "max":
                free = min(free, int(limit.read_text()) - int(used.read_text()))
        return free
    except (OSError, TypeError, ValueError):
        return None


def describe(device: torch.device) -> str:
    """The device in a few words, for banners and logs."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return device.type


def synchronize(device: torch.device, timeout: float | None = None) -> bool:
    """Wait until the device has finished all its work. False where that takes over `timeout` s."""
    if device.type == "mps":
        torch.mps.synchronize()
    if device.type != "cuda":
        return True
    if timeout is None:
        torch.cuda.synchronize(device)
        return True
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    deadline = time.monotonic() + timeout
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    return event.query()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the device or the machine is full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return any(sign in str(error) for sign in signs)
