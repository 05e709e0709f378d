"""A GPU that is not there, for PyTorch's compiler: it lowers a model for it, and nothing runs.

PyTorch's CPU build and Triton are all that it takes: the compiler asks the device for its
generation and its multiprocessors, and gets them from a table. Tensors are fake (FakeTensorMode):
they have a shape, a type and a device, and no numbers. Nothing takes it back, so it belongs into
processes of its own.
"""

import contextlib
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import torch
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.codecache import CppCodeCache
from torch._inductor.runtime import triton_helpers
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map

# Compute capability and multiprocessors; the names are those of hardware.GPUS.
CHIPS = {"T4": (7, 5, 40), "A100": (8, 0, 108), "H200": (9, 0, 132), "RTX 5090": (12, 0, 170)}


def missing() -> str | None:
    """What this machine lacks, in a sentence; None where it has all."""
    if torch.version.cuda:
        return "PyTorch is built for CUDA here; the fake device needs the build for CPUs"
    if importlib.util.find_spec("triton") is None:
        return "triton is missing, which PyTorch's compiler writes kernels for GPUs in"
    return None


def install(name: str) -> None:
    """From here on PyTorch believes that its first CUDA device is this one. name: of CHIPS."""
    import triton
    from triton.backends.compiler import GPUTarget

    CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text())
    major, minor, multiprocessors = CHIPS[name]
    properties = SimpleNamespace(
        name=name,
        major=major,
        multi_processor_count=multiprocessors,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor={7: 1024, 12: 1536}.get(major, 2048),
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "device": contextlib.nullcontext(),
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (major, minor),
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }
    for call, answer in answers.items():
        setattr(torch.cuda, call, always(answer))
    torch.version.cuda = "13.0"
    CudaInterface.get_device_properties = staticmethod(always(properties))
    triton_helpers.set_driver_to_gpu = always(None)
    target = GPUTarget("cuda", 10 * major + minor, 32)
    triton.runtime.driver.set_active(SimpleNamespace(get_current_target=always(target)))


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
            size = value.untyped_storage().nbytes() // value.itemsize
            whole = torch.empty(size, dtype=value.dtype, device="cuda")
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        node.meta.pop("tensor_meta", None)
    graph.recompile()
    return [moved(value) for value in inputs]
