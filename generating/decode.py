"""Token ids from a model: one forward for the prompts, then one forward per new token of each.

Ids in, ids out: knows neither text nor tokenizers. In this order: the loop, sampling, the forwards
(as a CUDA graph on a GPU), and the key-value cache that they share.

A sequence here is the list of ids that the model currently sees. Shapes: B sequences, V ids in the
vocabulary, T new tokens, D dimensions of a head.
"""

import contextlib
import functools
import json
import warnings
from dataclasses import asdict

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from formats.fingerprint import fingerprint, same
from hardware import out_of_memory
from model import GPTConfig

NAN = -1  # returned in place of an id if the logits are NaN or infinite
FIRST_LENGTH = 512  # initial positions in the cache


@torch.inference_mode()
def generate(
    model, prompts, max_new_tokens, repetition_penalty=1.0, end_ids=(), decoder=None, **settings
):
    """Yield the next token id of every sequence, a list of B ints, max_new_tokens times.

    model: a GPT in evaluation mode. prompts: B non-empty lists of ids, of any lengths; the model
    sees the last block_size ids of a longer one. repetition_penalty: as in
    `apply_repetition_penalty`. end_ids: ids that it spares, since a prompt has them where earlier
    texts or turns end, and this one would not end. decoder: a Decoder of this model for B
    sequences, to reuse; None: a new one. settings: as in `sample`. An id is NAN if the logits are
    NaN or infinite.

    A sequence that fills the context continues from its newer half: the model sees the last
    block_size / 2 tokens and all that follow, until the context is full again.
    """
    context = model.config.block_size
    sequences = [prompt[-context:] for prompt in prompts]
    shape = (len(prompts), model.config.vocab_size)
    # [B, V]: the ids that occur in each sequence, but for those of its prompt that are spared.
    seen = torch.zeros(shape, dtype=torch.bool, device=model.wte.weight.device)
    for row, prompt in zip(seen, prompts, strict=True):
        row[[i for i in prompt if i not in end_ids]] = True
    decoder = decoder or make_decoder(model, rows=len(sequences))
    cached = False  # True: the cache holds all tokens of each sequence but the last
    for _ in range(max_new_tokens):
        logits = decoder.step(sequences) if cached else decoder.prefill(sequences)
        finite = logits.isfinite().all(dim=-1)
        if repetition_penalty != 1:
            logits = apply_repetition_penalty(logits, seen, repetition_penalty)
        drawn = sample(logits, **settings)
        seen.scatter_(1, drawn[:, None], True)
        next_ids = drawn.where(finite, NAN).tolist()  # the only read from the device
        yield next_ids
        for sequence, next_id in zip(sequences, next_ids, strict=True):
            sequence.append(max(next_id, 0))
        cached = not restart_full(sequences, context)


