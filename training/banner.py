"""What is about to run, in a few lines."""

import hardware
from formats.mirror import address_of
from training import distributed
from training.setup import Run

PLACES = {"gpu": "on the GPU", "ram": "in RAM", "mmap": "memory-mapped"}


def banner(run: Run) -> str:
    """Device, model, data, step, start, run and checkpoints, a line each."""
    lines = {
        "device": device(run),
        "model": model(run),
        "data": data(run),
        "step": step(run),
        "start": start(run),
        "run": steps(run),
        "warning": warning(run),
        "checkpoints": checkpoints(run),
    }
    return "\n".join(f"{name:12}{text}" for name, text in lines.items() if text)


def device(run: Run) -> str:
    """What it computes on, and how."""
    count = f"{distributed.world_size} x " if distributed.world_size > 1 else ""
    dtype = str(run.dtype).removeprefix("torch.")
    compiled = "compiled" if run.compiles else "not compiled"
    if run.compiles == "max":
        compiled += " and tuned"
    return f"{count}{hardware.describe(run.device)}, {dtype}, {compiled}"


def model(run: Run) -> str:
    """The size of the model."""
    c, shape = run.config, run.state.model.config
    return (
        f"{run.state.model.num_parameters():,} parameters, {c.n_layer} layers x {c.n_embd}, "
        f"context {c.block_size}, vocabulary {shape.vocab_size:,}"
    )


def data(run: Run) -> str:
    """What it trains and validates on."""
    train, val = run.trainer.train_data, run.trainer.val_data
    validation = "none for validation, so no evaluations"
    if val:
        validation = f"{val.length:,} for validation"
    text = f"{run.config.data_dir}, {train.length:,} tokens {PLACES[train.location]}; {validation}"
    if run.config.loss_on == "assistant":
        replies = {name: split.counted("assistant") for name, split in run.meta.splits.items()}
        text += (
            f"; the loss is on the assistant's {replies['train'].tokens:,} and"
            f" {replies['val'].tokens:,} of them"
        )
    return text


def step(run: Run) -> str:
    """What an optimiser step takes, and how much of it at once."""
    c, micro_batch, whole = run.config, run.memory.training.size, run.memory.batch
    text = f"{c.batch_size * c.block_size:,} tokens = {c.batch_size} x {c.block_size}"
    if micro_batch < whole:
        text += f", {micro_batch} sequences at a time"
    if micro_batch < (c.micro_batch_size or whole):
        text += ", as memory.json remembers"
    return text


def start(run: Run) -> str:
    """The weights that it began with, if not with new ones."""
    if not run.config.init_from:
        return ""
    text = f"the weights of {run.config.init_from}"
    if run.state.progress.step:
        text += ", which this run, begun already, does not read again"
    return text


def steps(run: Run) -> str:
    """How far it goes, and from where."""
    epoch = run.trainer.train_data.windows / run.config.batch_size
    text = f"{run.schedule.total_steps:,} steps, {epoch:,.1f} an epoch"
    if run.state.progress.step:
        text += f"; continues at step {run.state.progress.step:,}"
    return text


def warning(run: Run) -> str:
    """What is probably not meant."""
    warmup = run.config.warmup_steps
    if warmup >= run.schedule.total_steps:
        return f"warmup_steps = {warmup} takes the whole run; lower it"
    return ""


def checkpoints(run: Run) -> str:
    """Where saves go, and how often."""
    c, often = run.config, []
    if c.save_interval:
        often.append(f"{c.save_interval:,} steps")
    if c.save_minutes:
        often.append(f"{c.save_minutes:g} minutes")
    text = str(run.folder)
    if often:
        text += f", every {' and '.join(often)}"
    if c.mirror:
        text += f"; copied to {address_of(c.mirror, run.folder)}"
    return text
