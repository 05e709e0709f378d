"""A compiled model replayed as CUDA graphs: one launch instead of some hundred.

It pays where a GPU finishes its kernels faster than Python launches them, as with 8 sequences of
GPT-2 Small on an H100. Not measured on a GPU yet.
"""

import torch


class Graphed:
    """Calls a compiled model so that its graphs may be replayed: compiled(x, y) is the loss.

    In all else it is the compiled model.

    What a graph returns is overwritten by its next replay. So each gradient is a tensor of its own,
    to which the graph's is added: with several micro-batches a step they add up as ever.
    """

    def __init__(self, compiled, model):
        self.compiled, self.weights = compiled, list(model.parameters())
        self.shape = None

    def __call__(self, x, y):
        if self.shape not in (None, x.shape):
            # After memory ran out: the graphs of the larger micro-batch give theirs back, with the
            # compiled code that holds on to them.
            torch._dynamo.reset()
        self.shape = x.shape
        torch.compiler.cudagraph_mark_step_begin()
        for weight in self.weights:
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
        return self.compiled(x, y)

    def __getattr__(self, name):
        return getattr(self.compiled, name)
