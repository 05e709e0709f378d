"""Kernels and bytes of a training step on a GPU that is not there, and what time they would take.

    python -m benchmarks.lowering [--preset FILE ...] [--gpu H200 ...] [--name NAME] [--key=value]

PyTorch's compiler traces the model as training does, fuses, and lists the kernels of forward and
backward with the bytes that each reads and writes; nothing runs. Models of two and of four layers
are lowered, and the whole one is on the line through both. The optimiser's pass is counted from the
number of weights.

`expected_ms` is, for each kernel, the longer of its bytes at 79% of the GPU's bandwidth and its
operations at 66% of its speed, as good kernels of this size reach. It is not measured, and has no
launches in it. Results go to results/lowering_NAME.json; further arguments are settings.

It takes triton (691 MB, so it is in no requirements file: `pip install triton==3.7.1` for torch
2.13) and g++; where one of them is missing it says so and does nothing.
"""

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, fields

import torch

import config as settings
import hardware
import model as model_file
from benchmarks import argument_parser, fake_device, measure_apart, print_table, write
from benchmarks.fake_device import GPU, GPUS
from benchmarks.scheduled import Kernel, Lowering
from config import Config
from hardware import Device
from model import GPT, GPTConfig
from training.adapt import adapt

PRESETS = [
    "config/gpt2_small.py",
    "config/gpt2_small_fast.py",
    "config/gpt2_small_modern.py",
]
VOCABULARY = 32000
LAYERS = (2, 4)  # those lowered
BANDWIDTH, SPEED = 0.79, 0.66  # of the data sheet: 3.8 TB/s and 650 TFLOP/s on an H200
ELEMENTWISE = "all but products, attention and optimizer"


@dataclass
class Part:
    """Launches of one kind in a step, their bytes, operations and milliseconds."""

    kernels: float = 0.0
    gigabytes: float = 0.0
    teraflops: float = 0.0
    expected_ms: float = 0.0

    def add(self, kernel: Kernel, gpu: GPU) -> None:
        """Count a launch."""
        speed = SPEED / 2 if kernel.part == "attention" else SPEED  # small products and a softmax
        products = (kernel.flops + kernel.flops8 / 2) / (gpu.tflops * 1e12 * speed)
        memory = kernel.gigabytes * 1e9 / (gpu.bandwidth * BANDWIDTH)
        self.kernels += 1
        self.gigabytes += kernel.gigabytes
        self.teraflops += (kernel.flops + kernel.flops8) / 1e12
        self.expected_ms += 1e3 * max(products, memory)


def total(parts: list[Part]) -> Part:
    """All of them together."""
    names = [field.name for field in fields(Part)]
    return Part(*(sum(getattr(part, name) for part in parts) for name in names))


