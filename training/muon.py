"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it steps along it: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon. Knows tensors only.
"""

import torch

from training import shard


def orthogonalize(x, steps: int = 5):
    """Matrices with their singular values brought near 1, by Newton-Schulz iteration.

    x: [N, rows, columns], as is what it returns; the iteration is in x's dtype. The quintic's slope
    at zero is steep: after five steps all but the smallest singular values lie between 0.7 and 1.2,
    near enough.
    """
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        quintic = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, quintic, x, beta=3.4445)
    return x.mT if tall else x


class Muon(torch.optim.AdamW):
    """Muon for the groups of parameters that ask for it, fused AdamW for the others.

    A group's `muon` says how many matrices each of its parameters holds side by side (3 for query,
    key and value), 0 that AdamW steps it. Muon's groups also have `lr`, Nesterov `momentum`,
    decoupled `weight_decay`, and `bfloat16`: whether to iterate in it.

    A step is `lr` times sqrt(rows / columns), where that is above 1. As in fused AdamW, gradients
    are divided by the tensor `grad_scale`, and where the tensor `found_inf` is 1 the step leaves
    weights and momentum as they are; nothing waits for the device.
    """

    @torch.no_grad()
    def step(self):
        """One step on the gradients as they are."""
        groups = self.param_groups
        for group in groups:
            shapes = {}
            for p in group["params"] if group["muon"] else ():
                if p.grad is not None:
                    shapes.setdefault(p.shape, []).append(p)
            for params in shapes.values():
                self._muon_step(params, group)
        self.param_groups = [g for g in groups if not g["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _muon_step(self, params, group):
        """The step of the matrices of one shape, stacked: few and large products."""
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())  # AdamW expects one in what it loads
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        of_one = params[0]
        momentum = [shard.local(self.state[p]["momentum_buffer"]) for p in params]
        grads = [shard.local(p.grad) for p in params]
        params = [shard.local(p) for p in params]
        size = 1.0
        if getattr(self, "grad_scale", None) is not None:
            grads = torch._foreach_div(grads, self.grad_scale)
        if getattr(self, "found_inf", None) is not None:
            bad = self.found_inf.bool()
            pairs = zip(momentum, grads, strict=True)
            grads = [torch.where(bad, m, g) for m, g in pairs]
            size = 1.0 - self.found_inf
        torch._foreach_lerp_(momentum, grads, 1 - group["momentum"])
        update = torch.stack(torch._foreach_lerp(grads, momentum, group["momentum"]))
        low = update.to(torch.bfloat16 if group["bfloat16"] else update.dtype)
        low = shard.join_rows(low, of_one)
        rows, columns = low.size(1) // group["muon"], low.size(2)
        low = orthogonalize(low.view(-1, rows, columns)).reshape(low.shape)
        update = shard.own_rows(low, of_one).to(update.dtype)
        update *= -group["lr"] * max(1.0, rows / columns) ** 0.5 * size
        if group["weight_decay"]:
            torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"] * size)
        torch._foreach_add_(params, update.unbind())
