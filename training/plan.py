"""What a run will take, before it starts: memory, disk, hours and money. Writes nothing.

The figures for other GPUs are computed; those for the present device are measured with a few real
steps.
"""

import contextlib
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch

from hardware import out_of_memory
from model import GPTConfig
from training.adapt import loss_chunks
from training.errors import RunError
from training.saver import copied_tensors
from training.setup import Run
from training.trial import measure

# Dense bf16 TFLOP/s (fp16 on T4 and V100), memory in GB.
GPUS = {
    "T4": (65, 16),
    "V100": (125, 16),
    "RTX 3090": (71, 24),
    "RTX 4090": (165, 24),
    "A100": (312, 40),
    "H100": (989, 80),
    "H200": (989, 141),
}
SHARE = 8  # GPUs for which the plan of a run with shard = True has a table
UTILISATION = 0.4  # of the peak; tokens/s of published runs of this class lie between 0.3 and 0.5


def moments(optimizer) -> int:
    """Bytes of what an optimiser keeps: AdamW two float32 for each parameter, Muon one."""
    return sum(
        p.numel() * (4 if group.get("num_fused") else 8)
        for group in optimizer.param_groups
        for p in group["params"]
    )


def memory(
    config: GPTConfig,
    parameters: int,
    optimizer: int,
    micro_batch: int,
    accumulates: bool,
    dtype: torch.dtype,
    checkpointing: bool = False,
    loss_chunks: int = 1,
    residual: int = 4,
) -> dict[str, int]:
    """Bytes of training at its peak, by what they hold.

    parameters: trained numbers. optimizer: bytes of its moments. accumulates: more than one
    micro-batch a step. dtype: of the matrix products. checkpointing: of activations. residual:
    bytes of a number that goes from layer to layer.

    Weights and gradients are 4 bytes a parameter each. Activations are what the backward pass
    needs, a token and layer: two residuals, in the products' precision the inputs of the linear
    layers, query, key and value, and the MLP's inner values; and once a token the logits with their
    gradient. With checkpointing it is a residual a layer, and one layer's activations. With chunks
    it is one chunk's logits, and the gradients of the head and of its input. 16-bit products add a
    copy of the weights.
    """
    item = dtype.itemsize
    width = config.n_embd
    queries, keys = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = width + 2 * queries + 2 * keys  # norm, query, key, value, the projection's input
    mlp = width + 2 * config.n_inner  # norm, and before and after GELU
    if config.arch == "qwen3":
        attention += 2 * (queries + keys)  # query and key normed, and turned
        mlp += config.n_inner  # gate, values and their product
    layer = 2 * residual * width + item * (attention + mlp)
    layers = config.n_layer * layer
    if checkpointing:
        layers = config.n_layer * residual * width + layer
    logits, head = config.vocab_size * 2 * item, 0
    if loss_chunks > 1:
        logits = logits / loss_chunks + item * width
        head = 4 * config.vocab_size * width
    activations = int(micro_batch * config.block_size * (layers + logits)) + head
    copies = 2 * parameters if item == 2 else 0
    weights, gradients = 4 * parameters, 4 * parameters
    # Without accumulation the gradients appear while the activations go: the larger of the two.
    during = gradients + activations if accumulates else max(gradients, activations)
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations + copies,
        "peak": weights + optimizer + copies + during,
    }


