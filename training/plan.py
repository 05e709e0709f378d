"""What a run prints before it starts: a banner, or with --dry_run the plan. Writes nothing.

The plan estimates the memory, disk space, hours and money that a run needs. Figures for other GPUs
are computed; those for this device are measured in a few real steps with a learning rate of 0,
which change no weights.
"""

import contextlib
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import hardware
from command_line import duration, plural, si
from config import Config
from formats import files, run_folder
from formats.mirror import address_of
from hardware import Device
from training import RunError, distributed
from training.fit import fit_in_memory
from training.memory import (
    checkpoint_bytes,
    fits_ram,
    largest_micro_batch,
    memory_here,
    micro_batch_to_try,
    ram_to_come,
)
from training.optimizer import clip_gradients, set_learning_rates, update_weights
from training.run import Run
from training.step import forward_backward

OVERFITS = 20  # parameters per token of text; above this a warning is printed
PLACES = {"gpu": "on the GPU", "ram": "in RAM", "mmap": "memory-mapped"}
PLANNED = ("T4", "V100", "RTX 3090", "RTX 4090", "A100", "H100", "H200")  # names in hardware.GPUS
UTILIZATION = 0.4  # of peak FLOP/s; published runs of this class reach 0.3 to 0.5
TOKENS = 4096  # per micro-batch on a CPU; more do not change the time per token
LONG_S = 0.5  # if forward and backward on a CPU take longer, no larger micro-batch is timed
STEPS = 20  # timed at most


# -- the banner ------------------------------------------------------------------------------------


def banner(run: Run) -> str:
    """One line each on device, model, data, step, start, run and checkpoints; then warnings."""
    c, model, done = run.config, run.model, run.step
    lines = {
        "device": describe_device(run),
        "model": f"{model.num_parameters():,} parameters, {plural(c.n_layer, 'layer')} x"
        f" {c.n_embd}, context {c.block_size}, vocabulary {model.config.vocab_size:,}",
        "data": describe_data(run),
        "step": describe_step(run),
    }
    if c.init_from and not done:
        lines["start"] = f"the weights of {c.init_from}"
    lines["run"] = plural(run.schedule.total_steps, "step")
    epoch = run.data.train.windows / c.batch_size
    shown = f"{epoch:,.1f}" if epoch >= 1 else f"{epoch:.2g}"
    lines["run"] += f", one epoch is {shown} steps"
    if done:
        lines["run"] += f"; continues at step {done:,}"
    lines["checkpoints"] = describe_checkpoints(run)
    text = "\n".join(f"{name:12}{line}" for name, line in lines.items())
    return text + "".join(f"\nwarning     {w}" for w in warnings(run))


def warnings(run: Run) -> list[str]:
    """Settings that are probably mistakes."""
    c, found = run.config, []
    if run.obstacle:
        found.append(f"torch.compile cannot work: {run.obstacle}. The run goes on without it")
    if c.warmup_steps >= run.schedule.total_steps:
        found.append(f"warmup_steps = {c.warmup_steps} takes the whole run; lower it")
    if c.micro_batch_size and not run.micro_batch_limit:
        asked = min(c.micro_batch_size, run.local_batch)
        if run.micro_batch < asked / 2:
            found.append(
                f"micro_batch_size = {asked} does not divide the {run.local_batch} sequences of a"
                f" step, and the next smaller number that does is {run.micro_batch}, which is slow;"
                f" choose a batch_size that {asked * distributed.world_size} divides"
            )
    if c.batch_size > run.data.train.windows:
        found.append(
            f"batch_size = {c.batch_size} is more than the {run.data.train.windows:,} sequences of"
            " the training data: each step repeats them; use more text, or lower batch_size"
        )
    tokens, parameters = run.data.train.length, run.model.num_parameters()
    if parameters > OVERFITS * tokens and not c.init_from:
        found.append(
            f"{tokens:,} tokens of text for {parameters:,} parameters: the model will overfit; use"
            " more text, trained weights (docs/fine-tuning.md), or a smaller n_layer and n_embd"
        )
    if run.device.type == "cpu" and not run.schedule.done and not fits_ram(run, 1):
        found.append(
            f"training takes up to {ram_to_come(run, 1) / 1e9:.1f} GB more memory, and"
            f" {(hardware.free_ram() or 0) / 1e9:.1f} GB are free: the system may kill the run, or"
            " swap; close other programs, lower block_size, or choose a smaller model"
        )
    more, free, place = disk_space(run)
    if more > free and not run.schedule.done:
        found.append(
            f"the checkpoints take up to {more / 1e6:,.0f} MB more, and {free / 1e6:,.0f} MB are"
            f" free at {place}; make room, lower keep_last, or use a larger disk"
        )
    return found


def describe_device(run: Run) -> str:
    """The device, the number of processes, the precision, and whether the model is compiled."""
    count = f"{distributed.world_size} x " if distributed.world_size > 1 else ""
    compiled = "compiled" if run.compiles else "not compiled"
    text = f"{count}{run.device.name}, {run.versions()['dtype']}, {compiled}"
    if run.device.type == "cuda":
        text += f", {run.attention_backend()} attention"
    unused = hardware.unused_gpus(run.device.torch, distributed.world_size)
    return f"{text}; {unused}" if unused else text


