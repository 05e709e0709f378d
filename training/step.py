"""The parts of an optimiser step: learning rate, gradients, clipping, AdamW; and the loss over a
validation split.

Functions of a model, tensors and plain values; they know no run, no files and no settings beyond
those that they name.
"""

import copy
import math

import torch
from torch.profiler import record_function

import hardware
from hardware import out_of_memory
from training import ranks
from training.muon import Muon


def learning_rate_at(step: int, total_steps: int, config) -> float:
    """The learning rate of step `step` (from 0): linear warm-up, then down to min_lr, which the
    last step has: by a cosine, or by a straight line over the last `decay_fraction` of the steps
    (wsd: warm-up, stable, decay).

    config: anything with learning_rate, min_lr (None: a tenth of that; 0 for wsd), warmup_steps,
    lr_schedule and decay_fraction.
    """
    wsd, high = config.lr_schedule == "wsd", config.learning_rate
    low = (0.0 if wsd else high / 10) if config.min_lr is None else config.min_lr
    if step < config.warmup_steps:
        return high * (step + 1) / config.warmup_steps
    if wsd:
        return low + (high - low) * min(
            1.0, (total_steps - 1 - step) / max(1, config.decay_fraction * total_steps)
        )
    done = (step - config.warmup_steps) / max(1, total_steps - 1 - config.warmup_steps)
    return low + (high - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def make_optimizer(model: torch.nn.Module, config, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2017) with weight decay on matrices only: biases and norms are
    left alone. Or Muon on the matrices of the blocks, and AdamW without decay on the rest.

    A group's learning rate is the step's times its `scale`. config: a Config.
    """
    beta2 = (
        0.5 ** (config.batch_size * config.block_size / config.beta2_tokens)
        if config.beta2_tokens
        else config.beta2
    )
    options = {
        "lr": config.learning_rate,
        "betas": (config.beta1, beta2),
        "eps": 1e-8,
        "fused": device.type in ("cuda", "cpu"),
    }
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optimizer == "adamw":
        groups = [
            {
                "params": [p for p in parameters if p.dim() >= 2],
                "weight_decay": config.weight_decay,
            },
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([g | {"scale": 1.0} for g in groups if g["params"]], **options)
    muon = {
        "scale": config.muon_lr / config.learning_rate if config.learning_rate else 0.0,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        # twice as fast as float32 on a CPU with such instructions
        "bfloat16": hardware.find_dtype(device, config.dtype) == torch.bfloat16,
    }
    others, matrices = [], {}
    for name, p in model.named_parameters():
        if name.startswith("h.") and p.dim() == 2:
            matrices.setdefault(side_by_side(name, model.config), []).append(p)
        else:
            others.append(p)
    groups = [{"params": others, "muon": 0, "scale": 1.0, "weight_decay": 0.0}]
    for count in sorted(matrices, reverse=True):
        groups.append({"params": matrices[count], "muon": count} | muon)
    return Muon(groups, **options)


def side_by_side(name: str, shape) -> int:
    """How many matrices of one size a parameter of a block holds: query (as often as it has
    groups), key and value in c_attn, gate and values in the c_fc of qwen3.
    """
    if name.endswith("c_attn.weight"):
        return shape.n_head // shape.n_kv_head + 2
    if name.endswith("c_fc.weight") and shape.arch == "qwen3":
        return 2
    return 1


def forward_backward(model, x, y, micro_batch: int, cast, scaler) -> torch.Tensor:
    """Gradients of the mean loss over x, y: int64 [B, T], `micro_batch` sequences at a time.
    Returns that loss, on the device.

    Where several processes share a batch, each brings its part of it, and gradients and loss are
    its part of the mean.
    """
    total = torch.zeros((), device=x.device)
    parts = len(x) // micro_batch * ranks.count
    for part_x, part_y in zip(x.split(micro_batch), y.split(micro_batch), strict=True):
        with record_function("forward"), cast():
            loss = model(part_x, part_y) / parts
        with record_function("backward"):
            scaler.scale(loss).backward()
        total += loss.detach()
    return total


@record_function("optimizer")
def optimizer_step(model, optimizer, scaler, lr: float, grad_clip: float) -> torch.Tensor:
    """Clip the gradients, take the step, clear them. Returns their norm before clipping, on the
    device.

    A norm that is not finite leaves weights and optimiser as they are. Fused AdamW takes the
    clipping factor and that decision as tensors, in its one pass over the gradients, so nothing
    waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    fused = optimizer.defaults.get("fused") and not scaler.is_enabled()
    if fused:
        optimizer.grad_scale = (norm / grad_clip).clamp(min=1.0) if grad_clip else None
        optimizer.found_inf = 1.0 - norm.isfinite().float()
    elif grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    if fused or scaler.is_enabled() or norm.isfinite():
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)
    return norm


def evaluate(model, data, windows: int, micro_batch: int, cast) -> tuple[float, int]:
    """The loss in nats of `windows` fixed windows of a split (dataset.Dataset), all of it for 0,
    and the number of predictions that it is the sum of; of this process's share of them where
    there are several.

    Runs with gradients enabled but never uses them: so the compiled forward is the one of training,
    with its memory and no second compilation.
    """
    dropout = model.config.dropout
    if dropout:
        model.eval()
    total, count = 0.0, 0
    for x, y, predictions in data.evaluation(windows, micro_batch, ranks.rank, ranks.count):
        with cast():
            total = total + model(x, y).detach() * predictions
        count += predictions
    if dropout:
        model.train()
    return float(total), count


def compile_layers(model):
    """A model that shares the weights of `model` and runs its layers, and its head with the loss,
    compiled one by one.

    Layers of one kind compile once, so that the first step comes after half the time
    (benchmarks/README.md).
    """
    layered = copy.copy(model)
    layered._modules = model._modules | {
        "h": torch.nn.ModuleList(torch.compile(block, dynamic=False) for block in model.h)
    }
    layered.head = torch.compile(model.head, dynamic=False)
    return layered


def compile_or_not(model, x, y, cast, scaler):
    """The compiled model after one trial forward and backward on x, y; or the model as it is, with
    the reason why.
    """
    try:
        compiled = (
            compile_layers(model) if x.device.type == "cpu" else torch.compile(model, dynamic=False)
        )
        with cast():
            loss = compiled(x, y)
        scaler.scale(loss).backward()
        return compiled, None
    except (
        Exception
    ) as error:  # a missing compiler, an old GPU, a bug: none of them is a reason not to train
        if out_of_memory(error):
            raise
        torch._dynamo.reset()
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        return model, f"{type(error).__name__}: {lines[0]}"
    finally:
        model.zero_grad(set_to_none=True)
