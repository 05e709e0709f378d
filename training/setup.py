"""A run's settings -> the parts that it is made of.

`build` makes them in the order in which they depend on each other: device, data, checkpoint, model,
schedule. What does not fit is an error in a sentence.
"""

import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import hardware
from config import Config, ConfigError
from formats import files, run_folder, run_log
from formats.address import recorded
from formats.data_folder import DataError, Meta, read_meta
from formats.pretrained import Pretrained
from hardware import Device
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer
from training import RunError, distributed, shard
from training.adapt import adapt
from training.conversations import Conversations, check_masked
from training.dataset import Data, Dataset
from training.fp8 import FP8Head
from training.loggers import check_installed
from training.memory import MicroBatch
from training.optimizer import make_optimizer
from training.resume import (
    Checkpoint,
    changed_settings,
    check_same,
    check_tokenizer,
    find_start,
    load_weights,
    with_shape,
)
from training.samples import check_prompts
from training.schedule import Clock, Schedule
from training.state import Progress, State
from training.trainer import Trainer


@dataclass
class Run:
    """The parts of one training run; train.py has them work together.

    compiles: False, True or "max". log: the records up to this step. best: that of the best
    evaluation whose step is still there.
    """

    config: Config
    folder: Path
    device: Device
    data: Data
    state: State
    schedule: Schedule
    micro_batch: MicroBatch
    trainer: Trainer
    clock: Clock
    compiles: bool | str
    log: list[dict]
    best: dict | None

    @property
    def tokens(self) -> int:
        return self.state.progress.sequences * self.config.block_size

    @property
    def epoch(self) -> float:
        return self.state.progress.sequences / self.data.train.windows

    def versions(self) -> dict:
        """What the run runs on."""
        return {
            "torch": torch.__version__,
            "processes": distributed.world_size,
            "device": self.device.name,
            "dtype": str(self.device.dtype).removeprefix("torch."),
        }


def build(config: Config) -> Run:
    """Find device and data, build the model, continue from a checkpoint if there is one.

    Raises ConfigError, DataError, CheckpointError, DeviceError or RunError for what does not fit.
    """
    started = time.monotonic()
    folder = Path(config.checkpoint_dir)
    check_installed(config)
    device = open_device(config)
    start = find_start(config)
    config = with_shape(config, start)
    data = open_data(config, device)
    check_prompts(data.tokenizer, config.sample_prompts)
    state = open_model(config, data, device, start)
    log, best = read_past(folder, state.progress.step)
    schedule = make_schedule(config, state.progress, data, log)
    check_same_on_all_ranks(config, schedule, data.meta)
    micro_batch = MicroBatch(config, device, folder)
    return Run(
        config=config,
        folder=folder,
        device=device,
        data=data,
        state=state,
        schedule=schedule,
        micro_batch=micro_batch,
        trainer=Trainer(config, device, data, state, schedule, micro_batch),
        clock=Clock(config, state.progress, device.torch, started),
        compiles=should_compile(config, state.model, device, schedule),
        log=log,
        best=best,
    )


# -- device and data -------------------------------------------------------------------------------


def open_device(config: Config) -> Device:
    """The device of this process, made ready."""
    torch.set_float32_matmul_precision("high")  # TF32 where products stay in float32
    device = hardware.open_device(config.device, config.dtype, distributed.local_rank)
    if config.allreduce_dtype == "bfloat16" and device.type != "cuda":
        raise ConfigError(f"allreduce_dtype = bfloat16 needs GPUs; {device.type} takes float32")
    if distributed.world_size > 1 and device.type in ("xpu", "mps"):
        raise ConfigError(f"several processes train on cuda or cpu; {device.type} takes one")
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device.torch).set_device(device.torch)
    if device.type == "mps":
        torch.mps.set_per_process_memory_fraction(1.0)  # else macOS swaps before memory runs out
    distributed.init_nccl(device.torch)
    return device


def open_data(config: Config, device: Device) -> Data:
    """The prepared folder: its tokenizer and its splits, val None where it holds no tokens."""
    meta = read_meta(config.data_dir, config.init_from)
    tokenizer = open_tokenizer(config, meta)
    split_type = Dataset
    if config.loss_on == "assistant":
        check_masked(config.data_dir, meta)
        split_type = Conversations
    options = (config.block_size, device.torch, config.data_location)
    train = split_type(config.data_dir, meta, "train", *options)
    val = None
    if meta.splits["val"].counted(config.loss_on).tokens:
        val = split_type(config.data_dir, meta, "val", *options)
    return Data(meta, tokenizer, train, val)


def open_tokenizer(config: Config, meta: Meta) -> Tokenizer:
    """The tokenizer of a prepared folder. Raises DataError if another one made the data."""
    path = Path(config.data_dir) / meta.tokenizer["file"]
    tokenizer = Tokenizer.load(path)
    if files.sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(
            f"{path} is not the tokenizer that made {config.data_dir}: its checksum is not the one "
            "in meta.json; copy the right one there, or prepare the data again"
        )
    return tokenizer