def describe_data(run: Run) -> str:
    """The training and validation data, and where they are kept."""
    train, val = run.data.train, run.data.val
    text = f"{run.config.data_dir}, {train.length:,} tokens {PLACES[train.location]}; "
    text += f"{val.length:,} for validation" if val else "no validation split, evaluations are off"
    if run.config.loss_on == "assistant":
        replies = {name: split.counted("assistant") for name, split in run.data.meta.splits.items()}
        text += f"; the loss counts only the assistant's: {replies['train'].tokens:,}"
        text += f" and {replies['val'].tokens:,}"
    return text


def describe_step(run: Run) -> str:
    """The tokens per optimizer step, and the micro-batch."""
    c, micro_batch, local_batch = run.config, run.micro_batch, run.local_batch
    text = f"{c.tokens_per_step:,} tokens = {c.batch_size} x {c.block_size}"
    if micro_batch < local_batch:
        text += f", micro-batches of {plural(micro_batch, 'sequence')}"
    return text


def describe_checkpoints(run: Run) -> str:
    """Where checkpoints go, and how often."""
    c, often = run.config, []
    if c.save_interval:
        often.append(plural(c.save_interval, "step"))
    if c.save_minutes:
        often.append(f"{c.save_minutes:g} minute{'s' * (c.save_minutes != 1)}")
    text = str(run.folder)
    if often:
        text += f", every {' and '.join(often)}"
    if c.mirror:
        text += f"; copied to {address_of(c.mirror, run.folder)}"
    return text


# -- the plan --------------------------------------------------------------------------------------


def plan(run: Run) -> Iterator[str]:
    """Yield the plan of a run as text; the measured part comes last."""
    for table in (operations_table, memory_table, disk_table, hours_table):
        yield "\n" + "\n".join(table(run))
    yield measured_here(run)


def operations_table(run: Run) -> list[str]:
    flops, steps = run.model.flops_per_token(), run.schedule.steps_left
    per_step = flops * run.config.tokens_per_step
    return [
        f"operations     {si(flops, 'FLOP')} per token, {si(per_step, 'FLOP')} per step, "
        f"{si(per_step * steps, 'FLOP')} for {steps * run.config.tokens_per_step:,} tokens in all"
    ]


def memory_table(run: Run) -> list[str]:
    """Memory on this device, by micro-batch and by use."""
    columns = ("weights", "gradients", "optimizer", "activations", "peak")
    lines = [f"{'memory':15}{'micro-batch':>14}{''.join(f'{name:>13}' for name in columns)}"]
    for micro_batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if run.local_batch % micro_batch == 0:
            needed = memory_here(run, micro_batch)
            cells = "".join(f"{si(needed[name], 'B'):>13}" for name in columns)
            lines.append(f"{'':15}{micro_batch:>14}{cells}")
    return lines


@contextlib.contextmanager
def memory_everywhere():
    """Raises MemoryError in all processes if one runs out of memory in this context."""
    lacks = False
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not hardware.out_of_memory(error):
            raise
        lacks = True
    if any(distributed.gather(lacks)):
        raise MemoryError


# -- disk, hours and money -------------------------------------------------------------------------


def disk_space(run: Run) -> tuple[int, int, Path]:
    """Bytes that checkpoints will add at most, bytes free, and the folder measured."""
    kept = run.config.keep_last + 2  # plus the best, and the one being written
    more = max(1, kept - len(run_folder.steps(run.folder))) * checkpoint_bytes(run)
    folder = next(p for p in (run.folder, *run.folder.absolute().parents) if p.exists())
    return more, shutil.disk_usage(folder).free, folder


@distributed.on_main
def check_disk(run: Run) -> None:
    """Raises RunError if the disk of the run's folder cannot take a checkpoint."""
    try:
        remedy = "lower keep_last, or use a larger disk"
        files.check_room(run.folder, checkpoint_bytes(run), remedy)
    except OSError as error:
        raise RunError(f"{run.folder} has no room for a checkpoint: {error}") from None
    trial = run.folder / ".trial"
    try:  # a mounted bucket may rename no folders (gcsfuse) or append to no file (rclone)
        with files.atomic_folder(trial) as partial:
            for _ in range(2):
                run_folder.append_log(partial, {})
    except OSError as error:
        advice = "Choose another checkpoint_dir"
        if run.step:  # such as another user's run: in an empty folder it would start from scratch
            advice = "To continue this run, copy its folder, and make the copy the checkpoint_dir"
        raise RunError(
            f"{run.folder} cannot hold checkpoints: {files.error_message(error)}. A run appends to"
            f" its log there, and renames folders. {advice}; mirror can copy each save to a disk"
            " that cannot do this"
        ) from None
    files.delete_folder(trial)


