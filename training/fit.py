"""Prepares the model before the first step, so that a step fits in memory.

Finds the micro-batch with which it does. Can recompute layers in the backward pass and compute the
loss in chunks of the logits. None of this changes parameters, losses or checkpoints, and model.py
knows nothing about it.
"""

import traceback
from functools import partial
from types import MethodType

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hardware
from config import Config
from formats import files
from hardware import Device
from model import GPT, IGNORE
from training import RunError, distributed
from training.compiling import compile_model, delete_empty_code
from training.memory import loss_chunks, micro_batch_to_try
from training.optimizer import reserve_state
from training.run import Run, largest_divisor
from training.step import evaluate, forward_backward


def fit_in_memory(run: Run) -> str | None:
    """Compile the model, and take the micro-batch of the estimate, halved until a step fits.

    The batch of an optimizer step stays the same, and with it the losses. Sets run.compiled,
    run.ddp and run.micro_batch. Returns the reason if compilation failed, and then no process
    compiles; else None. Raises RunError if a single sequence does not fit.
    """
    problem, retried = None, False
    if run.compiles:
        run.compiled = compile_model(run.model, run.device)
    run.micro_batch = micro_batch_to_try(run)
    while True:
        error = try_step(run)
        no_memory = error is not None and hardware.out_of_memory(error)
        failed = error is not None and not no_memory
        if failed:
            if run.compiled is run.model:
                raise error
            torch._dynamo.reset()
            if not retried and delete_empty_code():
                retried = True
                continue
            problem = f"torch.compile failed: {files.error_message(error)}"
        failed, no_memory = distributed.all_reduce_max(failed, no_memory)
        if failed:  # in any process: the micro-batch is one for all, and takes more memory now
            problem = problem or "torch.compile failed in another process"
            run.compiles, run.compiled = False, run.model
            run.micro_batch = micro_batch_to_try(run)
            continue
        if not no_memory:
            break
        if run.micro_batch == 1:
            c = run.config
            raise RunError(
                f"out of memory on {run.device.name} with a single sequence of {c.block_size}"
                " tokens. End other programs that use the memory; or try activation_checkpointing"
                f" = True; or begin a run with block_size = {c.block_size // 2}, or with a smaller"
                f" n_layer ({c.n_layer}) or n_embd ({c.n_embd})"
            )
        run.micro_batch = largest_divisor(run.local_batch, run.micro_batch // 2)
    run.ddp = data_parallel(run.compiled) if distributed.world_size > 1 else run.compiled
    return problem


def try_step(run: Run) -> Exception | None:
    """Try a forward and backward pass of up to two micro-batches; returns the error, if any.

    Changes neither weights nor saved buffers. With dropout, evaluation is a different graph: tries
    that too.
    """
    model = run.model
    buffers = [name for name, _ in model.named_buffers() if name in model.state_dict()]
    before = {name: model.get_buffer(name).clone() for name in buffers}
    try:
        reserve_state(run.optimizer)
        if distributed.world_size > 1:  # DistributedDataParallel keeps gradients allocated
            for p in model.parameters():
                p.grad = torch.zeros_like(p)
        rows, size = min(run.local_batch, 2 * run.micro_batch), run.micro_batch
        x, y = run.data.train.batch(0, rows, run.config.seed)
        forward_backward(run.compiled, x, y, size, run.cast, run.scaler)
        if model.config.dropout:
            evaluate(run.compiled, [(x[:size], y[:size])], run.cast)
        hardware.synchronize(run.device.torch)
        return None
    except Exception as error:
        traceback.clear_frames(error.__traceback__)  # the frames keep tensors alive
        return error
    finally:
        for name, value in before.items():
            model.get_buffer(name).copy_(value)
        model.train()
        model.zero_grad(set_to_none=True)
        hardware.release_memory(run.device.torch)


def data_parallel(model) -> DistributedDataParallel:
    """The model with its gradients averaged over all processes."""
    # Buffers are the same in all processes; DDP would send them in every step.
    buffers = [name for name, _ in model.named_buffers()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, buffers)
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


# -- less memory -----------------------------------------------------------------------------------


def apply_memory_options(model: GPT, config: Config, device: Device) -> None:
    """Checkpoint activations if the setting asks for it; chunk the loss if the logits are large."""
    if config.activation_checkpointing:
        use_activation_checkpointing(model)
    chunks = loss_chunks(config, model.config.vocab_size, device)
    if chunks > 1:
        use_chunked_loss(model, chunks)


def use_activation_checkpointing(model: GPT) -> None:
    """Store only each layer's input, and recompute the layer in the backward pass.

    Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost". The layers take a third more
    FLOPs per step.
    """
    options = {"use_reentrant": False, "preserve_rng_state": model.config.dropout > 0}

    def checkpointed(plain, *inputs):
        if not torch.is_grad_enabled():  # generation
            return plain(*inputs)
        return checkpoint(plain, *inputs, **options)

    for block in model.h:
        block.forward = partial(checkpointed, block.forward)


def use_chunked_loss(model: GPT, chunks: int) -> None:
    """Compute head and loss in chunks of the tokens, and recompute them in the backward pass.

    Only one chunk's logits are in memory at a time.
    """
    plain = type(model).head

    def head(self, x, targets):
        if targets is None:
            return plain(self, x, targets)
        pairs = zip(x.flatten(0, 1).chunk(chunks), targets.flatten().chunk(chunks), strict=True)
        total = sum(checkpoint(chunk_loss, self, x, y, use_reentrant=False) for x, y in pairs)
        return total / (targets != IGNORE).sum().clamp(min=1)

    def chunk_loss(self, x, targets):  # summed over the targets
        return plain(self, x[None], targets[None]) * (targets != IGNORE).sum()

    model.head = MethodType(head, model)
