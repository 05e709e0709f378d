"""An estimate of the memory that training takes, and the micro-batch that fits by it.

Computed from settings and shapes, also for GPUs that are not here; knows no step. Of this machine,
it reads how much memory is free.
"""

import math

import torch

import hardware
from config import Config
from hardware import Device
from model import GPT, GPTConfig, attention_blocks, is_blockwise
from training import distributed
from training.dataset import GPU_SHARE
from training.run import Run, largest_divisor

WORKSPACE = 32 << 20  # bytes, of cuBLAS on an H100 or H200; less on others


def memory(
    config: Config,
    model: GPT,
    optimizer: torch.optim.Optimizer,
    micro_batch: int,
    device: Device,
    compiled: bool = True,
) -> dict[str, int]:
    """Peak memory of training in bytes, by use: {"weights", "gradients", ..., "peak"}.

    Weights and gradients take 4 bytes per parameter. 16-bit copies of the weights and cuBLAS's
    workspace count as activations. Without compilation, activations take 1.5 times as much with
    gpt2, and twice with qwen3 (on a CPU: docs/results.md); all count twice.
    """
    parameters = model.num_parameters()
    needed = {
        "weights": 4 * parameters,
        "gradients": 4 * parameters,
        "optimizer": state_bytes(optimizer),
        "activations": activations(config, model.config, micro_batch, device),
    }
    if device.dtype.itemsize == 2:
        needed["activations"] += 2 * parameters
    if device.memory:
        needed["activations"] += WORKSPACE
    if not compiled:
        needed["activations"] *= 2
    in_backward = needed["gradients"] + needed["activations"]
    if micro_batch == config.batch_size:
        # Gradients are allocated while activations are freed. Not where they are accumulated, nor
        # with several processes: DistributedDataParallel keeps them.
        in_backward = max(needed["gradients"], needed["activations"])
    return needed | {"peak": needed["weights"] + needed["optimizer"] + in_backward}


def memory_here(run: Run, micro_batch: int) -> dict[str, int]:
    """As memory(), for a run as it is on this device."""
    return memory(run.config, run.model, run.optimizer, micro_batch, run.device, run.compiles)


def activations(config: Config, shape: GPTConfig, micro_batch: int, device: Device) -> int:
    """Bytes of activations for a backward pass.

    Per token and layer: two residuals, and in the precision of the matrix products the inputs of
    the linear layers, query, key and value, and the MLP's inner values; if attention is blockwise,
    its weights, and with dropout the masks. Per token: the gradients of one MLP, the logits, and
    their gradient, which a compiled step in bfloat16 on a GPU writes over them. Activation
    checkpointing keeps one residual per layer, plus one layer's activations. A chunked loss keeps
    one chunk's logits.
    """
    item, width = device.dtype.itemsize, shape.n_embd
    residual = 2 if device.memory and device.dtype == torch.bfloat16 else 4  # model.stream_dtype
    queries, keys = shape.n_head * shape.head_dim, shape.n_kv_head * shape.head_dim
    attention = width + 2 * queries + 2 * keys  # norm, query, key, value, the projection's input
    mlp = width + 2 * shape.n_inner  # norm, and before and after GELU
    if shape.arch == "qwen3":
        attention += queries + keys  # normed
    if shape.modern:
        attention += queries + keys  # rotated
        mlp += shape.n_inner  # gate, values and their product
    if is_blockwise(device.type, device.dtype, shape.block_size, shape.dropout):
        seen = sum((end - begin) * end for begin, end in attention_blocks(shape.block_size))
        weights = shape.n_head * seen // shape.block_size
        attention += weights
        if shape.dropout:  # a mask for each weight, and for what attention and MLP return
            attention += weights + 2 * width
    layer = 2 * residual * width + item * (attention + mlp)
    layers = shape.n_layer * layer
    if config.activation_checkpointing:
        layers = shape.n_layer * residual * width + layer
    logits = item * shape.vocab_size / loss_chunks(config, shape.vocab_size, device)
    if not device.memory or device.dtype != torch.bfloat16:
        logits *= 2  # their gradient
    return int(micro_batch * shape.block_size * (layers + item * mlp + logits))


def loss_chunks(config: Config, vocab_size: int, device: Device) -> int:
    """Into how many chunks to split head and loss: 8 if logits take much of a GPU, else 1."""
    if not device.memory:
        return 1
    sequences = config.micro_batch_size or config.batch_size // distributed.world_size
    logits = sequences * config.block_size * vocab_size
    gradients_too = 2 * logits * device.dtype.itemsize
    return 8 if gradients_too > device.memory / 6 else 1


def checkpoint_bytes(run: Run) -> int:
    """Bytes of a checkpoint: weights and the optimizer's state."""
    return 4 * run.model.num_parameters() + state_bytes(run.optimizer)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of AdamW's two moments or Muon's one."""
    total = 0
    for group in optimizer.param_groups:
        tensors = 1 if "num_fused" in group else 2
        total += 4 * tensors * sum(p.numel() for p in group["params"])
    return total


def micro_batch_to_try(run: Run) -> int:
    """The largest micro-batch that may fit in memory, by the estimate; at least one sequence.

    On a GPU, at most twice the estimate: fit_in_memory() tries them, and each that does not fit
    costs a compilation.
    """
    size = run.micro_batch
    if run.device.memory:
        most = 2 * max(1, largest_micro_batch(run, run.device))
        most = -int(distributed.all_reduce_max(-most)[0])  # the processes' GPUs may differ
        return largest_divisor(run.local_batch, min(size, most))
    while run.device.type == "cpu" and size > 1 and not fits_ram(run, size):
        size = largest_divisor(run.local_batch, size // 2)
    return size


def largest_micro_batch(run: Run, device: Device) -> int:
    """The largest micro-batch that fits a GPU's memory; 0 if none does."""
    room = 0.92 * device.memory
    if run.data.train.bytes <= GPU_SHARE * device.memory:
        room -= run.data.train.bytes  # dataset.find_location puts the tokens there
    batch = run.local_batch
    for size in range(batch, 0, -1):
        if (
            batch % size == 0
            and memory(run.config, run.model, run.optimizer, size, device)["peak"] < room
        ):
            return size
    return 0


def fits_ram(run: Run, micro_batch: int) -> bool:
    """Whether a CPU run fits in the free RAM of all its machines.

    Linux kills a process that takes more.
    """
    lacks = ram_to_come(run, micro_batch) > (hardware.free_ram() or math.inf)
    return not distributed.all_reduce_max(lacks)[0]  # each may see other free memory


def ram_to_come(run: Run, micro_batch: int) -> int:
    """Bytes of RAM that a CPU run will allocate on this machine, at its peak."""
    needed = memory_here(run, micro_batch)
    to_come = needed["peak"] - needed["weights"]  # the weights are allocated already
    if run.optimizer.state:  # and the moments, if they come from a checkpoint or a trial
        to_come -= needed["optimizer"]
    copy = checkpoint_bytes(run)  # which the first process saves while it trains on
    return copy + distributed.local_world_size * to_come
