"""The optimiser of a run, and one step with it.

Knows parameters, gradients and the settings that it names; no data and no files.
"""

import torch
from torch.profiler import record_function

import hardware
from model import num_fused
from training import muon


def make_optimizer(model: torch.nn.Module, config, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2017), or with Muon for the matrices of the blocks.

    A group's learning rate is the step's times its `scale`. config: a Config.
    """
    options = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": 1e-8,
        "fused": device.type in ("cuda", "cpu"),
    }
    if config.optimizer == "muon":
        return muon.Muon(muon_groups(model, config, device), **options)
    return torch.optim.AdamW(adamw_groups(by_kind(model), config, config.weight_decay), **options)


def adamw_groups(kinds: dict[str, list], config, weight_decay: float) -> list[dict]:
    """Embeddings, other matrices, vectors; vectors alone have no weight decay."""
    scale = embedding_scale(config)
    groups = [
        # AdamW decays by the learning rate times weight_decay: by as much as the other matrices.
        {"params": kinds["embedding"], "scale": scale, "weight_decay": weight_decay / scale},
        {"params": kinds["matrix"] + kinds["head"], "scale": 1.0, "weight_decay": weight_decay},
        {"params": kinds["vector"], "scale": 1.0, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(model, config, device: torch.device) -> list[dict]:
    """The blocks' matrices, a group per shape; the rest for AdamW, with as much weight decay."""
    kinds = by_kind(model)
    scale = config.muon_lr / config.learning_rate
    groups = adamw_groups(kinds | {"matrix": []}, config, config.weight_decay * scale)
    options = {
        "scale": scale,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        # On a GPU 16 bits are many times as fast as float32, on a CPU that has them twice.
        "dtype": hardware.find_dtype(device, config.dtype),
    }
    names = {p: name for name, p in model.named_parameters()}
    by_shape = {}
    for p in kinds["matrix"]:
        by_shape.setdefault((num_fused(names[p], model.config), p.shape), []).append(p)
    for (fused, _), params in by_shape.items():
        groups.append({"params": params, "num_fused": fused} | options)
    return groups


def by_kind(model) -> dict[str, list[torch.nn.Parameter]]:
    """The parameters: embeddings, the blocks' matrices, vectors, and the head.

    Embeddings are those of tokens and of learned positions. A tied one counts as the head.
    """
    kinds = {"embedding": [], "matrix": [], "vector": [], "head": []}
    for name, p in model.named_parameters():
        if p.dim() < 2:
            kinds["vector"].append(p)
        elif name.startswith("h."):
            kinds["matrix"].append(p)
        elif p is model.lm_head.weight:
            kinds["head"].append(p)
        else:
            kinds["embedding"].append(p)
    return kinds


def parameter_names(model, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimiser's parameters, in the order in which its state numbers them."""
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def embedding_scale(config) -> float:
    """The embeddings' learning rate over that of the rest."""
    if config.embedding_lr is None:
        return 1.0
    return config.embedding_lr / config.learning_rate


def reserve_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimiser's state, as its first step would."""
    for group in optimizer.param_groups:
        if "num_fused" in group:
            optimizer.reserve_momentum(group)
            continue
        for p in group["params"]:
            if not optimizer.state[p]:
                step = torch.zeros((), device=p.device if group["fused"] else None)
                averages = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": step} | averages


@record_function("optimizer")
def optimizer_step(model, optimizer, scaler, lr: float, grad_clip: float) -> torch.Tensor:
    """Clip the gradients, take the step, clear them. Returns their norm before clipping.

    The norm stays on the device; one that is not finite leaves weights and optimiser as they are.
    Fused AdamW takes that decision and the clipping factor as tensors, so nothing waits for the
    device.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["scale"]
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    fused = optimizer.defaults["fused"] and not scaler.is_enabled()
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
