"""Initial weights with an induction head, which predicts what followed the current token before.

Most runs learn this in their first few hundred steps, when the loss drops by half a nat: heads of
two layers have to learn it together (Olsson et al., 2022, "In-context Learning and Induction
Heads"). Here they attend to the right positions from the start. Training changes these weights like
all others.
"""

import torch

from model import GPT, rotary_frequencies

RANDOM = 0.1  # factor on the random weights of queries and keys, whose length QK norm sets


@torch.no_grad()
def add_induction_head(model: GPT) -> None:
    """Set the attention weights of a new qwen3 model with zero_init and two or more layers.

    The heads of the first layer attend 1, 2, 3, ... tokens back, and the first of them adds the
    previous token's values to the residual stream. The first head of the second layer attends to
    positions whose previous token equals the current one.
    """
    c, D = model.config, model.config.head_dim
    first, second = (block.attn for block in model.h[:2])
    angles = rotary_frequencies(c)  # of a head's pairs of dimensions, radians per position
    size = model.wte.weight.std()  # scale of the residual stream

    # Channel 0 of the stream is the same constant for all tokens. From it, every query reads one
    # fixed vector, in the pairs that rotate fast, and head n's key reads that vector rotated by n
    # positions. RoPE rotates both by their own positions, so a key matches the query n positions
    # later.
    model.wte.weight[:, 0] = size
    queries, keys, values = first.c_attn.weight.chunk(3)  # [heads x D, C] each
    queries *= RANDOM
    keys *= RANDOM
    fast = (angles > 0.2).float()
    fast *= (D / fast.sum()).sqrt()  # the length that QK norm gives
    queries[:, 0] = torch.cat((fast, 0 * fast)).repeat(c.n_head)
    turned = torch.outer(torch.arange(1, c.n_head + 1), angles)
    keys[:, 0] = torch.cat((fast * turned.cos(), fast * turned.sin()), dim=1).flatten()
    added = torch.nn.init.orthogonal_(torch.empty(c.n_embd, D))
    first.c_proj.weight[:, :D] = size * added

    # In the pairs that rotate by less than 2 radians over the whole context, the query is the
    # current token's values in the first head, and the key is what that head added to the stream:
    # the previous token's values.
    query, key, _ = (part[:D] for part in second.c_attn.weight.chunk(3))
    query *= RANDOM
    key *= RANDOM
    slow = (angles < 2 / c.block_size).repeat(2)
    query[slow] += values[:D][slow]
    key[slow] += added.T[slow]
