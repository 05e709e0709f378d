"""Token ids from a model: the prompts in one forward, then one token of each per forward.

Ids in, ids out: it knows no text and no tokenizer. A sequence is here the list of ids that the
model sees of it. In the comments B is sequences, V the vocabulary. `sample` draws a token.
"""

import torch

from generating.decoder import make_decoder


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, repetition_penalty=1.0, decoder=None, **settings):
    """Yield the next token id of every sequence, a list of B ints, max_new_tokens times.

    model: a GPT in evaluation mode. prompts: B lists of ids of any lengths, each at least one; of a
    prompt beyond the context the model sees the last block_size tokens. repetition_penalty: as in
    `apply_repetition_penalty`. decoder: a Decoder of this model for B sequences, to use it again;
    None: a new one. settings: as in `sample`.

    A sequence that has filled the context continues from its newer half: the model sees the last
    block_size / 2 tokens and all that follow, until the context is full again.
    """
    context = model.config.block_size
    sequences = [prompt[-context:] for prompt in prompts]
    shape = (len(prompts), model.config.vocab_size)
    # The tokens that each sequence has: [B, V].
    seen = torch.zeros(shape, dtype=torch.bool, device=model.wte.weight.device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[prompt] = True
    decoder = decoder or make_decoder(model, rows=len(sequences))
    cached = False  # whether the cache has all tokens of the sequences but the last of each
    for _ in range(max_new_tokens):
        logits = decoder.step(sequences) if cached else decoder.prefill(sequences)
        if repetition_penalty != 1:
            logits = apply_repetition_penalty(logits, seen, repetition_penalty)
        drawn = sample(logits, **settings)
        seen.scatter_(1, drawn[:, None], True)
        next_ids = drawn.tolist()  # the only thing that is read from the device
        yield next_ids
        for sequence, next_id in zip(sequences, next_ids, strict=True):
            sequence.append(next_id)
        cached = not restart_full(sequences, context)


def restart_full(sequences, context) -> bool:
    """Cut each sequence that has outgrown the context to its newer half; returns whether one had.

    Its tokens then have other positions, and the cache no longer fits them.
    """
    outgrown = [sequence for sequence in sequences if len(sequence) > context]
    keep = max(1, context // 2)
    for sequence in outgrown:
        del sequence[:-keep]
    return bool(outgrown)


# -- sampling --------------------------------------------------------------------------------------


def apply_repetition_penalty(logits, seen, penalty):
    """Make tokens that a sequence already has less likely, with a penalty above 1.

    logits: [B, V]. seen: bool [B, V]. Returns logits: those of seen tokens are divided by the
    penalty, or multiplied where negative (Keskar et al., 2019, "CTRL", section 4.1).
    """
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, vocab_size=None, generator=None):
    """Draw one token for each row of logits. Returns int64 [B].

    logits: [B, V]. temperature: 0 takes the likeliest. top_k: only the k likeliest; 0: all. top_p:
    only the likeliest that together reach this probability (Holtzman et al., 2019, "The Curious
    Case of Neural Text Degeneration"); 1: all. vocab_size: ids from here on are padding and never
    drawn. generator: a torch.Generator on the logits' device.
    """
    logits = logits[:, :vocab_size].float()
    if temperature < 1e-5:
        return logits.argmax(dim=-1)
    if not top_k and top_p >= 1:
        probs = (logits / temperature).softmax(dim=-1)
        return sample_index(probs, generator)

    vocabulary = logits.size(-1)
    logits, ids = logits.topk(min(top_k or vocabulary, vocabulary))  # the likeliest first
    probs = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        likelier = probs.cumsum(dim=-1) - probs  # the sum of all before a token; 0 for the first
        probs = probs.masked_fill(likelier >= top_p, 0)
    drawn = sample_index(probs, generator)
    return ids.gather(1, drawn[:, None])[:, 0]


def sample_index(probs, generator):
    """An index for each row, drawn with these probabilities: [B, V] -> int64 [B].

    A probability over exponential noise is the largest of its row with that probability. It draws
    what torch.multinomial draws, without its two checks, for which a GPU would have to wait.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / noise).argmax(dim=-1)
