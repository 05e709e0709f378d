"""The GPT: token ids in, logits or a loss out.

Pure PyTorch. It knows no file, no data set and no tokenizer. `arch` chooses between three forms of
one model: gpt2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners"), llama
(Touvron et al., 2023, "LLaMA"), which has RMSNorm, rotary positions and SwiGLU instead of
LayerNorm, learned positions and GELU, and no biases, and qwen3 (Yang et al., 2025, "Qwen3 Technical
Report"), which also has a norm of queries and keys. Names follow GPT-2's own checkpoint (wte, wpe,
h, ln_1, ...). At the end are three operations that a device computes faster in another form.

In the comments B is sequences, T tokens per sequence, C the model's width (n_embd), D a head's, V
the vocabulary size.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -1  # a target with this value does not count in the loss
LONG = 2048  # tokens; with more, a layer would keep more weights of attention than of all else


@dataclass
class GPTConfig:
    """The model's shape: all that is needed to build it and to load its weights.

    Raises ValueError for numbers that do not go together. The range of each is not checked here.
    """

    vocab_size: int
    block_size: int = 1024
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    bias: bool = True  # of gpt2; the others have none
    dropout: float = 0.0  # a run may change it, as no weight depends on it
    tie_weights: bool = True
    arch: str = "gpt2"
    n_inner: int | None = None  # width of the MLP; None: 4 n_embd, or 8/3 of it if it has a gate
    n_kv_head: int | None = None  # of keys and values, each for a group of queries; None: n_head
    head_dim: int | None = None  # None: n_embd / n_head
    rope_theta: float = 10_000.0  # base of the rotary positions' wavelengths
    norm_eps: float | None = None  # added under the norms' roots; None: 1e-5 in gpt2, else 1e-6

    def __post_init__(self):
        if self.arch not in ("gpt2", "qwen3", "llama"):
            raise ValueError(f"arch = {self.arch!r}: must be gpt2, qwen3 or llama")
        if self.head_dim is None and self.n_embd % self.n_head:
            raise ValueError(f"n_head = {self.n_head} does not divide n_embd = {self.n_embd}")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        if self.arch == "gpt2":
            self.n_inner = self.n_inner or 4 * self.n_embd
            self.norm_eps = self.norm_eps or 1e-5
            if self.n_kv_head != self.n_head or self.head_dim * self.n_head != self.n_embd:
                raise ValueError(
                    "gpt2 has no n_kv_head and no head_dim: it has n_head heads of n_embd / n_head"
                )
        else:
            self.bias = False
            self.n_inner = self.n_inner or 32 * math.ceil(self.n_embd * 8 / 3 / 32)
            self.norm_eps = self.norm_eps or 1e-6
            if self.n_head % self.n_kv_head:
                raise ValueError(
                    f"n_kv_head = {self.n_kv_head} does not divide n_head = {self.n_head}"
                )
            if self.head_dim % 2:
                raise ValueError(
                    f"heads of {self.head_dim}: rotary positions need an even number; "
                    "change n_head or head_dim"
                )

    @property
    def modern(self) -> bool:
        """True for qwen3 and llama: RMSNorm, rotary positions and SwiGLU, and no biases."""
        return self.arch != "gpt2"


class RMSNorm(nn.RMSNorm):
    """x / sqrt(mean(x^2)) over the last dimension, times a weight (Zhang and Sennrich, 2019)."""

    def forward(self, x):
        # The fused kernels want one dtype. That of the weights is never narrower here.
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def rotary_frequencies(config: GPTConfig):
    """The angle per position, in radians, of each pair of a head's numbers. float32 [D / 2]."""
    half = config.head_dim // 2
    return config.rope_theta ** -(torch.arange(half) / half)


def rotary_table(config: GPTConfig):
    """Cosines and signed sines of rotary positions (Su et al., 2021, "RoFormer").

    Returns float32 [2, block_size, D].
    """
    angles = torch.outer(torch.arange(config.block_size), rotary_frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)))


