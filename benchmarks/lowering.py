"""Kernels and bytes of a training step on a GPU that is not there, and what time they would take.

    python -m benchmarks.lowering [--preset FILE ...] [--gpu H200 ...] [--name NAME] [--key=value]

PyTorch's compiler traces the model as training does, fuses, and lists the kernels of forward and
backward with the bytes that each reads and writes; nothing runs. Models of two and of four layers
are lowered, and the whole one is on the line through both. The optimiser's pass is counted from the
number of weights.

`expected_ms` is, for each kernel, a microsecond for its launch and the longer of its bytes at 79%
of the GPU's bandwidth and its operations at 66% of its speed, as good kernels of this size reach;
for attention at the share that published charts show. It is not measured. Results go to
results/lowering_NAME.json; further arguments are settings.

It takes triton (691 MB, so it is in no requirements file: `pip install triton==3.7.1` for torch
2.13) and g++; where one of them is missing it says so and does nothing.
"""

from collections import defaultdict
from dataclasses import replace
from unittest import mock

import numpy as np
import sympy
import torch
from torch._inductor import config as inductor
from torch._inductor import memory
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.dependencies import MemoryDep
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode, Scheduler
from torch._inductor.utils import sympy_product
from torch._inductor.virtualized import V
from torch.utils._ordered_set import OrderedSet
from torch.utils._sympy.printers import PythonPrinter

import config as settings
import model as model_file
from benchmarks import argument_parser, fake_device, run_apart, run_main, write
from benchmarks.fake_device import CHIPS
from config import Config
from model import GPT, GPTConfig, num_fused
from tools.command import table
from training.low_memory import apply_memory_options
from training.plan import from_data_sheet
from training.start import model_shape

PRESETS = [
    "config/gpt2_small.py",
    "config/gpt2_small_modern.py",
]
VOCABULARY = 32000
LAYERS = (2, 4)  # those lowered
BANDWIDTH, SPEED = 0.79, 0.66  # of the data sheet: 3.8 TB/s and 650 TFLOP/s on an H200
LAUNCH = 1e-6  # seconds between two kernels
# Attention's share of the data sheet, forward and backward, causal, 512 tokens: about 210 and 160
# TFLOP/s on an H200 (Shah et al., 2024, "FlashAttention-3"); with heads of 128 a tenth more.
ATTENTION = (0.21, 0.16)
# Bytes a weight of an optimiser's passes, with the norm for clipping: as fused AdamW has them with
# grad_scale, and as they are counted in training/muon.py without weight decay.
ADAMW, MUON = 36, 62
COLUMNS = ("kernels", "gigabytes", "teraflops", "expected_ms")
ELEMENTWISE = "all but products, attention and optimizer"


def launch(gpu: str, size: float, flops: float = 0.0, speed: float = SPEED) -> np.ndarray:
    """A launch as COLUMNS. size: bytes read and written. speed: of products, a share of the peak.

    gpu: of CHIPS.
    """
    computing = flops / (from_data_sheet(gpu).peak_flops * speed)
    moving = size / (CHIPS[gpu].bandwidth * BANDWIDTH)
    return np.array([1, size / 1e9, flops / 1e12, 1e3 * (LAUNCH + max(computing, moving))])


