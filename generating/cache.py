"""Keys and values of the tokens so far, so that a forward takes the new ones alone.

Knows the model's shape and tensors; no text.
"""

import torch
import torch.nn.functional as F

from model import GPTConfig


class Cache:
    """Each layer's keys and values of the tokens so far, so that a forward takes the new ones
    alone.

    A slot for each position of the context. The B rows may differ in length: `set_positions` says
    where the coming tokens stand in each, and a token sees the slots up to its own. What lies
    beyond is left over from padding, and overwritten before it is seen.
    """

    def __init__(self, config: GPTConfig, rows: int, device, dtype):
        shape = (config.n_layer, rows, config.n_kv_head, config.block_size, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = torch.arange(config.block_size, device=device)
        self.rows = torch.arange(rows, device=device)[:, None]

    def set_positions(self, positions, read_until=None, contiguous=False):
        """Before a forward: the positions of its tokens, int64 [B, T]; and what spares work where
        it is known.

        read_until: no slot from there on is read. contiguous: the tokens of every row stand side by
        side and end at read_until.
        """
        T = positions.size(1)
        self.positions = positions
        self.read_until = read_until or len(self.slots)
        self.span = slice(self.read_until - T, self.read_until) if contiguous else None
        self.mask = None
        if not contiguous or T > 1:
            hidden = self.slots[: self.read_until] > positions[:, None, :, None]
            zeros = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device)
            self.mask = zeros.masked_fill(hidden, -torch.inf)  # [B, 1, T, read_until]

    def attend(self, layer, q, k, v):
        """Keep the new tokens' keys and values, and attend to all that the layer has.

        q: [B, heads, T, D]. k, v: [B, kv heads, T, D]. Returns q's shape and dtype.
        """
        self.write(self.keys[layer], k)
        self.write(self.values[layer], v)
        keys = self.keys[layer, :, :, : self.read_until]
        values = self.values[layer, :, :, : self.read_until]
        grouped = k.size(1) < q.size(1)
        y = F.scaled_dot_product_attention(
            q.to(keys.dtype), keys, values, attn_mask=self.mask, enable_gqa=grouped
        )
        return y.to(q.dtype)

    def write(self, slots, new):
        """Put what is new into the slots of its positions. slots: [B, heads, block_size, D], new:
        [B, heads, T, D].
        """
        if self.span:
            slots[:, :, self.span] = new
        else:
            slots[self.rows, :, self.positions] = new.transpose(1, 2).to(slots.dtype)
