"""Which of the ways to compute in fp8.py and low_memory.py a run uses.

Each follows from a setting or the GPU's memory, changes no parameter, and is unknown to model.py.
"""

from config import Config
from hardware import Device
from model import GPT
from training import distributed, fp8, low_memory


def adapt(model: GPT, config: Config, device: Device) -> None:
    """Change how `model` computes, in place."""
    rows, columns = model.lm_head.weight.shape
    chunks = loss_chunks(config, rows, device)
    problem = fp8.why_not(device.torch, device.dtype, rows, columns, config.block_size)
    if chunks > 1:
        problem = problem or "its logits need loss_chunks in this memory"
    if config.compile is False:
        problem = problem or "it takes a compiled model, and compile = False"
    if config.fp8_head and not problem:
        problem = fp8.trial(device.torch)
    if config.fp8_head and problem and distributed.is_main:
        print(f"fp8_head = True, but {problem}; the head's products stay in 16 bits")

    if config.activation_checkpointing:
        low_memory.use_activation_checkpointing(model)
    if chunks > 1:
        low_memory.use_chunked_loss(model, chunks)
    elif config.fp8_head and not problem:
        model.lm_head = fp8.FP8Head(model.lm_head)


def loss_chunks(config: Config, rows: int, device: Device) -> int:
    """How many chunks head and loss are computed in. rows: of the head."""
    if config.loss_chunks:
        return config.loss_chunks
    if not device.memory:
        return 1
    sequences = config.micro_batch_size or config.batch_size // distributed.world_size
    logits = sequences * config.block_size * rows * 2 * device.dtype.itemsize  # and their gradients
    return 8 if logits > device.memory / 6 else 1
