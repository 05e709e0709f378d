"""The GPT-2 language model.

Pure PyTorch: tensors in, tensors out. It knows no file, no data set and no tokenizer. Names follow GPT-2's own
checkpoint (wte, wpe, h, ln_1, c_attn, ...), so weights move between here and Hugging Face without a dictionary.

In the comments B is sequences, T tokens a sequence, C the model's width (n_embd), V the vocabulary.
"""
import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -1  # a target with this value counts for nothing in the loss
GONE = (("norm", "layernorm"), ("logit_softcap", 0.0))  # switches of older checkpoints, unused


@dataclass
class GPTConfig:
    """The model's shape: all that is needed to build it and to load its weights."""

    vocab_size: int
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True
    dropout: float = 0.0
    tie_weights: bool = True
    # What newer models do otherwise; the defaults are GPT-2.
    position: str = "learned"  # or "rotary"
    qk_norm: bool = False
    activation: str = "gelu"  # or "relu2"
    zero_init: bool = False
    shortcut: bool = False
    value_residual: bool = False

    @classmethod
    def saved(cls, values: dict) -> "GPTConfig":
        """The shape in a checkpoint: what it lacks takes its default. Raises ValueError for a switch that this code knows no more, where it was used."""
        gone = {k: v for k, v in values.items() if k not in cls.__dataclass_fields__}
        used = {k: v for k, v in gone.items() if (k, v) not in GONE}
        if used:
            raise ValueError("it was trained with " + ", ".join(f"{k} = {v}" for k, v in used.items()) + ", which this version of the code has no more")
        return cls(**{k: v for k, v in values.items() if k not in gone})

    def __post_init__(self):
        for name in ("vocab_size", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: must be at least 1")
        if self.n_embd % self.n_head:
            near = [h for h in range(1, self.n_embd + 1) if self.n_embd % h == 0]
            best = min(near, key=lambda h: abs(h - self.n_head))
            raise ValueError(f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}; the nearest that does is n_head = {best}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout = {self.dropout}: must be at least 0 and below 1")
        for name, known in (("position", ("learned", "rotary")), ("activation", ("gelu", "relu2"))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} = {getattr(self, name)!r}: must be {' or '.join(known)}")
        if self.position == "rotary" and self.n_embd // self.n_head % 2:
            raise ValueError(f"n_embd / n_head = {self.n_embd // self.n_head}: rotary positions need an even number; change n_head")


class Cache:
    """Each layer's keys and values of the tokens so far, so that a forward takes the new ones alone.

    A slot for each position of the context. The B rows may differ in length: `place` says where the coming tokens stand in each, and a
    token sees the slots up to its own. What lies beyond is left over from padding, and overwritten before it is seen.
    """

    def __init__(self, config: GPTConfig, rows: int, device, dtype):
        shape = (config.n_layer, rows, config.n_head, config.block_size, config.n_embd // config.n_head)
        self.keys, self.values = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.slots, self.rows = torch.arange(config.block_size, device=device), torch.arange(rows, device=device)[:, None]

    def place(self, positions, used=None, alike=False):
        """Before a forward: the positions of its tokens, int64 [B, T]. What spares work where it is known: `used`, no slot from there on is
        read; and `alike`, the tokens of every row stand side by side and end at `used`."""
        self.positions, self.used, T = positions, used or len(self.slots), positions.size(1)
        self.span = slice(used - T, used) if alike else None
        self.mask = None
        if not self.span or T > 1:
            hidden = self.slots[: self.used] > positions[:, None, :, None]
            self.mask = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device).masked_fill(hidden, -torch.inf)  # [B, 1, T, used]

    def attend(self, layer, q, k, v):
        """Keep keys and values of the tokens placed, and attend to all that the layer has. q, k, v: [B, heads, T, C / heads], as is what it returns."""
        for kept, new in ((self.keys[layer], k), (self.values[layer], v)):
            if self.span:
                kept[:, :, self.span] = new
            else:
                kept[self.rows, :, self.positions] = new.transpose(1, 2).to(kept.dtype)
        keys, values = self.keys[layer, :, :, : self.used], self.values[layer, :, :, : self.used]
        return F.scaled_dot_product_attention(q.to(keys.dtype), keys, values, attn_mask=self.mask).to(q.dtype)


def rotary_table(config: GPTConfig):
    """Cosines and signed sines of rotary positions (Su et al., 2021, "RoFormer"): [2, block_size, C / heads]."""
    half = config.n_embd // config.n_head // 2
    angles = torch.outer(torch.arange(config.block_size), 10_000.0 ** -(torch.arange(half) / half))
    return torch.stack((torch.cat((angles.cos(), angles.cos()), 1), torch.cat((-angles.sin(), angles.sin()), 1)))


def rotate(x, table):  # x: [B, heads, T, D], table: [2, T, D] or [2, B, 1, T, D]
    """Turn each pair of x's numbers (one of either half) by the angle of its position."""
    cos, sin = table.to(x.dtype)
    return x * cos + x.roll(x.size(-1) // 2, -1) * sin


def causal_attention(q, k, v, dropout):
    """softmax(q k^T / sqrt(d)) v, where no token sees a later one. q, k, v: [B, heads, T, d]; dropout: of the softmax's weights. Returns their shape.

    PyTorch's flash attention for CPUs leaves the bf16 instructions idle. Products of a quarter of the queries with the keys up to
    their end take 0.6 of its time (benchmarks/README.md).
    """
    if v.device.type != "cpu" or v.dtype != torch.bfloat16:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
    parts, q, T = [], q * q.size(-1) ** -0.5, q.size(2)
    size = max(128, -(-T // 4))
    for begin, end in ((at, min(at + size, T)) for at in range(0, T, size)):
        scores = q[:, :, begin:end] @ k[:, :, :end].transpose(-2, -1)
        later = torch.ones(end - begin, end, dtype=torch.bool).triu(begin + 1)
        parts.append(F.dropout(scores.masked_fill_(later, -torch.inf).softmax(dim=-1), dropout) @ v[:, :, :end])
    return torch.cat(parts, dim=2)


def gelu(x):
    """GPT-2's tanh form of GELU. In compiled code by its identity 0.5 (1 + tanh u) = sigmoid(2 u), as that is the faster to compute on a CPU."""
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    return (wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))).to(x.dtype)


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.layer = layer
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.qk_norm = config.qk_norm
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key and value at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        # How much of this layer's and of the first layer's values (Zhou et al., 2024, "Value Residual Learning").
        self.mix = nn.Parameter(torch.tensor([0.5, 0.5])) if config.value_residual and layer else None

    def forward(self, x, cache=None, rotary=None, first=None):  # x: [B, T, C]; first: list that holds the first layer's values
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # each [B, heads, T, C / heads]
        if self.qk_norm:
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.mix is not None:
            v = self.mix[0] * v + self.mix[1] * first[0]
        elif first is not None:
            first.append(v)
        dropout = self.dropout if self.training else 0.0
        y = causal_attention(q, k, v, dropout) if cache is None else cache.attend(self.layer, q, k, v)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two layers, four times as wide between them, with GPT-2's tanh form of GELU or the square of ReLU (So et al., 2021, "Primer")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.activation = config.activation
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):  # x: [B, T, C]
        x = self.c_fc(x)
        x = F.relu(x).square() if self.activation == "relu2" else gelu(x)
        return F.dropout(self.c_proj(x), self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a norm and added to its input."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config, layer)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)
        # How much of the layer's input, and of the token's embedding before the first layer.
        self.shortcut = nn.Parameter(torch.tensor([1.0, 0.0])) if config.shortcut else None

    def forward(self, x, cache=None, rotary=None, first=None, embedding=None):  # x, embedding: [B, T, C]
        if self.shortcut is not None:
            x = self.shortcut[0] * x + self.shortcut[1] * embedding
        x = x + self.attn(self.ln_1(x), cache, rotary, first)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd) if config.position == "learned" else None
        self.register_buffer("rotary", rotary_table(config) if config.position == "rotary" else None, persistent=False)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        """GPT-2's: normal with 0.02, biases zero, and the projections onto the residual stream smaller by sqrt(2 layers).

        With zero_init these projections, and a head of its own, begin at zero: the model begins as its embedding, of variance 1,
        and the other matrices keep their input's variance.
        """
        zero = self.config.zero_init
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5 if zero else 0.02)
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=1.0 if zero and not self.config.tie_weights else 0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (Attention, MLP)):  # apply() visits children first, so this is the last word on c_proj
            nn.init.normal_(module.c_proj.weight, std=0.0 if zero else 0.02 / math.sqrt(2 * self.config.n_layer))
        if module is self and zero and not self.config.tie_weights:
            nn.init.zeros_(self.lm_head.weight)

    def forward(self, idx, targets=None, cache=None, last=None):
        """Logits of the next token, or the loss against `targets`.

        idx: int64 [B, T] token ids, T at most block_size. targets: int64 [B, T], IGNORE where nothing is to be predicted.
        cache: a Cache in which the tokens were placed. last: int64 [B], the index of the only token of each row whose logits are wanted.
        Returns logits, [B, T, V], or [B, V] with `last`; with targets, the mean cross-entropy in nats a token, a scalar in float32.
        Raises ValueError for a sequence beyond the context, and, outside compiled code on the CPU, for an id beyond the vocabulary.
        """
        B, T = idx.shape
        if T > self.config.block_size:
            raise ValueError(f"a sequence of {T} tokens is longer than the model's context (block_size = {self.config.block_size})")
        if not torch.compiler.is_compiling() and idx.device.type == "cpu" and idx.numel():
            low, high = idx.aminmax()
            if low < 0 or high >= self.config.vocab_size:
                bad = int(low) if low < 0 else int(high)
                raise ValueError(f"token id {bad} is outside the model's vocabulary of {self.config.vocab_size} (ids 0 to {self.config.vocab_size - 1})")
        x, rotary = self.wte(idx), None
        if self.wpe is not None:
            x = x + (self.wpe.weight[:T] if cache is None else self.wpe(cache.positions))
        else:
            rotary = self.rotary[:, :T] if cache is None else self.rotary[:, cache.positions, None].transpose(2, 3)
        x = embedding = F.dropout(x, self.config.dropout, self.training)
        first = [] if self.config.value_residual else None
        for block in self.h:
            x = block(x, cache, rotary, first, embedding)
        if last is not None:
            x = x[torch.arange(B, device=x.device), last]
        return self.head(x, targets)

    def head(self, x, targets=None):
        """What the last layer's output [..., C] comes to: logits [..., V], or the loss against targets."""
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORE)

    def num_parameters(self) -> int:
        """Trained numbers in the model; tied weights count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations to train on one token, forward and backward: 6 for each weight of the blocks and the
        head, and 12 x layers x width x context for attention (Chowdhery et al., 2022, "PaLM", appendix B)."""
        c = self.config
        weights = sum(p.numel() for block in self.h for p in block.parameters()) + self.lm_head.weight.numel()
        return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size