def restart_full(sequences, context) -> bool:
    """Cut each sequence longer than the context to its newer half; returns True if there was one.

    The tokens kept get new positions, so the cache is no longer valid.
    """
    outgrown = [sequence for sequence in sequences if len(sequence) > context]
    keep = max(1, context // 2)
    for sequence in outgrown:
        del sequence[:-keep]
    return bool(outgrown)


# -- sampling --------------------------------------------------------------------------------------


def apply_repetition_penalty(logits, seen, penalty):
    """With a penalty above 1, make tokens that occur in a sequence less likely.

    logits: [B, V]. seen: bool [B, V]. Returns logits [B, V]: those of seen tokens are divided by
    the penalty, or multiplied if negative (Keskar et al., 2019, "CTRL", section 4.1).
    """
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


def sample(logits, temperature=1.0, top_k=0, top_p=1.0, vocab_size=None, generator=None):
    """Sample one token id per row of logits. Returns int64 [B].

    logits: [B, V]. temperature: 0 takes the likeliest token. top_k: sample among the k likeliest;
    0: all. top_p: sample among the likeliest that together reach this probability (Holtzman et al.,
    2019, "The Curious Case of Neural Text Degeneration"); 1: all. vocab_size: ids from here on are
    padding and never drawn. generator: a torch.Generator on the logits' device.
    """
    logits = logits[:, :vocab_size].float()
    if temperature < 1e-5:
        return logits.argmax(dim=-1)
    if not top_k and top_p >= 1:
        probs = (logits / temperature).softmax(dim=-1)
        return sample_index(probs, generator)

    vocabulary = logits.size(-1)
    logits, ids = logits.topk(min(top_k or vocabulary, vocabulary))  # sorted, likeliest first
    probs = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        likelier = probs.cumsum(dim=-1) - probs  # total probability of the tokens before each
        probs = probs.masked_fill(likelier >= top_p, 0)
    drawn = sample_index(probs, generator)
    return ids.gather(1, drawn[:, None])[:, 0]


def sample_index(probs, generator):
    """Sample an index per row with these probabilities: [B, V] -> int64 [B].

    Each probability is divided by exponential noise; entry i is then the largest with probability
    probs[i]. torch.multinomial draws the same, but its two checks would synchronize with the GPU.
    """
    noise = torch.empty_like(probs).exponential_(generator=generator)
    # An Apple GPU may draw 0, and argmax takes 0 / 0 (github.com/pytorch/pytorch/issues/192577).
    noise.clamp_(min=2**-24)
    return (probs / noise).argmax(dim=-1)


# -- forwards --------------------------------------------------------------------------------------


class Decoder:
    """Runs a model on a fixed number of sequences at once, with a key-value cache.

    The caller may reuse a decoder for another batch of as many sequences, once it is done with the
    one before.

    The cache starts short and doubles as the sequences grow: for a whole context of 40,960 tokens,
    it would take gigabytes.
    """

    def __init__(self, model, rows: int):
        weight = model.wte.weight
        self.model = model
        length = min(FIRST_LENGTH, model.config.block_size)
        self.cache = KVCache(model.config, rows, weight.device, weight.dtype, length)

    def make_room(self, sequences):
        """Double the cache until the longest sequence fits."""
        longest, length = max(map(len, sequences)), self.cache.length
        while length < longest:
            length = min(2 * length, self.model.config.block_size)
        if length > self.cache.length:
            self.cache.grow(length)

    def prefill(self, sequences):
        """Logits for the next token of each sequence, [B, V], from a forward of all its tokens.

        Writes their keys and values to the cache. Pads shorter sequences on the right, where the
        causal mask hides the padding.
        """
        self.make_room(sequences)
        ids, last = padded(sequences, self.cache.slots.device)
        self.cache.set_range(0, ids.size(1))
        return self.model(ids, cache=self.cache, last=last)

    def step(self, sequences):
        """Logits for the next token of each sequence, [B, V], from a forward of its last token.

        The cache must hold all tokens before it.
        """
        self.make_room(sequences)
        lengths = [len(sequence) for sequence in sequences]
        longest = max(lengths)
        ids, positions = last_tokens(sequences).to(self.cache.slots.device)
        if min(lengths) == longest:
            self.cache.set_range(longest - 1, longest)
        else:
            self.cache.set_positions(positions, read_until=longest)
        return self.model(ids, cache=self.cache)[:, 0]


class CudaGraphDecoder(Decoder):
    """A Decoder whose step is a CUDA graph, recorded at the first step.

    Launching a token's 200 kernels one by one takes several times longer than running them. If the
    recording fails, they are launched one by one, with a warning.

    The graph reads the whole cache; it is recorded again each time the cache grows.
    """

    def __init__(self, model, rows: int):
        super().__init__(model, rows)
        self.length = 0  # of the cache that the graph reads
        self.tokens = None  # int64 [2, B, 1], the graph's input
        self.logits = None  # [B, V], the graph's output
        self.graph = None  # None if the recording fails

    def step(self, sequences):
        """As Decoder.step; the next call overwrites the logits."""
        self.make_room(sequences)
        tokens = last_tokens(sequences)
        if self.length < self.cache.length:
            self.length, self.graph = self.cache.length, None
            self.tokens = tokens.to(self.cache.slots.device)
            self.record()
        else:  # from pinned memory, so that the copy does not block
            self.tokens.copy_(tokens.pin_memory(), non_blocking=True)
        if self.graph is None:
            return self.forward()
        self.graph.replay()
        return self.logits

    def forward(self):
        """A forward of self.tokens. Reads the whole cache, since a graph's shapes are fixed."""
        ids, positions = self.tokens
        self.cache.set_positions(positions, read_until=self.cache.length)
        return self.model(ids, cache=self.cache)[:, 0]

    def record(self):
        """Record `forward`. Raises RuntimeError when out of memory."""
        try:
            with torch.cuda.device(self.tokens.device):
                self.warm_up()
                graph = torch.cuda.CUDAGraph()
                # thread_local: work of other threads on the GPU does not break the recording.
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    self.logits = self.forward()
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            warnings.warn(f"no CUDA graph ({reason}): generation is slower", stacklevel=2)
        else:
            self.graph = graph

    def warm_up(self):
        """Run once on a side stream, since the initialization of libraries cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward()
        torch.cuda.current_stream().wait_stream(stream)


class Uncached:
    """Runs a model on all tokens of the sequences for each new one, as training does."""

    def __init__(self, model):
        self.model = model

    def prefill(self, sequences):
        """As Decoder.prefill."""
        ids, last = padded(sequences, self.model.wte.weight.device)
        return self.model(ids, last=last)

    step = prefill


@functools.cache
def fits_cache(shape: str) -> bool:
    """False if model.py has been changed and computes something else with a KVCache than without.

    shape: the fields of a GPTConfig, in JSON.
    """
    config = GPTConfig(**json.loads(shape))

    def with_cache(model, ids):
        decoder = Decoder(model, rows=1)
        decoder.prefill([ids[:-1]])
        return decoder.step([ids])

    return same(fingerprint(config, with_cache), fingerprint(config))


def make_decoder(model, rows: int) -> Decoder | Uncached:
    """The fastest decoder for the model's device that computes what the model does."""
    if not fits_cache(json.dumps(asdict(model.config))):
        what = "model.py computes something else with KVCache.attend than without it"
        warnings.warn(f"{what}: generation is slower, as it leaves the cache out", stacklevel=2)
        return Uncached(model)
    on_cuda = model.wte.weight.device.type == "cuda"
    return CudaGraphDecoder(model, rows) if on_cuda else Decoder(model, rows)


def padded(sequences, device) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequences, padded on the right, int64 [B, T], and the place of each one's last token."""
    ids = pad_sequence([torch.tensor(sequence) for sequence in sequences], batch_first=True)
    last = torch.tensor([len(sequence) - 1 for sequence in sequences])
    return ids.to(device), last.to(device)


def last_tokens(sequences) -> torch.Tensor:
    """Each sequence's last token and its position: int64 [2, B, 1], on the CPU."""
    ids = [sequence[-1:] for sequence in sequences]
    positions = [[len(sequence) - 1] for sequence in sequences]
    return torch.tensor([ids, positions])


# -- the cache -------------------------------------------------------------------------------------


class KVCache:
    """Each layer's keys and values, with one slot for each of the first `length` positions.

    Before a forward, `set_range` or `set_positions` gives the positions of its tokens; each attends
    to the slots up to its own. Later slots may hold leftovers of padding or of an earlier text,
    which are overwritten before any token attends to them.
    """

    def __init__(self, config: GPTConfig, rows: int, device, dtype, length: int):
        shape = (config.n_layer, rows, config.n_kv_head, length, config.head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.slots = torch.arange(config.block_size, device=device)
        self.rows = torch.arange(rows, device=device)[:, None]  # [B, 1]

    @property
    def length(self) -> int:
        return self.keys.size(3)

    def grow(self, length: int) -> None:
        """Extend the cache to `length` positions; keeps its content."""
        more = (0, 0, 0, length - self.length)  # padding of the last two dimensions
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def set_range(self, begin: int, end: int):
        """The next tokens of every row are at positions begin .. end - 1.

        Either begin is 0, and attention is causal, or there is a single token, which attends to all
        slots before it. Neither needs a mask.
        """
        self.positions = slice(begin, end)
        self.read_until = end
        self.is_causal = begin == 0
        self.mask = None

    def set_positions(self, positions, read_until: int):
        """The next tokens have a position per row: int64 [B, T], all below read_until."""
        self.positions = positions
        self.read_until = read_until
        self.is_causal = False
        self.mask = self.causal_mask()

    def causal_mask(self):
        """The attention bias: -inf for slots after a token's own, else 0. [B, 1, T, read_until]."""
        slots = self.slots[: self.read_until]
        hidden = slots > self.positions[:, None, :, None]
        zeros = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device)
        return zeros.masked_fill(hidden, -torch.inf)

    def attend(self, layer, q, k, v):
        """Write the new tokens' keys and values to a layer's cache, and attend to all of it.

        q: [B, heads, T, D]. k, v: [B, kv heads, T, D]. Returns a tensor of q's shape.
        """
        self.write(self.keys[layer], k)
        self.write(self.values[layer], v)
        keys = self.keys[layer, :, :, : self.read_until]
        values = self.values[layer, :, :, : self.read_until]
        with self.backends():
            return F.scaled_dot_product_attention(
                q.to(keys.dtype),
                keys,
                values,
                attn_mask=self.mask,
                is_causal=self.is_causal,
                enable_gqa=k.size(1) < q.size(1),
            )

    def backends(self):
        """A context that excludes cuDNN's attention, which builds a plan per prompt length.

        A plan takes half a second on a B200 (github.com/modelscope/FunASR/issues/3704).
        """
        if self.keys.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )

    def write(self, slots, new):
        """Write new keys or values, [B, kv heads, T, D], to the slots of their positions."""
        if isinstance(self.positions, slice):
            slots[:, :, self.positions] = new
        else:
            slots[self.rows, :, self.positions] = new.transpose(1, 2).to(slots.dtype)
