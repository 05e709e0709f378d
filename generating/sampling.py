"""One token drawn for each row of logits.

Tensors in, tensors out.
"""

import torch


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
