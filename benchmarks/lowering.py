"""Kernels, bytes and memory of a training step on a GPU that this machine does not have.

    python -m benchmarks.lowering [--preset FILE ...] [--gpu H200 ...] [--key=value ...]

PyTorch's compiler traces the model as training does and writes the kernels of forward and backward;
nothing runs. Launches are counted with the bytes that they read and write. Then Triton and ptxas
compile every configuration of every kernel for that GPU: `faults` lists kernels that spill over 64
bytes of registers, need more shared memory than a T4 has, or move over 100 MB and mostly store less
than 4 bytes at a time. Results go to results/lowering_step_cpu.json; further arguments are
settings.

It takes g++ and triton (691 MB, so it is in no requirements file: `pip install triton==3.7.1` for
torch 2.13). Where triton is missing it says so and does nothing.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from functools import partial
from types import SimpleNamespace

import torch
from torch._inductor import config as inductor
from torch._inductor.codecache import PyCodeCache
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.graph import GraphLowering
from torch._inductor.ir import MultiOutput
from torch._inductor.scheduler import NopKernelSchedulerNode

import config as settings
import model as model_file
from benchmarks import argument_parser, fake_device, run_apart, run_main, write
from benchmarks.fake_device import CHIPS
from config import Config
from model import GPT
from training.low_memory import apply_memory_options
from training.plan import from_data_sheet
from training.start import model_shape

PRESETS = ["config/gpt2_small.py", "config/gpt2_small_modern.py"]
VOCABULARY = 32000
SPILLED = 64  # bytes of registers that a thread may keep in memory
SHARED = 1 << 16  # bytes of shared memory that a block may take on a T4, the least of all
KERNEL = re.compile(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", re.DOTALL)


class Lowering:
    """What the compiler makes of forward and backward; it takes the place of compile_fx_inner.

    launches, bytes: {part of the step: number}. kernels: name and source of those that the compiler
    wrote. peak: bytes of tensors at most, but for the weights.
    """

    def __init__(self):
        self.launches, self.bytes = Counter(), Counter()
        self.kernels, self.peak = set(), 0

    def __call__(self, graph, inputs, **options):
        """Lower forward or backward. Returns a function whose outputs have the right shapes."""
        outputs = [
            node.meta["val"] if isinstance(node, torch.fx.Node) else node
            for node in graph.graph.output_node().args[0]
        ]
        compile_fx_inner(graph, fake_device.move(graph, inputs), **options)
        run = fake_device.always(outputs)
        run._boxed_call = True  # it gets its arguments in one list
        return run

    def read(self, lowered, code):
        """Add a graph's figures. It takes the place of loading what Inductor has written."""
        self.kernels |= set(KERNEL.findall(code.value))
        self.peak = max(self.peak, peak_bytes(lowered, code.value))
        for node in lowered.scheduler.nodes:
            if isinstance(node, NopKernelSchedulerNode) or isinstance(node.node, MultiOutput):
                continue  # it only names memory or a result
            part = "elementwise"
            if node.is_extern() and "scaled_dot_product" in str(node.node.get_origins()):
                part = "attention"
            elif node.is_extern() and node.estimate_flops():
                part = "products"
            self.launches[part] += 1
            self.bytes[part] += node.get_read_write_buffers_sizes()
        return SimpleNamespace(call=None, __file__="", key="")


def peak_bytes(lowered, code: str) -> int:
    """Bytes of the tensors that are there at once, at most, by the allocations in generated code.

    A tensor that takes the memory of another costs nothing. Weights do not count.
    """

    def size(name):
        if lowered.try_get_buffer(name) is None:  # scratch memory of a kernel, some megabytes
            return 0
        return int(lowered.get_numel(name)) * lowered.get_dtype(name).itemsize

    live = {name: size(name) for name in lowered.graph_inputs if not name.startswith("primals")}
    most = 0
    for line in code[code.rindex("\ndef call(") :].splitlines():
        if reused := re.search(r"(\w+) = .*; del (\w+)  # reuse", line):
            live[reused[1]] = live.pop(reused[2], 0)
        elif made := re.search(r"(\w+) = (?:empty_strided_cuda\(|buf\d+\[)", line):
            live[made[1]] = size(made[1])
        elif gone := re.search(r"\bdel (\w+)", line):
            live.pop(gone[1], None)
        most = max(most, sum(live.values()))
    return most


