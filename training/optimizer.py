"""The optimiser of a run, and one step with it.

Knows parameters, gradients and the settings that it names; no data and no files.
"""

import torch
from torch.profiler import record_function

import hardware
from training import muon, shard


def make_optimizer(model: torch.nn.Module, config, device: torch.device) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2017), or with Muon for the matrices of the blocks.

    A group's learning rate is the step's times its `scale`. config: a Config.
    """
    beta2 = config.beta2
    if config.beta2_tokens:
        beta2 = 0.5 ** (config.batch_size * config.block_size / config.beta2_tokens)
    options = {
        "lr": config.learning_rate,
        "betas": (config.beta1, beta2),
        "eps": 1e-8,
        "fused": device.type in ("cuda", "cpu")
        or (device.type in ("xpu", "mps") and skips_bad_steps(device)),
    }
    if config.optimizer == "muon":
        return muon.Muon(muon_groups(model, config, device), **options)
    return torch.optim.AdamW(adamw_groups(model, config), **options)


def skips_bad_steps(device: torch.device) -> bool:
    """Whether fused AdamW and SGD, which Muon uses, leave a parameter where `found_inf` is set.

    On mps, PyTorch ignored that until the summer of 2026.
    """
    p = torch.zeros(1, device=device, requires_grad=True)
    p.grad = torch.ones_like(p)
    for kind in (torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind([p], fused=True)
        optimizer.found_inf, optimizer.grad_scale = torch.ones((), device=device), None
        optimizer.step()
    return p.item() == 0


def adamw_groups(model, config) -> list[dict]:
    """Embeddings, other matrices, vectors; these alone have no weight decay."""
    kinds, scale = by_kind(model), embedding_scale(config)
    decay = config.weight_decay
    groups = [
        # AdamW decays by the learning rate times weight_decay: by as much as the other matrices.
        {"params": kinds["embedding"], "scale": scale, "weight_decay": decay / (scale or 1.0)},
        {"params": kinds["matrix"] + kinds["other"], "scale": 1.0, "weight_decay": decay},
        {"params": kinds["vector"], "scale": 1.0, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def muon_groups(model, config, device: torch.device) -> list[dict]:
    """For Muon the blocks' matrices, a group for each shape; before them the rest, for AdamW."""
    kinds = by_kind(model)
    others = {"num_fused": 0, "weight_decay": 0.0}
    groups = [
        {"params": kinds["embedding"], "scale": embedding_scale(config)} | others,
        {"params": kinds["other"] + kinds["vector"], "scale": 1.0} | others,
    ]
    options = {
        "scale": config.muon_lr / config.learning_rate,
        "momentum": config.muon_momentum,
        "weight_decay": config.weight_decay,
        # On a GPU 16 bits are many times as fast as float32, on a CPU that has them twice.
        "dtype": hardware.find_dtype(device, config.dtype),
    }
    names = {p: name for name, p in model.named_parameters()}
    alike = {}
    for p in kinds["matrix"]:
        alike.setdefault((num_fused(names[p], model.config), p.shape), []).append(p)
    groups += [{"params": params, "num_fused": n} | options for (n, _), params in alike.items()]
    return [group for group in groups if group["params"]]


def by_kind(model) -> dict[str, list[torch.nn.Parameter]]:
    """The parameters: embeddings, the blocks' matrices, vectors, and the head as `other`.

    Embeddings are those of tokens and of learned positions. A tied one counts as the head.
    """
    kinds = {"embedding": [], "matrix": [], "vector": [], "other": []}
    for name, p in model.named_parameters():
        if p.dim() < 2:
            kinds["vector"].append(p)
        elif name.startswith("h."):
            kinds["matrix"].append(p)
        elif p is model.lm_head.weight:
            kinds["other"].append(p)
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


def num_fused(name: str, shape) -> int:
    """How many matrices of one size a parameter of a block holds on top of each other.

    c_attn: query, as often as it has groups, key and value. c_fc of qwen3: gate and values.
    """
    if name.endswith("c_attn.weight"):
        return shape.n_head // shape.n_kv_head + 2
    if name.endswith("c_fc.weight") and shape.arch == "qwen3":
        return 2
    return 1


def reserve_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the optimiser's state, as its first step would."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if optimizer.state[p]:
                continue
            if group.get("num_fused"):
                optimizer.state[p] = muon.new_state(p)
                continue
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
    norm = shard.full_tensor(torch.nn.utils.get_total_norm(gradients))
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
