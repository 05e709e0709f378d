"""A GPU that is not there, for PyTorch's compiler: it lowers a model for it, and nothing runs.

PyTorch's CPU build and Triton are all that it takes: the compiler asks the device for its
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
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map


class Chip(NamedTuple):
    """Figures of a data sheet. shared_memory: bytes for a block of threads."""

    capability: tuple[int, int]
    multiprocessors: int
    shared_memory: int


CHIPS = {  # the names are those of hardware.GPUS
    "T4": Chip((7, 5), 40, 65_536),
    "A100": Chip((8, 0), 108, 166_912),
    "H200": Chip((9, 0), 132, 232_448),
    "RTX 5090": Chip((12, 0), 170, 101_376),
}


def missing() -> str | None:
    """What this machine lacks, in a sentence; None where it has all."""
    if torch.version.cuda:
        return "PyTorch is built for CUDA here; the fake device needs the build for CPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is missing, which PyTorch's compiler writes kernels for GPUs in"
    if not shutil.which("g++"):
        return "g++ is missing, which builds what PyTorch's CPU build lacks of CUDA"
    return None


def install(name: str) -> None:
    """From here on PyTorch believes that its first CUDA device is this one. name: of CHIPS."""
    import triton
    from torch._dynamo.device_interface import CudaInterface, register_interface_for_device
    from torch._inductor.runtime import triton_helpers
    from triton.backends.compiler import GPUTarget

    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder) / "gpu.so")
        ctypes.CDLL(f"{folder}/gpu.so", mode=ctypes.RTLD_GLOBAL)
    major, minor = CHIPS[name].capability
    properties = SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=CHIPS[name].multiprocessors,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor={7: 1024, 12: 1536}.get(major, 2048),
        max_threads_per_block=1024,
        warp_size=32,
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "device": contextlib.nullcontext(),
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": None,
    }
    for call, answer in answers.items():
        setattr(torch.cuda, call, always(answer))
    torch.version.cuda = "13.0"
    torch.accelerator.is_available = always(False)
    torch.accelerator.current_accelerator = always(None)
    CudaInterface.is_available = staticmethod(always(True))
    CudaInterface.get_compute_capability = staticmethod(always(10 * major + minor))
    CudaInterface.get_device_properties = staticmethod(always(properties))
    CudaInterface.Worker.get_device_properties = staticmethod(always(properties))
    for device in ("cuda", "cuda:0"):
        register_interface_for_device(device, CudaInterface)
    triton_helpers.set_driver_to_gpu = always(None)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=always(target)))


def build(library: Path) -> None:
    """Compile fake_device.cpp, in three seconds."""
    source, home = Path(__file__).with_suffix(".cpp"), Path(torch.__file__).parent
    command = ["g++", "-shared", "-fPIC", "-std=c++20", source, "-o", library]
    command += [f"-I{home}/include", f"-I{home}/include/torch/csrc/api/include"]
    command += [f"-L{home}/lib", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{home}/lib"]
    subprocess.run(command, check=True)


def always(answer):
    """A function that returns `answer`, whatever it is called with."""
    return lambda *_, **__: answer


def move(graph, inputs):
    """A graph that was traced on the CPU, and its inputs, on the fake GPU.

    PyTorch's CPU build differentiates nothing on another device.
    """

    def moved(value):
        if not isinstance(value, FakeTensor):
            return value
        with value.fake_mode:
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            whole = torch.empty(value.storage_offset() + last + 1, dtype=value.dtype, device="cuda")
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        node.meta.pop("tensor_meta", None)
    graph.recompile()
    return [moved(value) for value in inputs]
