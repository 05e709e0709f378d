"""torch.compile: whether it pays, what it lacks on this machine, and how it gets the model.

model.py knows nothing about it.
"""

import contextlib
import copy
import importlib.util
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import MethodType

import torch

from config import Config
from hardware import Device
from model import GPT
from training import distributed

COMPILERS = {"win32": "cl", "darwin": "clang++"}  # called by torch.compile on a CPU; else g++
REMEDIES = {
    "win32": "start in Visual Studio's x64 Native Tools Command Prompt, with its C++ tools",
    "darwin": "xcode-select --install",
}
# Characters not allowed in a path, since torch.compile splits its commands as a shell does.
BREAKS_COMMAND = re.compile(r"[\s'\"]")


def should_compile(config: Config, model: GPT, device: Device, total_steps: int) -> bool:
    """The setting `compile`; if it is None, whether the run is long enough to repay compilation.

    On a CPU, compiling a small model takes 37 s, and saves a third of each step in bfloat16 and a
    tenth in float32, which pays off after about 2e13 and 5e13 FLOPs. On a GPU 1e15 is an estimate:
    some ten seconds of uncompiled steps. Never on mps, where PyTorch's compiler is a prototype.
    """
    if config.compile is not None:
        return config.compile
    tokens = total_steps * config.tokens_per_step
    flops = tokens * model.flops_per_token() / distributed.world_size
    on_cpu = 5e13 if device.dtype == torch.float32 else 2e13
    return flops > {"cpu": on_cpu, "cuda": 1e15, "xpu": 1e15}.get(device.type, math.inf)


def compiler_obstacle(device: str) -> str:
    """Why torch.compile cannot work on this machine, in a sentence; "" if no reason is known.

    Checks its requirements, since torch.compile takes half a minute to fail. device: its type.
    """
    names = [os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")]
    folders = [Path(torch.__file__).parent, Path(sysconfig.get_path("include"))]
    folders.append(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()))
    if device == "cuda" and sys.platform == "linux":  # Triton accepts blanks in paths
        names, folders = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"], []
    elif device == "cuda" and not importlib.util.find_spec("triton"):
        return "Triton is missing; pip install triton-windows, in the version for this PyTorch"
    elif device != "cpu":
        return ""
    if not any(map(shutil.which, names)):
        remedy = REMEDIES.get(sys.platform, "on Debian: apt-get install g++ python3-dev")
        return f"there is no compiler {' or '.join(names)}; {remedy}"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            f"Python's headers are not in {sysconfig.get_path('include')}; on Debian: apt-get"
            " install python3-dev"
        )
    for folder in folders:
        if BREAKS_COMMAND.search(str(folder)):
            return (
                f"{folder} has a blank or a quote in its path, which torch.compile cannot pass to a"
                " compiler; move the environment, or for the cache set TORCHINDUCTOR_CACHE_DIR to"
                " another folder"
            )
    if folders and is_noexec(folders[-1]):
        return (
            f"no code may run from the disk of {folders[-1]}, as it is mounted noexec; set"
            " TORCHINDUCTOR_CACHE_DIR to another folder"
        )
    return ""


def is_noexec(folder: Path) -> bool:
    """True if Linux runs no code from the disk of a folder, which need not exist yet."""
    if sys.platform != "linux":
        return False
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return bool(os.statvfs(there).f_flag & os.ST_NOEXEC)


def compile_model(model: GPT, device: Device):
    """The model compiled: on a single GPU as one graph, which is the fastest; else by layers."""
    # In one process, a search trains more shapes than 8; PyTorch would not compile the others.
    torch._dynamo.config.recompile_limit = 256
    if device.type == "cpu" or distributed.world_size > 1:
        return compile_layers(model)
    return torch.compile(model, dynamic=False)


def compile_layers(model):
    """A model that shares the weights of `model`, with each layer and the head compiled separately.

    The head includes the loss. Equal layers compile only once, which halves the time to the first
    step. Each layer's gradients are ready when its own backward pass ends, so several processes can
    send them during the next layer's.
    """
    compiled = copy.copy(model)
    layers = [torch.compile(block, dynamic=False) for block in model.h]
    compiled._modules = model._modules | {"h": torch.nn.ModuleList(layers)}
    # A method of the copy, whose `training` an evaluation sets.
    compiled.head = torch.compile(MethodType(model.head.__func__, compiled), dynamic=False)
    return compiled


def delete_empty_code() -> bool:
    """Delete empty files from the cache of torch.compile; returns True if there were any.

    A kill can leave an empty library that was being linked, and a power cut can empty any file.
    Every later compilation would load it and fail.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir  # the import takes a second

    code = [path for kind in ("so", "py") for path in Path(cache_dir()).rglob(f"*.{kind}")]
    empty = []
    for path in code:
        with contextlib.suppress(FileNotFoundError):  # another run's temporary file
            if not path.stat().st_size:
                empty.append(path)
    for path in empty:
        path.unlink(missing_ok=True)
    return bool(empty)
