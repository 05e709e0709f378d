"""Muon for the matrices of the blocks, AdamW for everything else, as one optimiser.

Muon makes the momentum of a matrix orthogonal before it steps along it: Jordan et al., 2024,
https://kellerjordan.github.io/posts/muon. Several processes share that work out. Knows tensors and
processes only.
"""

import itertools

import torch

from training import distributed, shard


def orthogonalize(x, dtype=torch.float32):
    """Matrices with their singular values brought near 1.

    x: [N, rows, columns]; of the same shape is what it returns, in `dtype`, that of the iteration.
    Each of several processes does a part of the N.
    """
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    x = distributed.split_across_ranks(
        newton_schulz, x.to(dtype)
    )  # float16 has no numbers as small as momentum
    return x.mT if tall else x


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


class Muon(torch.optim.AdamW):
    """Muon for the groups of parameters that ask for it, fused AdamW for the others.

    A group's `muon` says how many matrices each of its parameters holds side by side (3 for query,
    key and value), 0 that AdamW steps it. Muon's groups also have `lr`, Nesterov `momentum`,
    decoupled `weight_decay`, and `dtype`, that of the iteration; these are the same in all of them.

    A step is `lr` times sqrt(rows / columns), where that is above 1. As in fused AdamW, gradients
    are divided by the tensor `grad_scale`, and where the tensor `found_inf` is 1 the step leaves
    weights and momentum as they are; nothing waits for the device.
    """

    @torch.no_grad()
    def step(self):
        """One step on the gradients as they are."""
        groups = self.param_groups
        self._muon_step([group for group in groups if group["muon"]])
        self.param_groups = [group for group in groups if not group["muon"]]
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _muon_step(self, groups):
        """The step of all matrices, in few and large operations.

        Raises distributed.Lost before anything has changed.
        """
        shapes = {}  # (rows, columns) of a matrix: the parameters that hold such
        for group in groups:
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault((len(p) // group["muon"], p.size(1)), []).append(p)
        if not shapes:
            return
        options, params = groups[0], list(itertools.chain(*shapes.values()))
        shared = shard.is_dtensor(params[0])
        before, momentum, ahead = self._momentum(params, options["momentum"])
        keep = 1.0
        if getattr(self, "found_inf", None) is not None:
            keep = 1.0 - self.found_inf
            torch._foreach_mul_(ahead, keep)
        if shared:
            ahead = shard.join_rows(ahead, params)
        updates = orthogonal(shapes, dict(zip(params, ahead, strict=True)), options["dtype"])
        torch._foreach_copy_(before, momentum)
        if options["weight_decay"]:
            local = [shard.local_shard(p) for p in params]
            torch._foreach_mul_(local, 1 - options["lr"] * options["weight_decay"] * keep)
        for (rows, columns), stack in updates.items():
            changed = shapes[rows, columns]
            parts = stack.float().reshape(-1, columns).split([len(p) for p in changed])
            size = options["lr"] * max(1.0, rows / columns) ** 0.5
            if shared:
                parts = shard.own_rows(parts, changed)
            torch._foreach_add_([shard.local_shard(p) for p in changed], parts, alpha=-size)

    def _momentum(self, params, decay):
        """The momentum before this step, with its gradients, and that in Nesterov's form."""
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros(())  # AdamW expects one in what it loads
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        before = [shard.local_shard(self.state[p]["momentum_buffer"]) for p in params]
        grads = [shard.local_shard(p.grad) for p in params]
        if self.defaults["fused"]:
            # PyTorch's SGD heeds grad_scale and found_inf in its one pass. Its rate of 0 leaves the
            # weights alone.
            momentum = torch._foreach_mul(before, 1.0)
            torch._fused_sgd_(
                [shard.local_shard(p) for p in params],
                grads,
                momentum,
                lr=0.0,
                momentum=decay,
                dampening=decay,
                weight_decay=0.0,
                nesterov=False,
                maximize=False,
                is_first_step=False,
                grad_scale=getattr(self, "grad_scale", None),
                found_inf=getattr(self, "found_inf", None),
            )
        else:
            momentum = torch._foreach_lerp(before, grads, 1 - decay)
        # new + decay (new - old), which is gradient and new momentum in Nesterov's proportion
        ahead = torch._foreach_mul(momentum, 1 + decay)
        torch._foreach_add_(ahead, before, alpha=-decay)
        return before, momentum, ahead


def orthogonal(shapes, updates, dtype):
    """The updates of all parameters made orthogonal: {(rows, columns): [N, rows, columns]}.

    shapes: the parameters that hold such matrices. updates: of each parameter.
    """
    found = {}
    for alike in together(shapes):
        stacks = []
        for rows, columns in alike:
            stack = torch.cat([updates[p] for p in shapes[rows, columns]]).view(-1, rows, columns)
            stacks.append(stack.mT if rows > columns else stack)
        whole = torch.cat(stacks) if len(stacks) > 1 else stacks[0]
        done = orthogonalize(whole, dtype).split([len(stack) for stack in stacks])
        for (rows, columns), stack in zip(alike, done, strict=True):
            found[rows, columns] = stack.mT if rows > columns else stack
    return found


def together(shapes) -> list[list[tuple[int, int]]]:
    """The shapes in lists of those that are one another's, or their transpose."""
    alike = {}
    for shape in shapes:
        alike.setdefault(frozenset(shape), []).append(shape)
    return list(alike.values())