# -- the kernels -----------------------------------------------------------------------------------


def compile_kernels(kernels: set[tuple[str, str]]) -> tuple[int, list[str]]:
    """Compile every configuration of each kernel. Returns how many there are, and their faults.

    kernels: names and sources. One that does not compile raises Triton's error. The tuner takes the
    fastest configuration, so a fault is one that all configurations of a kernel have.
    """
    count, faults = 0, []
    for name, source in sorted(kernels):
        kernel = getattr(PyCodeCache.load(source), name)
        spilled, shared, narrow = [], [], []
        for configuration in kernel.configs:
            binary = kernel._precompile_config(configuration).kernel
            shared.append(binary.metadata.shared)
            text = disassemble(binary.asm["cubin"])
            spilled.append(max(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", text))))
            stores = re.findall(r"\bSTG\.E\S*", text)
            small = [store for store in stores if re.search(r"\.[US](8|16)", store)]
            narrow.append(len(small) > len(stores) / 2)
        if min(spilled) > SPILLED:
            faults.append(f"{name}: spills {min(spilled)} bytes")
        if min(shared) > SHARED:
            faults.append(f"{name}: needs {min(shared):,} bytes of shared memory")
        if all(narrow) and kernel.inductor_meta["kernel_num_gb"] > 0.1:
            faults.append(f"{name}: mostly stores less than 4 bytes at a time")
        count += len(spilled)
    return count, faults


def disassemble(cubin: bytes) -> str:
    """The instructions of a compiled kernel, and the registers and memory that it takes."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


# -- the step --------------------------------------------------------------------------------------


def lower(config: Config, gpu: str) -> Lowering:
    """The launches of a forward and backward of the micro-batch that the settings have."""
    device, lowering = from_data_sheet(gpu), Lowering()

    def read(graph, code):
        return lowering.read(graph, code)

    GraphLowering._compile_to_module_lines = read
    model_file.causal_attention = flash_attention
    if device.dtype == torch.bfloat16:  # what model.stream_dtype chooses on a GPU
        model_file.stream_dtype = fake_device.always(torch.bfloat16)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(model_shape(config, VOCABULARY))
        rows = config.micro_batch_size or config.batch_size
        chunk = torch.zeros(rows, config.block_size + 1, dtype=torch.int64)
        apply_memory_options(model, config, device)
        backend = partial(compile_fx, inner_compile=lowering)
        compiled = torch.compile(model, backend=backend, dynamic=False, fullgraph=True)
        with torch.autocast("cpu", device.dtype):
            loss = compiled(chunk[:, :-1], chunk[:, 1:])
        loss.backward()
    return lowering


def flash_attention(q, k, v, dropout):
    """What scaled_dot_product_attention chooses on a GPU: here it cannot ask one."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(q, k, v, dropout, True)[0]


@inductor.patch(
    fx_graph_cache=False,
    graph_partition=False,
    profile_bandwidth=True,  # each kernel says how much it moves
    use_static_triton_launcher=False,
)
def measure(arguments: list[str], gpu: str) -> dict:
    """The step of one preset on one GPU, in this process: by part, its peak memory, its kernels."""
    config = settings.load(arguments)
    fake_device.install(gpu)
    step = lower(config, gpu)
    found = {}
    for part, launches in sorted(step.launches.items()):
        found[part] = {"kernels": launches, "gigabytes": round(step.bytes[part] / 1e9, 2)}
    count, faults = compile_kernels(step.kernels)
    return found | {
        "peak_gigabytes": round(step.peak / 1e9, 2),
        "compiled": count,
        "faults": faults,
    }


def main(argv):
    parser = argument_parser("lowering", __doc__)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--gpu", nargs="+", choices=CHIPS, default=list(CHIPS))
    args, extra = parser.parse_known_args(argv)
    if missing := fake_device.missing():
        print(f"nothing is lowered: {missing}")
        return
    result = {"settings": extra}
    for preset in args.preset:
        result[preset] = {}
        for gpu in args.gpu:
            result[preset][gpu] = run_apart(measure, [preset, *extra], gpu)
            print(f"{preset}, {gpu}:", json.dumps(result[preset][gpu], indent=1))
    write("lowering_step", result, torch.device("cpu"))


if __name__ == "__main__":
    run_main("lowering", main)