class Lowering:
    """A backend for torch.compile: lowers forward and backward, counts launches, runs nothing.

    parts: {part of the step: its launches, as COLUMNS}. peak: bytes of tensors at most, but for the
    weights.
    """

    def __init__(self, config: Config, gpu: str):
        self.gpu, self.peak = gpu, 0
        self.parts = defaultdict(lambda: np.zeros(len(COLUMNS)))
        self.vocabulary = {VOCABULARY}
        sequences = config.micro_batch_size or config.batch_size
        self.head_dim = model_shape(config, VOCABULARY).head_dim
        # attention's operations: multiples
        self.pairs = sequences * config.block_size**2 * config.n_head * self.head_dim

    def __call__(self, graph, inputs):
        return compile_fx(graph, inputs, inner_compile=self.lower)

    def lower(self, graph, inputs, **options):
        """In the place of Inductor's compile_fx_inner, for forward and backward each.

        Returns a function in the place of the compiled one, whose outputs have the right shapes.
        """
        outputs = [
            node.meta["val"] if isinstance(node, torch.fx.Node) else node
            for node in graph.graph.output_node().args[0]
        ]
        with (  # counts where Inductor would write its code
            mock.patch.object(Scheduler, "codegen", lambda scheduler: self.count(scheduler)),
            inductor.patch(force_disable_caches=True, graph_partition=False),
        ):
            compile_fx_inner(graph, fake_device.move(graph, inputs), **options)

        def run(_):
            return outputs

        run._boxed_call = True  # it gets its arguments in one list
        return run

    def count(self, scheduler: Scheduler) -> None:
        """Add the launches of a graph, which V.graph is."""
        for node in scheduler.nodes:
            extern = isinstance(node, ExternKernelSchedulerNode)
            if isinstance(node, NopKernelSchedulerNode):
                continue
            if extern and isinstance(node.node, MultiOutput):
                continue  # it names a result of another
            part, flops, speed = self.called(node) if extern else self.fused(node)
            self.parts[part] += launch(self.gpu, bytes_moved(node), flops, speed)
        peak, _ = memory.prepare_planning_info(
            scheduler.nodes,
            scheduler.name_to_buf,
            scheduler.name_to_fused_node,
            OrderedSet(V.graph.graph_inputs.keys()),
            OrderedSet(V.graph.get_output_names()),
        )
        self.peak = max(self.peak, peak)

    def fused(self, node) -> tuple[str, float, float]:
        """Part, operations and speed of a kernel that Inductor writes."""
        logits = any(len(s) > 1 and s[-1] in self.vocabulary for s in buffer_shapes(node))
        return "loss" if logits else "elementwise", 0.0, SPEED

    def called(self, node) -> tuple[str, float, float]:
        """The same of a kernel that is called."""
        names = str([origin.target for origin in node.node.get_origins()])
        if "scaled_dot_product" in names:
            # causal: half of the pairs; two products forward, five backward
            backward = "backward" in names
            speed = ATTENTION[backward] * (1.1 if self.head_dim >= 128 else 1)
            return "attention", self.pairs * (5 if backward else 2), speed
        flops = float(node.estimate_flops() or 0)
        if not flops:
            return "elementwise", 0.0, SPEED
        of_head = any(self.vocabulary & set(shape) for shape in buffer_shapes(node))
        part = "products of the head" if of_head else "products of the blocks"
        return part, flops, SPEED


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
    seen = np.zeros(int(V.graph.get_numel(touched[0].name)), dtype=bool)
    for dependency in touched:
        index = sympy.lambdify(dependency.var_names, dependency.index, "numpy", PythonPrinter)
        loops = np.ogrid[tuple(slice(int(n)) for n in dependency.size)]
        at = np.atleast_1d(index(*loops))
        seen[at[(at >= 0) & (at < len(seen))]] = True  # beyond it, a condition keeps from reading
    return int(seen.sum())


def buffer_shapes(node) -> list[tuple]:
    """The shapes of what a node reads and writes."""
    shapes = []
    for dependency in node.read_writes.reads | node.read_writes.writes:
        buffer = V.graph.try_get_buffer(dependency.name)
        if buffer is not None and buffer.has_tensor_output():
            shapes.append(tuple(int(size) for size in buffer.get_size()))
    return shapes


# -- the step --------------------------------------------------------------------------------------


def lower(config: Config, layers: int, gpu: str) -> Lowering:
    """The launches of a forward and backward of the micro-batch that the settings have."""
    device = from_data_sheet(gpu)
    sequences = config.micro_batch_size or config.batch_size
    lowering = Lowering(config, gpu)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(shape(config, n_layer=layers))
        chunk = torch.zeros(sequences, config.block_size + 1, dtype=torch.int64)
        apply_memory_options(model, config, device)
        compiled = torch.compile(model, backend=lowering, dynamic=False, fullgraph=True)
        with torch.autocast("cpu", device.dtype):
            loss = compiled(chunk[:, :-1], chunk[:, 1:])
        loss.backward()
    torch._dynamo.reset()
    return lowering