def memory_shared(
    needed: dict[str, int], inside: int, outside: int, layers: int, gpus: int, low_precision: bool
) -> dict[str, int]:
    """Bytes of training at its peak on each of several GPUs that share out the model (shard.py).

    needed: on one GPU, as memory() has it. inside: parameters of all layers. outside: the others.

    Each has its part of weights, gradients and optimiser. Whole are, with their gradients, what
    lies outside of the layers, and two layers: one at work, and the next. They count among the
    activations, with their copies in 16 bits; memory() has those of all weights there.
    """
    at_work = outside + 2 * inside // layers
    copies = 2 * (at_work - inside - outside) if low_precision else 0
    activations = needed["activations"] + 8 * at_work + copies
    shared = {name: needed[name] // gpus for name in ("weights", "gradients", "optimizer")}
    return shared | {"activations": activations, "peak": sum(shared.values()) + activations}


def check_ram(run: Run) -> None:
    """Raises MemoryError where a CPU's memory does not do: Linux would not say so, but end us."""
    needed = memory_of(run, 1, run.device.dtype, None)
    with contextlib.suppress(OSError):  # no such file on other systems
        known = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free = 1024 * int(known["MemAvailable"].split()[0])
        # The weights are there already.
        if run.device.type == "cpu" and needed["peak"] - needed["weights"] > free:
            raise MemoryError


def plan(run: Run) -> Iterator[str]:
    """The plan of a run as text, a part at a time: what must be measured comes last."""
    yield from blocks([size_of(run), memory_table(run)])
    if run.config.shard:
        yield from blocks([memory_table(run, SHARE)])
    yield from blocks([disk(run), hours_table(run)])
    yield here(run)


def blocks(tables: list[list[str]]) -> Iterator[str]:
    """Each of the tables as text, with an empty line before it."""
    for lines in tables:
        yield "\n" + "\n".join(lines)


def flops_left(run: Run) -> float:
    """Floating-point operations to the end of the run."""
    tokens = run.schedule.steps_left * run.config.batch_size * run.config.block_size
    return run.state.model.flops_per_token() * tokens


def size_of(run: Run) -> list[str]:
    """Parameters, operations and steps."""
    c, model, steps = run.config, run.state.model, run.schedule.steps_left
    flops, tokens = model.flops_per_token(), c.batch_size * c.block_size
    epoch = run.data.train.windows / c.batch_size
    return [
        f"parameters     {model.num_parameters():,}",
        f"FLOPs a token  {flops / 1e6:,.0f} million; {flops * tokens / 1e12:,.1f} TFLOP a step, "
        f"{flops_left(run) / 1e18:,.2f} EFLOP in all",
        f"steps          {steps:,} of {tokens:,} tokens, {epoch:,.1f} an epoch; "
        f"{steps * tokens:,} tokens in all",
    ]


def memory_of(run: Run, micro_batch: int, dtype: torch.dtype, room: float | None) -> dict[str, int]:
    """Bytes of training at its peak with so many sequences at once, by what they hold.

    room: bytes that the GPU has; None for another device.
    """
    c, model = run.config, run.state.model
    residual = 2 if room and dtype == torch.bfloat16 else 4  # as ops.stream_dtype has it
    return memory(
        model.config,
        model.num_parameters(),
        moments(run.state.optimizer),
        micro_batch,
        micro_batch < c.batch_size,
        dtype,
        c.activation_checkpointing,
        loss_chunks(c, model.config.vocab_size, dtype, room),
        residual,
    )


def memory_on(
    run: Run, micro_batch: int, dtype: torch.dtype, room: float | None, gpus: int
) -> dict[str, int]:
    """The same on each of so many GPUs, which share out the model where they are several."""
    needed = memory_of(run, micro_batch, dtype, room)
    if gpus == 1:
        return needed
    model = run.state.model
    inside = sum(p.numel() for p in model.h.parameters())
    outside = model.num_parameters() - inside
    return memory_shared(needed, inside, outside, len(model.h), gpus, dtype.itemsize == 2)


def memory_table(run: Run, gpus: int = 1) -> list[str]:
    """GB by micro-batch and by what they hold, on one GPU or each of several."""
    columns = {"weights": 10, "gradients": 11, "optimizer": 11, "activations": 13, "peak": 8}
    head = "".join(f"{name:>{width}}" for name, width in columns.items())
    title = "memory, GB" if gpus == 1 else f"each of {gpus} GPUs"
    lines = [f"{title:15}{'sequences at once':>18}{head}"]
    for micro_batch in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if run.config.batch_size % (gpus * micro_batch):
            continue
        room = run.device.memory
        if gpus > 1 and not room:
            room = math.inf  # of GPUs that are not here
        needed = memory_on(run, micro_batch, run.device.dtype, room, gpus)
        cells = "".join(f"{needed[name] / 1e9:>{width}.2f}" for name, width in columns.items())
        lines.append(f"{'':15}{micro_batch:>18}{cells}")
    return lines


def disk(run: Run) -> list[str]:
    """What checkpoints take."""
    c = run.config
    size = 4 * run.state.model.num_parameters() + moments(run.state.optimizer)
    copy = size
    if run.device.type == "cuda":
        # PyTorch rounds what it locks in memory for a GPU's copies up to a power of two.
        copy = sum(1 << (t.nbytes - 1).bit_length() for t in copied_tensors(run.state.optimizer))
    folder = next(p for p in (run.folder, *run.folder.absolute().parents) if p.exists())
    free, kept = shutil.disk_usage(folder).free, (c.keep_last + 2) * size
    verdict = "" if kept < free else "  << too little"
    return [
        f"a checkpoint   {size / 1e9:,.2f} GB; {c.keep_last} and the best are kept and one is "
        f"being written: {kept / 1e9:,.2f} GB of {free / 1e9:,.1f} GB free at {folder}{verdict}",
        f"{'':15}while one is written, its copy takes {copy / 1e9:,.2f} GB of RAM",
    ]


def hours_table(run: Run) -> list[str]:
    """Hours and costs on GPUs, computed."""
    c = run.config
    hint = ""
    if not c.cost_per_hour:
        hint = "; set cost_per_hour for costs (Colab's A100: about 8 compute units)"
    lines = [f"{'':15}{'hours':>10}{'cost':>10}   at {UTILISATION:.0%} of its peak{hint}"]
    for name, (tflops, gigabytes) in GPUS.items():
        hours = flops_left(run) / (tflops * 1e12 * UTILISATION) / 3600
        dtype = torch.float16 if name in ("T4", "V100") else torch.bfloat16
        fits = largest_micro_batch(run, gigabytes, dtype)
        room = f"{fits} sequences at once in {gigabytes} GB"
        if not fits:
            room = f"does not fit {gigabytes} GB"
        if c.shard:
            room += f"; {largest_micro_batch(run, gigabytes, dtype, SHARE)} on each of {SHARE}"
        lines.append(f"{name:15}{hours:>10,.2f}{money(hours, c):>10}   {room}")
    return lines


def here(run: Run) -> str:
    """The last line of the table of hours: the present device, measured by a few real steps."""
    c = run.config
    try:
        check_ram(run)
        trial = measure(run)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) and not isinstance(error, RunError):
            raise
        where = run.device.name
        return f"{'here':15}{'':>20}   not one sequence fits the memory of {where}"
    if not trial:
        return f"{'here':15}{'':>20}   stopped before it was measured"
    hours = trial.step_s * run.schedule.steps_left / 3600
    speed = c.batch_size * c.block_size / trial.step_s
    return (
        f"{'here':15}{hours:>10,.2f}{money(hours, c):>10}   {trial.step_s:,.3f} s a step, "
        f"{speed:,.0f} tokens/s, measured on {run.device.name} with "
        f"{trial.micro_batch} sequences at once"
    )


def largest_micro_batch(run: Run, gigabytes: int, dtype: torch.dtype, gpus: int = 1) -> int:
    """The most sequences at once that a GPU of so much memory holds; 0 where not one does.

    dtype: of the products. gpus: how many of them share out the model.
    """
    room = 0.92e9 * gigabytes
    if run.data.train.bytes <= 0.25e9 * gigabytes:
        room -= run.data.train.bytes  # the tokens lie there too, up to a quarter
    batch = run.config.batch_size
    sizes = [size for size in range(1, batch // gpus + 1) if batch % (gpus * size) == 0]
    whole = 1e9 * gigabytes
    fitting = [size for size in sizes if memory_on(run, size, dtype, whole, gpus)["peak"] < room]
    return max(fitting, default=0)


def money(hours: float, config) -> str:
    """What so many hours cost, or nothing where no price is set."""
    if not config.cost_per_hour:
        return "-"
    return f"{hours * config.cost_per_hour:,.2f}"
