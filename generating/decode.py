"""Token ids from a model: the prompts in one forward, then one token of each per forward.

Ids in, ids out: it knows no text and no tokenizer. A sequence is here the list of ids that the
model sees of it. In the comments B is sequences, V the vocabulary. `sample` draws a token.
"""

import contextlib

import torch

from generating.cache import Cache, last_tokens
from generating.cuda_graph import cuda_graph_decoder


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, repetition_penalty=1.0, **settings):
    """Yield the next token id of every sequence, a list of B ints, max_new_tokens times.

    model: a GPT in evaluation mode. prompts: B lists of ids of any lengths, each at least one; of a
    prompt beyond the context the model sees the last block_size tokens. repetition_penalty: as in
    `apply_repetition_penalty`. settings: as in `sample`.

    A sequence that has filled the context continues from its newer half: the model sees the last
    block_size / 2 tokens and all that follow, until the context is full again.
    """
    context = model.config.block_size
    sequences = [list(prompt)[-context:] for prompt in prompts]
    seen = tokens_in(prompts, model)
    cached = False  # whether the cache has all tokens of the sequences but the last of each
    with choose_decoder(model, rows=len(sequences)) as decoder:
        for _ in range(max_new_tokens):
            if cached:
                logits = decoder(model, sequences)
            else:
                logits = prefill(model, decoder.cache, sequences)
            if repetition_penalty != 1:
                logits = apply_repetition_penalty(logits, seen, repetition_penalty)
            drawn = sample(logits, **settings)
            seen.scatter_(1, drawn[:, None], True)
            next_ids = drawn.tolist()  # the only thing that is read from the device
            yield next_ids
            for sequence, next_id in zip(sequences, next_ids, strict=True):
                sequence.append(next_id)
            cached = not restart_full(sequences, context)


def tokens_in(prompts, model):
    """Which tokens of the vocabulary are in each prompt: bool [B, V]."""
    shape = (len(prompts), model.config.vocab_size)
    seen = torch.zeros(shape, dtype=torch.bool, device=model.wte.weight.device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    return seen


def choose_decoder(model, rows):
    """A context that gives the fastest decoder of a device, its cache still empty.

    On a CPU the cache is float32: one row's attention takes half the time of bfloat16's there.
    """
    weight = model.wte.weight
    if weight.device.type == "cuda":
        return cuda_graph_decoder(model, rows)
    dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
    return contextlib.nullcontext(Decoder(Cache(model.config, rows, weight.device, dtype)))


class Decoder:
    """A forward of the last token of each sequence; the cache has all others."""

    def __init__(self, cache: Cache):
        self.cache = cache

    def __call__(self, model, sequences):
        """Logits of what follows each sequence, [B, V]."""
        lengths = [len(sequence) for sequence in sequences]
        longest = max(lengths)
        ids, positions = last_tokens(sequences).to(self.cache.slots.device)
        self.cache.set_positions(positions, longest, contiguous=min(lengths) == longest)
        return model(ids, cache=self.cache)[:, 0]


def restart_full(sequences, context) -> bool:
    """Cut each sequence that has outgrown the context to its newer half; returns whether one had.

    Its tokens then have other positions, and the cache no longer fits them.
    """
    outgrown = [sequence for sequence in sequences if len(sequence) > context]
    keep = max(1, context // 2)
    for sequence in outgrown:
        del sequence[:-keep]
    return bool(outgrown)


def prefill(model, cache, sequences):
    """Logits of what follows each sequence, [B, V], from a forward of all its tokens.

    Afterwards the keys and values of these tokens are in the cache. Shorter sequences are padded on
    the right, where none of their tokens sees it.
    """
    device = cache.slots.device
    lengths = [len(sequence) for sequence in sequences]
    width = max(lengths)
    ids = [sequence + [0] * (width - len(sequence)) for sequence in sequences]
    ids = torch.tensor(ids, device=device)
    last = torch.tensor([length - 1 for length in lengths], device=device)
    positions = cache.slots[:width].expand(len(sequences), -1)
    cache.set_positions(positions, width, contiguous=True)
    return model(ids, cache=cache, last=last)


# -- sampling --------------------------------------------------------------------------------------


def apply_repetition_penalty(logits, seen, penalty):
    """Make tokens that a sequence already has less likely, with a penalty above 1.

    logits: [B, V]. seen: bool [B, V]. Returns logits: those of seen tokens are divided by the
    penalty, or multiplied where negative (Keskar et al., 2019, "CTRL", section 4.1).
    """
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def sample(logits, temperature=1.0, top_k=None, top_p=None, vocab_size=None, generator=None):
    """Draw one token for each row of logits. Returns int64 [B].

    logits: [B, V]. temperature: 0 takes the likeliest. top_k: only the k likeliest; None or 0: all.
    top_p: only the likeliest that together reach this probability (Holtzman et al., 2019, "The
    Curious Case of Neural Text Degeneration"); None or 1: all. vocab_size: ids from here on are
    padding and never drawn. generator: a torch.Generator on the logits' device.
    """
    logits = logits[:, :vocab_size].float()
    if temperature < 1e-5:
        return logits.argmax(dim=-1)
    top_p = top_p or 1.0
    if not top_k and top_p >= 1:
        probs = (logits / temperature).softmax(dim=-1)
        return draw(probs, generator)

    vocabulary = logits.size(-1)
    logits, ids = logits.topk(min(top_k or vocabulary, vocabulary))  # the likeliest first
    probs = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        likelier = probs.cumsum(dim=-1) - probs  # the sum of all before a token; 0 for the first
        probs = probs.masked_fill(likelier >= top_p, 0)
    drawn = draw(probs, generator)
    return ids.gather(1, drawn[:, None])[:, 0]


def draw(probs, generator):
    """An index for each row, drawn with these probabilities: [B, V] -> int64 [B].

    A probability over exponential noise is the largest of its row with that probability. It draws
    what torch.multinomial draws, without its two checks, for which a GPU would have to wait.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(dim=-1)
