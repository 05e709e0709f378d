"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it steps along it: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon. Knows tensors and the processes that share the work.
"""

import torch

from training import distributed


class Muon(torch.optim.AdamW):
    """Muon for groups of parameters with `num_fused`, AdamW for the others.

    A group of Muon's holds parameters of one shape, each `num_fused` matrices on top of each other
    (3 for query, key and value), and has `lr`, Nesterov `momentum`, decoupled `weight_decay`, and
    `dtype`, in which matrices are made orthogonal.

    As in fused AdamW, gradients are divided by the tensor `grad_scale`, and where the tensor
    `found_inf` is 1 a step changes neither weights nor momentum; nothing waits for the device.
    """

    grad_scale = None  # optimizer_step() and GradScaler set these two
    found_inf = None

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.momenta = {}  # the first parameter of a group: the group's stack

    @torch.no_grad()
    def step(self):
        """Change the parameters along their gradients, `p.grad`."""
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
        """Muon's step for one group, as one stack of matrices [N, R, C]."""
        momentum = self.reserve_momentum(group)
        beta, lr = group["momentum"], group["lr"]
        R, C = momentum.shape[1:]
        gradient = torch.cat([p.grad.view(-1, R, C) for p in group["params"]])
        good = torch.ones((), device=momentum.device)
        if self.grad_scale is not None:
            gradient /= self.grad_scale
        if self.found_inf is not None:
            gradient.masked_fill_(self.found_inf.bool(), 0)
            good -= self.found_inf

        momentum.lerp_(gradient, (1 - beta) * good)
        update = gradient.lerp_(momentum, beta)  # Nesterov's look ahead
        update = orthogonalize(update, group["dtype"])
        length = lr * max(1.0, R / C) ** 0.5 * good
        update = update.mul(length.view(1))  # a factor of no dimension would be rounded to 16 bits
        weights = [p.view(-1, R, C) for p in group["params"]]
        if group["weight_decay"]:
            torch._foreach_mul_(weights, 1 - lr * group["weight_decay"] * good)
        torch._foreach_sub_(weights, update.split(group["num_fused"]))

    def reserve_momentum(self, group) -> torch.Tensor:
        """A group's momentum, [N, R, C], of which each parameter's state is a part."""
        params, fused = group["params"], group["num_fused"]
        if params[0] not in self.momenta:
            rows, columns = params[0].shape
            stack = params[0].new_zeros(fused * len(params), rows // fused, columns)
            self.momenta[params[0]] = stack
            for p, part in zip(params, stack.split(fused), strict=True):
                self.state[p] = {"momentum_buffer": part.view_as(p)}
        return self.momenta[params[0]]


def orthogonalize(x: torch.Tensor, dtype=torch.float32) -> torch.Tensor:
    """Matrices with their singular values brought near 1. x: [N, R, C]; returns it in `dtype`.

    Several processes split the matrices between them.
    """
    norm = x.norm(dim=(1, 2), keepdim=True) + 1e-7
    x = (x / norm).to(dtype)  # rounded only now: float16 has no numbers as small as momentum
    if x.size(1) > x.size(2):
        return distributed.split_across_ranks(newton_schulz, x.mT).mT
    return distributed.split_across_ranks(newton_schulz, x)


def newton_schulz(x):
    """Five steps of the iteration in x's dtype. x: [N, rows, columns], no taller than wide.

    The quintic's slope at zero is steep: all but the smallest singular values are then between 0.7
    and 1.2, near enough.
    """
    for _ in range(5):
        gram = torch.bmm(x, x.mT)
        quintic = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, quintic, x, beta=3.4445)
    return x
