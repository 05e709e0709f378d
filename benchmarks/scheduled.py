"""What PyTorch's compiler would launch: a backend that lowers a graph and counts, and runs nothing.

It calls Inductor's own functions, of torch 2.13: another version may need another call.
"""

from dataclasses import dataclass

import numpy
import sympy
import torch
from torch._inductor import memory
from torch._inductor.compile_fx import (
    _recursive_post_grad_passes,
    _recursive_record_original_output_strides,
    compile_fx,
    fake_tensor_prop,
    view_to_reshape,
)
from torch._inductor.debug import DebugContext
from torch._inductor.dependencies import MemoryDep
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensor
from torch.utils._ordered_set import OrderedSet
from torch.utils._pytree import tree_map
from torch.utils._sympy.printers import PythonPrinter


@dataclass
class Kernel:
    """One launch. flops: of products in 16 bits. flops8: of those in 8."""

    part: str
    gigabytes: float
    flops: float = 0.0
    flops8: float = 0.0


class Lowering:
    """A backend for torch.compile: forward and backward are lowered, and their launches kept.

    pairs: sequences x tokens x tokens x the width of all heads, which attention's operations are
    multiples of. kernels: those launches. peak_gigabytes: what tensors take at most, but for the
    weights.
    """

    def __init__(self, vocab_size: int, pairs: float):
        self.widths = {vocab_size, 64 * -(-vocab_size // 64)}
        self.pairs = pairs
        self.kernels, self.peak_gigabytes = [], 0.0

    def __call__(self, graph, inputs):
        return compile_fx(graph, inputs, inner_compile=self.lower)

    def lower(self, graph, inputs, is_backward=False, **_):
        """In the place of Inductor's compile_fx_inner, for forward and backward each.

        Returns a function in the place of the compiled one, whose outputs have the right shapes.
        """
        outputs = [
            node.meta["val"] if isinstance(node, torch.fx.Node) else node
            for node in graph.graph.output_node().args[0]
        ]
        inputs = move(graph, inputs)
        view_to_reshape(graph)
        mode = fake_tensor_prop(graph, inputs)
        _recursive_record_original_output_strides(graph)
        with V.set_fake_mode(mode):
            _recursive_post_grad_passes(graph, is_inference=False)
            lowering = GraphLowering(graph, example_inputs=inputs, is_backward=is_backward)
        with (
            V.set_fake_mode(mode),
            V.set_graph_handler(lowering),
            V.set_extern_kernel_nodes([]),
            V.set_debug_handler(DebugContext()),
        ):
            lowering.run(*inputs)
            lowering.init_wrapper_code()
            lowering._update_scheduler()
            nodes = [node for node in lowering.scheduler.nodes if launches(node)]
            self.kernels += [self.kernel(node) for node in nodes]
            self.peak_gigabytes = max(self.peak_gigabytes, peak_bytes(lowering) / 1e9)

        def run(_):
            return outputs

        run._boxed_call = True  # it gets its arguments in one list
        return run

    def kernel(self, node) -> Kernel:
        """What a node of the scheduler launches."""
        names, shapes = operations(node), buffer_shapes(node)
        gigabytes = bytes_moved(node) / 1e9
        if not isinstance(node, ExternKernelSchedulerNode):
            logits = any(len(shape) > 1 and shape[-1] in self.widths for shape in shapes)
            return Kernel("loss" if logits else "elementwise", gigabytes)
        if any("scaled_dot_product" in name for name in names):
            # causal: half of the pairs; two products forward, five backward
            backward = any("backward" in name for name in names)
            return Kernel("attention", gigabytes, self.pairs * (5 if backward else 2))
        flops = float(node.estimate_flops() or 0)
        if not flops:
            return Kernel("elementwise", gigabytes)
        of_head = any(self.widths & set(shape) for shape in shapes)
        part = "products of the head" if of_head else "products of the blocks"
        if any("scaled_mm" in name for name in names):
            return Kernel(part, gigabytes, flops8=flops)
        return Kernel(part, gigabytes, flops)


def move(graph, inputs):
    """A graph that was traced on the CPU, and its inputs, on the fake GPU.

    PyTorch's CPU build differentiates nothing on another device.
    """

    def moved(value):
        if not isinstance(value, FakeTensor):
            return value
        with value.fake_mode:
            last = sum((n - 1) * step for n, step in zip(value.shape, value.stride(), strict=True))
            whole = torch.empty(value.storage_offset() + last + 1, dtype=value.dtype, device="cuda")
            return whole.as_strided(value.shape, value.stride(), value.storage_offset())

    for node in graph.graph.nodes:
        if "val" in node.meta:
            node.meta["val"] = tree_map(moved, node.meta["val"])
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 0)}
        node.meta.pop("tensor_meta", None)
    graph.recompile()
    return [moved(value) for value in inputs]


