"""Keys and values of the tokens so far, so that a forward takes only the new ones."""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from model import GPTConfig


class KVCache:
    """Each layer's keys and values, with a slot for each of the first `length` positions.

    The B rows may differ in length: `set_positions` gives the positions of the next tokens in each,
    and a token sees the slots up to its own. The slots beyond it hold what padding or an earlier
    text left there; they are overwritten before a token sees them.
    """

    def __init__(
        self,
        config: GPTConfig,
        rows: int,
        device: torch.device,
        dtype: torch.dtype,
        length: int,
    ):
        shape = (config.n_layer, rows, config.n_kv_head, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = torch.arange(config.block_size, device=device)
        self.rows = torch.arange(rows, device=device)[:, None]  # [B, 1]

    @property
    def length(self) -> int:
        return self.keys.size(3)

    def grow(self, length: int) -> None:
        """Make room for more positions; what is kept stays."""
        more = (0, 0, 0, length - self.length)  # of the last two dimensions
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def set_positions(self, positions, read_until=None, contiguous=False):
        """Give the positions of a forward's tokens, and what saves work where it is known.

        positions: int64 [B, T]. read_until: slots from there on are not read; None: all are.
        contiguous: every row has the tokens before read_until, all from slot 0 on or the last one.
        """
        T = positions.size(1)
        self.positions = positions
        self.read_until = read_until or self.length
        self.span = self.mask = None
        # From slot 0 on attention is causal; later, one token of each row sees all that is read.
        self.is_causal = contiguous and T > 1
        if contiguous:
            self.span = slice(self.read_until - T, self.read_until)
        else:
            self.mask = self.causal_mask()

    def causal_mask(self):
        """A bias for scores: -inf for slots beyond a token's own, else 0. [B, 1, T, read_until]."""
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
        with self.backends():
            y = F.scaled_dot_product_attention(
                q.to(keys.dtype),
                keys,
                values,
                attn_mask=self.mask,
                is_causal=self.is_causal,
                enable_gqa=k.size(1) < q.size(1),
            )
        return y.to(q.dtype)

    def backends(self):
        """All of attention's but cuDNN's, which plans for each new length of a prompt.

        A plan takes half a second on a B200 (github.com/modelscope/FunASR/issues/3704).
        """
        if self.keys.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )

    def write(self, slots, new):
        """Put new keys or values, [B, kv heads, T, D], into the slots of their positions."""
        if self.span:
            slots[:, :, self.span] = new
        else:
            slots[self.rows, :, self.positions] = new.transpose(1, 2).to(slots.dtype)
