"""Token ids from a model: the prompts in one forward, then one token of each per forward.

Ids in, ids out: it knows no text and no tokenizer. A sequence is here the list of ids that the
model sees of it. In the comments B is sequences, V the vocabulary.
"""

import contextlib
import functools

import torch

from generating.cache import Cache, last_tokens
from generating.cuda_graph import cuda_graph_decoder
from generating.sampling import apply_repetition_penalty, sample


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
    with choose_decoder(model, rows=len(sequences)) as (cache, decode):
        for _ in range(max_new_tokens):
            logits = decode(sequences) if cached else prefill(model, cache, sequences)
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


@contextlib.contextmanager
def choose_decoder(model, rows):
    """An empty cache, and the fastest way to decode one token with it: sequences -> logits [B, V].

    It needs all tokens of the sequences but the last of each in the cache. On a CPU the cache is
    float32: one row's attention takes half the time of bfloat16's there.
    """
    weight = model.wte.weight
    if weight.device.type == "cuda":
        with cuda_graph_decoder(model, rows) as decoder:
            yield decoder.cache, functools.partial(decoder, model)
        return
    dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
    cache = Cache(model.config, rows, weight.device, dtype)
    yield cache, functools.partial(decode_one_token, model, cache)


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


def decode_one_token(model, cache, sequences):
    """Logits of what follows each sequence, [B, V], from a forward of its last token alone."""
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    ids, positions = last_tokens(sequences).to(cache.slots.device)
    cache.set_positions(positions, longest, contiguous=min(lengths) == longest)
    return model(ids, cache=cache)[:, 0]
