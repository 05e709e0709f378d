"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it steps along it: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon. Knows tensors and the processes that share the work.
"""

import torch

from training import distributed, shard


class Muon(torch.optim.AdamW):
    """Muon for groups of parameters with `num_fused` above 0, fused AdamW for the others.

    A group of Muon's: parameters of one shape, each `num_fused` matrices on top of each other (3
    for query, key and value); `lr`, Nesterov `momentum`, decoupled `weight_decay`, and `dtype`, in
    which matrices are made orthogonal. A step is `lr` long times sqrt(rows / columns), where that
    is above 1.

    As in fused AdamW, gradients are divided by the tensor `grad_scale`, and where the tensor
    `found_inf` is 1 a step changes neither weights nor momentum; nothing waits for the device.
    """

    grad_scale = None  # optimizer_step() and GradScaler set these two
    found_inf = None

    @torch.no_grad()
    def step(self):
        """One step on the gradients as they are."""
        groups = self.param_groups
        matrices = [group for group in groups if group["num_fused"]]
        others = [group for group in groups if not group["num_fused"]]
        good = 1.0 if self.found_inf is None else 1 - self.found_inf
        # All messages come before the first change: a lost process leaves a whole state behind.
        steps = [self._momentum_and_update(group, good) for group in matrices]
        for group, (momentum, update) in zip(matrices, steps, strict=True):
            self._apply(group, momentum, update, good)
        self.param_groups = others
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _momentum_and_update(self, group, good):
        """The new momentum of a group, and the orthogonal update from it: [N, R, C] each.

        All parameters of a group are one stack: a few operations, however many layers. With `shard`
        R are the rows of this process. good: 1, or 0 for a step to be skipped.
        """
        params, beta = group["params"], group["momentum"]
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())  # AdamW expects one in what it loads
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [shard.local_shard(self.state[p]["momentum_buffer"]) for p in params]
        momentum = torch.stack(buffers)
        gradients = torch.stack([shard.local_shard(p.grad) for p in params])
        if self.grad_scale is not None:
            gradients /= self.grad_scale
        if self.found_inf is not None:
            gradients = torch.where(good.bool(), gradients, 0.0)  # as NaN times 0 is NaN
        momentum.lerp_(gradients, (1 - beta) * good)
        nesterov = gradients.lerp_(momentum, beta)
        if shard.is_dtensor(params[0]):
            return momentum, orthogonalize_shard(nesterov, params[0], group)
        return momentum, orthogonalize(nesterov, group["num_fused"], group["dtype"])

    def _apply(self, group, momentum, update, good):
        """Change the momentum and the weights of a group."""
        params = group["params"]
        buffers = [shard.local_shard(self.state[p]["momentum_buffer"]) for p in params]
        weights = [shard.local_shard(p) for p in params]
        rows, columns = params[0].size(0) / group["num_fused"], params[0].size(1)
        lr = group["lr"] * good
        torch._foreach_copy_(buffers, momentum.unbind())
        torch._foreach_mul_(weights, 1 - lr * group["weight_decay"])
        update *= lr * max(1.0, rows / columns) ** 0.5
        torch._foreach_sub_(weights, update.unbind())


def orthogonalize(x, num_fused: int = 1, dtype: torch.dtype = torch.float32):
    """Matrices with their singular values brought near 1, in x's dtype.

    x: [N, R, C], in each [R, C] `num_fused` matrices on top of each other. dtype: of the products.
    Several processes split the matrices between them.
    """
    matrices = x.reshape(-1, x.size(1) // num_fused, x.size(2))
    tall = matrices.size(1) > matrices.size(2)
    if tall:
        matrices = matrices.mT
    matrices = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    # Only now: float16 has no numbers as small as momentum.
    matrices = distributed.split_across_ranks(newton_schulz, matrices.to(dtype))
    if tall:
        matrices = matrices.mT
    return matrices.to(x.dtype).reshape(x.shape)


def orthogonalize_shard(x, p, group):
    """The same of sharded parameters like `p`. x: [N, r, C], the rows that this process has."""
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((len(x), *p.shape))
    stride = (p.numel(), p.size(1), 1)
    stack = DTensor.from_local(x, p.device_mesh, [Shard(1)], shape=shape, stride=stride)
    full = orthogonalize(shard.full_tensor(stack), group["num_fused"], group["dtype"])
    return shard.local_shard(shard.distribute(full, stack))


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
