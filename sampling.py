"""Token ids from a model: the prompts in one forward, then one token a forward, with keys and values kept.

Ids in, ids out: it knows no text and no tokenizer. In the comments B is sequences, V the vocabulary.
"""
import torch

from model import Cache


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, repetition_penalty=1.0, **settings):
    """Yield the next token id of every sequence, a list of B ints, max_new_tokens times.

    model: a GPT in evaluation mode. prompts: B lists of ids of any lengths, each at least one; of a prompt beyond the context the model
    sees the last block_size tokens. repetition_penalty: as in `penalise`. settings: as in `sample`.

    A sequence that has filled the context goes on from its newer half: the model sees the last block_size / 2 tokens and all
    that follow, until the context is full again.
    """
    device, context = model.wte.weight.device, model.config.block_size
    texts = [list(prompt)[-context:] for prompt in prompts]
    seen = torch.zeros(len(texts), model.config.vocab_size, dtype=torch.bool, device=device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    cache, full = Cache(model.config, device), True
    for _ in range(max_new_tokens):
        logits = prefill(model, cache, texts) if full else next_token(model, cache, texts)
        if repetition_penalty != 1:
            logits = penalise(logits, seen, repetition_penalty)
        next_ids = sample(logits, **settings)
        seen.scatter_(1, next_ids[:, None], True)
        new = next_ids.tolist()
        yield new
        full = any(len(text) == context for text in texts)
        texts = [[*(text if len(text) < context else text[context + 1 - context // 2 :]), i] for text, i in zip(texts, new, strict=True)]


def prefill(model, cache, texts):
    """Logits of what follows each text, [B, V]; its keys and values are in the cache then. texts: B lists of ids."""
    device, longest = cache.slots.device, max(map(len, texts))
    idx = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)  # no token sees what follows it
    cache.place(cache.slots[:longest].expand(len(texts), -1), used=longest)
    return model(idx, cache=cache, last=torch.tensor([len(text) - 1 for text in texts], device=device))


def next_token(model, cache, texts):
    """The same, where the cache has all of each text but its last token."""
    device = cache.slots.device
    cache.place(torch.tensor([[len(text) - 1] for text in texts], device=device), used=max(map(len, texts)))
    return model(torch.tensor([text[-1:] for text in texts], device=device), cache=cache)[:, 0]


def penalise(logits, seen, penalty):
    """Make tokens that already stand in a sequence less likely, with penalty above 1 (Keskar et al., 2019, "CTRL", section 4.1).

    logits: [B, V]. seen: bool [B, V]. Returns logits: those of seen tokens are divided by the penalty, or multiplied where negative.
    """
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


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
