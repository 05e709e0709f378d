"""Initial weights with which a model copies: what followed the current token before, follows again.

Most runs learn this in their first few hundred steps, when the loss drops by half a nat: heads of
two layers have to learn it together (Olsson et al., 2022, "In-context Learning and Induction
Heads"). Here they begin with it. Knows the model's weights; training changes them like all others.
"""

import torch

from model import GPT, rotary_frequencies

RANDOM = 0.1  # share of the random weights that is left in queries and keys


@torch.no_grad()
def add_induction_head(model: GPT) -> None:
    """Give a new model with rotary positions and two layers heads with these patterns.

    The first layer's heads attend to the token 1, 2, 3, ... before, and the first of them adds its
    values to the stream. The second layer's first head attends to where these are the values of the
    current token.
    """
    c = model.config
    first, second = (block.attn for block in model.h[:2])
    angles = rotary_frequencies(c)  # of the pairs of a head's numbers, in radians per position
    scale = model.wte.weight.std()

    # One channel of the stream is the same for all tokens. From it all queries read one vector, in
    # the pairs that turn fast, and the heads' keys that vector, turned by 1, 2, 3, ... positions.
    # The model then turns both by their positions, so a key matches the query as many positions on.
    model.wte.weight[:, 0] = scale
    queries, keys, values = parts(first)
    queries *= RANDOM
    keys *= RANDOM
    fast = (angles > 0.2).float()
    fast *= (c.head_dim / fast.sum()).sqrt()
    queries[:, 0] = torch.cat((fast, 0 * fast)).repeat(c.n_head)
    turned = torch.outer(torch.arange(1, c.n_kv_head + 1), angles)
    keys[:, 0] = torch.cat((fast * turned.cos(), fast * turned.sin()), dim=1).flatten()
    added = torch.nn.init.orthogonal_(torch.empty(c.n_embd, c.head_dim))
    first.c_proj.weight[:, : c.head_dim] = scale * added

    # In the pairs that hardly turn within the context, the query is the values of the current
    # token, and the key those of the token before, read back from the stream.
    query, key, _ = (part[: c.head_dim] for part in parts(second))
    query *= RANDOM
    key *= RANDOM
    slow = (angles < 2 / c.block_size).repeat(2)
    query[slow] += values[: c.head_dim][slow]
    key[slow] += added.T[slow]


def parts(attention) -> tuple[torch.Tensor, ...]:
    """The weights of queries, keys and values, each [heads x D, C], as parts of c_attn's."""
    heads = (attention.n_head, attention.n_kv_head, attention.n_kv_head)
    return attention.c_attn.weight.split([n * attention.head_dim for n in heads])
