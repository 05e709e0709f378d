"""A GPU that is not there, for PyTorch's compiler: it lowers a model for it, and nothing runs.

PyTorch's CPU build with Triton beside it is all that it takes: the compiler asks the device for its
generation and its multiprocessors, and gets them from a table. Tensors are fake (FakeTensorMode):
they have a shape, a type and a device, and no numbers. Nothing takes it back, so it belongs into
processes of its own.
"""

import contextlib
import ctypes
import importlib.util
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch


@dataclass(frozen=True)
class GPU:
    """What a data sheet says. tflops: dense products in 16 bits. bandwidth: bytes a second."""

    name: str
    capability: tuple[int, int]
    multiprocessors: int
    tflops: float
    bandwidth: float
    gigabytes: int
    shared_memory: int  # bytes that one block of threads may use


GPUS = {
    "T4": GPU("Tesla T4", (7, 5), 40, 65, 0.32e12, 16, 65_536),
    "A100": GPU("NVIDIA A100", (8, 0), 108, 312, 1.555e12, 40, 166_912),
    "H100": GPU("NVIDIA H100", (9, 0), 132, 989, 3.35e12, 80, 232_448),
    "H200": GPU("NVIDIA H200", (9, 0), 132, 989, 4.8e12, 141, 232_448),
}


def missing() -> str | None:
    """What this machine lacks, in a sentence; None where it has all."""
    if importlib.util.find_spec("triton") is None:
        return "triton is missing, which PyTorch's compiler writes kernels for GPUs in"
    if not shutil.which("g++"):
        return "g++ is missing, which builds what PyTorch's CPU build lacks of CUDA"
    if torch.version.cuda:
        return "PyTorch is built for CUDA here; the fake device needs the build for CPUs"
    return None


def install(gpu: GPU) -> None:
    """From here on PyTorch believes that its first CUDA device is this one."""
    library = Path(tempfile.mkdtemp(prefix="fake_device_")) / "gpu.so"
    build(library)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    shutil.rmtree(library.parent)
    properties = SimpleNamespace(
        name=gpu.name,
        major=gpu.capability[0],
        minor=gpu.capability[1],
        multi_processor_count=gpu.multiprocessors,
        total_memory=gpu.gigabytes * 10**9,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=1024 if gpu.capability < (8, 0) else 2048,
        max_threads_per_block=1024,
        warp_size=32,
        shared_memory_per_block_optin=gpu.shared_memory,
        shared_memory_per_block=49_152,
        gcnArchName="",
    )
    replace_calls(gpu, properties)
    replace_triton_driver(gpu)


def build(library: Path) -> None:
    """Compile fake_device.cpp, in three seconds."""
    source, home = Path(__file__).with_suffix(".cpp"), Path(torch.__file__).parent
    include = [home / "include", home / "include/torch/csrc/api/include"]
    command = ["g++", "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(library)]
    command += [f"-I{folder}" for folder in include]
    command += [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    subprocess.run(command, check=True)


def replace_calls(gpu: GPU, properties: SimpleNamespace) -> None:
    """What PyTorch asks the CUDA driver for is answered from the properties."""
    from torch._dynamo.device_interface import CudaInterface, register_interface_for_device

    answers = {
        "is_available": True,
        "is_initialized": True,
        "is_bf16_supported": gpu.capability >= (8, 0),
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": gpu.capability,
        "get_device_name": gpu.name,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "mem_get_info": (gpu.gigabytes * 10**9, gpu.gigabytes * 10**9),
        "set_rng_state": None,
        "synchronize": None,
        "_lazy_init": None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, always(answer))
    torch.cuda.device = always(contextlib.nullcontext())
    torch.version.cuda = "13.0"
    for name in ("getDevice", "setDevice", "exchangeDevice", "maybeExchangeDevice"):
        setattr(torch._C, f"_cuda_{name}", always(0))
    torch._C._cuda_getCurrentRawStream = always(0)
    torch.accelerator.is_available = always(False)
    torch.accelerator.current_accelerator = always(None)
    asked = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_compute_capability": 10 * gpu.capability[0] + gpu.capability[1],
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
    }
    for name, answer in asked.items():
        setattr(CudaInterface, name, staticmethod(always(answer)))
    for name in ("current_device", "get_device_properties"):
        setattr(CudaInterface.Worker, name, staticmethod(always(asked[name])))
    for name in ("cuda", "cuda:0"):
        register_interface_for_device(name, CudaInterface)


def replace_triton_driver(gpu: GPU) -> None:
    """Triton compiles for this GPU."""
    import triton
    from triton.backends.compiler import GPUTarget

    target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)
    driver = SimpleNamespace(
        get_current_target=always(target),
        get_current_device=always(0),
        get_current_stream=always(0),
        get_device_capability=always(gpu.capability),
        get_active_torch_device=always(torch.device("cuda", 0)),
    )
    triton.runtime.driver.set_active(driver)


def always(answer):
    """A function that returns `answer`, whatever it is called with."""
    return lambda *_, **__: answer
