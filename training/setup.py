"""A run's settings -> the parts that it is made of.

`build` makes them in the order in which they depend on each other: device, data, start, model,
schedule. What does not fit is an error in a sentence.
"""

import math
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

import hardware
from config import Config, ConfigError
from formats import files, run_folder
from formats.data_folder import Meta, check_masked, read_meta, tokenizer_file
from formats.mirror import Mirror, address_of
from formats.run_folder import CheckpointError
from hardware import Device, DeviceError
from model import GPT
from tokenizer_bpe import Tokenizer
from training import RunError, distributed
from training.dataset import Data, Dataset
from training.induction import add_induction_head
from training.low_memory import apply_memory_options
from training.optimizer import make_optimizer
from training.recorder import without_unknown_characters
from training.run import Run
from training.saver import Saver
from training.schedule import Clock, Schedule, weight_decay_at
from training.start import Checkpoint, NewRun, Start, find_start
from training.state import Counters, State
from training.trainer import Trainer

COMPILERS = {"win32": "cl", "darwin": "clang++"}  # that torch.compile calls for a CPU; else g++


def build(config: Config) -> Run:
    """Find device and data, build the model, continue from a checkpoint if there is one.

    Raises ConfigError, DataError, CheckpointError, DeviceError or RunError for what does not fit.
    """
    started, given = time.monotonic(), config
    folder = Path(config.checkpoint_dir)
    device = open_device(config)
    start = find_start(config)
    config = start.settings(config)
    data = open_data(config, device)
    config = without_unknown_characters(config, data.tokenizer)
    start.check(config, data)
    log, val_losses = read_past(folder, start.counters.step)
    schedule = make_schedule(config, start.counters, data, log)
    try:
        state = open_model(config, data, device, start, schedule)
    except CheckpointError:
        gone = isinstance(start, Checkpoint) and not start.folder.exists()
        if not gone or distributed.world_size > 1:
            raise
        return build(given)  # as a dry run, while a training process saves and rotates
    check_same_on_all_ranks(config, schedule, data.meta)
    compiles = should_compile(config, state.model, device, schedule)
    obstacle = compiler_obstacle(device.type) if compiles else ""
    return Run(
        id=run_folder.run_id(folder) or run_folder.new_id(),
        config=config,
        folder=folder,
        device=device,
        data=data,
        start=start,
        state=state,
        schedule=schedule,
        trainer=Trainer(config, device, data, state, schedule),
        clock=Clock(config, state.counters, device.torch, started),
        saver=make_saver(config, data, state, val_losses),
        compiles=compiles and not obstacle,
        obstacle=obstacle,
        log=log,
    )


# -- device and data -------------------------------------------------------------------------------


def open_device(config: Config) -> Device:
    """The device of this process, made ready."""
    torch.set_float32_matmul_precision("high")  # TF32 where products stay in float32
    device = hardware.find_device(config.device, distributed.local_rank)
    if distributed.world_size > 1 and device.type in ("xpu", "mps"):
        raise ConfigError(f"several processes train on cuda or cpu; {device.type} takes one")
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device).set_device(device)
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(1.0)  # else macOS swaps before memory runs out
    try:
        first = torch.zeros((), device=device)
    except RuntimeError as error:
        if hardware.out_of_memory(error):
            raise
        raise DeviceError(
            f"device = {device} does not work: {files.error_message(error)}. See the causes in"
            " docs/troubleshooting.md#packages-and-drivers; device = cpu trains without it"
        ) from None
    # NCCL sets itself up now, while the GPU has memory for it, and finds two processes on one GPU.
    distributed.all_reduce_mean(first)
    return hardware.look_up(device, config.dtype)


def open_data(config: Config, device: Device) -> Data:
    """The prepared folder: its tokenizer and its splits, val None where it holds no tokens."""
    meta = read_meta(config.data_dir)
    tokenizer = Tokenizer.load(tokenizer_file(config.data_dir, meta))
    if config.loss_on == "assistant":
        check_masked(config.data_dir, meta)
    options = (config.block_size, device.torch, config.loss_on)
    train, val = Dataset(config.data_dir, meta, "train", *options), None
    if meta.splits["val"].counted(config.loss_on).tokens:
        val = Dataset(config.data_dir, meta, "val", *options)
    return Data(meta, tokenizer, train, val)


# -- model -----------------------------------------------------------------------------------------


def open_model(
    config: Config, data: Data, device: Device, start: Start, schedule: Schedule
) -> State:
    """Model, optimiser and counters, as in `start` or new."""
    torch.manual_seed(config.seed)
    model = GPT(start.shape(config, data.meta.vocab_size), config.zero_init)
    if isinstance(start, NewRun) and config.induction_init:
        add_induction_head(model)
    apply_memory_options(model, config, device)
    model = model.to(device.torch)
    epochs = schedule.total_steps * config.batch_size / data.train.windows
    decay = weight_decay_at(schedule.total_steps, epochs, config)
    optimizer = make_optimizer(model, replace(config, weight_decay=decay), device.torch)
    scaler = torch.amp.GradScaler(device.type, enabled=device.dtype == torch.float16)
    state = State(model, optimizer, scaler, schedule.counters)
    start.load(state)
    return state


