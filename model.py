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


class Attention(nn.Module):
    """Causal multi-head self-attention."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.n_head = config.n_head
        self.dropout = config.dropout
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # query, key and value at once
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):  # x: [B, T, C]
        B, T, C = x.shape
        q, k, v = self.c_attn(x).view(B, T, 3, self.n_head, C // self.n_head).permute(2, 0, 3, 1, 4)  # each [B, heads, T, C / heads]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        y = y.transpose(1, 2).reshape(B, T, C)
        return F.dropout(self.c_proj(y), self.dropout, self.training)


class MLP(nn.Module):
    """Two layers, four times as wide between them, with GPT-2's tanh form of GELU."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.dropout = config.dropout
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x):  # x: [B, T, C]
        return F.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")), self.dropout, self.training)


class Block(nn.Module):
    """One layer: attention and MLP, each behind a LayerNorm and added to its input."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):  # x: [B, T, C]
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """GPT-2 (Radford et al., 2019, "Language Models are Unsupervised Multitask Learners")."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.h = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.wte.weight
        self.apply(self._init_weights)

    def _init_weights(self, module):
        """GPT-2's: normal with 0.02, biases zero, and the projections onto the residual stream smaller by sqrt(2 layers)."""
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, (Attention, MLP)):  # apply() visits children first, so this is the last word on c_proj
            nn.init.normal_(module.c_proj.weight, std=0.02 / math.sqrt(2 * self.config.n_layer))

    def forward(self, idx, targets=None):
        """Logits of the next token, or the loss against `targets`.

        idx: int64 [B, T] token ids, T at most block_size. targets: int64 [B, T], IGNORE where nothing is to be predicted.
        Returns logits [B, T, V] without targets; with them, the mean cross-entropy in nats a token, a scalar in float32.
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
        x = self.wte(idx) + self.wpe.weight[:T]
        x = F.dropout(x, self.config.dropout, self.training)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(B * T, -1).float(), targets.reshape(B * T), ignore_index=IGNORE)

    def num_parameters(self) -> int:
        """Trained numbers in the model; tied weights count once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations to train on one token, forward and backward: 6 for each weight of the blocks and the
        head, and 12 x layers x width x context for attention (Chowdhery et al., 2022, "PaLM", appendix B)."""
        c = self.config
        weights = sum(p.numel() for block in self.h for p in block.parameters()) + self.lm_head.weight.numel()
        return 6 * weights + 12 * c.n_layer * c.n_embd * c.block_size

    @torch.inference_mode()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, vocab_size=None, generator=None):
        """Yield the next token of every sequence, int64 [B], max_new_tokens times.

        idx: int64 [B, T] prompts of one length, T at least 1; beyond the context, the model sees the last block_size tokens.
        temperature, top_k, top_p, vocab_size, generator: as in `sample`.
        """
        for _ in range(max_new_tokens):
            logits = self(idx[:, -self.config.block_size :])[:, -1]
            next_id = sample(logits, temperature, top_k, top_p, vocab_size, generator)
            idx = torch.cat((idx, next_id[:, None]), dim=1)
            yield next_id


def sample(logits, temperature=1.0, top_k=None, top_p=None, vocab_size=None, generator=None):
    """Draw one token for each row of logits.

    logits: [B, V]. temperature: 0 takes the likeliest. top_k: only the k likeliest. top_p: only the likeliest that together
    reach this probability (Holtzman et al., 2019, "The Curious Case of Neural Text Degeneration"). vocab_size: ids from here on
    are padding and never drawn. generator: a torch.Generator on the logits' device. Returns int64 [B].
    """
    logits = logits[:, :vocab_size].float()
    if temperature == 0:
        return logits.argmax(dim=-1)
    logits = logits / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p is not None and top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probs = ordered.softmax(dim=-1)
        before = probs.cumsum(dim=-1) - probs  # probability of all likelier tokens: the first is always kept
        logits = logits.masked_fill((before >= top_p).scatter(-1, order, before >= top_p), -torch.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)[:, 0]
