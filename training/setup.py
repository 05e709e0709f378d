"""Builds a run from its settings.

`build` makes the parts in the order of their dependencies: device, data, start, model, schedule.
Reports what does not fit together as an error for the user.
"""

import contextlib
import re
import secrets
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import hardware
from config import Config, ConfigError
from config.loader import check
from formats import files, run_folder
from formats.data_folder import Meta, check_masked, read_meta, tokenizer_file
from formats.mirror import Mirror, address_of
from formats.shapes import Undrawn
from hardware import Device, DeviceError
from model import GPT
from tokenizer_bpe import Tokenizer, TokenizerError
from training import RunError, distributed
from training.compiling import compiler_obstacle, should_compile
from training.dataset import Data, Dataset
from training.fit import apply_memory_options
from training.induction import add_induction_head
from training.optimizer import make_optimizer
from training.run import LossSums, Progress, Run
from training.saver import Saver
from training.schedule import Clock, Counters, Schedule, count_steps, peak_decay
from training.start import Start, find_start

FIRST_TOKENS = 64  # of the validation text, from which a prompt is taken


def build(config: Config) -> Run:
    """Find device and data, build the model, and load a checkpoint if there is one.

    Raises AddressError, CheckpointError, ConfigError, DataError, DeviceError, TokenizerError or
    RunError if they do not fit.
    """
    started, folder = time.monotonic(), Path(config.checkpoint_dir)
    device = open_device(config)
    meta = read_meta(config.data_dir)
    tokenizer = Tokenizer.load(tokenizer_file(config.data_dir, meta))
    config = without_unknown_characters(with_prompts(config, meta, tokenizer), tokenizer)
    start = find_start(config, meta, tokenizer)
    config, progress = start.config, start.progress
    if not progress.step:
        check(config)  # again, with the shape of the loaded weights
    data = open_data(config, meta, tokenizer, device)

    counters = Counters(progress.step, progress.sequences)
    total_steps = count_steps(config, counters, data.train.windows)
    epochs = total_steps * config.batch_size / data.train.windows
    decay = peak_decay(total_steps, epochs, config)
    model, optimizer, scaler = open_model(start, device, decay)

    log, val_losses, running_s = read_past(folder, progress)
    evaluated = max((record["step"] for record in log if "val_loss" in record), default=0)
    compiles = should_compile(config, model, device, total_steps)
    obstacle = compiler_obstacle(device.type) if compiles else ""
    mirror = None
    if config.mirror and distributed.is_main:
        mirror = Mirror(address_of(config.mirror, folder))
    run = Run(
        id=run_folder.run_id(folder) or secrets.token_hex(8),
        config=config,
        folder=folder,
        device=device,
        data=data,
        model=model,
        optimizer=optimizer,
        scaler=scaler,
        counters=counters,
        loss_sums=LossSums(progress.sums, device.torch),
        schedule=Schedule(config, counters, total_steps, evaluated, data.val is not None),
        clock=Clock(config, device.torch, started, progress.elapsed_s, running_s),
        saver=Saver(
            folder, config.keep_last, tokenizer.to_json(), mirror, progress.step, val_losses
        ),
        log=log,
        compiles=compiles and not obstacle,
        obstacle=obstacle,
        context=start.context,
        # On a CPU, it keeps the bits of dropout and of sums. The next GPU may have more memory.
        micro_batch_limit=progress.micro_batch_limit if device.type == "cpu" else None,
    )
    check_same_on_all_ranks(run)
    return run


def open_device(config: Config) -> Device:
    """The device of this process, initialized."""
    torch.set_float32_matmul_precision("high")  # TF32 for float32 matrix products
    device = hardware.find_device(config.device, distributed.local_rank)
    if distributed.world_size > 1 and device.type in ("xpu", "mps"):
        raise ConfigError(f"several processes train on cuda or cpu; {device.type} takes one")
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device).set_device(device)
    try:
        first = torch.zeros((), device=device)
        hardware.stay_in_memory(device)
    except RuntimeError as error:
        if hardware.out_of_memory(error):
            raise
        raise DeviceError(
            f"device = {device} does not work: {files.error_message(error)}. See the causes in"
            " docs/troubleshooting.md#packages-and-drivers; device = cpu trains without it"
        ) from None
    # Initializes NCCL now, while the GPU has memory for it, and detects two processes on one GPU.
    distributed.all_reduce_mean(first)
    return hardware.look_up(device, config.dtype)