def should_compile(config: Config, model: GPT, device: Device, schedule: Schedule) -> bool:
    """The setting `compile`; without one, True if the run is long enough to repay it.

    On a CPU, compiling a small model takes half a minute and a sixth off each step, which pays off
    after about 4e13 operations. On a GPU 1e15 are an estimate: some ten seconds of uncompiled
    steps. PyTorch's compiler for mps is a prototype.
    """
    if config.compile is not None:
        return config.compile
    tokens = schedule.total_steps * config.tokens_per_step
    flops = tokens * model.flops_per_token() / distributed.world_size
    return flops > {"cpu": 4e13, "cuda": 1e15, "xpu": 1e15}.get(device.type, math.inf)


def compiler_obstacle(device: str) -> str:
    """Why torch.compile cannot work on this machine, in a sentence; "" where nothing is known.

    Looks at what it needs before it takes half a minute to find out. device: its type.
    """
    names = [os.environ.get("CXX") or COMPILERS.get(sys.platform, "g++")]
    folders = [Path(torch.__file__).parent, Path(sysconfig.get_path("include"))]
    folders.append(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or tempfile.gettempdir()))
    if device == "cuda" and sys.platform == "linux":  # Triton passes paths with blanks on
        names, folders = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"], []
    elif device != "cpu":
        return ""
    if not any(map(shutil.which, names)):
        return f"there is no compiler {' or '.join(names)}; on Debian: apt-get install g++"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return (
            f"Python's headers are not in {sysconfig.get_path('include')}; on Debian: apt-get"
            " install python3-dev"
        )
    for folder in folders:
        if " " in str(folder):
            return (
                f"{folder} has a blank in its path, which compilers take for two paths; move the"
                " environment, or for the cache set TORCHINDUCTOR_CACHE_DIR to another folder"
            )
    return ""


# -- schedule and saves ----------------------------------------------------------------------------


def make_schedule(config: Config, counters: Counters, data: Data, log: list[dict]) -> Schedule:
    """Where the run ends, and what is due on the way. log: what was evaluated already."""
    total_steps = count_steps(config, counters, data.train.windows)
    evaluated = max((record["step"] for record in log if "val_loss" in record), default=0)
    return Schedule(config, counters, total_steps, evaluated, data.val is not None)


def count_steps(config: Config, counters: Counters, windows: int) -> int:
    """The step at which the run ends. windows: sequences per epoch."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.epochs is not None:
        left = config.epochs * windows - counters.sequences
        ends.append(counters.step + max(0, math.ceil(left / config.batch_size)))
    return min(ends)


def make_saver(config: Config, data: Data, state: State, val_losses: dict[int, float]) -> Saver:
    """The saver of the run's folder; it writes nothing before begin()."""
    folder, mirror = Path(config.checkpoint_dir), None
    if config.mirror and distributed.is_main:
        mirror = Mirror(address_of(config.mirror, folder))
    tokenizer_json, step = data.tokenizer.to_json(), state.counters.step
    return Saver(folder, config.keep_last, tokenizer_json, mirror, step, val_losses)


def read_past(folder: Path, step: int) -> tuple[list[dict], dict[int, float]]:
    """The log up to `step`, and {step: validation loss} of the evaluations with a finite one."""
    log = [record for record in run_folder.read_log(folder) if record["step"] <= step]
    evaluated = {record["step"]: record["val_loss"] for record in log if "val_loss" in record}
    # An evaluation that was cut off before its loss was recorded comes again, and its samples too.
    log = [r for r in log if "samples" not in r or r["step"] in evaluated]
    # best.json knows of an evaluation whose record a full disk did not take.
    best = run_folder.read_best(folder)
    if best and best["step"] <= step:
        evaluated.setdefault(best["step"], best["val_loss"])
    return log, {step: loss for step, loss in evaluated.items() if loss is not None}


def check_same_on_all_ranks(config: Config, schedule: Schedule, meta: Meta) -> None:
    """Raises RunError unless all processes see the same settings, checkpoint, log and data."""
    seen = {
        "settings": config.recorded() | {"checkpoint_dir": None, "data_dir": None},
        "step": schedule.counters.step,
        "evaluated": schedule.evaluated,
        "total_steps": schedule.total_steps,
        "data": meta.identity(),
    }
    checksum = int(files.fingerprint(seen)[:12], 16)
    if len(set(distributed.gather(checksum))) > 1:
        raise RunError(
            "the processes of this run do not see the same settings, checkpoint or data; several "
            f"machines need {config.checkpoint_dir} and {config.data_dir} on a shared disk, or "
            "copies on each"
        )
