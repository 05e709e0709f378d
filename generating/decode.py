"""Token ids from a model: the prompts in one forward, then one token a forward, with keys and
values kept.

Ids in, ids out: it knows no text and no tokenizer. In the comments B is sequences, V the
vocabulary.
"""

import warnings

import torch

from generating.cache import Cache
from generating.sampling import penalise, sample
from hardware import out_of_memory


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
