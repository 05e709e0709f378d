"""Kernels, bytes and memory of a training step on a GPU that this machine does not have.

    python -m benchmarks.lowering [--preset FILE ...] [--gpu H200 ...] [--name NAME] [--key=value]

PyTorch's compiler traces the model as training does and writes the kernels of forward and backward;
nothing runs. Launches are counted with the bytes that they read and write. Then Triton and ptxas
compile every configuration of every kernel for that GPU: `faults` lists kernels that spill over 64
bytes of registers, need more shared memory than the GPU has, or move over 100 MB and mostly store
less than 4 bytes at a time. Results go to results/lowering_NAME_cpu.json; further arguments are
settings.

It takes triton (691 MB, so it is in no requirements file: `pip install triton==3.7.1` for torch
2.13) and g++. Where something is missing it says so and does nothing.
"""

import json
import re
import subprocess
import tempfile
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch

import config as settings
import model as model_file
from benchmarks import argument_parser, fake_device, run_apart, run_main, write
from benchmarks.fake_device import CHIPS
from config import Config
from model import GPT
from training.low_memory import apply_memory_options
from training.plan import from_data_sheet
from training.start import model_shape

MISSING = fake_device.missing()
try:  # private names of the compiler, which another PyTorch may lack
    from torch._inductor import config as inductor
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
except ImportError as error:
    MISSING = MISSING or f"the compiler of PyTorch {torch.__version__} is another: {error}"

PRESETS = ["config/gpt2_small.py", "config/gpt2_small_modern.py"]
VOCABULARY = 32000
SPILLED = 64  # bytes of registers that a thread may keep in memory
KERNEL = re.compile(r"(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str", re.DOTALL)


class Lowering:
    """A backend for torch.compile: counts what forward and backward launch, and runs nothing.

    launches, bytes: {part of the step: number}. kernels: name and source of those that the compiler
    wrote. peak: bytes of tensors at most, but for the weights.
    """

    def __init__(self):
        self.launches, self.bytes = Counter(), Counter()
        self.kernels, self.peak = set(), 0

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

        def read(lowered, code):  # where Inductor would load what it wrote
            self.count(lowered)
            self.kernels |= set(KERNEL.findall(code.value))
            self.peak = max(self.peak, peak_bytes(lowered, code.value))
            return SimpleNamespace(call=None, __file__="", key="")

        # profile_bandwidth: each kernel says how much it moves
        with (
            mock.patch.object(GraphLowering, "_compile_to_module_lines", read),
            inductor.patch(
                force_disable_caches=True, graph_partition=False, profile_bandwidth=True
            ),
        ):
            compile_fx_inner(graph, fake_device.move(graph, inputs), **options)

        def run(_):
            return outputs

        run._boxed_call = True  # it gets its arguments in one list
        return run

    def count(self, lowered) -> None:
        """Add the launches of a graph."""
        for node in lowered.scheduler.nodes:
            part, extern = "elementwise", isinstance(node, ExternKernelSchedulerNode)
            names_a_result = extern and isinstance(node.node, MultiOutput)
            if names_a_result or isinstance(node, NopKernelSchedulerNode):
                continue
            if extern and "scaled_dot_product" in str([o.target for o in node.node.get_origins()]):
                part = "attention"
            elif extern and node.estimate_flops():
                part = "products"
            self.launches[part] += 1
            self.bytes[part] += node.get_read_write_buffers_sizes()


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


def compile_kernels(kernels: set[tuple[str, str]], gpu: str) -> tuple[int, list[str]]:
    """Compile every configuration of each kernel. Returns how many there are, and their faults.

    kernels: names and sources. One that does not compile raises Triton's error.
    """
    import triton

    binaries, compile_one = [], triton.compile

    def keep(*args, **options):
        binaries.append(compile_one(*args, **options))
        return binaries[-1]

    count, faults = 0, []
    for name, source in sorted(kernels):
        kernel = getattr(PyCodeCache.load(source), name)
        binaries.clear()  # of the kernel before
        with mock.patch.object(triton, "compile", keep):
            for configuration in kernel.configs:
                kernel._precompile_config(configuration)
        count += len(binaries)
        moved = 1e9 * kernel.inductor_meta["kernel_num_gb"]
        faults += [f"{name}: {fault}" for fault in faults_of(binaries, moved, gpu)]
    return count, faults


def faults_of(binaries: list, moved: float, gpu: str) -> list[str]:
    """Faults of a kernel. binaries: one of each configuration. moved: bytes read and written.

    The tuner takes the fastest configuration, so a fault is one that all of them have.
    """
    spilled, narrow = [], []
    for binary in binaries:
        text = disassemble(binary.asm["cubin"])
        spilled.append(max(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", text))))
        stores = re.findall(r"\bSTG\.E\S*", text)
        narrow.append(sum(bool(re.search(r"\.[US](8|16)", s)) for s in stores) > len(stores) / 2)
    shared = min(binary.metadata.shared for binary in binaries)
    faults = {
        f"spills {min(spilled)} bytes": min(spilled) > SPILLED,
        f"needs {shared:,} bytes of shared memory": shared > CHIPS[gpu].shared_memory,
        "mostly stores less than 4 bytes at a time": moved > 1e8 and all(narrow),
    }
    return [fault for fault, found in faults.items() if found]


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
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(model_shape(config, VOCABULARY))
        rows = config.micro_batch_size or config.batch_size
        chunk = torch.zeros(rows, config.block_size + 1, dtype=torch.int64)
        apply_memory_options(model, config, device)
        compiled = torch.compile(model, backend=lowering, dynamic=False, fullgraph=True)
        with torch.autocast("cpu", device.dtype):
            loss = compiled(chunk[:, :-1], chunk[:, 1:])
        loss.backward()
    return lowering


def flash_attention(q, k, v, dropout):
    """What scaled_dot_product_attention chooses on a GPU: here it cannot ask one."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(q, k, v, dropout, True)[0]


def stream_dtype(x):
    """What ops.stream_dtype chooses on a GPU: here it is asked for a CPU."""
    return torch.bfloat16 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else x.dtype


def measure(arguments: list[str], gpu: str) -> dict:
    """The step of one preset on one GPU, in this process: by part, its peak memory, its kernels."""
    config = settings.load(arguments)
    fake_device.install(gpu)
    model_file.causal_attention = flash_attention
    model_file.stream_dtype = stream_dtype
    lowering = lower(config, gpu)
    found = {}
    for part, launches in sorted(lowering.launches.items()):
        found[part] = {"kernels": launches, "gigabytes": round(lowering.bytes[part] / 1e9, 2)}
    count, faults = compile_kernels(lowering.kernels, gpu)
    peak = round(lowering.peak / 1e9, 2)
    return found | {"peak_gigabytes": peak, "compiled": count, "faults": faults}


def main(argv):
    parser = argument_parser("lowering", __doc__)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--gpu", nargs="+", choices=CHIPS, default=list(CHIPS))
    parser.add_argument("--name")
    args, extra = parser.parse_known_args(argv)
    if MISSING:
        print(f"nothing is lowered: {MISSING}")
        return
    result = {"settings": extra}
    for preset in args.preset:
        result[preset] = {}
        for gpu in args.gpu:
            result[preset][gpu] = run_apart(measure, [preset, *extra], gpu)
            print(f"{preset}, {gpu}:", json.dumps(result[preset][gpu], indent=1))
    write(f"lowering_{args.name or 'step'}", result, torch.device("cpu"))


if __name__ == "__main__":
    run_main("lowering", main)
