"""Initial weights that lean toward copying: what followed the current token before, follows again.

Most runs learn this in their first few hundred steps, when the loss drops by half a nat: heads of
two layers have to learn it together (Olsson et al., 2022, "In-context Learning and Induction
Heads"). Here they attend in the right places from the start. Knows the model's weights; training
changes them like all others.
"""

import torch

from model import GPT, rotary_frequencies

RANDOM = 0.1  # share of the random weights that stays in queries and keys; QK norm sets their size


@torch.no_grad()
def add_induction_head(model: GPT) -> None:
    """Set the attention heads of a new qwen3 model with zero_init and two or more layers.

    The heads of the first layer attend 1, 2, 3, ... tokens back, and the first of them adds the
    previous token's values to the stream. The first head of the second layer attends to positions
    whose previous token was the current one.
    """
    c, D = model.config, model.config.head_dim
    first, second = (block.attn for block in model.h[:2])
    angles = rotary_frequencies(c)  # of the pairs of a head's numbers, in radians per position
    size = model.wte.weight.std()  # of what is in the stream

    # One channel of the stream is the same for all tokens. From it all queries read one vector, in
    # the pairs that turn fast, and the heads' keys that vector, turned by 1, 2, 3, ... positions.
    # The model then turns both by their positions, so a key matches the query as many positions on.
    model.wte.weight[:, 0] = size
    queries, keys, values = first.c_attn.weight.chunk(3)  # [heads x D, C] each
    queries *= RANDOM
    keys *= RANDOM
    fast = (angles > 0.2).float()
    fast *= (D / fast.sum()).sqrt()  # a vector as long as QK norm makes it
    queries[:, 0] = torch.cat((fast, 0 * fast)).repeat(c.n_head)
    turned = torch.outer(torch.arange(1, c.n_head + 1), angles)
    keys[:, 0] = torch.cat((fast * turned.cos(), fast * turned.sin()), dim=1).flatten()
    added = torch.nn.init.orthogonal_(torch.empty(c.n_embd, D))
    first.c_proj.weight[:, :D] = size * added

    # In the pairs that turn by less than 2 radians over the context, the query is the values of the
    # current token, and the key those of the previous token, read back from the stream.
    query, key, _ = (part[:D] for part in second.c_attn.weight.chunk(3))
    query *= RANDOM
    key *= RANDOM
    slow = (angles < 2 / c.block_size).repeat(2)
    query[slow] += values[:D][slow]
    key[slow] += added.T[slow]
