"""The optimizer: AdamW, or AdamW with Muon for the blocks' matrices; clipping and updates.

Knows parameters, gradients, some settings, and the processes that share Muon's work; neither data
nor files.
"""

import torch

import hardware
from model import num_fused
from training import distributed

# What make_optimizer gives to an optimizer's groups.
GIVEN = ("params", "lr", "initial_lr", "weight_decay", "betas", "momentum", "eps", "fused")


def make_optimizer(
    model: torch.nn.Module, config, device: torch.device, decay: float
) -> torch.optim.Optimizer:
    """AdamW (Loshchilov and Hutter, 2017), or AdamW with Muon for the blocks' matrices.

    Parameters with the same options share a group; those of Muon also have one shape. A group's
    `initial_lr` is its peak learning rate. decay: the fraction by which a step at the peak shrinks
    the matrices' weights. config: a Config.
    """
    groups = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue  # frozen
        owner = model.get_submodule(name.rpartition(".")[0])
        lr, shrink, muon, shape = config.learning_rate, decay, {}, None
        if p.dim() < 2:
            shrink = 0.0
        elif isinstance(owner, torch.nn.Embedding) and p is not model.lm_head.weight:
            if config.embedding_lr is not None:
                lr = config.embedding_lr
        elif config.optimizer == "muon" and name.startswith("h."):
            lr, shape = config.muon_lr, p.shape
            muon = {
                "num_fused": num_fused(name, p, model.config),
                "momentum": config.muon_momentum,
                # 16 bits are many times faster than float32 on a GPU, and twice on a CPU that has
                # them.
                "dtype": hardware.find_dtype(device, config.dtype),
            }
        # PyTorch multiplies weight_decay by the learning rate.
        options = {"lr": lr, "initial_lr": lr, "weight_decay": shrink / lr if lr else 0.0} | muon
        group = groups.setdefault((shape, *options.values()), {"params": [], **options})
        group["params"].append(p)
    make = Muon if config.optimizer == "muon" else torch.optim.AdamW
    fused = device.type in ("cuda", "cpu")
    betas = (config.beta1, config.beta2)
    return make(list(groups.values()), betas=betas, eps=1e-8, fused=fused)


