"""Keys and values of the tokens so far, so that a forward takes only the new ones."""

import torch
import torch.nn.functional as F

from model import GPTConfig


class KVCache:
    """Each layer's keys and values, with a slot for each position of the context.

    The B rows may differ in length: `set_positions` gives the positions of the next tokens in each,
    and a token sees the slots up to its own. The slots beyond it hold what padding or an earlier
    text left there; they are overwritten before a token sees them.
    """

    def __init__(self, config: GPTConfig, rows: int, device: torch.device, dtype: torch.dtype):
        shape = (config.n_layer, rows, config.n_kv_head, config.block_size, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = torch.arange(config.block_size, device=device)
        self.rows = torch.arange(rows, device=device)[:, None]  # [B, 1]

    def set_positions(self, positions, read_until=None, contiguous=False):
        """Give the positions of a forward's tokens, and what saves work where it is known.

        positions: int64 [B, T]. read_until: slots from there on are not read; None: all are.
        contiguous: the tokens of every row are consecutive and end at read_until.
        """
        T = positions.size(1)
        self.positions = positions
        self.read_until = read_until or len(self.slots)
        self.span = None
        if contiguous:
            self.span = slice(self.read_until - T, self.read_until)
        self.mask = None
        if T > 1 or not contiguous:  # else the one token of each row sees all that is read
            self.mask = self.causal_mask()

    def causal_mask(self):
        """What is added to scores: -inf for slots beyond a token's own. [B, 1, T, read_until]."""
        slots = self.slots[: self.read_until]
        hidden = slots > self.positions[:, None, :, None]
        zeros = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device)
        return zeros.masked_fill(hidden, -torch.inf)

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
        """Put new keys or values, [B, kv heads, T, D], into the slots of their positions."""
        if self.span:
            slots[:, :, self.span] = new
        else:
            slots[self.rows, :, self.positions] = new.transpose(1, 2).to(slots.dtype)