def lower(config: Config, layers: int, gpu: GPU) -> Lowering:
    """The launches of a forward and backward of the micro-batch that the settings have."""
    dtype = torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16
    sequences = config.micro_batch_size or config.batch_size
    heads = config.n_head * (config.head_dim or config.n_embd // config.n_head)
    lowering = Lowering(config.vocab_size, sequences * config.block_size**2 * heads)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(shape(config, n_layer=layers))
        chunk = torch.zeros(sequences, config.block_size + 1, dtype=torch.int64)
        device = torch.device("cuda", 0)
        memory = hardware.gpu_memory(device)
        adapt(model, config, Device(device, dtype, gpu.name, memory, 1e12 * gpu.tflops))
        compiled = torch.compile(model, backend=lowering, dynamic=False, fullgraph=True)
        with torch.autocast("cpu", dtype):
            loss = compiled(chunk[:, :-1], chunk[:, 1:])
        loss.backward()
    torch._dynamo.reset()
    return lowering


def shape(config: Config, **other) -> GPTConfig:
    """The model's shape, but for what is given."""
    return GPTConfig(**{f.name: getattr(config, f.name) for f in fields(GPTConfig)} | other)


def flash_attention(q, k, v, dropout):
    """What scaled_dot_product_attention chooses on a GPU: here it cannot ask one."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(q, k, v, dropout, True)[0]


def stream_dtype(x):
    """What ops.stream_dtype chooses on a GPU: here it is asked for a CPU."""
    return torch.bfloat16 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else x.dtype


def optimizer_part(config: Config, gpu: GPU) -> Part:
    """The norm for clipping and AdamW: each weight's numbers read and written once, in one pass.

    Muon's products are of the matrices of the blocks, and its passes over them are twice AdamW's.
    """
    with torch.device("meta"):
        model = GPT(shape(config))
    part = Part()
    for name, p in model.named_parameters():
        kernel = Kernel("optimizer", 32 * p.numel() / 1e9)
        if config.optimizer == "muon" and name.startswith("h.") and p.dim() == 2:
            short, long = sorted(p.shape)
            flops = 5 * (4 * short * short * long + 2 * short**3)
            kernel = Kernel("optimizer", 64 * p.numel() / 1e9, flops)
        part.add(kernel, gpu)
    part.kernels = 0  # a few dozen, which are not lowered
    return part


def parts_of(lowering: Lowering, gpu: GPU) -> dict[str, Part]:
    """The launches, by part."""
    parts = defaultdict(Part)
    for kernel in lowering.kernels:
        parts[kernel.part].add(kernel, gpu)
    return parts


def extrapolate(few: float, more: float, layers: int) -> float:
    """The value of a model of `layers`, on the line through those of LAYERS."""
    return few + (more - few) / (LAYERS[1] - LAYERS[0]) * (layers - LAYERS[0])


def measure(arguments: list[str], gpu: GPU) -> dict:
    """The step of one preset on one GPU, in this process: by part, in all, and its peak memory."""
    config = settings.load(arguments)
    config.vocab_size = VOCABULARY
    fake_device.install(gpu)
    model_file.causal_attention = flash_attention
    model_file.stream_dtype = stream_dtype
    lowerings = [lower(config, layers, gpu) for layers in LAYERS]
    few, more = (parts_of(lowering, gpu) for lowering in lowerings)
    parts = {}
    for name in sorted({*few, *more}):
        pairs = zip(asdict(few[name]).values(), asdict(more[name]).values(), strict=True)
        parts[name] = Part(*(extrapolate(*pair, config.n_layer) for pair in pairs))
    elementwise = total([parts["loss"], parts["elementwise"]])
    parts["optimizer"] = optimizer_part(config, gpu)
    rows = parts | {ELEMENTWISE: elementwise, "step": total(list(parts.values()))}
    found = {}
    for name, part in rows.items():
        found[name] = {key: round(value, 2) for key, value in asdict(part).items()}
    peaks = [lowering.peak_gigabytes for lowering in lowerings]
    return found | {"peak_gigabytes": round(extrapolate(*peaks, config.n_layer), 2)}


def show(title: str, found: dict) -> None:
    print(f"\n{title}")
    rows = []
    for name, part in found.items():
        if isinstance(part, dict):
            rows.append([name, *(f"{value:,.1f}" for value in part.values())])
    print_table(["", "kernels", "GB", "TFLOP", "expected ms"], rows)
    print(f"at the peak, without weights and moments: {found['peak_gigabytes']:.1f} GB")


def main(argv):
    parser = argument_parser("lowering", __doc__)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=["H200", "T4"])
    parser.add_argument("--name")
    parser.add_argument("--apart", action="store_true")  # one preset, in this process
    args, extra = parser.parse_known_args(argv)
    missing = fake_device.missing()
    if missing:
        print(f"nothing is lowered: {missing}")
        return
    if args.apart:
        print(json.dumps(measure([*args.preset, *extra], GPUS[args.gpu[0]])))
        return
    result = {"torch": torch.__version__, "settings": extra}
    for preset in args.preset:
        result[preset] = {}
        for gpu in args.gpu:
            found = measure_apart("lowering", "--preset", preset, "--gpu", gpu, "--apart", *extra)
            result[preset][gpu] = found
            show(f"{preset}, {gpu}", found)
    write(f"lowering_{args.name or 'step'}", result)


if __name__ == "__main__":
    main(sys.argv[1:])
