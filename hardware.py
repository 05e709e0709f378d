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

# As sold: dense TFLOP/s of matrix products in bf16 (in fp16 on V100 and T4), added up in float32,
# and GB of memory (of the smallest variant). The first key found in a device's name counts.
GPUS = {
    "H200": (989, 141),
    "H100 PCIe": (756, 80),
    "H100": (989, 80),
    "H800": (989, 80),
    "GH200": (989, 96),
    "GB200": (2500, 186),
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
    "RTX PRO 6000 Blackwell": (504, 96),
    "RTX 6000 Ada": (364, 48),
    "RTX 5090": (210, 32),
    "RTX 5080": (113, 16),
    "RTX 4090": (165, 24),
    "RTX 4080": (97, 16),
    "RTX 4070 Ti": (80, 12),
    "RTX 3090": (71, 24),
    "RTX 3080": (60, 10),
    "MI300X": (1307, 192),
    "MI250X": (192, 64),  # one of its two chips, each of which is a device to PyTorch
}
# Words after a key that make it another product, with another speed.
VARIANTS = "Ti|SUPER|D|Laptop|Max-Q|NVL|MIG"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
INSTALL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/"
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
SYSTEM = Path("/")  # with dev, proc and sys of Linux

# PyTorch reads these when it first allocates or compiles, which is after this module's import.
# Large pages for tensors of megabytes on Linux: 5% off a CPU's step (docs/findings.md).
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
# Compile for the instructions that the CPU lists, without building a program to test each one: a
# quarter off the first compilation. A compiler that lacks them fails, and the run stays uncompiled.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
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
    bytes that a GPU may use. peak_flops: its floating-point operations a second, as sold or else
    measured. Both are None on a CPU.
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


def open_device(name: str, dtype: str, local_rank: int = 0) -> Device:
    """The Device for the settings `device` and `dtype`. Raises DeviceError.

    local_rank: the GPU that `cuda` and `auto` mean.
    """
    device = find_device(name, local_rank)
    products = find_dtype(device, dtype)
    return Device(
        torch=device,
        dtype=products,
        name=describe(device),
        memory=gpu_memory(device),
        peak_flops=peak_flops(device, products),
    )


def find_device(name: str, local_rank: int = 0) -> torch.device:
    """The device for a setting of `auto`, cuda, cuda:N, xpu, mps or cpu. Raises DeviceError.

    local_rank: as of open_device; GPU 0 where a launcher shows each process only its own.
    """
    limit_threads_to_cgroup()
    if name == "auto":
        name = next((kind for kind, count in gpus().items() if count), "cpu")
        if name == "cpu":
            _check_build()
    try:
        device = torch.device(name)
    except RuntimeError:
        raise DeviceError(
            f"PyTorch knows no device = {name!r}; use auto, cuda, cuda:1, xpu, mps or cpu"
        ) from None
    count = (gpus() | {"cpu": 1}).get(device.type, 0)
    if device.type in ("cuda", "xpu") and device.index is None:
        device = torch.device(device.type, 0 if count == 1 else local_rank)
    if (device.index or 0) >= count:
        raise DeviceError(
            f"device = {device}: PyTorch {torch.__version__} finds {count} of that kind on this"
            f" machine; device=auto takes {find_device('auto')}"
        )
    if device.type == "cuda":
        _check_generation(device)
    return device


def gpus() -> dict[str, int]:
    """How many GPUs of each kind PyTorch finds, in the order in which `auto` prefers them."""
    return {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "xpu": torch.xpu.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }


def left_aside(device: torch.device, processes: int) -> str:
    """Which GPUs `processes` processes on `device` do not use, and why, for banners; or ""."""
    found = gpus()
    others = [kind for kind, count in found.items() if count and kind != device.type]
    if others:
        return f"not used: {', '.join(others)}; device = {others[0]} uses it"
    if device.type == "cuda" and found["cuda"] > processes:
        return f"one of {found['cuda']} GPUs; torchrun trains on more"
    hiding = [f", as {name} is set" for name in HIDING if name in os.environ]
    nothing = f"PyTorch {torch.__version__} finds no GPU" + "".join(hiding)
    return nothing if device.type == "cpu" else ""


def _check_build():
    """Raises DeviceError where only the installation keeps a GPU from use."""
    # A notebook without a GPU may have nvidia-smi, but not the driver.
    driver = os.name == "nt" or (SYSTEM / "proc/driver/nvidia/version").exists()
    nvidia = shutil.which("nvidia-smi") and driver
    # Most of AMD's processors have a GPU, with little memory of its own, that ROCm does not know.
    memory = (SYSTEM / "sys/class/drm").glob("card*/device/mem_info_vram_total")
    amd = (SYSTEM / "dev/kfd").exists() and any(int(m.read_text()) > 3 << 30 for m in memory)
    if not (nvidia or amd) or any(name in os.environ for name in HIDING):
        return
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    made_for = " ".join(f"{name} {version}" for name, version in versions.items() if version)
    remedy = f"another build may:\n  {INSTALL}{'cu126' if nvidia else 'rocm7.2'}"
    if not nvidia and torch.version.hip:
        remedy = "no permission?\n  sudo usermod -aG render,video $USER     # then log in again"
    raise DeviceError(
        f"this machine has an {'NVIDIA driver' if nvidia else 'AMD GPU'}, but PyTorch"
        f" {torch.__version__}, made for {made_for or 'CPUs'}, finds no GPU; {remedy}\n"
        "device = cpu trains without a GPU"
    )


