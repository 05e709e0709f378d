"""The summary of a run that is printed before it starts."""

import hardware
from formats.mirror import address_of
from training import distributed
from training.plan import disk_space, steps_per_epoch
from training.run import Run

OVERFITS = 20  # parameters per token of text; above this a warning is printed
PLACES = {"gpu": "on the GPU", "ram": "in RAM", "mmap": "memory-mapped"}


def banner(run: Run) -> str:
    """Device, model, data, step, start, run and checkpoints, a line each."""
    c, model, done = run.config, run.state.model, run.step
    lines = {
        "device": device(run),
        "model": f"{model.num_parameters():,} parameters, {c.n_layer} layers x {c.n_embd}, "
        f"context {c.block_size}, vocabulary {model.config.vocab_size:,}",
        "data": data(run),
        "step": step(run),
    }
    if c.init_from and not done:
        lines["start"] = f"the weights of {c.init_from}"
    lines["run"] = f"{run.schedule.total_steps:,} steps, {steps_per_epoch(run)} an epoch"
    if done:
        lines["run"] += f"; continues at step {done:,}"
    lines["checkpoints"] = checkpoints(run)
    text = "\n".join(f"{name:12}{line}" for name, line in lines.items())
    return run.start.changes + text + "".join(f"\nwarning     {w}" for w in warnings(run))


def warnings(run: Run) -> list[str]:
    """Settings that are probably mistakes."""
    c, found = run.config, []
    if run.obstacle:
        found.append(f"torch.compile cannot work: {run.obstacle}. The run goes on without it")
    if c.warmup_steps >= run.schedule.total_steps:
        found.append(f"warmup_steps = {c.warmup_steps} takes the whole run; lower it")
    if c.batch_size > run.data.train.windows:
        found.append(
            f"batch_size = {c.batch_size} is more than the {run.data.train.windows:,} sequences of"
            " the training data: each step repeats them; use more text, or lower batch_size"
        )
    tokens, parameters = run.data.train.length, run.state.model.num_parameters()
    if parameters > OVERFITS * tokens and not c.init_from:
        found.append(
            f"{tokens:,} tokens of text for {parameters:,} parameters: the model will overfit; use"
            " more text, or a smaller n_layer and n_embd"
        )
    more, free, place = disk_space(run)
    if more > free and not run.schedule.done:
        found.append(
            f"the checkpoints take up to {more / 1e6:,.0f} MB more, and {free / 1e6:,.0f} MB are"
            f" free at {place}; make room, lower keep_last, or use a larger disk"
        )
    return found


def device(run: Run) -> str:
    """The device, the processes, the precision, whether the model is compiled."""
    count = f"{distributed.world_size} x " if distributed.world_size > 1 else ""
    compiled = "compiled" if run.compiles else "not compiled"
    text = f"{count}{run.device.name}, {run.versions()['dtype']}, {compiled}"
    if run.device.type == "cuda":
        text += f", {run.trainer.attention_backend()} attention"
    unused = hardware.unused_gpus(run.device.torch, distributed.world_size)
    return f"{text}; {unused}" if unused else text


def data(run: Run) -> str:
    """The training and validation data, and where they are kept."""
    train, val = run.data.train, run.data.val
    text = f"{run.config.data_dir}, {train.length:,} tokens {PLACES[train.location]}; "
    text += f"{val.length:,} for validation" if val else "no validation split, evaluations are off"
    if run.config.loss_on == "assistant":
        replies = {name: split.counted("assistant") for name, split in run.data.meta.splits.items()}
        text += f"; the loss counts only the assistant's: {replies['train'].tokens:,}"
        text += f" and {replies['val'].tokens:,}"
    return text


def step(run: Run) -> str:
    """The tokens of an optimiser step, and its micro-batch."""
    c, micro_batch, local_batch = run.config, run.trainer.micro_batch, run.trainer.local_batch
    text = f"{c.tokens_per_step:,} tokens = {c.batch_size} x {c.block_size}"
    if micro_batch < local_batch:
        text += f", micro-batches of {micro_batch} sequences"
    return text


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
