"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it steps along it: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon. Knows tensors and the processes that share the work.
"""

import torch
from torch.optim.sgd import sgd

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

        The updates of a group are one stack [N, R, C]: a few operations, however many layers. With
        `shard` R are the rows of this process.
        """
        decay = groups[0]["weight_decay"]
        params = [p for group in groups for p in group["params"]]
        for p in params:
            self.state[p] = self.state[p] or new_state(p)
        weights = [shard.local_shard(p) for p in params]
        lr = torch.full((), groups[0]["lr"], device=weights[0].device)
        if self.found_inf is not None:
            lr = lr * (1 - self.found_inf)
        kept = [shard.local_shard(self.state[p]["momentum_buffer"]) for p in params]
        momenta = kept
        if distributed.world_size > 1:
            # All messages come before the first change: a lost process leaves the state whole.
            momenta = torch._foreach_mul(kept, 1.0)
        updates = self._nesterov(groups, momenta)
        orthogonalize_groups(groups, updates, lr)
        if momenta is not kept:
            torch._foreach_copy_(kept, momenta)
        if decay:
            torch._foreach_mul_(weights, 1 - lr * decay)
        torch._foreach_sub_(weights, unstack(updates))

    def _nesterov(self, groups, momenta):
        """The new momenta in place, and Nesterov's look ahead from them, a stack for each group.

        With b for `momentum`: m becomes b m + (1 - b) g, and an update is b m + (1 - b) g again.
        Fused SGD does both in one pass: weights of zero become the update at a rate of -1.
        """
        params = [p for group in groups for p in group["params"]]
        gradients = [shard.local_shard(p.grad) for p in params]
        updates = []
        for group in groups:
            rows, columns = shard.local_shard(group["params"][0]).shape
            updates.append(gradients[0].new_zeros(len(group["params"]), rows, columns))
        beta, fused = groups[0]["momentum"], self.defaults["fused"]
        scale = torch.full((), 1 / (1 - beta), device=gradients[0].device)
        if self.grad_scale is not None:
            scale = scale * self.grad_scale
        options = {"fused": True, "grad_scale": scale, "found_inf": self.found_inf}
        if not fused:  # optimizer_step() has clipped, and skips bad steps
            torch._foreach_div_(gradients, scale)
            options = {"foreach": True}
        sgd(
            unstack(updates),
            gradients,
            momenta,
            momentum=beta,
            nesterov=True,
            lr=-1.0,
            weight_decay=0.0,
            dampening=0.0,
            maximize=False,
            **options,
        )
        return updates


def matrix_shape(group: dict) -> tuple[int, int]:
    """Rows and columns of a group's matrices."""
    rows, columns = group["params"][0].shape
    return rows // group["num_fused"], columns


def step_size(group: dict) -> float:
    """How long a step is, in units of `lr`: sqrt(rows / columns), where that is above 1."""
    rows, columns = matrix_shape(group)
    return max(1.0, rows / columns) ** 0.5


def temporary_bytes(groups: list[dict], dtype: torch.dtype, gpus: int = 1) -> int:
    """What a step with products in `dtype` takes beyond gradients and state, about.

    Updates of all matrices; of the largest product the iterates and their Gram matrices. `gpus`
    that share the model also hold new momenta, and compute a part of a product each, from and to
    whole matrices.
    """
    groups = [group for group in groups if group.get("num_fused")]
    sizes = [sum(p.numel() for p in group["params"]) for group in groups]
    largest = max((sum(sizes[n] for n in alike) for alike in by_shape(groups)), default=0)
    largest *= dtype.itemsize
    if gpus == 1:
        return 4 * sum(sizes) + 4 * largest
    return 8 * sum(sizes) // gpus + 3 * largest + 4 * largest // gpus


def unstack(stacks):
    return [x for stack in stacks for x in stack.unbind()]


def new_state(p: torch.Tensor) -> dict:
    """What Muon keeps of a matrix. AdamW expects a step in what it loads."""
    return {"step": torch.zeros(()), "momentum_buffer": torch.zeros_like(p)}


def orthogonalize_groups(groups: list[dict], updates: list[torch.Tensor], lr) -> None:
    """Make the groups' updates orthogonal and as long as their steps, in place.

    updates: [N, R, C] each. lr: a scalar on their device.
    """
    for alike in by_shape(groups):
        matrices = []
        for n in alike:
            whole = shard.gather_rows(updates[n], groups[n]["params"][0], groups[n]["dtype"])
            matrices.append(whole.view(-1, *matrix_shape(groups[n])))
        for n, done in zip(alike, orthogonalize(matrices, groups[0]["dtype"]), strict=True):
            p = groups[n]["params"][0]
            rows = shard.local_rows(done.reshape(-1, *p.shape), p)
            # Of one dimension: a product with a scalar would be rounded to 16 bits.
            torch.mul(rows, (lr * step_size(groups[n])).view(1), out=updates[n])


def by_shape(groups: list[dict]) -> list[list[int]]:
    """The numbers of the groups whose matrices have one shape or its transpose, in lists."""
    alike = {}
    for number, group in enumerate(groups):
        alike.setdefault(frozenset(matrix_shape(group)), []).append(number)
    return list(alike.values())


def orthogonalize(matrices: list[torch.Tensor], dtype=torch.float32) -> list[torch.Tensor]:
    """Matrices with their singular values brought near 1, in `dtype`.

    matrices: stacks [N, R, C] of one shape or its transpose: they become one product. Several
    processes split them between them.
    """
    counts = [len(x) for x in matrices]
    shape = sorted(matrices[0].shape[1:])
    product = matrices[0].new_empty(sum(counts), *shape, dtype=dtype)
    for x, part in zip(matrices, product.split(counts), strict=True):
        norm = x.norm(dim=(1, 2), keepdim=True, dtype=torch.float32) + 1e-7
        # Rounded only now: float16 has no numbers as small as momentum.
        torch.div(x.mT if is_tall(x) else x, norm, out=part)
    product = distributed.split_across_ranks(newton_schulz, product)
    parts = zip(matrices, product.split(counts), strict=True)
    return [part.mT if is_tall(x) else part for x, part in parts]


def is_tall(x):
    return x.size(1) > x.size(2)


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