def parameter_names(model, optimizer: torch.optim.Optimizer) -> list[str]:
    """The names of an optimizer's parameters, in the order of its state dict's numbers."""
    names = {p: name for name, p in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def reserve_state(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the state of AdamW or Muon, as the first step would; of others, nothing."""
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        if "num_fused" in group:
            optimizer.reserve_momentum(group)
            continue
        for p in group["params"]:
            if not optimizer.state[p]:
                step = torch.zeros((), device=p.device if group["fused"] else None)
                averages = {name: torch.zeros_like(p) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[p] = {"step": step} | averages


def load_state(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load the state of an optimizer that is neither AdamW nor Muon.

    Its groups may hold state too, such as a number of steps; what GIVEN names is that of now.
    """
    groups = optimizer.state_dict()["param_groups"]
    for group, was in zip(groups, saved["param_groups"], strict=True):
        group |= {name: value for name, value in was.items() if name not in GIVEN}
    optimizer.load_state_dict(saved | {"param_groups": groups})


def set_learning_rates(optimizer: torch.optim.Optimizer, multiplier: float) -> None:
    """Give each group its peak learning rate times `multiplier`."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * multiplier


def clip_gradients(model, optimizer, scaler, grad_clip: float) -> torch.Tensor:
    """Clip the gradients to a norm of grad_clip (0: no clipping). Returns the norm before.

    The norm is a scalar on the device. A fused optimizer gets the factor as a tensor, and a flag to
    skip the update if the norm is not finite, so nothing waits for the device.
    """
    scaler.unscale_(optimizer)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if is_fused(optimizer, scaler):
        optimizer.grad_scale = (norm / grad_clip).clamp(min=1.0) if grad_clip else None
        optimizer.found_inf = 1.0 - norm.isfinite().float()
    elif grad_clip:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), grad_clip, norm)
    return norm


def update_weights(optimizer, scaler, norm: torch.Tensor) -> None:
    """Take an optimizer step, and clear the gradients.

    If the norm of the gradients is not finite, weights and optimizer state do not change.
    """
    if is_fused(optimizer, scaler) or scaler.is_enabled() or norm.isfinite():
        scaler.step(optimizer)
        scaler.update()
    optimizer.zero_grad(set_to_none=True)


def is_fused(optimizer, scaler) -> bool:
    """True if the optimizer itself clips and skips; with float16, the GradScaler does."""
    return optimizer.defaults.get("fused") and not scaler.is_enabled()


# -- Muon ------------------------------------------------------------------------------------------


class Muon(torch.optim.AdamW):
    """Muon for parameter groups with `num_fused`, AdamW for the others.

    Muon orthogonalizes the momentum of a matrix and uses that as the update: Jordan et al., 2024,
    https://kellerjordan.github.io/posts/muon.

    A Muon group holds parameters of one shape, each a stack of `num_fused` matrices (3 for query,
    key and value). It has `lr`, Nesterov `momentum`, decoupled `weight_decay`, and `dtype`, the
    precision of the orthogonalization.

    As in fused AdamW, gradients are divided by the tensor `grad_scale`, and if the tensor
    `found_inf` is 1, a step changes neither weights nor momentum; nothing waits for the device.
    """

    grad_scale = None  # clip_gradients() and GradScaler set these two
    found_inf = None

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.momenta = {}  # {first parameter of a group: momentum of the group}

    @torch.no_grad()
    def step(self):
        """Update the parameters from their gradients."""
        groups = self.param_groups
        for group in groups:
            if "num_fused" in group:
                self.step_matrices(group)
        self.param_groups = [group for group in groups if "num_fused" not in group]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def step_matrices(self, group):
        """Muon's step for one group, on all its matrices at once, [N, R, C]."""
        momentum = self.reserve_momentum(group)
        beta, lr = group["momentum"], group["lr"]
        R, C = momentum.shape[1:]
        # A matrix that no token reached, such as an expert's, has no gradient.
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
        gradient = torch.cat([grad.view(-1, R, C) for grad in gradients])
        good = torch.ones((), device=momentum.device)
        if self.grad_scale is not None:
            gradient /= self.grad_scale
        if self.found_inf is not None:
            gradient.masked_fill_(self.found_inf.bool(), 0)
            good -= self.found_inf

        momentum.lerp_(gradient, (1 - beta) * good)
        update = gradient.lerp_(momentum, beta)  # Nesterov
        update = orthogonalize(update, group["dtype"])
        length = lr * max(1.0, R / C) ** 0.5 * good
        update = update.mul(length.view(1))  # 0-dim would be rounded to 16 bits
        weights = [p.view(-1, R, C) for p in group["params"]]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * good)
        torch._foreach_sub_(weights, update.split(group["num_fused"]))

    def reserve_momentum(self, group) -> torch.Tensor:
        """A group's momentum, [N, R, C]; each parameter's state is a view of a part of it."""
        params, fused = group["params"], group["num_fused"]
        if params[0] not in self.momenta:
            rows, columns = params[0].flatten(0, -2).shape
            stack = params[0].new_zeros(fused * len(params), rows // fused, columns)
            self.momenta[params[0]] = stack
            for p, part in zip(params, stack.split(fused), strict=True):
                self.state[p] = {"momentum_buffer": part.view_as(p)}
        return self.momenta[params[0]]


def orthogonalize(x: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """Bring the singular values of matrices near 1: [N, R, C] -> the same shape in `dtype`.

    If there are several processes, each computes a share of the matrices.
    """
    norm = x.norm(dim=(1, 2), keepdim=True) + 1e-7
    x = (x / norm).to(dtype)  # in this order: momentum underflows in float16
    if x.size(1) > x.size(2):
        return distributed.split_across_ranks(newton_schulz, x.mT).mT
    return distributed.split_across_ranks(newton_schulz, x)


def newton_schulz(x):
    """Five Newton-Schulz iterations in x's dtype. x: [N, R, C] with R <= C and norms of at most 1.

    The quintic is steep at zero, so that all but the smallest singular values end between 0.7 and
    1.2, which is close enough.
    """
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        quintic = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, quintic, x, beta=3.4445)
    return x
