"""What a run will take, before it starts: memory, disk, hours and money. Writes nothing.

The figures for other GPUs are computed; those for the present device are measured with a few real
steps.
"""

import shutil
import statistics
import time

import hardware
from hardware import out_of_memory
from model import GPTConfig
from training.guard import RunError
from training.step import forward_backward, optimizer_step

# Dense bf16 TFLOP/s (fp16 on T4 and V100), memory in GB.
GPUS = {"T4": (65, 16), "V100": (125, 16), "A100": (312, 40), "H100": (989, 80), "H200": (989, 141)}
UTILISATION = 0.4  # of the peak; tokens/s of published runs of this class lie between 0.3 and 0.5


def moments(optimizer) -> int:
    """Bytes of what an optimiser keeps for its parameters: AdamW two numbers each, Muon one, in
    float32.
    """
    return sum(
        p.numel() * (4 if group.get("muon") else 8)
        for group in optimizer.param_groups
        for p in group["params"]
    )


def memory(
    config: GPTConfig,
    parameters: int,
    optimizer: int,
    micro_batch: int,
    accumulates: bool,
    low_precision: bool,
) -> dict[str, int]:
    """Bytes of training at its peak, by what they hold. parameters: trained numbers; optimizer:
    bytes of its moments; accumulates: more than one micro-batch a step; low_precision: matrix
    products in 16 bits.

    Weights and gradients are 4 bytes a parameter each. Activations are what the backward pass
    needs, a token and layer: two residuals in float32, and in the products' precision the inputs of
    the linear layers, query, key and value, and the MLP's inner values; and once a token the logits
    with their gradient. 16-bit products add a copy of the weights.
    """
    item = 2 if low_precision else 4
    tokens, width = micro_batch * config.block_size, config.n_embd
    queries, keys = config.n_head * config.head_dim, config.n_kv_head * config.head_dim
    attention = (
        width + queries + 2 * keys + queries
    )  # the norm's output, query, key and value, the projection's input
    mlp = width + 2 * config.n_inner  # the norm's output, before and after GELU
    if config.arch == "qwen3":
        attention += 2 * (queries + keys)  # normed, and turned
        mlp += config.n_inner  # gate, values and their product
    layer = 2 * 4 * width + item * (attention + mlp)
    logits = config.vocab_size * 2 * item
    activations, copies = (
        tokens * (config.n_layer * layer + logits),
        2 * parameters if low_precision else 0,
    )
    weights, gradients = 4 * parameters, 4 * parameters
    # Without accumulation the gradients appear while the activations go: the peak holds the larger
    # of the two.
    peak = (
        weights
        + optimizer
        + copies
        + (gradients + activations if accumulates else max(gradients, activations))
    )
    return {
        "weights": weights,
        "gradients": gradients,
        "optimizer": optimizer,
        "activations": activations + copies,
        "peak": peak,
    }


