"""A model with its cache: the forwards that generation takes, on a GPU as a CUDA graph.

Token ids in, logits out; decode.py chooses the ids. In the comments B is sequences, V the
vocabulary.
"""

import warnings

import torch
from torch.nn.utils.rnn import pad_sequence

from generating.cache import KVCache
from hardware import out_of_memory

FIRST_LENGTH = 512  # positions in the cache of a CUDA graph, at first


class Decoder:
    """The forwards of a model for a number of sequences at once, one text after the other.

    A sequence is the list of ids that the model sees of it. Whoever generates owns the decoder: it
    can be used again for as many sequences, but not for two texts at the same time.
    """

    def __init__(self, model, rows: int, length: int | None = None):
        """length: positions that the cache has room for; None: the whole context."""
        weight = model.wte.weight
        self.model = model
        length = length or model.config.block_size
        self.cache = KVCache(model.config, rows, weight.device, weight.dtype, length)

    def prefill(self, sequences):
        """Logits of what follows each sequence, [B, V], from a forward of all its tokens.

        Afterwards the keys and values of these tokens are in the cache. Shorter sequences are
        padded on the right, where none of their tokens sees it.
        """
        slots = self.cache.slots
        prompts = [torch.tensor(sequence) for sequence in sequences]
        ids = pad_sequence(prompts, batch_first=True).to(slots.device)
        last = torch.tensor([len(sequence) - 1 for sequence in sequences], device=slots.device)
        width = ids.size(1)
        self.cache.set_positions(slots[:width].expand_as(ids), width, contiguous=True)
        return self.model(ids, cache=self.cache, last=last)

    def step(self, sequences):
        """Logits of what follows each sequence, [B, V], from a forward of its last token.

        The cache has all others.
        """
        lengths = [len(sequence) for sequence in sequences]
        longest = max(lengths)
        ids, positions = last_tokens(sequences).to(self.cache.slots.device)
        self.cache.set_positions(positions, longest, contiguous=min(lengths) == longest)
        return self.model(ids, cache=self.cache)[:, 0]


class CudaGraphDecoder(Decoder):
    """A Decoder whose step is a CUDA graph, recorded at the first one.

    To launch a token's 200 kernels one by one takes several times longer than to run them. If the
    recording fails, they are launched one by one, with a warning. It is not measured on a GPU yet.

    The graph reads the whole cache, which therefore begins short and doubles as sequences grow; the
    graph is then recorded again.
    """

    def __init__(self, model, rows: int):
        super().__init__(model, rows, min(FIRST_LENGTH, model.config.block_size))
        self.tokens = None  # int64 [2, B, 1], what the graph reads; None: nothing is recorded yet
        self.logits = None  # [B, V], what the graph writes
        self.graph = None  # stays None if the recording fails

    def make_room(self, sequences):
        """Double the cache until the sequences fit; the graph of the shorter one goes."""
        longest, length = max(map(len, sequences)), self.cache.length
        while length < longest:
            length = min(2 * length, self.model.config.block_size)
        if length > self.cache.length:
            self.tokens = self.logits = self.graph = None
            self.cache.grow(length)

    def prefill(self, sequences):
        self.make_room(sequences)
        return super().prefill(sequences)

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
        self.cache.set_positions(positions)
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
