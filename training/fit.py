"""Prepares the model before the first step, so that steps are fast and fit in memory.

Compiles it, and finds the micro-batch with which a step fits. Can recompute layers in the backward
pass and compute the loss in chunks of the logits. None of this changes parameters, losses or
checkpoints, and model.py knows nothing about it.
"""

import contextlib
import copy
import math
import os
import re
import shutil
import sys
import sysconfig
import tempfile
import traceback
from functools import partial
from pathlib import Path
from types import MethodType

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hardware
from config import Config
from formats import files
from hardware import Device
from model import GPT, IGNORE
from training import RunError, distributed
from training.memory import loss_chunks, micro_batch_to_try
from training.optimizer import reserve_state
from training.run import Run, largest_divisor
from training.step import evaluate, forward_backward

COMPILERS = {"win32": "cl", "darwin": "clang++"}  # called by torch.compile on a CPU; else g++
REMEDIES = {
    "win32": "start in Visual Studio's x64 Native Tools Command Prompt, with its C++ tools",
    "darwin": "xcode-select --install",
}
# Characters not allowed in a path, since torch.compile splits its commands as a shell does.
BREAKS_COMMAND = re.compile(r"[\s'\"]")


def fit(run: Run) -> str | None:
    """Compile the model, and take the micro-batch of the estimate, halved until a step fits.

    The batch of an optimizer step stays the same, and with it the losses. Sets run.compiled,
    run.ddp and run.micro_batch. Returns the reason if compilation failed, and then no process
    compiles; else None. Raises RunError if a single sequence does not fit.
    """
    problem, retried = None, False
    if run.compiles:
        # In one process, a search trains more shapes than 8; PyTorch would not compile the others.
        torch._dynamo.config.recompile_limit = 256
        if run.device.type == "cpu" or distributed.world_size > 1:
            run.compiled = compile_layers(run.model)
        else:  # on a single GPU, one graph is the fastest
            run.compiled = torch.compile(run.model, dynamic=False)
    run.micro_batch = micro_batch_to_try(run)
    while True:
        error = try_step(run)
        no_memory = error is not None and hardware.out_of_memory(error)
        failed = error is not None and not no_memory
        if failed:
            if run.compiled is run.model:
                raise error
            torch._dynamo.reset()
            if not retried and delete_empty_code():
                retried = True
                continue
            problem = f"torch.compile failed: {files.error_message(error)}"
        failed, no_memory = distributed.all_reduce_max(failed, no_memory)
        if failed:  # in any process: the micro-batch is one for all, and takes more memory now
            problem = problem or "torch.compile failed in another process"
            run.compiles, run.compiled = False, run.model
            run.micro_batch = micro_batch_to_try(run)
            continue
        if not no_memory:
            break
        if run.micro_batch == 1:
            c = run.config
            raise RunError(
                f"out of memory on {run.device.name} with a single sequence of {c.block_size}"
                " tokens. End other programs that use the memory; or try activation_checkpointing"
                f" = True; or begin a run with block_size = {c.block_size // 2}, or with a smaller"
                f" n_layer ({c.n_layer}) or n_embd ({c.n_embd})"
            )
        run.micro_batch = largest_divisor(run.local_batch, run.micro_batch // 2)
    run.ddp = data_parallel(run.compiled) if distributed.world_size > 1 else run.compiled
    return problem


def try_step(run: Run) -> Exception | None:
    """Try a forward and backward pass of up to two micro-batches; returns the error, if any.

    Changes no weights. With dropout, evaluation is a different graph: tries that too.
    """
    try:
        reserve_state(run.optimizer)
        if distributed.world_size > 1:  # DistributedDataParallel keeps gradients allocated
            for p in run.model.parameters():
                p.grad = torch.zeros_like(p)
        rows, size = min(run.local_batch, 2 * run.micro_batch), run.micro_batch
        x, y = run.data.train.batch(0, rows, run.config.seed)
        forward_backward(run.compiled, x, y, size, run.cast, run.scaler)
        if run.model.config.dropout:
            evaluate(run.compiled, [(x[:size], y[:size])], run.cast)
        hardware.synchronize(run.device.torch)
        return None
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # the frames keep tensors alive
        return error
    finally:
        run.model.train()
        run.model.zero_grad(set_to_none=True)
        hardware.release_memory(run.device.torch)


# -- compiling -------------------------------------------------------------------------------------


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


def data_parallel(model) -> DistributedDataParallel:
    """The model with its gradients averaged over all processes."""
    # Buffers are the same in all processes; DDP would send them in every step.
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


# -- less memory -----------------------------------------------------------------------------------


def apply_memory_options(model: GPT, config: Config, device: Device) -> None:
    """Checkpoint activations if the setting asks for it; chunk the loss if the logits are large."""
    if config.activation_checkpointing:
        use_activation_checkpointing(model)
    chunks = loss_chunks(config, model.config.vocab_size, device)
    if chunks > 1:
        use_chunked_loss(model, chunks)


def use_activation_checkpointing(model: GPT) -> None:
    """Store only each layer's input, and recompute the layer in the backward pass.

    Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost". The layers take a third more
    FLOPs per step.
    """
    options = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}

    def checkpointed(plain, *inputs):
        if not torch.is_grad_enabled():  # generation
            return plain(*inputs)
        return checkpoint(plain, *inputs, **options)

    for block in model.h:
        block.forward = partial(checkpointed, block.forward)


def use_chunked_loss(model: GPT, chunks: int) -> None:
    """Compute head and loss in chunks of the tokens, and recompute them in the backward pass.

    Only one chunk's logits are in memory at a time.
    """
    plain = type(model).head

    def head(self, x, targets):
        if targets is None:
            return plain(self, x, targets)
        pairs = zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        total = sum(checkpoint(chunk_loss, self, x, y, use_reentrant=False) for x, y in pairs)
        return total / (targets != IGNORE).sum().clamp(min=1)

    def chunk_loss(self, x, targets):  # summed over the targets
        return plain(self, x[None], targets[None]) * (targets != IGNORE).sum()

    model.head = MethodType(head, model)
