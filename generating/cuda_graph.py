"""A token's forward pass as a CUDA graph, recorded once and kept for the next prompt.

It is not measured on a GPU yet.
"""

import contextlib
import warnings
import weakref

import torch

from generating.cache import Cache, last_tokens
from hardware import out_of_memory

_kept = weakref.WeakKeyDictionary()  # model -> (key, its latest CudaGraphDecoder)


class CudaGraphDecoder:
    """decode.Decoder as a CUDA graph, recorded at the first call.

    To launch a token's 200 kernels one by one takes several times longer than to run them. If the
    recording fails, they are launched one by one, with a warning. The decoder holds no reference to
    the model: what is kept for a model must not keep the model alive.
    """

    def __init__(self, cache: Cache):
        self.cache = cache
        self.tokens = None  # int64 [2, B, 1], what the graph reads; None: nothing is recorded yet
        self.logits = None  # [B, V], what the graph writes
        self.graph = None  # stays None if the recording fails

    def __call__(self, model, sequences):
        """Logits of what follows each sequence, [B, V]; the next call overwrites them."""
        tokens = last_tokens(sequences)
        if self.tokens is None:
            self.tokens = tokens.to(self.cache.slots.device)
            self.record(model)
        else:  # from pinned memory, so that nothing waits for the copy
            self.tokens.copy_(tokens.pin_memory(), non_blocking=True)
        if self.graph is None:
            return self.forward(model)
        self.graph.replay()
        return self.logits

    def forward(self, model):
        """As decode.Decoder, but it reads every slot: a graph's shapes are fixed."""
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
        """Run once on a side stream: libraries set themselves up, which cannot be recorded."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.forward(model)
        torch.cuda.current_stream().wait_stream(stream)


@contextlib.contextmanager
def cuda_graph_decoder(model, rows: int):
    """The CudaGraphDecoder of the last prompt where it fits, else a new one.

    It is taken out while in use, so two texts that grow at the same time have one each. Under
    autocast none is kept: its graph reads copies of the weights that are gone when autocast ends.
    """
    weight = model.wte.weight
    key = (rows, weight.dtype, weight.data_ptr())  # weights that moved need a new graph
    autocast = torch.is_autocast_enabled(weight.device.type)
    kept_key, decoder = _kept.pop(model, (None, None))
    if kept_key != key or autocast:
        decoder = CudaGraphDecoder(Cache(model.config, rows, weight.device, weight.dtype))
    try:
        yield decoder
    finally:
        if decoder.graph is not None and not autocast:
            _kept[model] = (key, decoder)
