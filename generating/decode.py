"""Token ids from a model: the prompts in one forward, then one token of each per forward.

Ids in, ids out: it knows no text and no tokenizer. In this order: the loop, how a token is drawn,
the forwards, on a GPU as a CUDA graph, and the cache of keys and values that they share.

A sequence is here the list of ids that the model sees of it. In the comments B is sequences, V the
vocabulary.
"""

import contextlib
import warnings

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from hardware import out_of_memory
from model import GPTConfig

NAN = -1  # the id where a model's logits are NaN or infinite, so that no token can be drawn
FIRST_LENGTH = 512  # positions in the cache, at first


@torch.inference_mode()
def generate(model, prompts, max_new_tokens, repetition_penalty=1.0, decoder=None, **settings):
    """Yield the next token id of every sequence, a list of B ints, max_new_tokens times.

    model: a GPT in evaluation mode. prompts: B lists of ids of any lengths, each at least one; of a
    prompt beyond the context the model sees the last block_size tokens. repetition_penalty: as in
    `apply_repetition_penalty`. decoder: a Decoder of this model for B sequences, to use it again;
    None: a new one. settings: as in `sample`. An id is NAN if the model computes no numbers.

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
        finite = logits.isfinite().all(dim=-1)
        if repetition_penalty != 1:
            logits = apply_repetition_penalty(logits, seen, repetition_penalty)
        drawn = sample(logits, **settings)
        seen.scatter_(1, drawn[:, None], True)
        next_ids = drawn.where(finite, NAN).tolist()  # all that is read from the device
        yield next_ids
        for sequence, next_id in zip(sequences, next_ids, strict=True):
            sequence.append(max(next_id, 0))
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
    penalized = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalized, logits)


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


# -- forwards --------------------------------------------------------------------------------------


class Decoder:
    """The forwards of a model for a number of sequences at once, one text after the other.

    A sequence is the list of ids that the model sees of it. The caller owns the decoder: it
    can be used again for as many sequences, but not for two texts at the same time.

    The cache begins short and doubles as sequences grow: of a context of 40,960 it would take
    gigabytes.
    """

    def __init__(self, model, rows: int):
        weight = model.wte.weight
        self.model = model
        length = min(FIRST_LENGTH, model.config.block_size)
        self.cache = KVCache(model.config, rows, weight.device, weight.dtype, length)

    def make_room(self, sequences):
        """Double the cache until the sequences fit."""
        longest, length = max(map(len, sequences)), self.cache.length
        while length < longest:
            length = min(2 * length, self.model.config.block_size)
        if length > self.cache.length:
            self.cache.grow(length)

    def prefill(self, sequences):
        """Logits of what follows each sequence, [B, V], from a forward of all its tokens.

        Afterwards the keys and values of these tokens are in the cache. Shorter sequences are
        padded on the right, where none of their tokens sees it.
        """
        self.make_room(sequences)
        slots = self.cache.slots
        prompts = [torch.tensor(sequence) for sequence in sequences]
        ids = pad_sequence(prompts, batch_first=True).to(slots.device)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=slots.device)
        self.cache.set_range(0, ids.size(1))
        return self.model(ids, cache=self.cache, last=last)

    def step(self, sequences):
        """Logits of what follows each sequence, [B, V], from a forward of its last token.

        The cache has all others.
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
    """A Decoder whose step is a CUDA graph, recorded at the first one.

    To launch a token's 200 kernels one by one takes several times longer than to run them. If the
    recording fails, they are launched one by one, with a warning.

    The graph reads the whole cache; if that has grown, it is recorded again.
    """

    def __init__(self, model, rows: int):
        super().__init__(model, rows)
        self.tokens = None  # int64 [2, B, 1], what the graph reads; None: nothing is recorded yet
        self.logits = None  # [B, V], what the graph writes
        self.graph = None  # stays None if the recording fails

    def make_room(self, sequences):
        length = self.cache.length
        super().make_room(sequences)
        if self.cache.length > length:
            self.tokens = self.logits = self.graph = None

    def step(self, sequences):
        """Logits of what follows each sequence, [B, V]; the next call overwrites them."""
        self.make_room(sequences)
        tokens = last_tokens(sequences)
        if self.tokens is None:
            self.tokens = tokens.to(self.cache.slots.device)
            self.record()
        else:  # from pinned memory, so that nothing waits for the copy
            self.tokens.copy_(tokens.pin_memory(), non_blocking=True)
        if self.graph is None:
            return self.forward()
        self.graph.replay()
        return self.logits

    def forward(self):
        """A forward of self.tokens. It reads the whole cache: the shapes of a graph are fixed."""
        ids, positions = self.tokens
        self.cache.set_positions(positions, read_until=self.cache.length)
        return self.model(ids, cache=self.cache)[:, 0]

    def record(self):
        """Record `forward`. Raises RuntimeError when out of memory."""
        try:
            with torch.cuda.device(self.tokens.device):
                self.warm_up()
                graph = torch.cuda.CUDAGraph()
                # Whatever other threads do on the GPU meanwhile does not end the recording.
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
        """Run once on a side stream: libraries set themselves up, which cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward()
        torch.cuda.current_stream().wait_stream(stream)


@torch.inference_mode()
def make_decoder(model, rows: int) -> Decoder:
    """The fastest decoder on the model's device."""
    on_cuda = model.wte.weight.device.type == "cuda"
    return CudaGraphDecoder(model, rows) if on_cuda else Decoder(model, rows)


