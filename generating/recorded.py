"""A token's forward pass as a CUDA graph, recorded once and kept for the prompts to come.

Knows tensors and a model; no text.
"""

import contextlib
import warnings
import weakref

import torch

from generating.cache import Cache, last_tokens
from hardware import out_of_memory

MOST_KEPT = 4  # recorded steps of a model; each has a cache of its own
_kept = weakref.WeakKeyDictionary()  # model -> {key: RecordedDecoder}, the latest used last


class RecordedDecoder:
    """decode.decode_one_token as a CUDA graph, recorded at the first call.

    To launch a token's 200 kernels one by one takes several times longer than they run. Where the
    recording fails, they are launched so all the same, with a warning. It holds no reference to the
    model: what is kept for a model must not keep the model.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self.tokens = None  # int64 [2, B, 1], what the graph reads; None: nothing is recorded yet
        self.logits = None  # [B, V], what the graph writes
        self.graph = None  # stays None where the recording failed

    def __call__(self, model, sequences):
        """Logits of what follows each sequence, [B, V]; the next call overwrites them."""
        tokens = last_tokens(sequences)
        if self.tokens is None:
            self.tokens = tokens.to(self.cache.slots.device)
            self.record(model)
        else:
            self.load(tokens)
        if self.graph is None:
            return self.forward(model)
        self.graph.replay()
        return self.logits

    def load(self, tokens):
        """Copy the coming tokens to where the graph reads them, without waiting for the copy."""
        if self.tokens.device.type == "cuda":
            tokens = tokens.pin_memory()
        self.tokens.copy_(tokens, non_blocking=True)

    def forward(self, model):
        """As decode_one_token, but reading every slot: a graph's shapes stay as they are."""
        ids, positions = self.tokens
        self.cache.set_positions(positions)
        return model(ids, cache=self.cache)[:, 0]

    def record(self, model):
        """Record a forward of self.tokens. Raises RuntimeError when out of memory."""
        try:
            with torch.cuda.device(self.tokens.device):
                self.warm_up(model)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    self.logits = self.forward(model)
        except RuntimeError as error:
            if out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
            warnings.warn(f"no CUDA graph ({reason}): generation is slower", stacklevel=2)
        else:
            self.graph = graph

    def warm_up(self, model):
        """Let libraries set themselves up, as they do on first use: that cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(model)
        torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def kept_decoder(model, rows: int):
    """A RecordedDecoder for so many rows, as an earlier prompt left it, or a new one.

    It is taken away from the kept ones while it is in use, so two texts that grow at the same time
    have one each. Under autocast it is not kept: its graph reads copies of the weights that are
    gone when that context ends.
    """
    weight = model.wte.weight
    may_keep = not torch.is_autocast_enabled(weight.device.type)
    kept = _kept.setdefault(model, {})
    key = (rows, weight.dtype, weight.data_ptr())  # weights that were moved need a new graph
    decoder = kept.pop(key, None) if may_keep else None
    if decoder is None:
        decoder = RecordedDecoder(Cache(model.config, rows, weight.device, weight.dtype))
    try:
        yield decoder
    finally:
        if may_keep and decoder.graph is not None:
            kept[key] = decoder
            for oldest in list(kept)[:-MOST_KEPT]:
                del kept[oldest]
