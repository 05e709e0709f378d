"""Linear layers on a CPU: exact in float32, close in fewer bits, whatever the processor offers."""

import functools
import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import hardware
from generating import cpu_kernels
from generating.cpu_kernels import Fbgemm, Half, OneDnn, OneDnnBfloat16, PackedLinear, Plain, pack
from generating.decode import generate
from generating.load import open_checkpoint
from tests.conftest import ROOT
from tests.generating.test_sampling import CONTEXT, PROMPTS
from tests.test_model import randomised

TOLERANCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02, "int8": 0.3}  # of logits near 1
# As for machines that have no more: oneDNN's, PyTorch's own and MKL's instructions.
KINDS = {
    "none": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
}


def error(model, packed, idx):
    """The largest difference of two models' logits."""
    return (model(idx) - packed(idx)).abs().max().item()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("tied", [True, False])
def test_packed_layers_compute_the_same(dtype, tied):
    model, packed = (randomised(tie_weights=tied) for _ in range(2))
    pack(packed, dtype)
    for idx in (torch.tensor([[5]]), torch.randint(97, (3, 20))):
        assert packed(idx).dtype == torch.float32
        assert error(model, packed, idx) < TOLERANCE[dtype]
    assert len(list(generate(packed, PROMPTS, 2 * CONTEXT, temperature=0))) == 2 * CONTEXT


@pytest.mark.parametrize("dtype", ["float32", "auto"])
@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
def test_in_float32_greedy_text_is_that_of_the_plain_model(dtype, arch):
    model, packed = (randomised(arch=arch, tie_weights=False) for _ in range(2))
    pack(packed, dtype)  # auto too: so small a model is not worth fewer bits
    written = list(generate(packed, PROMPTS, 3 * CONTEXT, temperature=0))
    assert written == list(generate(model, PROMPTS, 3 * CONTEXT, temperature=0))


@pytest.mark.parametrize("way", [Plain, OneDnn, OneDnnBfloat16, Half, Fbgemm, cpu_kernels.Int8])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 48), (1, 1, 48), (5, 48), (2, 3, 48)])
def test_each_way_multiplies(way, bias, shape):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias)
    if not cpu_kernels.works(way, linear):
        pytest.skip("not on this machine")
    x = torch.randn(shape)
    y = PackedLinear(linear, way, way)(x)
    assert y.dtype == torch.float32 and y.shape == (*shape[:-1], 80)
    assert torch.allclose(y, linear(x), atol=0.05)


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("one_row", [Half, Fbgemm])
@pytest.mark.parametrize("weight, size", [(1e-3, 1e5), (1e5, 1e-3)], ids=["input", "weight"])
def test_packed_layers_stand_numbers_beyond_float16(rows, one_row, weight, size):
    linear = torch.nn.Linear(16, 8)
    torch.nn.init.constant_(linear.weight, weight)
    packed = PackedLinear(linear, one_row, OneDnn, torch.bfloat16)
    x = torch.full((rows, 16), size)
    assert torch.allclose(packed(x), F.linear(x, linear.weight, linear.bias), rtol=0.4)


def test_one_row_and_several_have_the_same_weights():
    linear = torch.nn.Linear(64, 64)
    for dtype in (torch.bfloat16, torch.float16):
        packed = PackedLinear(linear, Fbgemm, OneDnn, dtype)
        rows = torch.eye(64)
        one_by_one = torch.cat([packed(row[None]) for row in rows])
        assert torch.allclose(one_by_one, packed(rows), atol=1e-6)
        assert not torch.allclose(packed(rows), linear(rows), atol=1e-6)


def missing(way, weight, bias):
    """The making of a way that this PyTorch has not."""
    raise AttributeError("no such op")


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_where_an_op_is_missing_the_next_way_is_taken(dtype, monkeypatch):
    monkeypatch.setattr(OneDnn, "__init__", missing)
    monkeypatch.setattr(Half, "__init__", missing)
    monkeypatch.setattr(Fbgemm, "__init__", missing)
    monkeypatch.setattr(cpu_kernels, "SMALL", 100)  # so that they take turns
    model, packed = (randomised(tie_weights=False) for _ in range(2))
    pack(packed, dtype)
    assert error(model, packed, torch.tensor([[5, 6]])) < TOLERANCE.get(dtype, 1e-4)
    assert packed.lm_head.several.__class__ is Plain


def test_int8_is_refused_in_a_sentence_where_there_is_none(monkeypatch, bpe_run):
    monkeypatch.setattr(cpu_kernels, "works", lambda way, layer: way is not cpu_kernels.Int8)
    with pytest.raises(hardware.DeviceError, match=r"no int8 products.*--dtype auto"):
        pack(randomised(), "int8")
    with pytest.raises(hardware.DeviceError, match="int8 is for CPUs"):
        open_checkpoint(bpe_run, torch.device("mps"), "int8")


def test_the_fastest_way_is_found_and_chance_does_not_decide(monkeypatch):
    layers = [torch.nn.Linear(8, 8)]
    monkeypatch.setattr(cpu_kernels, "SMALL", 1)
    times = {OneDnn: 1.0, Half: 0.9, Fbgemm: 0.8}
    monkeypatch.setattr(cpu_kernels, "time_in_turn", lambda ways, layers, rows: times)
    fastest = functools.partial(cpu_kernels.fastest, layers=layers, rows=1)
    assert fastest([OneDnn, Half]) is OneDnn
    assert fastest([OneDnn, Half, Fbgemm]) is Fbgemm
    assert fastest([Half, Fbgemm]) is Half


TRY = """
import torch
from generating import cpu_kernels
from generating.decode import generate
from tests.test_model import randomised
cpu_kernels.SMALL = 100
plain = randomised(tie_weights=False)
idx = torch.randint(97, (2, 20), generator=torch.Generator().manual_seed(0))
for dtype, most in {tolerance}.items():
    model = randomised(tie_weights=False)
    cpu_kernels.pack(model, dtype)
    for x in (idx, idx[:1, :1]):
        assert (model(x) - plain(x)).abs().max() < most, dtype
    assert len(list(generate(model, [[5], [6, 7]], 20, temperature=0))) == 20
"""


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_cpu_generates(kind):
    code = TRY.replace("{tolerance}", str(TOLERANCE | {"auto": TOLERANCE["bfloat16"]}))
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | KINDS[kind],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "deprecated" not in result.stderr
