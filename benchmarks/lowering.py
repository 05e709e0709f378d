"""Kernels and bytes of a training step on a GPU that is not there, and what time they would take.

    python -m benchmarks.lowering [--preset FILE ...] [--gpu H200 ...] [--name NAME] [--key=value]

PyTorch's compiler traces the model as training does, fuses, and lists the kernels that it would
launch in forward and backward with the bytes that each reads and writes; nothing runs. Models of
two and of four layers are lowered, and the whole one lies on the line through both. The optimiser's
pass is counted from the number of weights.

Two times follow. `roofline` is what the data sheet allows: for each kernel the longer of its bytes
at full bandwidth and its operations at full speed. `expected` has 79% of the bandwidth and 66% of
the speed, as good kernels of this size reach. Neither is measured, and launches are not in them.
Results go to results/lowering_NAME.json; further arguments are settings.

It takes triton (691 MB, so it is in no requirements file: `pip install triton==3.7.1` for torch
2.13) and g++; where one of them is missing it says so and does nothing.
"""

import json
import sys
from collections import defaultdict
from dataclasses import asdict, dataclass, fields

import torch

import config as settings
import model as model_file
from benchmarks import argument_parser, make_believe_gpu, measure_apart, print_table, write_json
from benchmarks.make_believe_gpu import GPU, GPUS
from benchmarks.scheduled import Kernel, Lowering
from config import Config
from model import GPT, GPTConfig
from training.adapt import adapt

PRESETS = [
    "config/gpt2_small.py",
    "config/gpt2_small_fast.py",
    "config/gpt2_small_modern.py",
]
VOCABULARY = 32000
LAYERS = (2, 4)  # those lowered
BANDWIDTH, SPEED = 0.79, 0.66  # of the data sheet, in `expected`: 3.8 TB/s, 650 TFLOP/s on an H200
ELEMENTWISE = "all but products, attention and optimizer"


@dataclass
class Part:
    """Launches of one kind in a step, their bytes, operations and milliseconds."""

    kernels: float = 0.0
    gigabytes: float = 0.0
    teraflops: float = 0.0
    roofline_ms: float = 0.0
    expected_ms: float = 0.0

    def add(self, kernel: Kernel, gpu: GPU) -> None:
        """Count a launch."""
        self.kernels += 1
        self.gigabytes += kernel.gigabytes
        self.teraflops += (kernel.flops + kernel.flops8) / 1e12
        self.roofline_ms += milliseconds(kernel, gpu, 1.0, 1.0)
        self.expected_ms += milliseconds(kernel, gpu, BANDWIDTH, SPEED)


def milliseconds(kernel: Kernel, gpu: GPU, bandwidth: float, speed: float) -> float:
    """A launch's time, where so much of the data sheet's bandwidth and speed is reached."""
    if kernel.part == "attention" and speed < 1:
        speed /= 2  # its products are small, with a softmax between them
    products = (kernel.flops + kernel.flops8 / 2) / (gpu.tflops * 1e12 * speed)
    return 1e3 * max(products, kernel.gigabytes * 1e9 / (gpu.bandwidth * bandwidth))