def _check_generation(gpu):
    """Raises DeviceError for a GPU older than those that PyTorch was built for."""
    major, minor = torch.cuda.get_device_capability(gpu)
    built_for = re.findall(r"sm_(\d+)", " ".join(torch.cuda.get_arch_list()))
    if 10 * major + minor < min(map(int, built_for), default=0):
        raise DeviceError(
            f"PyTorch {torch.__version__} no longer supports {torch.cuda.get_device_name(gpu)};"
            f" one made for CUDA 12 does:\n  {INSTALL}cu126"
        )


def find_dtype(device: torch.device, name: str) -> torch.dtype:
    """The dtype of matrix products for a setting of `auto`, bfloat16, float16 or float32.

    auto: bfloat16 where the hardware multiplies it (GPUs of NVIDIA from Ampere on, of AMD with
    matrix units, of Intel and Apple; CPUs with AMX, AVX512-BF16 or ARM's FEAT_BF16), float16 on
    older GPUs of NVIDIA and AMD, else float32.
    """
    if name != "auto":
        return DTYPES[name]
    other = torch.float32
    if device.type == "cuda" and torch.version.hip:
        architecture = torch.cuda.get_device_properties(device).gcnArchName
        multiplies, other = re.match("gfx(908|90a|9[45]|1[12])", architecture), torch.float16
    elif device.type == "cuda":
        multiplies, other = torch.cuda.get_device_capability(device) >= (8, 0), torch.float16
    elif device.type == "xpu":
        multiplies = torch.xpu.is_bf16_supported(including_emulation=False)
    elif device.type == "mps":
        multiplies = True  # in macOS 14, which PyTorch takes
    else:
        multiplies = torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
        if torch.backends.mkldnn.is_available():  # which knows ARM's; older PyTorch does not tell
            arm = getattr(torch.cpu, "get_capabilities", dict)()
            multiplies = multiplies or arm.get("bf16")
    return torch.bfloat16 if multiplies else other


def autocast(device: torch.device, dtype: torch.dtype):
    """The context of a forward with matrix products in `dtype` and weights kept in float32."""
    if dtype == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype)


def should_compile(device: torch.device, flops: float) -> bool:
    """Whether compiling a model pays for a run of `flops` floating-point operations.

    On a CPU, compiling a small model takes half a minute and a sixth off each step: 4e13 operations
    pay for it (docs/findings.md). PyTorch's compiler for mps is a prototype.
    """
    if device.type == "cpu":
        return flops > 4e13
    return device.type in ("cuda", "xpu")


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


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """Floating-point operations a second of a GPU, as sold or else measured; None for a CPU."""
    if device.type == "cpu":
        return None
    return sold_flops(describe(device)) or measured_flops(device, dtype)


def sold_flops(name: str) -> float | None:
    """Floating-point operations a second that a GPU is sold with; None if not known."""
    for key, (tflops, _) in GPUS.items():
        if re.search(rf"\b{key}\b(?!.*\b({VARIANTS})\b)", name):
            return tflops * 1e12
    return None


def measured_flops(device: torch.device, dtype: torch.dtype, size: int = 4096) -> float:
    """Floating-point operations a second of large matrix products."""
    a, products = torch.randn(size, size, device=device).to(dtype), 20
    for count in (1, products):  # the first warms up
        synchronize(device)
        start = time.perf_counter()
        for _ in range(count):
            a @ a
        synchronize(device)
    return products * 2 * size**3 / (time.perf_counter() - start)


def gpu_memory(device: torch.device) -> int | None:
    """Bytes that a GPU may use; None for a CPU. On a Mac: up to where macOS would swap."""
    if device.type == "cpu":
        return None
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    return torch.get_device_module(device).get_device_properties(device).total_memory


def free_ram() -> int | None:
    """Bytes of RAM that can be had without swapping; None where the system does not say."""
    try:
        meminfo = (SYSTEM / "proc/meminfo").read_text()
        free = 1024 * int(re.search(r"MemAvailable: +(\d+) kB", meminfo)[1])
        # The limit of a container, in the two versions of Linux's control groups.
        group = SYSTEM / "sys/fs/cgroup"
        for limit, used, file_cache in (
            ("memory.max", "memory.current", r"^(?:in)?active_file (\d+)"),
            (
                "memory/memory.limit_in_bytes",
                "memory/memory.usage_in_bytes",
                r"^total_(?:in)?active_file (\d+)",
            ),
        ):
            limit, used = group / limit, group / used
            if limit.exists() and used.exists() and limit.read_text().strip() != "max":
                cached = 0  # bytes of files: counted as used, but given back to whoever asks
                with contextlib.suppress(OSError):  # gVisor has none
                    statistics = used.with_name("memory.stat").read_text()
                    cached = sum(map(int, re.findall(file_cache, statistics, re.MULTILINE)))
                free = min(free, int(limit.read_text()) - int(used.read_text()) + cached)
        return free
    except (OSError, TypeError, ValueError):
        return None


def describe(device: torch.device) -> str:
    """The device in a few words, for banners and logs."""
    if device.type == "cpu":
        return f"cpu, {torch.get_num_threads()} threads"
    name = "mps"
    if device.type != "mps":
        name = torch.get_device_module(device).get_device_name(device)
    return f"{name}, {gpu_memory(device) / 2**30:.0f} GiB"


def synchronize(device: torch.device, timeout: float | None = None) -> bool:
    """Wait until the device has finished all its work. False where that takes over `timeout` s.

    Only cuda knows a timeout.
    """
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type == "xpu" or (device.type == "cuda" and timeout is None):
        torch.get_device_module(device).synchronize(device)
    elif device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        deadline = time.monotonic() + timeout
        while not event.query() and time.monotonic() < deadline:
            time.sleep(0.001)
        return event.query()
    return True


def out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the memory of the device or the machine is full."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    signs = ("can't allocate memory", "out of memory", "ALLOC_FAILED", "OUT_OF_DEVICE_MEMORY")
    return any(sign in str(error) for sign in signs)
