"""The ways of computing a model that few runs ask for, put on it before training.

Each is a setting, changes no parameter, and is unknown to model.py.
"""

import torch

from config import Config
from hardware import gpu_memory
from model import GPT
from training import distributed, fp8, low_memory


def adapt(model: GPT, config: Config, device: torch.device, dtype: torch.dtype) -> None:
    """Change how `model` computes, in place, as the settings say. dtype: of the products."""
    rows, columns = model.lm_head.weight.shape
    chunks = loss_chunks(config, rows, dtype, gpu_memory(device))
    if config.activation_checkpointing:
        low_memory.use_activation_checkpointing(model)
    in_8_bits = config.fp8_head
    if in_8_bits:
        problem = fp8.why_not(device, dtype, rows, columns, config.block_size)
        if chunks > 1:
            problem = problem or "its logits need loss_chunks in this memory"
        if problem and distributed.is_main:
            print(f"fp8_head = True, but {problem}; the head's products stay in 16 bits")
        in_8_bits = not problem
    if chunks > 1:
        low_memory.use_chunked_loss(model, chunks)
    elif in_8_bits:
        model.lm_head = fp8.FP8Head(model.lm_head)
    elif device.type == "cuda" and rows > 1024 and rows % 64:
        low_memory.use_aligned_head(model)


def loss_chunks(config: Config, rows: int, dtype: torch.dtype, memory: float | None) -> int:
    """In how many parts head and loss are computed.

    rows: of the head. memory: bytes that a GPU has; None for another device.
    """
    if config.loss_chunks or not memory:
        return config.loss_chunks or 1
    sequences = config.micro_batch_size or config.batch_size // distributed.world_size
    logits = sequences * config.block_size * rows * 2 * dtype.itemsize  # and their gradients
    return 8 if logits > memory / 6 else 1
