"""Linear layers on a CPU: exact in float32, close in 16 bits, whatever the processor offers."""

import gc
import platform
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from generating import cpu_kernels
from generating.cpu_kernels import FORMATS, PackedLinear, fastest, pack
from generating.decode import generate
from generating.load import load_model, open_checkpoint
from tests.conftest import ok, run_code
from tests.generating.test_decode import CONTEXT, PROMPTS
from tests.test_model import randomized

CPU = torch.device("cpu")
TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02, "auto": 0.1}  # of logits near 1
# Emulations of machines that have less: oneDNN's instructions, and PyTorch's own.
KINDS = {
    "this one": {},
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
if platform.machine() in ("x86_64", "AMD64"):
    KINDS |= {
        "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
        "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    }


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_in_float32_greedy_text_is_that_of_the_plain_model(arch, tied):
    model, packed = (randomized(arch=arch, tie_weights=tied) for _ in range(2))
    assert pack(packed, "auto") == ("float32", "float32")  # so small a model is not timed
    written = list(generate(packed, PROMPTS, CONTEXT, temperature=0))
    assert written == list(generate(model, PROMPTS, CONTEXT, temperature=0))


def compute_the_same():
    """Assert that a packed model is close to the plain one, and generates."""
    cpu_kernels.SMALL = 1  # so that formats are timed
    plain = randomized(tie_weights=False)
    for dtype, most in TOLERANCE.items():
        model = randomized(tie_weights=False)
        _, several = pack(model, dtype)
        assert dtype == "auto" or several in ("float32", dtype)
        for idx in (torch.tensor([[5]]), torch.randint(97, (3, 20))):
            assert (model(idx) - plain(idx)).abs().max() < most, dtype
        assert len(list(generate(model, [[5], [6, 7]], 20, temperature=0))) == 20


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_cpu_computes_the_same(kind):
    code = (
        "import torch; print(torch.backends.cpu.get_cpu_capability())\n"
        "from tests.generating import test_cpu_kernels as t; t.compute_the_same()"
    )
    result = ok(run_code(code, **KINDS[kind]))
    if asked := KINDS[kind].get("ATEN_CPU_CAPABILITY"):
        assert result.stdout.strip() in (asked.upper(), "DEFAULT")
    assert "deprecated" not in result.stderr


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("bias", [True, False])
def test_each_format_multiplies(name, bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias)
    try:
        packed = PackedLinear(linear, name, name)
    except RuntimeError:
        pytest.skip("not on this machine")
    for shape in ((1, 48), (1, 1, 48), (5, 48), (2, 3, 48)):
        x = torch.randn(shape)
        y = packed(x)
        assert y.dtype == torch.float32
        assert y.shape == (*shape[:-1], 80)
        assert torch.allclose(y, linear(x), atol=0.05)


def test_inputs_beyond_float16_give_no_nan():
    linear = torch.nn.Linear(16, 8)
    torch.nn.init.constant_(linear.weight, 1e-3)
    x = torch.full((1, 16), 1e5)
    y = PackedLinear(linear, "float16", "float32")(x)
    assert torch.allclose(y, linear(x), rtol=0.4)


def test_one_row_and_several_have_the_same_weights():
    linear, rows = torch.nn.Linear(64, 64), torch.eye(64)
    packed = PackedLinear(linear, "float16", "float32", rounded_to="bfloat16")
    one_by_one = torch.cat([packed(row[None, None])[0] for row in rows])
    exact = F.linear(rows, linear.weight.bfloat16().float(), linear.bias)
    assert torch.allclose(packed(rows), exact, atol=1e-6)
    assert torch.allclose(one_by_one, exact, atol=1e-3)
    assert not torch.allclose(one_by_one, exact, atol=1e-6)  # in float16


def missing(weight, bias):
    """A format that this machine lacks."""
    raise AttributeError("no such op")


def slow(weight, bias):
    """A format that takes a hundred times as long as others."""
    return lambda x: sum(F.linear(x, weight, bias) for _ in range(100))


def test_a_large_model_is_packed_in_what_is_faster_for_its_dtype(monkeypatch):
    for name, form in {"bfloat16": FORMATS["float32"], "float32": slow, "float16": missing}.items():
        monkeypatch.setitem(FORMATS, name, form)
    assert pack(randomized(), "auto") == ("float32", "float32")
    monkeypatch.setattr(cpu_kernels, "SMALL", 1)
    assert pack(randomized(), "auto") == ("bfloat16", "bfloat16")
    for dtype in ("float32", "float16"):
        assert pack(randomized(), dtype) == ("float32", "float32")


def test_of_two_formats_in_16_bits_the_coarser_is_that_of_all_weights(monkeypatch):
    fast = FORMATS["float32"]

    def for_several(weight, bias):
        one_row, several = slow(weight, bias), fast(weight, bias)
        return lambda x: one_row(x) / 100 if x.numel() == x.size(-1) else several(x)

    monkeypatch.setattr(cpu_kernels, "SMALL", 1)
    monkeypatch.setitem(FORMATS, "float16", fast)
    monkeypatch.setitem(FORMATS, "bfloat16", for_several)
    monkeypatch.setitem(FORMATS, "float32", slow)
    model, plain = (randomized(tie_weights=False) for _ in range(2))
    assert pack(model, "auto") == ("float16", "bfloat16")
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    for module in plain.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = module.weight.data.bfloat16().float()
    for idx in (torch.tensor([[5]]), torch.randint(97, (3, 20))):
        assert torch.allclose(model(idx), plain(idx), atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="float32 is not packed")
def test_a_layer_is_gone_when_the_next_one_is_packed(reciting_run, monkeypatch):
    """Or a model would be in memory twice."""
    layers = [m for m in load_model(reciting_run, CPU)[0].modules() if isinstance(m, nn.Linear)]
    sizes, held = [layer.weight.nbytes for layer in layers], []
    del layers
    gc.collect()  # what other tests have left

    def packed(weight, bias, format=FORMATS["float32"]):
        tensors = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
        plain = [t.untyped_storage() for t in tensors if t.layout == torch.strided]
        held.append(sum({storage.data_ptr(): storage.nbytes() for storage in plain}.values()))
        return format(weight, bias)

    for name, form in {"bfloat16": missing, "float16": missing, "float32": packed}.items():
        monkeypatch.setitem(FORMATS, name, form)
    monkeypatch.setattr(cpu_kernels, "SMALL", 1)  # so that formats are timed
    open_checkpoint(reciting_run, CPU)
    held = held[-len(sizes) :]
    assert [before - after for before, after in pairwise(held)] == sizes[:-1]


def test_a_format_that_is_hardly_faster_is_not_taken(monkeypatch):
    monkeypatch.setitem(FORMATS, "float16", FORMATS["float32"])
    monkeypatch.setattr(cpu_kernels, "CLEARLY", 0.1)  # a busy machine's times vary
    layers = [torch.nn.Linear(256, 256)]
    for usual in ("float32", "float16"):
        assert fastest(["float32", "float16"], usual, layers, 1) == usual


class Adapted(nn.Linear):
    """As a LoRA, a layer that adds to its product."""

    def forward(self, x):
        return super().forward(x) + 1


def test_a_layer_that_computes_something_else_stays():
    model = nn.Sequential(nn.Linear(4, 4), Adapted(4, 4))
    x = torch.ones(2, 4)
    expected = model(x)
    pack(model)
    assert isinstance(model[0], PackedLinear)
    torch.testing.assert_close(model(x), expected)
