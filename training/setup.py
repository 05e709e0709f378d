"""A run's settings -> the parts that it is made of. Writes nothing.

`build` puts them together in the order in which they depend on each other; the functions below it
each make one part, and say in a sentence what does not fit.
"""

import math
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch

import hardware
from config import Config, ConfigError
from formats import files, pretrained, run_folder, run_log
from formats.data_folder import DataError, Meta, read_meta
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer
from training import distributed, shard
from training.adapt import adapt
from training.conversations import Conversations, check_masked
from training.dataset import Dataset
from training.errors import RunError
from training.init_from import check_fits, fill_shape
from training.loggers import check_installed
from training.memory import Memory
from training.optimizer import make_optimizer
from training.resume import (
    Checkpoint,
    changed_settings,
    check_same,
    find_checkpoint,
    restore_optimizer,
    restore_weights,
)
from training.samples import check_prompts
from training.schedule import Budget, Clock, Schedule
from training.state import Progress, State
from training.trainer import Trainer


@dataclass
class Run:
    """The parts of one training run; train.py has them work together.

    log: the records up to this step. best: that of the best evaluation whose step is still there.
    """

    config: Config
    folder: Path
    device: torch.device
    dtype: torch.dtype
    meta: Meta
    tokenizer: Tokenizer
    state: State
    trainer: Trainer
    memory: Memory
    schedule: Schedule
    clock: Clock
    budget: Budget
    compiles: bool | str
    log: list[dict]
    best: dict | None

    @property
    def tokens(self) -> int:
        """Training tokens seen so far."""
        return self.state.progress.sequences * self.config.block_size

    @property
    def epoch(self) -> float:
        """Passes over the training data so far."""
        return self.state.progress.sequences / self.trainer.train_data.windows

    def versions(self) -> dict:
        """What the run runs on."""
        return {
            "torch": torch.__version__,
            "processes": distributed.world_size,
            "device": hardware.describe(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
        }


def build(config: Config) -> Run:
    """Find device and data, build the model, continue from a checkpoint if there is one.

    Raises ConfigError, DataError, CheckpointError, DeviceError or RunError for what does not fit.
    """
    started = time.monotonic()
    folder = Path(config.checkpoint_dir)
    check_installed(config)
    device, dtype = open_device(config)
    meta = read_meta(config.data_dir, config.init_from)
    if config.loss_on == "assistant":
        check_masked(config.data_dir, meta)
    tokenizer = load_tokenizer(config.data_dir, meta)
    check_prompts(tokenizer, config.sample_prompts)

    checkpoint = find_checkpoint(config)
    weights = find_weights(config, tokenizer, checkpoint)
    shape = find_shape(config, meta, checkpoint, weights)
    if checkpoint:
        check_same(checkpoint, config, shape, meta.identity())
        print(changed_settings(checkpoint.state["settings"], asdict(config)), end="")

    kind = Conversations if config.loss_on == "assistant" else Dataset
    place = (config.block_size, device, config.data_location)
    train_data = kind(config.data_dir, meta, "train", *place)
    val_data = None
    if meta.splits["val"].counted(config.loss_on).tokens:
        val_data = kind(config.data_dir, meta, "val", *place)

    state = build_state(config, shape, device, dtype, checkpoint, weights)
    log, best = read_past(folder, state.progress.step)
    evaluated = max((r["step"] for r in log if "val_loss" in r), default=0)
    total_steps = count_steps(config, state.progress, train_data.windows)
    schedule = Schedule(config, state.progress, total_steps, evaluated, val_data is not None)
    known_memory = files.read_json(folder / "memory.json", micro_batch=int, eval_micro_batch=int)
    memory_kind = shard.FixedMemory if shard.wanted(config) else Memory
    local_batch = config.batch_size // distributed.world_size
    memory = memory_kind(config, device, local_batch, known_memory, state.model)
    check_together(config, folder, meta, schedule)
    if not shard.wanted(config):  # else it was done before
        check_same_weights(state.model)

    clock = Clock(state.progress, device, started)
    return Run(
        config=config,
        folder=folder,
        device=device,
        dtype=dtype,
        meta=meta,
        tokenizer=tokenizer,
        state=state,
        trainer=Trainer(config, state, schedule, memory, train_data, val_data, device, dtype),
        memory=memory,
        schedule=schedule,
        clock=clock,
        budget=Budget(config, clock),
        compiles=compilation_pays(config, state.model, device, train_data.windows),
        log=log,
        best=best,
    )


def open_device(config: Config) -> tuple[torch.device, torch.dtype]:
    """The device and the precision of its products, made ready."""
    device = hardware.find_device(config.device, distributed.local_rank)
    hardware.respect_quota()
    dtype = hardware.find_dtype(device, config.dtype)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        distributed.init_nccl(device)
    torch.set_float32_matmul_precision("high")  # TF32 where products stay in float32
    return device, dtype


def load_tokenizer(data_dir: str, meta: Meta) -> Tokenizer:
    """The tokenizer of a prepared folder. Raises DataError if another one made the data."""
    path = Path(data_dir) / meta.tokenizer["file"]
    tokenizer = Tokenizer.load(path)
    if files.sha256(path) != meta.tokenizer["sha256"]:
        raise DataError(
            f"{path} is not the tokenizer that made {data_dir}: its checksum is not the one in "
            "meta.json; copy the right one there, or prepare the data again"
        )
    return tokenizer


def find_weights(
    config: Config, tokenizer: Tokenizer, checkpoint: Checkpoint | None
) -> pretrained.Pretrained | None:
    """The weights to start from; None for those of a checkpoint, and for new ones."""
    if checkpoint or not config.init_from:
        return None
    weights = pretrained.load(config.init_from)
    check_fits(weights, config, tokenizer)
    return weights


def find_shape(
    config: Config,
    meta: Meta,
    checkpoint: Checkpoint | None,
    weights: pretrained.Pretrained | None,
) -> GPTConfig:
    """The model's shape. With init_from it is that of the weights, where no setting is given."""
    if not config.init_from:
        return model_config(config, meta)
    source = checkpoint.shape if checkpoint else weights.config
    fill_shape(config, source)  # also in what is saved as the run's settings
    return model_config(config, meta, source.vocab_size)


def model_config(config: Config, meta: Meta, vocab_size: int | None = None) -> GPTConfig:
    """The model's shape for these settings and data.

    Large vocabularies are rounded up to a multiple of 64, as tensor cores like it (GPT-2's 50,257
    becomes 50,304); the ids so added are never sampled. vocab_size: that of the weights started
    from, kept as it is, since new rows would take probability from the trained ones.
    """
    if vocab_size is None:
        vocab_size = meta.vocab_size
        if vocab_size > 1024:
            vocab_size = 64 * math.ceil(vocab_size / 64)
    shape = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
    try:
        return GPTConfig(vocab_size=vocab_size, **shape)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def build_state(
    config: Config,
    shape: GPTConfig,
    device: torch.device,
    dtype: torch.dtype,
    checkpoint: Checkpoint | None,
    weights: pretrained.Pretrained | None,
) -> State:
    """Model, optimiser and counters: new, from `weights`, or from `checkpoint`."""
    torch.manual_seed(config.seed)
    model = GPT(shape, config.zero_init)
    if weights:
        model.load_state_dict(weights.cut_to(config.block_size))
    if checkpoint:
        restore_weights(checkpoint, model)
    adapt(model, config, device, dtype)
    if shard.wanted(config):
        check_same_weights(model)
        shard.shard_model(model, device)
    model = model.to(device)
    optimizer = make_optimizer(model, config, device)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    if not checkpoint:
        return State(model, optimizer, scaler, Progress())
    restore_optimizer(checkpoint, optimizer, scaler)
    return State(model, optimizer, scaler, checkpoint.progress)


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


def compilation_pays(config: Config, model: GPT, device: torch.device, windows: int) -> bool | str:
    """Whether to compile, or "max": as the setting says, else what a run so long repays."""
    if config.compile is not None:
        return config.compile
    steps = count_steps(config, Progress(), windows)
    tokens = steps * config.batch_size * config.block_size
    flops = tokens * model.flops_per_token() / distributed.world_size
    if hardware.tuning_pays(device, flops):
        return "max"
    return hardware.compile_pays(device, flops)


def check_together(config: Config, folder: Path, meta: Meta, schedule: Schedule) -> None:
    """Raises RunError unless all processes see the same checkpoint, log and data."""
    seen = run_folder.fingerprint(
        {
            "step": schedule.progress.step,
            "evaluated": schedule.evaluated,
            "data": meta.identity(),
            "steps": schedule.total_steps,
        }
    )
    if len(set(distributed.gather(int(seen[:12], 16)))) > 1:
        raise RunError(
            "the processes of this run do not see the same checkpoint or data; several machines "
            f"need {folder} and {config.data_dir} on a shared disk, or copies on each"
        )


def check_same_weights(model: GPT) -> None:
    """Raises RunError unless all processes have the same weights."""
    if not distributed.same_on_all_ranks(model.parameters()):
        raise RunError(
            "the processes of this run begin with different weights; they need the same seed, "
            "settings and version of PyTorch, and the same files where init_from names some"
        )
