"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it steps along it: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon. Knows tensors and the processes that share the work.
"""

import torch

from training import distributed, shard


class Muon(torch.optim.AdamW):
    """Muon for groups of parameters with `num_fused` above 0, fused AdamW for the others.

    A group of Muon's: parameters of one shape, each `num_fused` matrices on top of each other (3
    for query, key and value). `lr`, Nesterov `momentum`, decoupled `weight_decay`, and `dtype`, in
    which matrices are made orthogonal, are the same in all groups. A step is `lr` long times
    sqrt(rows / columns), where that is above 1.

    As in fused AdamW, gradients are divided by the tensor `grad_scale`, and where the tensor
    `found_inf` is 1 a step changes neither weights nor momentum; nothing waits for the device.
    """

    grad_scale = None  # optimizer_step() and GradScaler set these two
    found_inf = None

    @torch.no_grad()
    def step(self):
        """One step on the gradients as they are."""
        groups = self.param_groups
        self._step_matrices([group for group in groups if group["num_fused"]])
        self.param_groups = [group for group in groups if not group["num_fused"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _step_matrices(self, groups):
        """Muon's own step.

        All parameters of a group are one stack [N, R, C]: a few operations, however many layers.
        With `shard` R are the rows of this process.
        """
        beta, weight_decay = groups[0]["momentum"], groups[0]["weight_decay"]
        params = [p for group in groups for p in group["params"]]
        for p in params:
            self.state[p] = self.state[p] or new_state(p)
        momenta = [torch.stack(self._buffers(group["params"])) for group in groups]
        gradients = [
            torch.stack([shard.local_shard(p.grad) for p in group["params"]]) for group in groups
        ]
        bad = self.found_inf
        if bad is None:
            bad = torch.zeros((), device=gradients[0].device)
        lr = groups[0]["lr"] * (1 - bad)
        if self.grad_scale is not None:
            torch._foreach_div_(gradients, self.grad_scale)
        weight, is_bad = (1 - beta) * (1 - bad), bad > 0
        for momentum, gradient in zip(momenta, gradients, strict=True):
            gradient.masked_fill_(is_bad, 0.0)  # as NaN times 0 is NaN
            momentum.lerp_(gradient, weight)
        torch._foreach_lerp_(gradients, momenta, beta)  # Nesterov's momentum
        # All messages come before the first change: a lost process leaves a whole state behind.
        updates = orthogonalize_groups(groups, gradients)
        torch._foreach_mul_(updates, [step_size(group) for group in groups])
        torch._foreach_mul_(updates, lr)
        weights = [shard.local_shard(p) for p in params]
        torch._foreach_copy_(self._buffers(params), unstack(momenta))
        torch._foreach_mul_(weights, 1 - lr * weight_decay)
        torch._foreach_sub_(weights, unstack(updates))

    def _buffers(self, params):
        return [shard.local_shard(self.state[p]["momentum_buffer"]) for p in params]


def step_size(group: dict) -> float:
    """How long a step is beside `lr`: sqrt(rows / columns) of a matrix, where that is above 1."""
    rows, columns = group["params"][0].shape
    return max(1.0, rows / group["num_fused"] / columns) ** 0.5


def unstack(stacks):
    return [x for stack in stacks for x in stack.unbind()]


def new_state(p: torch.Tensor) -> dict:
    """What Muon keeps of a matrix. AdamW expects a step in what it loads."""
    return {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(p)}


def orthogonalize_groups(groups: list[dict], updates: list[torch.Tensor]) -> list[torch.Tensor]:
    """The groups' updates made orthogonal. updates: [N, R, C] each, as is what it returns."""
    firsts = [group["params"][0] for group in groups]
    matrices = []
    for group, p, update in zip(groups, firsts, updates, strict=True):
        rows, columns = p.shape
        full = shard.gather_rows(update, p)
        matrices.append(full.view(-1, rows // group["num_fused"], columns))
    done = orthogonalize(matrices, groups[0]["dtype"])
    return [shard.local_rows(x.reshape(-1, *p.shape), p) for x, p in zip(done, firsts, strict=True)]


def orthogonalize(matrices: list[torch.Tensor], dtype=torch.float32) -> list[torch.Tensor]:
    """Matrices with their singular values brought near 1.

    matrices: stacks [N, R, C]. Those of one shape, or of its transpose, are one product.
    dtype: of the products. Several processes split the matrices between them.
    """
    alike = {}  # shape: the numbers of the stacks that have it
    for number, x in enumerate(matrices):
        alike.setdefault(frozenset(x.shape[1:]), []).append(number)
    done = list(matrices)
    for numbers in alike.values():
        x = torch.cat([x.mT if is_tall(x) else x for x in (matrices[n] for n in numbers)])
        x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
        # Only now: float16 has no numbers as small as momentum.
        x = distributed.split_across_ranks(newton_schulz, x.to(dtype)).to(x.dtype)
        parts = x.split([len(matrices[number]) for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            done[number] = part.mT if is_tall(matrices[number]) else part
    return done


def is_tall(x):
    return x.size(1) > x.size(2)


def newton_schulz(x, steps: int = 5):
    """Five steps of the iteration in x's dtype. x: [N, rows, columns], no taller than wide.

    The quintic's slope at zero is steep: all but the smallest singular values then lie between 0.7
    and 1.2, near enough.
    """
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        quintic = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, quintic, x, beta=3.4445)
    return x
