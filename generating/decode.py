"""Token ids from a model: the prompts in one forward, then one token of each a forward.

Ids in, ids out: it knows no text and no tokenizer. A sequence is here the list of ids that the
model sees of it. In the comments B is sequences, V the vocabulary.
"""

import functools
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
    context = model.config.block_size
    sequences = [list(prompt)[-context:] for prompt in prompts]
    seen = tokens_in(prompts, model)
    cache = make_cache(model, rows=len(sequences))
    decoder = choose_decoder(model, cache)
    cached = False  # whether the cache has all tokens of the sequences but the last of each
    for _ in range(max_new_tokens):
        logits = decoder(sequences) if cached else prefill(model, cache, sequences)
        if repetition_penalty != 1:
            logits = penalise(logits, seen, repetition_penalty)
        drawn = sample(logits, **settings)
        seen.scatter_(1, drawn[:, None], True)
        next_ids = drawn.tolist()
        yield next_ids
        append(sequences, next_ids)
        cached = not restart_full(sequences, context)


def tokens_in(prompts, model):
    """Which tokens of the vocabulary stand in each prompt: bool [B, V]."""
    shape = (len(prompts), model.config.vocab_size)
    seen = torch.zeros(shape, dtype=torch.bool, device=model.wte.weight.device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[list(prompt)] = True
    return seen


def make_cache(model, rows):
    """An empty cache for so many sequences, where the model is.

    On a CPU it is float32: one row's attention takes half the time of bfloat16's there.
    """
    weight = model.wte.weight
    dtype = torch.float32 if weight.device.type == "cpu" else weight.dtype
    return Cache(model.config, rows, weight.device, dtype)


def append(sequences, next_ids):
    """Put the new token at the end of each sequence."""
    for sequence, next_id in zip(sequences, next_ids, strict=True):
        sequence.append(next_id)


def restart_full(sequences, context) -> bool:
    """Cut each sequence that has outgrown the context to its newer half; returns whether one had.

    Its tokens stand at other positions then, and the cache no longer fits them.
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
    longest = max(lengths)
    ids = [sequence + [0] * (longest - len(sequence)) for sequence in sequences]
    ids = torch.tensor(ids, device=device)
    last = torch.tensor([length - 1 for length in lengths], device=device)
    positions = cache.slots[:longest].expand(len(sequences), -1)
    cache.set_positions(positions, longest, contiguous=True)
    return model(ids, cache=cache, last=last)


def choose_decoder(model, cache):
    """The fastest way to decode one token on the model's device: sequences -> logits [B, V].

    It needs a cache that has all tokens of the sequences but the last of each.
    """
    if model.wte.weight.device.type == "cuda":
        return RecordedDecoder(model, cache)
    return functools.partial(decode_one_token, model, cache)


def decode_one_token(model, cache, sequences):
    """Logits of what follows each sequence, [B, V], from a forward of its last token alone."""
    lengths = [len(sequence) for sequence in sequences]
    longest = max(lengths)
    ids, positions = last_tokens(sequences, cache.slots.device)
    cache.set_positions(positions, longest, contiguous=min(lengths) == longest)
    return model(ids, cache=cache)[:, 0]


def last_tokens(sequences, device):
    """Each sequence's last token and its position: int64 [2, B, 1], one copy to the device."""
    ids = [sequence[-1:] for sequence in sequences]
    positions = [[len(sequence) - 1] for sequence in sequences]
    return torch.tensor([ids, positions], device=device)


class RecordedDecoder:
    """decode_one_token as a CUDA graph, recorded at the first call.

    To launch a token's 200 kernels one by one takes several times longer than they run. Where the
    recording fails, they are launched so all the same, with a warning.
    """

    def __init__(self, model, cache):
        self.model = model
        self.cache = cache
        self.tokens = None  # int64 [2, B, 1], what the graph reads; None: nothing is recorded yet
        self.logits = None  # [B, V], what the graph writes
        self.graph = None  # stays None where the recording failed

    def __call__(self, sequences):
        tokens = last_tokens(sequences, self.cache.slots.device)
        if self.tokens is None:
            self.tokens = tokens
            self.record()
        if self.graph is None:
            return self.forward(tokens)
        self.tokens.copy_(tokens)
        self.graph.replay()
        return self.logits

    def forward(self, tokens):
        """As decode_one_token, but reading every slot: a graph's shapes stay as they are."""
        ids, positions = tokens
        self.cache.set_positions(positions)
        return self.model(ids, cache=self.cache)[:, 0]

    def record(self):
        """Record a forward of self.tokens. Raises RuntimeError when out of memory."""
        try:
            with torch.cuda.device(self.tokens.device):
                self.warm_up()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.logits = self.forward(self.tokens)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            warnings.warn(f"no CUDA graph ({reason}): generation is slower", stacklevel=2)
        else:
            self.graph = graph

    def warm_up(self):
        """Let libraries set themselves up, as they do on first use: that cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(self.tokens)
        torch.cuda.current_stream().wait_stream(stream)
