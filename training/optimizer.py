"""The optimiser of a run, and one step with it.

Knows parameters, gradients and the settings that it names; no data and no files.
"""

import torch
from torch.profiler import record_function

import hardware
from training import shard
from training.muon import Muon


def make_optimizer(model: torch.nn.Module, config, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2017), or Muon on the matrices of the blocks.

    AdamW decays matrices only: biases and norms are left alone. Beside Muon, AdamW takes the rest
    without decay. A group's learning rate is the step's times its `scale`. config: a Config.
    """
    beta2 = config.beta2
    if config.beta2_tokens:
        beta2 = 0.5 ** (config.batch_size * config.block_size / config.beta2_tokens)
    options = {
        "lr": config.learning_rate,
        "betas": (config.beta1, beta2),
        "eps": 1e-8,
        "fused": device.type in ("cuda", "cpu"),
    }
    if config.optimizer == "muon":
        return Muon(muon_groups(model, config, device), **options)
    parameters = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in parameters if p.dim() >= 2]
    vectors = [p for p in parameters if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay, "scale": 1.0}]
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0, "scale": 1.0})
    return torch.optim.AdamW(groups, **options)


def muon_groups(model, config, device: torch.device) -> list[dict]:
    """First all but the blocks' matrices, for AdamW; then those, for Muon, by side_by_side."""
    options = {
        "scale": config.muon_lr / config.learning_rate if config.learning_rate else 0.0,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        # in 16 bits many times as fast as in float32 on a GPU, twice on a CPU that has them
        "dtype": hardware.find_dtype(device, config.dtype),
    }
    others, matrices = [], {}
    for name, p in model.named_parameters():
        if name.startswith("h.") and p.dim() == 2:
            matrices.setdefault(side_by_side(name, model.config), []).append(p)
        else:
            others.append(p)
    groups = [{"params": others, "muon": 0, "scale": 1.0, "weight_decay": 0.0}]
    for count in sorted(matrices, reverse=True):
        groups.append({"params": matrices[count], "muon": count} | options)
    return groups


def reserve_state(optimizer: torch.optim.Optimizer) -> None:
    """Take the memory of the optimiser's state, as its first step would: AdamW's, or Muon's."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state[p]:
                continue
            place = p.device if group["fused"] and not group.get("muon") else None
            state = {"step": torch.zeros((), device=place)}
            names = ["momentum_buffer"] if group.get("muon") else ["exp_avg", "exp_avg_sq"]
            optimizer.state[p] = state | {name: torch.zeros_like(p) for name in names}


def side_by_side(name: str, shape) -> int:
    """How many matrices of one size a parameter of a block holds.

    In c_attn the query, as often as it has groups, key and value; in the c_fc of qwen3 gate and
    values.
    """
    if name.endswith("c_attn.weight"):
        return shape.n_head // shape.n_kv_head + 2
    if name.endswith("c_fc.weight") and shape.arch == "qwen3":
        return 2
    return 1


@record_function("optimizer")
def optimizer_step(model, optimizer, scaler, lr: float, grad_clip: float) -> torch.Tensor:
    """Clip the gradients, take the step, clear them. Returns their norm before clipping.

    The norm stays on the device. One that is not finite leaves weights and optimiser as they are.
    Fused AdamW takes the clipping factor and that decision as tensors, in its one pass over the
    gradients, so nothing waits for the device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    scaler.unscale_(optimizer)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    norm = shard.full_tensor(norm)
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
