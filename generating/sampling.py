"""One token drawn for each row of logits.

Tensors in, tensors out. In the comments B is rows, V the vocabulary.
"""

import torch


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