def bytes_moved(node) -> int:
    """Bytes that a launch reads and writes: of each tensor, the elements that it touches.

    What stays within the launch counts for nothing, and what it computes from is read once.
    """
    writes = {dependency.name for dependency in node.read_writes.writes}
    total = 0
    for name, whole in node.get_read_write_buffer_accesses(True, True).items():
        of = node.read_writes.writes if name in writes else node.read_writes.reads
        touched = [dependency for dependency in of if dependency.name == name]
        if touched and all(isinstance(dependency, MemoryDep) for dependency in touched):
            whole = min(whole, elements(touched) * V.graph.get_dtype(name).itemsize)
        total += whole
    return total


def elements(touched: list[MemoryDep]) -> int:
    """How many elements of one tensor these indices touch, each counted once.

    An index that is looked up, as a target's logit, touches one for each of its loop's turns.
    """
    turns = sum(int(sympy_product(dependency.size)) for dependency in touched)
    known = all(set(d.index.free_symbols) <= set(d.var_names) for d in touched)
    if len(touched) == 1 or not known:
        return turns
    seen = numpy.zeros(int(V.graph.get_numel(touched[0].name)), dtype=bool)
    for dependency in touched:
        index = sympy.lambdify(dependency.var_names, dependency.index, "numpy", PythonPrinter)
        loops = numpy.ogrid[tuple(slice(int(n)) for n in dependency.size)]
        at = numpy.atleast_1d(index(*loops))
        seen[at[(at >= 0) & (at < len(seen))]] = True  # beyond it, a condition keeps from reading
    return int(seen.sum())


def launches(node) -> bool:
    """Whether a node of the scheduler is a launch: not what only names a result of another."""
    if isinstance(node, NopKernelSchedulerNode):
        return False
    return not (isinstance(node, ExternKernelSchedulerNode) and isinstance(node.node, MultiOutput))


def operations(node) -> set[str]:
    """The names of the operations that came together in a node, without their overload."""
    names = set()
    for part in node.get_nodes():
        for origin in part.node.get_origins() if part.node is not None else ():
            target = getattr(origin.target, "__name__", str(origin.target))
            names.add(target.partition(".")[0])
    return names


def buffer_shapes(node) -> list[tuple]:
    """The shapes of what a node reads and writes."""
    shapes = []
    for dependency in node.read_writes.reads | node.read_writes.writes:
        buffer = V.graph.try_get_buffer(dependency.name)
        if buffer is not None and buffer.has_tensor_output():
            shapes.append(tuple(int(size) for size in buffer.get_size()))
    return shapes


def peak_bytes(lowering) -> int:
    """Bytes of tensors at most while a graph runs; its inputs count until their last use."""
    scheduler = lowering.scheduler
    peak, _ = memory.prepare_planning_info(
        scheduler.nodes,
        scheduler.name_to_buf,
        scheduler.name_to_fused_node,
        OrderedSet(lowering.graph_inputs.keys()),
        OrderedSet(lowering.get_output_names()),
    )
    return peak