def with_prompts(config: Config, meta: Meta, tokenizer: Tokenizer) -> Config:
    """Where sample_prompts is None, three words of the validation text; none of conversations.

    Three characters of a text without blanks, or of a list of single words, which it continues.
    """
    val = meta.splits["val"]
    if config.sample_prompts is not None:
        return config
    if val.mask or not val.tokens:
        return replace(config, sample_prompts=[])
    ids = np.fromfile(Path(config.data_dir, val.file), meta.dtype, FIRST_TOKENS)
    text = tokenizer.decode(ids).partition(tokenizer.eot)[0]
    words = re.search(r"\s(\S+(?:[ \t]+\S+){,2})", text)  # the first may be the end of one
    return replace(config, sample_prompts=[words[1] if words else text.strip()[:3]])


def without_unknown_characters(config: Config, tokenizer: Tokenizer) -> Config:
    """Drop the sample_prompts that the tokenizer cannot encode, with a message for each.

    A preset's prompts are in English, and a character-level text may lack some of the letters.
    Raises ConfigError if such a prompt was given on the command line.
    """
    known = []
    for prompt in config.sample_prompts:
        try:
            tokenizer.encode(prompt)
            known.append(prompt)
        except TokenizerError as error:
            problem = f"sample_prompts: {prompt!r}: {error}"
            if "sample_prompts" in config.typed:
                raise ConfigError(f"{problem}; choose another, or '--sample_prompts=[]'") from None
            print(f"{problem}; the run skips it. --sample_prompts=TEXT sets another")
    return replace(config, sample_prompts=known)


def open_data(config: Config, meta: Meta, tokenizer: Tokenizer, device: Device) -> Data:
    """The splits of the prepared folder; val is None if it holds no tokens."""
    if config.loss_on == "assistant":
        check_masked(config.data_dir, meta)
    options = (config.block_size, device.torch, config.loss_on)
    train, val = Dataset(config.data_dir, meta, "train", *options), None
    if meta.splits["val"].counted(config.loss_on).tokens:
        val = Dataset(config.data_dir, meta, "val", *options)
    return Data(meta, tokenizer, train, val)


def open_model(
    start: Start, device: Device, decay: float
) -> tuple[GPT, torch.optim.Optimizer, torch.amp.GradScaler]:
    """Model, optimizer and scaler with what `start` loads. decay: as in make_optimizer."""
    config = start.config
    loads = start.load and not config.dry_run  # a plan depends on shapes alone
    torch.manual_seed(config.seed)
    with Undrawn() if loads else contextlib.nullcontext():  # it takes seconds
        model = GPT(start.shape, config.zero_init)
    if start.load is None and config.induction_init:
        add_induction_head(model)
    apply_memory_options(model, config, device)
    model = model.to(device.torch)
    optimizer = make_optimizer(model, config, device.torch, decay)
    scaler = torch.amp.GradScaler(device.type, enabled=device.dtype == torch.float16)
    if loads:
        start.load(model, optimizer, scaler)
    return model, optimizer, scaler


def read_past(folder: Path, progress: Progress) -> tuple[list[dict], dict[int, float], float]:
    """The log up to a checkpoint, {step: finite validation loss} in it, and running_s.

    running_s is that of the checkpoint, plus the time after it that a kill lost. If the checkpoints
    are gone, the run begins again, with progress.running_s.
    """
    whole = run_folder.read_log(folder)
    running_s = progress.running_s
    if progress.step or not run_folder.has_saved(folder):
        running_s = max([running_s, *(record.get("running_s") or 0 for record in whole)])
    log = [record for record in whole if record["step"] <= progress.step]
    evaluated = {record["step"]: record["val_loss"] for record in log if "val_loss" in record}
    # An evaluation that was interrupted before its loss was recorded is repeated with its samples.
    log = [r for r in log if "samples" not in r or r["step"] in evaluated]
    # A full disk may have lost an evaluation's record that best.json still has.
    best = run_folder.read_best(folder)
    if best and best["step"] <= progress.step:
        evaluated.setdefault(best["step"], best["val_loss"])
    val_losses = {step: loss for step, loss in evaluated.items() if loss is not None}
    return log, val_losses, running_s


def check_same_on_all_ranks(run: Run) -> None:
    """Raises RunError unless all processes see the same settings, checkpoint, log and data."""
    seen = {
        "settings": run.config.recorded() | {"checkpoint_dir": None, "data_dir": None},
        "step": run.step,
        "evaluated": run.schedule.evaluated,
        "total_steps": run.schedule.total_steps,
        "data": run.data.meta.identity(),
    }
    checksum = int(files.fingerprint(seen)[:12], 16)
    if len(set(distributed.gather(checksum))) > 1:
        raise RunError(
            "the processes of this run do not see the same settings, checkpoint or data; several "
            f"machines need {run.folder} and {run.config.data_dir} on a shared disk, or "
            "copies on each"
        )