def disk_table(run: Run) -> list[str]:
    c = run.config
    size = checkpoint_bytes(run)
    more, free, folder = disk_space(run)
    return [
        f"a checkpoint   {si(size, 'B')}; {c.keep_last} and the best are kept, one is being "
        f"written: up to {si(more, 'B')} more of {si(free, 'B')} free at {folder}",
        f"{'':15}while one is written, its copy takes {si(size, 'B')} of RAM",
    ]


def hours_table(run: Run) -> list[str]:
    c = run.config
    hint = ""
    if not c.cost_per_hour:
        hint = "; set cost_per_hour for costs (Colab's A100: about 8 compute units)"
    count = distributed.world_size
    who = "of the GPU's peak speed" if count == 1 else f"of the peak speed of {count} GPUs"
    who += ", which small models do not reach"
    lines = [f"{'':15}{'time':>14}{'cost':>10}   at {UTILIZATION:.0%} {who}{hint}"]
    flops = run.model.flops_per_token() * c.tokens_per_step * run.schedule.steps_left
    for name in PLANNED:
        device = from_data_sheet(name)
        hours = flops / (device.peak_flops * UTILIZATION * count) / 3600
        fits = largest_micro_batch(run, device)
        gigabytes = f"{device.memory / 1e9:.0f} GB"
        room = f"micro-batch {fits} in {gigabytes}" if fits else f"does not fit {gigabytes}"
        lines.append(f"{name:15}{duration(3600 * hours):>14}{money(hours, c):>10}   {room}")
    return lines


def money(hours: float, config: Config) -> str:
    """The cost of `hours`; "-" without a price."""
    if not config.cost_per_hour:
        return "-"
    return f"{hours * config.cost_per_hour:,.2f}"


def from_data_sheet(name: str) -> Device:
    """A Device for a GPU from its data sheet. name: a key of hardware.GPUS."""
    tflops, gigabytes = hardware.GPUS[name]
    dtype = torch.float16 if name in ("T4", "V100") else torch.bfloat16
    return Device(torch.device("cuda"), dtype, name, int(1e9 * gigabytes), 1e12 * tflops)


def measured_here(run: Run) -> str:
    """The last line of the table of hours: this device, measured in a few real steps."""
    c, where, note = run.config, run.device.name, ""
    if run.device.type == "cpu" and run.compiles:
        note = ", not compiled; compiling saves a third in bfloat16, a tenth in float32"
    try:
        step_s, micro_batch = measure(run)
    except (RunError, MemoryError):
        return f"{'here':15}{'':>24}   one sequence does not fit in the memory of {where}"
    hours = step_s * run.schedule.steps_left / 3600
    speed = c.tokens_per_step / step_s
    return (
        f"{'here':15}{duration(3600 * hours):>14}{money(hours, c):>10}   "
        f"{step_s:,.3f} s per step, "
        f"{speed:,.0f} tokens/s, measured on {where} with micro-batch {micro_batch}{note}"
    )


# -- a few real steps ------------------------------------------------------------------------------


def measure(run: Run, seconds: float = 10.0, may_compile: bool = False) -> tuple[float, int]:
    """Time at least two steps, for about `seconds`, not counting compilation.

    On a CPU, does not compile unless it may, which can take minutes, and starts with micro-batches
    of one sequence, which may use up all the time; then doubles them. Several processes follow the
    clock of the first, so that they take equally many steps, since Muon's update waits for all.
    Returns the seconds per optimizer step, and the micro-batch used. Raises RunError if one
    sequence does not fit in memory, and MemoryError if any process runs out of memory.
    """
    c, optimizer, scaler = run.config, run.optimizer, run.scaler
    if run.device.type == "cpu" and not (may_compile and run.compiles):
        run.compiles = False
        if not fits_ram(run, 1):
            raise MemoryError
        limit, size = max(1, min(micro_batch_to_try(run), TOKENS // c.block_size)), 1
    else:
        fit_in_memory(run)
        size = limit = run.micro_batch
    set_learning_rates(optimizer, 0.0)
    forward_s, update_s = [], []
    begun = time.perf_counter()
    while len(update_s) < STEPS:
        x, y = run.data.train.batch(0, size, c.seed)
        with memory_everywhere(), timed(run.device.torch, forward_s):
            forward_backward(run.compiled, x, y, size, run.cast, scaler)
        with timed(run.device.torch, update_s):
            norm = clip_gradients(run.model, optimizer, scaler, c.grad_clip)
            update_weights(optimizer, scaler, norm)
        if size < limit and distributed.gather(forward_s[-1])[0] < LONG_S:
            size, forward_s, update_s = min(2 * size, limit), [], []
            begun = time.perf_counter()
        elif len(update_s) > 1 and distributed.gather(time.perf_counter() - begun)[0] > seconds:
            break
    # The first of each is a warm-up.
    forward, update = (statistics.median(s[1:]) for s in (forward_s, update_s))
    return forward * run.local_batch / size + update, size


@contextlib.contextmanager
def timed(device: torch.device, seconds: list[float]):
    """Append to `seconds` how long the device takes for the work in this context."""
    hardware.synchronize(device)
    start = time.perf_counter()
    yield
    hardware.synchronize(device)
    seconds.append(time.perf_counter() - start)