def last_tokens(sequences) -> torch.Tensor:
    """Each sequence's last token and its position: int64 [2, B, 1], on the CPU."""
    ids = [sequence[-1:] for sequence in sequences]
    positions = [[len(sequence) - 1] for sequence in sequences]
    return torch.tensor([ids, positions])


# -- the cache -------------------------------------------------------------------------------------


class KVCache:
    """Each layer's keys and values, with a slot for each of the first `length` positions.

    Before a forward, `set_range` or `set_positions` says where its tokens are; each sees the slots
    up to its own. The slots beyond it hold what padding or an earlier text left there; they are
    overwritten before a token sees them.
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
        """Make room for more positions; what is kept stays."""
        more = (0, 0, 0, length - self.length)  # of the last two dimensions
        self.keys, self.values = F.pad(self.keys, more), F.pad(self.values, more)

    def set_range(self, begin: int, end: int):
        """In every row the next tokens are at begin .. end - 1: from 0 on, or one token.

        Then no mask is needed: attention of the first tokens is causal, and a last one sees all.
        """
        self.positions = slice(begin, end)
        self.read_until = end
        self.is_causal = begin == 0
        self.mask = None

    def set_positions(self, positions, read_until: int):
        """Each row's next tokens have positions of their own, int64 [B, T], below read_until."""
        self.positions = positions
        self.read_until = read_until
        self.is_causal = False
        self.mask = self.causal_mask()

    def causal_mask(self):
        """A bias for scores: -inf for slots beyond a token's own, else 0. [B, 1, T, read_until]."""
        slots = self.slots[: self.read_until]
        hidden = slots > self.positions[:, None, :, None]
        zeros = torch.zeros(hidden.shape, dtype=self.keys.dtype, device=hidden.device)
        return zeros.masked_fill(hidden, -torch.inf)

    def attend(self, layer, q, k, v):
        """Keep the new tokens' keys and values, and attend to all that the layer has.

        q: [B, heads, T, D]. k, v: [B, kv heads, T, D]. Returns q's shape and dtype.
        """
        self.write(self.keys[layer], k)
        self.write(self.values[layer], v)
        keys = self.keys[layer, :, :, : self.read_until]
        values = self.values[layer, :, :, : self.read_until]
        with self.backends():
            y = F.scaled_dot_product_attention(
                q.to(keys.dtype),
                keys,
                values,
                attn_mask=self.mask,
                is_causal=self.is_causal,
                enable_gqa=k.size(1) < q.size(1),
            )
        return y.to(q.dtype)

    def backends(self):
        """All of attention's but cuDNN's, which plans for each new length of a prompt.

        A plan takes half a second on a B200 (github.com/modelscope/FunASR/issues/3704).
        """
        if self.keys.device.type != "cuda":
            return contextlib.nullcontext()
        return sdpa_kernel(
            [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
        )

    def write(self, slots, new):
        """Put new keys or values, [B, kv heads, T, D], into the slots of their positions."""
        if isinstance(self.positions, slice):
            slots[:, :, self.positions] = new
        else:
            slots[self.rows, :, self.positions] = new.transpose(1, 2).to(slots.dtype)