def measure(run, seconds: float = 20.0) -> tuple[float, int]:
    """Seconds of an optimiser step on the present device, from a few real ones, and the sequences
    at once that they were measured with.

    On a CPU a micro-batch is cut to about 4,096 tokens, from which on the time a token does not
    change.
    """
    c = run.config
    micro = (
        run.micro_batch
        if run.device.type != "cpu"
        else max(1, min(run.micro_batch, 4096 // c.block_size))
    )
    while True:
        try:
            run.micro_batch = micro
            x, y = run.train_data.batch(0, micro, c.seed)
            if run.compiles:
                run.compile()
            forward, step, begun = [], [], time.perf_counter()
            while len(step) < 4 or time.perf_counter() - begun < seconds and len(step) < 20:
                forward.append(
                    timed(
                        run.device, forward_backward, run.forward, x, y, micro, run.cast, run.scaler
                    )
                )
                step.append(
                    timed(
                        run.device,
                        optimizer_step,
                        run.model,
                        run.optimizer,
                        run.scaler,
                        0.0,
                        c.grad_clip,
                    )
                )
            # The first of each warms up.
            return (
                statistics.median(forward[1:]) * c.batch_size / micro + statistics.median(step[1:]),
                micro,
            )
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error) or micro == 1:
                raise
        micro //= 2


def timed(device, work, *arguments) -> float:
    """Seconds that work(*arguments) takes on the device."""
    hardware.synchronize(device)
    start = time.perf_counter()
    work(*arguments)
    hardware.synchronize(device)
    return time.perf_counter() - start


def plan(run) -> str:
    """The plan of a run (run.Run) as text."""
    c, model, state = run.config, run.model, moments(run.optimizer)
    parameters, flops = model.num_parameters(), model.flops_per_token()
    tokens_per_step, steps = c.batch_size * c.block_size, run.total_steps - run.progress.step
    total_flops = flops * tokens_per_step * steps
    lines = [
        f"parameters     {parameters:,}",
        (
            f"FLOPs a token  {flops / 1e6:,.0f} million; {flops * tokens_per_step / 1e12:,.1f}"
            f" TFLOP a step, {total_flops / 1e18:,.2f} EFLOP in all"
        ),
        (
            f"steps          {steps:,} of {tokens_per_step:,} tokens,"
            f" {run.train_data.windows / c.batch_size:,.1f} an epoch; {steps * tokens_per_step:,}"
            " tokens in all"
        ),
        "",
        (
            "memory, GB    "
            f" {'sequences at once':>18}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'activations':>13}{'peak':>8}"
        ),
    ]
    for micro in [
        m for m in (1, 2, 4, 8, 16, 32, 64, 128, 256) if m <= c.batch_size and c.batch_size % m == 0
    ]:
        m = memory(
            run.model_config,
            parameters,
            state,
            micro,
            micro < c.batch_size,
            run.dtype.itemsize == 2,
        )
        cells = (
            (m["weights"], 10),
            (m["gradients"], 11),
            (m["optimizer"], 11),
            (m["activations"], 13),
            (m["peak"], 8),
        )
        lines.append(
            f"{'':15}{micro:>18}" + "".join(f"{value / 1e9:>{width}.2f}" for value, width in cells)
        )
    size = 4 * parameters + state
    # PyTorch rounds what it locks in memory for a GPU's copies up to a power of two.
    copy = (
        size
        if run.device.type != "cuda"
        else sum(1 << (t.nbytes - 1).bit_length() for t in run.copied())
    )
    folder = next(p for p in (run.folder, *run.folder.absolute().parents) if p.exists())
    free, kept = shutil.disk_usage(folder).free, c.keep_last + 2
    lines += [
        "",
        f"a checkpoint   {size / 1e9:,.2f} GB; {c.keep_last} and the best are kept and one is being"
        f" written: {kept * size / 1e9:,.2f} GB of {free / 1e9:,.1f} GB free at {folder}"
        + ("" if kept * size < free else "  << too little")
        + f"\n{'':15}while one is written, its copy takes {copy / 1e9:,.2f} GB of RAM",
        "",
        f"{'':15}{'hours':>10}{'cost':>10}   at {UTILISATION:.0%} of its peak"
        + (
            ""
            if c.cost_per_hour
            else "; set cost_per_hour for costs (Colab's A100: about 8 compute units)"
        ),
    ]
    for name, (tflops, gigabytes) in GPUS.items():
        hours = total_flops / (tflops * 1e12 * UTILISATION) / 3600
        sizes = [m for m in range(1, c.batch_size + 1) if c.batch_size % m == 0]
        room = 0.92e9 * gigabytes - (
            run.train_data.bytes if run.train_data.bytes <= 0.25e9 * gigabytes else 0
        )  # the tokens lie there too, up to a quarter
        fits = max(
            (
                m
                for m in sizes
                if memory(run.model_config, parameters, state, m, m < c.batch_size, True)["peak"]
                < room
            ),
            default=0,
        )
        lines.append(
            f"{name:15}{hours:>10,.2f}{money(hours, c):>10}  "
            f" {f'{fits} sequences at once in {gigabytes} GB' if fits else f'does not fit {gigabytes} GB'}"
        )
    try:
        seconds, micro = measure(run)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error) and not isinstance(error, RunError):
            raise
        return "\n".join(
            [
                *lines,
                (
                    f"{'here':15}{'':>20}   not one sequence fits the memory of"
                    f" {hardware.describe(run.device)}"
                ),
            ]
        )
    hours = seconds * steps / 3600
    here = (
        f"{seconds:,.3f} s a step, {tokens_per_step / seconds:,.0f} tokens/s, measured on"
        f" {hardware.describe(run.device)} with {micro} sequences at once"
    )
    lines.append(f"{'here':15}{hours:>10,.2f}{money(hours, c):>10}   {here}")
    return "\n".join(lines)


def money(hours: float, config) -> str:
    """What so many hours cost, or nothing where no price is set."""
    return f"{hours * config.cost_per_hour:,.2f}" if config.cost_per_hour else "-"
