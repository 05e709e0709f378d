"""Token ids from a model: the prompts in one forward, then one token a forward, with keys and
values kept.

Ids in, ids out: it knows no text and no tokenizer. In the comments B is sequences, V the
vocabulary.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import nn

from hardware import out_of_memory
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


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, repetition_penalty=1.0, **settings):
    """Yield the next token id of every sequence, a list of B ints, max_new_tokens times.

    model: a GPT in evaluation mode. prompts: B lists of ids of any lengths, each at least one; of a
    prompt beyond the context the model sees the last block_size tokens. repetition_penalty: as in
    `penalise`. settings: as in `sample`.

    A sequence that has filled the context goes on from its newer half: the model sees the last
    block_size / 2 tokens and all that follow, until the context is full again.
    """
    device, context = model.wte.weight.device, model.config.block_size
    texts = [list(prompt)[-context:] for prompt in prompts]
    seen = torch.zeros(len(texts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    dtype = (
        torch.float32 if device.type == "cpu" else model.wte.weight.dtype
    )  # there one row's attention takes half the time of bfloat16's
    cache, full, step = Cache(model.config, len(texts), device, dtype), True, None
    for _ in range(max_new_tokens):
        if full:
            logits = prefill(model, cache, texts)
        else:
            tokens = torch.tensor(
                [[text[-1:] for text in texts], [[len(text) - 1] for text in texts]], device=device
            )
            step = step or (recorded(model, cache, tokens) if device.type == "cuda" else None)
            logits = (
                step(tokens)
                if step
                else next_token(
                    model, cache, tokens, max(map(len, texts)), len(set(map(len, texts))) == 1
                )
            )
        if repetition_penalty != 1:
            logits = penalise(logits, seen, repetition_penalty)
        next_ids = sample(logits, **settings)
        seen.scatter_(1, next_ids[:, None], True)
        new = next_ids.tolist()
        yield new
        full = any(len(text) == context for text in texts)
        texts = [
            [*(text if len(text) < context else text[context + 1 - context // 2 :]), i]
            for text, i in zip(texts, new, strict=True)
        ]


def prefill(model, cache, texts):
    """Logits of what follows each text, [B, V]; its keys and values are in the cache then. texts: B
    lists of ids.
    """
    device, longest = cache.slots.device, max(map(len, texts))
    idx = torch.tensor(
        [text + [0] * (longest - len(text)) for text in texts], device=device
    )  # no token sees what follows it
    cache.set_positions(cache.slots[:longest].expand(len(texts), -1), longest, contiguous=True)
    return model(
        idx, cache=cache, last=torch.tensor([len(text) - 1 for text in texts], device=device)
    )


def next_token(model, cache, tokens, read_until=None, contiguous=False):
    """Logits of what follows one more token of each text, [B, V]. tokens: int64 [2, B, 1], their
    ids and their positions; the cache has all tokens before them. read_until, contiguous: as in
    Cache.set_positions.
    """
    ids, positions = tokens
    cache.set_positions(positions, read_until, contiguous)
    return model(ids, cache=cache)[:, 0]


def recorded(model, cache, tokens):
    """next_token as a function of `tokens` alone, recorded as a CUDA graph: to launch its 200
    kernels one by one takes several times longer than they run. Where that fails, next_token as
    it is, with a warning.
    """
    tokens = tokens.clone()
    try:
        with torch.cuda.device(tokens.device):
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                next_token(
                    model, cache, tokens
                )  # libraries set themselves up on first use, which cannot be recorded
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                logits = next_token(model, cache, tokens)
    except RuntimeError as error:
        if out_of_memory(error):
            raise
        warnings.warn(
            f"no CUDA graph ({str(error).splitlines()[0]}): generation is slower", stacklevel=2
        )
        return lambda tokens: next_token(model, cache, tokens)

    def replay(new):
        tokens.copy_(new)
        graph.replay()
        return logits

    return replay


class PackedLinear(nn.Module):
    """A Linear layer for generation on a CPU; no gradients. float32 in and out.

    Its weight lies as oneDNN likes it for a few rows. A bfloat16 weight is kept in float16 too,
    which holds its values, for one row at a time: PyTorch's kernel for that reads 32 GB/s where
    oneDNN's reads 21, and the usual layout gives 15 (benchmarks/README.md).
    """

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight, bias = linear.weight.data, None if linear.bias is None else linear.bias.data
        self.dtype, self.bias = weight.dtype, bias
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, 1)
        self.half = weight.half() if weight.dtype == torch.bfloat16 else None
        if self.half is not None and not self.half.isfinite().all():
            self.half = None
        self.half_bias = bias.half() if bias is not None else None

    def forward(self, x):
        if self.half is not None and x.numel() == x.size(-1):
            return nn.functional.linear(
                x.half().clamp_(-65504, 65504), self.half, self.half_bias
            ).float()
        return torch.ops.mkldnn._linear_pointwise(
            x.to(self.dtype), self.packed, self.bias, "none", [], ""
        ).float()


def pack(model) -> None:
    """Make a model faster at one token a forward, where this machine can: on a CPU, its Linear
    layers become PackedLinear, and what lies between them float32.
    """
    weight = model.wte.weight
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return
    if (
        weight.dtype == torch.bfloat16
        and not torch.ops.mkldnn._is_mkldnn_bf16_supported()
        or weight.dtype == torch.float16
        and not torch.ops.mkldnn._is_mkldnn_fp16_supported()
    ):
        return
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, PackedLinear(child))
    model.float()


def penalise(logits, seen, penalty):
    """Make tokens that already stand in a sequence less likely, with penalty above 1 (Keskar et
    al., 2019, "CTRL", section 4.1).

    logits: [B, V]. seen: bool [B, V]. Returns logits: those of seen tokens are divided by the
    penalty, or multiplied where negative.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def sample(logits, temperature=1.0, top_k=None, top_p=None, vocab_size=None, generator=None):
    """Draw one token for each row of logits.

    logits: [B, V]. temperature: 0 takes the likeliest. top_k: only the k likeliest. top_p: only the
    likeliest that together reach this probability (Holtzman et al., 2019, "The Curious Case of
    Neural Text Degeneration"). vocab_size: ids from here on are padding and never drawn. generator:
    a torch.Generator on the logits' device. Returns int64 [B].
    """
    logits = logits[:, :vocab_size].float()
    if temperature < 1e-5:
        return logits.argmax(dim=-1)
    ids = None
    if top_k or (top_p or 1) < 1:
        logits, ids = logits.topk(
            min(top_k or logits.size(-1), logits.size(-1))
        )  # the likeliest first
    probs = (logits / temperature).softmax(dim=-1)
    if (top_p or 1) < 1:
        probs = probs.masked_fill(
            probs.cumsum(dim=-1) - probs >= top_p, 0
        )  # the likelier ones suffice; nothing is likelier than the first
    drawn = torch.multinomial(probs, 1, generator=generator)
    return (drawn if ids is None else ids.gather(1, drawn))[:, 0]