def shape(config: Config, **other) -> GPTConfig:
    """The model's shape, but for what is given."""
    return replace(model_shape(config, VOCABULARY), **other)


def flash_attention(q, k, v, dropout):
    """What scaled_dot_product_attention chooses on a GPU: here it cannot ask one."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(q, k, v, dropout, True)[0]


def stream_dtype(x):
    """What ops.stream_dtype chooses on a GPU: here it is asked for a CPU."""
    return torch.bfloat16 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else x.dtype


def optimizer_part(config: Config, gpu: str) -> np.ndarray:
    """The norm for clipping and AdamW, or Muon's passes and products for the blocks' matrices."""
    with torch.device("meta"):
        model = GPT(shape(config))
    passes = moved = flops = 0
    for name, p in model.named_parameters():
        if config.optimizer == "muon" and name.startswith("h.") and p.dim() == 2:
            fused = num_fused(name, model.config)
            short, long = sorted((p.size(0) // fused, p.size(1)))
            passes += MUON * p.numel()
            moved += 5 * (8 + 12 * short / long) * p.numel()
            flops += 5 * (4 * short * short * long + 2 * short**3) * fused
        else:
            passes += ADAMW * p.numel()
    part = launch(gpu, passes) + launch(gpu, moved, flops)
    part[0] = 0  # a few dozen launches, which are not lowered
    return part


def measure(arguments: list[str], gpu: str) -> dict:
    """The step of one preset on one GPU, in this process: by part, in all, and its peak memory."""
    config = settings.load(arguments)
    fake_device.install(gpu)
    model_file.causal_attention = flash_attention
    model_file.stream_dtype = stream_dtype
    few, more = (lower(config, layers, gpu) for layers in LAYERS)

    def whole(of_few, of_more):
        """The value of the whole model, on the line through those of LAYERS."""
        return of_few + (of_more - of_few) / (LAYERS[1] - LAYERS[0]) * (config.n_layer - LAYERS[0])

    names = sorted({*few.parts, *more.parts})
    parts = {name: whole(few.parts[name], more.parts[name]) for name in names}
    elementwise = parts["loss"] + parts["elementwise"]
    parts["optimizer"] = optimizer_part(config, gpu)
    rows = parts | {ELEMENTWISE: elementwise, "step": sum(parts.values())}
    found = {}
    for name, part in rows.items():
        found[name] = dict(zip(COLUMNS, part.round(2).tolist(), strict=True))
    return found | {"peak_gigabytes": round(whole(few.peak, more.peak) / 1e9, 2)}


def show(title: str, found: dict) -> None:
    print(f"\n{title}")
    rows = []
    for name, part in found.items():
        if isinstance(part, dict):
            rows.append([name, *(f"{value:,.1f}" for value in part.values())])
    print(table(["", "kernels", "GB", "TFLOP", "expected ms"], rows))
    print(f"at the peak, without weights and moments: {found['peak_gigabytes']:.1f} GB")


def main(argv):
    parser = argument_parser("lowering", __doc__)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--gpu", nargs="+", choices=CHIPS, default=["H200", "T4"])
    parser.add_argument("--name")
    args, extra = parser.parse_known_args(argv)
    missing = fake_device.missing()
    if missing:
        print(f"nothing is lowered: {missing}")
        return
    result = {"torch": torch.__version__, "settings": extra}
    for preset in args.preset:
        result[preset] = {}
        for gpu in args.gpu:
            result[preset][gpu] = run_apart(measure, [preset, *extra], gpu)
            show(f"{preset}, {gpu}", result[preset][gpu])
    write(f"lowering_{args.name or 'step'}", result)


if __name__ == "__main__":
    run_main("lowering", main)