# -- model -----------------------------------------------------------------------------------------


def open_model(
    config: Config, data: Data, device: Device, start: Checkpoint | Pretrained | None
) -> State:
    """Model, optimiser and counters, as in `start` or new."""
    shape = model_shape(config, data.meta.vocab_size, start)
    if isinstance(start, Pretrained):
        check_tokenizer(start, config.data_dir, data.tokenizer)
    if isinstance(start, Checkpoint):
        check_same(start, config, shape, data.meta.identity())
        print(changed_settings(start.state["settings"], recorded(asdict(config))), end="")

    torch.manual_seed(config.seed)
    model = GPT(shape, config.zero_init)
    adapt(model, config, device)
    if config.shard and distributed.world_size > 1:
        shard.shard_model(model, device.torch)
    model = model.to(device.torch)
    optimizer = make_optimizer(model, config, device.torch)
    scaler = torch.amp.GradScaler(device.type, enabled=device.dtype == torch.float16)
    progress = Progress()
    if isinstance(start, Pretrained):
        load_weights(model, start.cut_to(config.block_size))
    if isinstance(start, Checkpoint):
        progress = start.load(model, optimizer, scaler)
    return State(model, optimizer, scaler, progress)


def model_shape(
    config: Config, vocab_size: int, start: Checkpoint | Pretrained | None = None
) -> GPTConfig:
    """The model's shape for these settings and a tokenizer's vocabulary.

    Large vocabularies are rounded up to a multiple of 64, as tensor cores like it (GPT-2's 50,257
    becomes 50,304); the ids so added are never sampled. With init_from the vocabulary stays that of
    the weights, since new rows would take probability from the trained ones.
    """
    if start and config.init_from:
        vocab_size = start.config.vocab_size
    elif vocab_size > 1024:
        vocab_size = 64 * math.ceil(vocab_size / 64)
    shape = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
    try:
        return GPTConfig(vocab_size=vocab_size, **shape)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def should_compile(config: Config, model: GPT, device: Device, schedule: Schedule) -> bool | str:
    """Whether to compile: as the setting says, else if the whole run repays it."""
    if config.compile is not None:
        return config.compile
    if isinstance(model.lm_head, FP8Head):  # uncompiled it would compute in 16
        return True
    tokens = schedule.total_steps * config.batch_size * config.block_size
    flops = tokens * model.flops_per_token() / distributed.world_size
    return hardware.should_compile(device.torch, flops)


# -- schedule --------------------------------------------------------------------------------------


def make_schedule(config: Config, progress: Progress, data: Data, log: list[dict]) -> Schedule:
    """Where the run ends, and what is due on the way. log: what was evaluated already."""
    total_steps = count_steps(config, progress, data.train.windows)
    evaluated = max((record["step"] for record in log if "val_loss" in record), default=0)
    return Schedule(config, progress, total_steps, evaluated, data.val is not None)


def count_steps(config: Config, progress: Progress, windows: int) -> int:
    """The step at which the run ends. windows: sequences an epoch."""
    ends = []
    if config.max_steps is not None:
        ends.append(config.max_steps)
    if config.epochs is not None:
        left = config.epochs * windows - progress.sequences
        ends.append(progress.step + max(0, math.ceil(left / config.batch_size)))
    return min(ends)


def read_past(folder: Path, step: int) -> tuple[list[dict], dict | None]:
    """The log up to `step`, and the best evaluation of a step that is still there."""
    log = [record for record in run_log.read(folder) if record["step"] <= step]
    # An evaluation that was cut off before its loss was recorded comes again, and its answers too.
    evaluated = {record["step"] for record in log if "val_loss" in record}
    log = [r for r in log if "samples" not in r or r["step"] in evaluated]
    named = files.read_json(folder / "best.json", step=int, val_loss=float) or {}
    kept = {run_folder.step_of(path) for path in run_folder.steps(folder)}
    scored = [
        record
        for record in (named, *log)
        if record.get("val_loss") is not None and record["step"] in kept and record["step"] <= step
    ]
    return log, min(scored, key=lambda record: record["val_loss"], default=None)


def check_same_on_all_ranks(config: Config, schedule: Schedule, meta: Meta) -> None:
    """Raises RunError unless all processes see the same settings, checkpoint, log and data."""
    seen = {
        "settings": asdict(config) | {"checkpoint_dir": None, "data_dir": None},
        "step": schedule.progress.step,
        "evaluated": schedule.evaluated,
        "total_steps": schedule.total_steps,
        "data": meta.identity(),
    }
    checksum = int(run_folder.fingerprint(seen)[:12], 16)
    if len(set(distributed.gather(checksum))) > 1:
        raise RunError(
            "the processes of this run do not see the same settings, checkpoint or data; several "
            f"machines need {config.checkpoint_dir} and {config.data_dir} on a shared disk, or "
            "copies on each"
        )
