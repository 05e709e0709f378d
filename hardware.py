"""What the machine offers: device, precision, speed on paper, and the errors of its memory.

Knows no model and no data.
"""

import contextlib
import math
import os
import re
import shutil
import sys
import time
from pathlib import Path

import torch

# Dense bf16 or fp16 matrix products, TFLOP/s, from the makers' data sheets. The first name found
# in the device's name counts.
PEAK_TFLOPS = {
    "H200": 989,
    "H100 PCIe": 756,
    "H100": 989,
    "H800": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "A800": 312,
    "L40S": 362,
    "L4": 121,
    "A10G": 70,
    "A10": 125,
    "A40": 150,
    "A6000": 155,
    "V100": 125,
    "T4": 65,
    "4090": 165,
    "3090": 71,
}
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

# Tensors of megabytes in large pages, on Linux: they are new memory each time, and a step takes 5%
# less (benchmarks/README.md). PyTorch looks at this when it first allocates.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

# GPU memory in segments that grow: what a halved micro-batch or another length of prompt leaves
# free is then of use for tensors of any size. PyTorch looks at this when it first allocates there.
# A user may have chosen under the old name, which counts more.
if sys.platform.startswith("linux") and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

FOR_CUDA_12 = (
    "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
)


class DeviceError(ValueError):
    """A device that is not there, in a sentence for the user."""


def find_device(name: str, number: int = 0) -> torch.device:
    """The device for a setting of `auto`, cuda, cuda:N, mps or cpu.

    number: which GPU, where the name says none; the only one where a process sees no others. Raises
    DeviceError for one that this machine lacks.
    """
    if name == "auto":
        name = _best_device()
    try:
        if name == "cuda" and torch.cuda.device_count() == 1:
            number = 0  # as launchers give each process a GPU of its own
        device = torch.device("cuda", number) if name == "cuda" else torch.device(name)
    except RuntimeError:
        raise DeviceError(
            f"device = {name!r} is none that PyTorch knows; use auto, cuda, cuda:1, mps or cpu"
        ) from None
    count = _devices_like(device)
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device = {device}: PyTorch {torch.__version__} finds {count} of that kind on this"
            f" machine; device=auto takes {find_device('auto')}"
        )
    if device.type == "cuda":
        _check_generation(device)
    return device


def _best_device():
    """cuda, mps or cpu. Raises DeviceError where a GPU stays unused because of the installation."""
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available():
        return "mps"
    if shutil.which("nvidia-smi") and not _gpus_are_hidden():
        if torch.version.cuda:
            made = f"for CUDA {torch.version.cuda}, finds no GPU; for an older driver:"
        else:
            made = "made for CPUs, finds no GPU; for the GPU:"
        raise DeviceError(
            f"this machine has an NVIDIA driver, but PyTorch {torch.__version__}, {made}\n "
            f" {FOR_CUDA_12}\ndevice = cpu does without a GPU"
        )
    return "cpu"


def _gpus_are_hidden():
    """Whether GPUs are out of reach on purpose, as in a notebook without one."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return True
    return os.name != "nt" and not Path("/proc/driver/nvidia/version").exists()


def _devices_like(device):
    """How many devices of this kind the machine has."""
    if device.type == "cuda":
        return torch.cuda.device_count()
    if device.type == "mps":
        return int(torch.backends.mps.is_available())
    return 1 if device.type == "cpu" else 0


def _check_generation(gpu):
    """Raises DeviceError for a GPU older than those that PyTorch was built for."""
    major, minor = torch.cuda.get_device_capability(gpu)
    known = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))
    if 10 * major + minor < min(map(int, known), default=0):
        raise DeviceError(
            f"{torch.cuda.get_device_name(gpu)} is older than PyTorch {torch.__version__} knows;"
            f" one made for CUDA 12 knows it:\n  {FOR_CUDA_12}"
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


def compile_pays(device: torch.device, operations: float) -> bool:
    """Whether to compile a model for a run of so many floating-point operations.

    On a CPU, half a minute of compilation takes a sixth off a small model's step, and comes back
    after some 4e13 operations (benchmarks/README.md). PyTorch's compiler for mps is a prototype.
    """
    if device.type == "cpu":
        return operations > 4e13
    return device.type == "cuda"


def tuning_pays(device: torch.device, operations: float) -> bool:
    """Whether to try several kernels for each part of a model, for so many operations.

    Ten minutes of it on a GPU shall be less than a hundredth of the run, which it may make 2 to 5%
    shorter (computed, not measured on a GPU yet).
    """
    peak = peak_flops(device)
    return peak is not None and operations / (0.4 * peak) > 100 * 600


def respect_quota(path: str = "/sys/fs/cgroup/cpu.max") -> None:
    """Take as many threads as the container may use processors: PyTorch counts those that it sees.

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
    """Floating-point operations a second that the device is sold as, or None if it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    for key, tflops in PEAK_TFLOPS.items():
        if re.search(rf"\b{key}\b", name):
            return tflops * 1e12
    return None


def gpu_memory(device: torch.device) -> int | None:
    """Bytes that a GPU has; None for another device."""
    if device.type != "cuda":
        return None
    return torch.cuda.get_device_properties(device).total_memory


def describe(device: torch.device) -> str:
    """The device in a few words, for banners and logs."""
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        return f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB"
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    return device.type


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what it was given, so that a clock tells the truth."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def catches_up(device: torch.device, seconds: float) -> bool:
    """Whether the device finishes what it was given within so many seconds."""
    if device.type != "cuda":
        return True
    deadline = time.monotonic() + seconds
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    while not event.query() and time.monotonic() < deadline:
        time.sleep(0.001)
    return event.query()


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device's memory, or the machine's, did not suffice."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED")
    return any(sign in str(error) for sign in signs)