def lower(config: Config, layers: int, gpu: GPU) -> Lowering:
    """The launches of a forward and backward of the micro-batch that the settings have."""
    dtype = torch.bfloat16 if gpu.capability >= (8, 0) else torch.float16
    shape = {f.name: getattr(config, f.name) for f in fields(GPTConfig) if f.name != "vocab_size"}
    shape["n_layer"] = layers
    sequences = config.micro_batch_size or config.batch_size
    heads = config.n_head * (config.head_dim or config.n_embd // config.n_head)
    lowering = Lowering(config.vocab_size, sequences * config.block_size**2 * heads)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        model = GPT(GPTConfig(vocab_size=config.vocab_size, **shape))
        chunk = torch.zeros(sequences, config.block_size + 1, dtype=torch.int64)
        adapt(model, config, torch.device("cuda", 0), dtype)
        compiled = torch.compile(model, backend=lowering, dynamic=False, fullgraph=True)
        with torch.autocast("cpu", dtype):
            loss = compiled(chunk[:, :-1], chunk[:, 1:])
        loss.backward()
    torch._dynamo.reset()
    return lowering


def flash_attention(q, k, v, dropout):
    """What scaled_dot_product_attention chooses on a GPU: here it cannot ask one."""
    q, k = q.to(v.dtype), k.to(v.dtype)
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    return attention(q, k, v, dropout, True)[0]


def stream_dtype(x):
    """What model.stream_dtype chooses on a GPU: here it is asked for a CPU."""
    return torch.bfloat16 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else x.dtype


def optimizer_part(config: Config, gpu: GPU) -> Part:
    """The norm for clipping and AdamW: each weight's numbers read and written once, in one pass.

    Muon's products are of the matrices of the blocks, and its passes over them are twice AdamW's.
    """
    with torch.device("meta"):
        shape = {f.name: getattr(config, f.name) for f in fields(GPTConfig)}
        model = GPT(GPTConfig(**shape))
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


def extrapolate(few: Part, more: Part, layers: int) -> Part:
    """The part of a model of `layers`, on the line through those of LAYERS."""
    values = {}
    for name, value in asdict(few).items():
        slope = (getattr(more, name) - value) / (LAYERS[1] - LAYERS[0])
        values[name] = value + slope * (layers - LAYERS[0])
    return Part(**values)


def parts_of(lowering: Lowering, gpu: GPU) -> dict[str, Part]:
    """The launches, by part."""
    parts = defaultdict(Part)
    for kernel in lowering.kernels:
        parts[kernel.part].add(kernel, gpu)
    return parts


def report(config: Config, lowerings: list[Lowering], gpu: GPU) -> dict:
    """The step on one GPU: by part, in all, and the memory at its peak.

    lowerings: of LAYERS.
    """
    few, more = (parts_of(lowering, gpu) for lowering in lowerings)
    parts = {
        name: extrapolate(few[name], more[name], config.n_layer) for name in sorted({*few, *more})
    }
    elementwise = Part()
    for name, part in parts.items():
        if name != "attention" and not name.startswith("products"):
            elementwise = plus(elementwise, part)
    parts["optimizer"] = optimizer_part(config, gpu)
    total = Part()
    for part in parts.values():
        total = plus(total, part)
    first, second = (lowering.peak_gigabytes for lowering in lowerings)
    slope = (second - first) / (LAYERS[1] - LAYERS[0])
    return {
        "gpu": gpu.name,
        "parts": {name: rounded(part) for name, part in parts.items()},
        ELEMENTWISE: rounded(elementwise),
        "step": rounded(total),
        "peak_gigabytes": round(first + slope * (config.n_layer - LAYERS[0]), 2),
    }


def plus(one: Part, other: Part) -> Part:
    """Both together."""
    return Part(**{name: value + getattr(other, name) for name, value in asdict(one).items()})


def rounded(part: Part) -> dict:
    """A part as JSON has it."""
    return {name: round(value, 2) for name, value in asdict(part).items()}


def measure(arguments: list[str], gpu: GPU) -> dict:
    """The lowering of one preset, in this process: a report for each GPU with the same kernels."""
    config = settings.load(arguments)
    config.vocab_size = VOCABULARY
    make_believe_gpu.make_believe(gpu)
    model_file.causal_attention = flash_attention
    model_file.stream_dtype = stream_dtype
    lowerings = [lower(config, layers, gpu) for layers in LAYERS]

    def kernels_of(gpu):  # bfloat16 from sm_80, 8 bits from sm_89
        return gpu.capability >= (8, 0), config.fp8_head and gpu.capability >= (8, 9)

    alike = {name: g for name, g in GPUS.items() if kernels_of(g) == kernels_of(gpu)}
    return {name: report(config, lowerings, g) for name, g in alike.items()}


def show(title: str, of: dict) -> None:
    """Print what was counted on one GPU."""
    print(f"\n{title}")
    rows = [
        [name, *(f"{part[key]:,.1f}" for key in asdict(Part()))]
        for name, part in [
            *of["parts"].items(),
            (ELEMENTWISE, of[ELEMENTWISE]),
            ("step", of["step"]),
        ]
    ]
    print_table(["", "kernels", "GB", "TFLOP", "roofline ms", "expected ms"], rows)
    print(f"at the peak, beside weights and moments: {of['peak_gigabytes']:.1f} GB")


def main(argv):
    """The command line's work."""
    parser = argument_parser("lowering", __doc__)
    parser.add_argument("--preset", nargs="+", default=PRESETS)
    parser.add_argument("--gpu", nargs="+", choices=GPUS, default=["H200", "T4"])
    parser.add_argument("--name")
    parser.add_argument("--apart", action="store_true")  # one preset, in this process
    args, extra = parser.parse_known_args(argv)
    missing = make_believe_gpu.missing()
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
            result[preset] |= found
        for gpu, of in result[preset].items():
            show(f"{preset}, {gpu}", of)
    write_json(f"lowering_{args.name or 'step'}", result)


if __name__ == "__main__":
    main(sys.argv[1:])