def rotate(x, rotary):
    """Turn each pair of x's numbers, one of either half, by the angle of its position.

    x: [B, T, heads, D]. rotary: [2, T, 1, D], or [2, B, T, 1, D] if the rows are at different
    positions.
    """
    cos, sin = rotary.to(x.dtype)
    swapped = x.unflatten(-1, (2, -1)).flip(-2).flatten(-2)  # compiled, faster than roll()
    return x * cos + swapped * sin


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.config, self.layer = config, layer
        heads = config.n_head + 2 * config.n_kv_head  # query, key and value at once
        self.c_attn = nn.Linear(config.n_embd, heads * config.head_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.n_head * config.head_dim, config.n_embd, bias=config.bias)
        qwen3 = config.arch == "qwen3"
        self.q_norm = RMSNorm(config.head_dim, config.norm_eps) if qwen3 else nn.Identity()
        self.k_norm = RMSNorm(config.head_dim, config.norm_eps) if qwen3 else nn.Identity()

    def forward(self, x, rotary, cache):  # x: [B, T, C]
        c = self.config
        B, T, _ = x.shape
        heads = self.c_attn(x).view(B, T, -1, c.head_dim)
        q, k, v = heads.split((c.n_head, c.n_kv_head, c.n_kv_head), dim=2)
        q, k = self.q_norm(q), self.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # [B, heads, T, D]
        if cache is not None:
            y = cache.attend(self.layer, q, k, v)
        else:
            if c.n_kv_head < c.n_head:
                k, v = (t.repeat_interleave(c.n_head // c.n_kv_head, dim=1) for t in (k, v))
            # Without dropout, nothing reads `training`: training and evaluation are one graph.
            y = causal_attention(q, k, v, c.dropout if c.dropout and self.training else 0.0)
        return self.c_proj(y.transpose(1, 2).reshape(B, T, -1))


class MLP(nn.Module):
    """GPT-2's: two layers with GELU between them."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)

    def forward(self, x):  # x: [B, T, C]
        return self.c_proj(gelu(self.c_fc(x)))


class SwiGLU(nn.Module):
    """Values times a gate (Shazeer, 2020, "GLU Variants Improve Transformer")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        # gate and values at once
        self.c_fc = nn.Linear(config.n_embd, 2 * config.n_inner, bias=False)
        self.c_proj = nn.Linear(config.n_inner, config.n_embd, bias=False)

    def forward(self, x):  # x: [B, T, C]
        gate, values = self.c_fc(x).chunk(2, dim=-1)
        return self.c_proj(F.silu(gate) * values)


def make_norm(config: GPTConfig):
    """The norm before attention, before the MLP and before the head."""
    if config.modern:
        return RMSNorm(config.n_embd, config.norm_eps)
    return nn.LayerNorm(config.n_embd, config.norm_eps, bias=config.bias)


class Block(nn.Module):
    """One layer: attention and MLP, each after a norm and added to its input."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = Attention(config, layer)
        self.ln_2 = make_norm(config)
        self.mlp = SwiGLU(config) if config.modern else MLP(config)
        # Identity costs less than Dropout(0), which 30 layers call 60 times a token.
        self.dropout = nn.Dropout(config.dropout) if config.dropout else nn.Identity()

    def forward(self, x, rotary, cache):  # x: [B, T, C]
        x = x + self.dropout(self.attn(self.ln_1(x), rotary, cache))
        return x + self.dropout(self.mlp(self.ln_2(x)))


def cross_entropy(logits, targets):
    """The mean loss in nats of the targets that count; 0 if none does.

    logits: [N, V]. targets: int64 [N], IGNORE where there is nothing to predict.
    """
    losses = F.cross_entropy(logits.float(), targets, ignore_index=IGNORE, reduction="sum")
    return losses / (targets != IGNORE).sum().clamp(min=1)


class GPT(nn.Module):
    """The language model. zero_init: begin with zero projections, see init_std."""

    def __init__(self, config: GPTConfig, zero_init: bool = False):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = None if config.modern else nn.Embedding(config.block_size, config.n_embd)
        rotary = rotary_table(config) if config.modern else None
        self.register_buffer("rotary", rotary, persistent=False)
        self.h = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.ln_f = make_norm(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.init_weights(zero_init)

    def init_weights(self, zero_init: bool):
        """Zero for biases, normal for weights, with the deviations of init_std.

        Only those of Linear and Embedding: others keep the values they were made with.
        """
        for name, p in self.named_parameters():
            module, _, kind = name.rpartition(".")
            if not isinstance(self.get_submodule(module), nn.Linear | nn.Embedding):
                continue
            if kind == "weight":
                nn.init.normal_(p, std=self.init_std(name, p, zero_init))
            elif kind == "bias":
                nn.init.zeros_(p)

    def init_std(self, name: str, p: nn.Parameter, zero_init: bool) -> float:
        """GPT-2's: 0.02; onto the residual stream smaller by sqrt(2 layers).

        zero_init: zero onto the residual stream and for an untied head. The model begins as its
        embedding, of variance 1, and the other matrices keep their input's variance.
        """
        if name.endswith("c_proj.weight"):
            return 0.0 if zero_init else 0.02 / math.sqrt(2 * self.config.n_layer)
        if not zero_init:
            return 0.02
        if name in ("wte.weight", "wpe.weight"):
            return 0.02 if self.config.tie_weights else 1.0
        return 0.0 if name == "lm_head.weight" else p.size(-1) ** -0.5

    def forward(self, idx, targets=None, cache=None, last=None):
        """Logits of the next token, or the loss against `targets`.

        idx: int64 [B, T] token ids, T at most block_size. targets: int64 [B, T], IGNORE where there
        is nothing to predict. cache: a generating.decode.KVCache, which keeps keys and values and
        has the tokens' positions. last: int64 [B], the one token of each row whose logits to
        return.

        Returns logits, [B, T, V], or [B, V] with `last`; with targets, the mean cross-entropy in
        nats per token, a scalar in float32, 0 if all are IGNORE. Raises ValueError for a
        sequence beyond the context.
        """
        B, T = idx.shape
        context = self.config.block_size
        if T > context:
            raise ValueError(
                f"a sequence of {T} tokens is longer than the context (block_size = {context})"
            )
        positions = slice(T) if cache is None else cache.positions
        x = self.wte(idx)
        x = x.to(stream_dtype(x))
        rotary = None
        if self.wpe is not None:
            x = x + self.wpe.weight[positions].to(x.dtype)
        else:
            rotary = self.rotary[:, positions].unsqueeze(-2)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            x = block(x, rotary, cache)
        if last is not None:
            x = x[torch.arange(B, device=x.device), last]
        return self.head(x, targets)

    def head(self, x, targets):
        """The last layer's output -> logits, or the loss. x: [..., C] -> [..., V] or a scalar."""
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return cross_entropy(logits.flatten(0, 1), targets.flatten())

    def num_parameters(self) -> int:
        """Trained parameters; tied weights count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations to train on one token, forward and backward.

        6 per weight of the blocks and the head, and 12 x layers x width of all heads x context for
        attention (Chowdhery et al., 2022, "PaLM", appendix B).
        """
        c = self.config
        weights = sum(p.numel() for p in self.h.parameters()) + self.lm_head.weight.numel()
        return 6 * weights + 12 * c.n_layer * c.n_head * c.head_dim * c.block_size


def num_fused(name: str, p: nn.Parameter, config: GPTConfig) -> int:
    """How many matrices of one size a parameter of a block holds on top of each other.

    c_attn: query, as often as it has groups, key and value. c_fc: gate and values, if it has both.
    """
    if name.endswith("c_attn.weight"):
        return config.n_head // config.n_kv_head + 2
    if name.endswith("c_fc.weight"):
        return max(1, p.shape[:-1].numel() // config.n_inner)
    return p.shape[:-2].numel()  # a stack has more than two dimensions


# -- operations, each in the form that is the fastest on a device ----------------------------------
#
# The first line of each docstring says what it computes; the rest is how. Some ask PyTorch whether
# it compiles, or whether it is under autocast: the layers depend on both already, and an argument
# could only repeat them or contradict them.


def causal_attention(q, k, v, dropout):
    """softmax(q k^T / sqrt(D)) v, where no token sees a later one.

    q, k, v, and what it returns: [B, heads, T, D]. dropout: of the softmax's weights.
    """
    if is_blockwise(v.device.type, v.dtype, v.size(2), dropout):
        return BlockwiseAttention.apply(q * q.size(-1) ** -0.5, k, v, dropout)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)


def is_blockwise(device, dtype, T, dropout):
    """Whether causal_attention takes BlockwiseAttention. device: its type.

    PyTorch's keeps no weights for the backward pass without dropout. With it, PyTorch's keeps more
    of them, and takes longer.
    """
    return device == "cpu" and (dropout > 0 or dtype == torch.bfloat16 and T <= LONG)


def attention_blocks(T):
    """The queries of each block of BlockwiseAttention, (begin, end). Its keys end there too."""
    size = max(128, math.ceil(T / 4))
    return [(begin, min(begin + size, T)) for begin in range(0, T, size)]


class BlockwiseAttention(torch.autograd.Function):
    """causal_attention in plain products: a quarter of the queries with the keys up to their end.

    PyTorch's flash attention for CPUs leaves the bf16 instructions idle. The first derivatives are
    written out: autograd's gradient of the keys is transposed, which the layers before it read
    slowly. q: already divided by sqrt(D).
    """

    @staticmethod
    def forward(ctx, q, k, v, dropout):
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        outputs, kept = [], []
        for begin, end in attention_blocks(q.size(2)):
            scores = q[:, :, begin:end] @ k[:, :, :end].transpose(-2, -1)
            later = torch.ones(end - begin, end, dtype=torch.bool).triu(begin + 1)
            weights, total = late_softmax(scores.masked_fill_(later, -torch.inf))
            mask = F.dropout(torch.ones_like(weights), dropout) if dropout else None
            dropped = weights if mask is None else weights * mask
            outputs.append((dropped @ v[:, :, :end] / total).to(v.dtype))
            if any(ctx.needs_input_grad):
                kept += [weights, total, mask]
        y = torch.cat(outputs, dim=2)
        ctx.save_for_backward(q, k, v, y, *kept)
        return y

    @staticmethod
    def backward(ctx, dy):
        q, k, v, y, *kept = ctx.saved_tensors
        blocks = attention_blocks(q.size(2))
        dq, dk, dv = [], [], []
        for n, (begin, end) in enumerate(blocks):
            weights, total, mask = kept[3 * n : 3 * n + 3]
            d = (dy[:, :, begin:end] / total).to(v.dtype)
            dweights = d @ v[:, :, :end].transpose(-2, -1)
            dropped = weights
            if mask is not None:
                dweights, dropped = dweights * mask, weights * mask
            dtotal = (d.float() * y[:, :, begin:end]).sum(-1, keepdim=True)
            dscores = dweights.sub_(dtotal).mul_(weights)
            dq.append(dscores @ k[:, :, :end])
            dk.append(dscores.transpose(-2, -1) @ q[:, :, begin:end])
            dv.append(dropped.transpose(-2, -1) @ d)

        def added(parts):  # each block's part ends with its keys
            return [sum(p[:, :, b:e] for p in parts[n:]) for n, (b, e) in enumerate(blocks)]

        return *(torch.cat(t, dim=2) for t in (dq, added(dk), added(dv))), None


def late_softmax(scores):
    """Weights and their total, by which the caller divides: softmax(scores) = weights / total.

    Compiled, the caller divides later, when there are fewer numbers (Dao et al., 2022,
    "FlashAttention").
    """
    if not torch.compiler.is_compiling():
        return scores.softmax(dim=-1).to(scores.dtype), scores.new_ones(1)
    wide = scores.float()
    weights = (wide - wide.amax(-1, keepdim=True)).exp().to(scores.dtype)
    return weights, weights.float().sum(-1, keepdim=True)


def gelu(x):
    """GPT-2's tanh form of GELU.

    Compiled, by its identity 0.5 (1 + tanh u) = sigmoid(2 u), which a CPU computes faster.
    """
    if not torch.compiler.is_compiling():
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    u = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
    return (wide * torch.sigmoid(2 * u)).to(x.dtype)


def stream_dtype(x):
    """The dtype of the residual stream: bfloat16 on a GPU with autocast to it, else that of x.

    Norms and additions then move half the bytes; all elementwise kernels together, a quarter fewer.
    On a CPU a step takes 3% longer with it, and float16 lacks the range.
    """
    device = x.device.type
    if device in ("cpu", "meta") or not torch.is_autocast_enabled(device):
        return x.dtype
    if torch.get_autocast_dtype(device) != torch.bfloat16:
        return x.dtype
    return torch.bfloat16
