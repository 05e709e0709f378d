"""model.py: shape, equality with Hugging Face's models, initialization, dropout, errors."""

import dataclasses
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import config
from formats import huggingface
from formats.shapes import without_weights
from model import GPT, IGNORE, GPTConfig, causal_attention, stream_dtype

QWEN3 = {"arch": "qwen3", "tie_weights": False}
LLAMA = {"arch": "llama", "n_kv_head": 1, "norm_eps": 0.1, "rope_theta": 1e5}
GROUPED = {"arch": "qwen3", "n_kv_head": 2, "head_dim": 24, "n_inner": 80, "rope_theta": 1e6}
FORMS = {"gpt2": {}, "qwen3": QWEN3, "grouped queries": GROUPED, "llama": LLAMA}
TINY = {"vocab_size": 97, "block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 64}


def randomized(**changes):
    """A tiny model whose biases and norms are not at their initial values."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
def test_logits_equal_those_of_transformers(shape, tied):
    from transformers import AutoConfig, AutoModelForCausalLM  # seconds, not for whoever imports

    model = randomized(**shape | {"tie_weights": tied})
    described = AutoConfig.for_model(**huggingface.config_values(model.config, 97, 0))
    hf = AutoModelForCausalLM.from_config(described).eval()
    weights = huggingface.to_hf(model.config, model.state_dict(), 97)
    missing, unexpected = hf.load_state_dict(weights, strict=False)
    assert missing == (["lm_head.weight"] if tied else [])
    assert not unexpected
    hf.tie_weights()
    idx = torch.randint(97, (2, 32))
    with torch.no_grad():
        assert (model(idx) - hf(idx).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("name", "vocab_size", "parameters"),
    [
        ("gpt2_small", 32000, 134_601_216),
        ("gpt2_small_modern", 32000, pytest.approx(134_601_216, rel=0.01)),  # the same budget
        ("gpt2_124m", 50257, 124_439_808),  # as published
    ],
)
def test_a_preset_has_its_parameters(name, vocab_size, parameters):
    settings = config.load([f"config/{name}.py"]).recorded()
    names = {field.name for field in dataclasses.fields(GPTConfig)} & settings.keys()
    model = without_weights(GPTConfig(vocab_size, **{name: settings[name] for name in names}))
    assert model.num_parameters() == parameters


def test_the_operations_of_a_token_are_those_of_palm():
    model = without_weights(GPTConfig(32000))
    weights, attention = 85_054_464 + 32000 * 768, 12 * 768 * 1024
    assert model.flops_per_token() == 6 * weights + 12 * attention


def test_initialization_is_gpt2s():
    torch.manual_seed(0)
    model = GPT(GPTConfig(1000, 64, 6, 4, 128))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.h[0].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for proj in (model.h[3].attn.c_proj, model.h[3].mlp.c_proj):
        assert proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.05)
        assert not proj.bias.any()
    loss = model(torch.randint(1000, (4, 64)), torch.randint(1000, (4, 64)))
    assert loss.item() == pytest.approx(math.log(1000), abs=0.1)


def test_initialization_leaves_what_other_modules_set():
    model = GPT(GPTConfig(97, 8, 1, 2, 16))
    model.h[0].scale = torch.nn.Parameter(torch.zeros(16))
    model.h[0].mlp.c_fc.added = torch.nn.Parameter(torch.zeros(16, 4))
    model.init_weights(zero_init=False)
    assert not model.h[0].scale.any() and not model.h[0].mlp.c_fc.added.any()
    assert torch.equal(model.ln_f.weight, torch.ones(16))


def test_zero_init_keeps_the_variance_through_another_matrix_wherever_it_is():
    model = GPT(GPTConfig(**TINY | QWEN3))
    model.added, model.h[0].added = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    model.init_weights(zero_init=True)
    for added in (model.added, model.h[0].added):
        assert added.weight.std().item() == pytest.approx(1 / 8, rel=0.05)


@pytest.mark.parametrize("shape", [{}, QWEN3], ids=["gpt2", "qwen3"])
def test_with_bfloat16_between_the_layers_the_loss_is_the_same(shape, monkeypatch):
    """As a GPU computes it: a CPU keeps float32 there."""
    model, idx, seen = randomized(**shape), torch.randint(97, (2, 32)), []
    for block in model.h:
        block.register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    exact = model(idx, idx)
    monkeypatch.setattr("model.stream_dtype", lambda x: torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)
    assert seen == [torch.float32] * 3 + [torch.bfloat16] * 3
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), abs=0.02)


@pytest.mark.parametrize(
    ("device", "enabled", "dtype", "between"),
    [
        ("cuda", True, torch.bfloat16, torch.bfloat16),
        ("cuda", True, torch.float16, torch.float32),
        ("cuda", False, torch.bfloat16, torch.float32),
        ("cpu", True, torch.bfloat16, torch.float32),
    ],
)
def test_between_the_layers_is_bfloat16_on_a_gpu_with_autocast_to_it(
    monkeypatch, device, enabled, dtype, between
):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
    with FakeTensorMode():
        assert stream_dtype(torch.empty(2, 3, device=device)) == between


def attended(q, k, v, upstream, attention):
    """What attention returns, and the gradients of q, k and v."""
    inputs = [t.detach().requires_grad_() for t in (q, k, v)]
    y = attention(*inputs)
    return y, *torch.autograd.grad(y, inputs, upstream)


@pytest.mark.parametrize(("length", "compiles"), [(20, False), (300, False), (140, True)])
def test_attention_in_bfloat16_on_a_cpu_is_that_in_float32(length, compiles):
    """In one block, in three, and compiled in two."""
    attention = torch.compile(causal_attention) if compiles else causal_attention
    tensors = torch.randn(4, 1, 2, length, 16, generator=torch.Generator().manual_seed(0))
    exact = attended(*tensors, partial(causal_attention, dropout=0.0))
    close = attended(*tensors.bfloat16(), partial(attention, dropout=0.0))
    assert (close[0] - exact[0]).abs().max() < 0.03
    for value, reference in zip(close, exact, strict=True):
        assert (value - reference).abs().max() < 0.02 * reference.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_long_context_in_bfloat16_on_a_cpu_keeps_no_weights(monkeypatch, dropout):
    """With dropout, PyTorch's attention would keep more of them."""
    tensors = torch.randn(3, 1, 2, 40, 16).bfloat16().requires_grad_()
    outputs, kept = [], []
    for longest in (40, 39):
        monkeypatch.setattr("model.LONG", longest)
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
            outputs.append(causal_attention(*tensors, dropout))
    assert (outputs[0] - outputs[1]).abs().max() < 0.03
    weights = [t for t in kept if t.shape == (1, 2, 40, 40)]
    assert len(weights) == (4 if dropout else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_on_a_cpu_drops_weights_in_both_passes(dtype):
    tensors = torch.randn(4, 1, 2, 40, 16, generator=torch.Generator().manual_seed(0))
    later = torch.ones(40, 40, dtype=torch.bool).triu(1)

    def plain(q, k, v):
        weights = (q @ k.mT / 4).masked_fill(later, -torch.inf).softmax(-1)
        return weights * F.dropout(torch.ones(1, 2, 40, 40, dtype=dtype), 0.3) @ v

    torch.manual_seed(1)
    exact = attended(*tensors, plain)
    torch.manual_seed(1)
    close = attended(*tensors.to(dtype), partial(causal_attention, dropout=0.3))
    for value, reference in zip(close, exact, strict=True):
        assert (value - reference).abs().max() < 0.02 * reference.abs().max()


def test_loss_is_the_mean_cross_entropy_of_what_is_not_ignored():
    model = randomized()
    idx, targets = torch.randint(97, (2, 16)), torch.randint(97, (2, 16))
    targets[0, :5] = IGNORE
    picked = model(idx).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -picked[targets != IGNORE].mean()
    assert model(idx, targets).item() == pytest.approx(expected.item(), rel=1e-5)


def test_tied_weights_are_one_tensor_and_count_once():
    tied, untied = (GPT(GPTConfig(**TINY, tie_weights=tie)) for tie in (True, False))
    assert untied.num_parameters() - tied.num_parameters() == 97 * 64
    assert tied.lm_head.weight is tied.wte.weight


def test_without_bias_there_is_none():
    model = GPT(GPTConfig(**TINY, bias=False))
    assert not [name for name, _ in model.named_parameters() if "bias" in name]


def test_a_sequence_beyond_the_context_is_a_sentence():
    with pytest.raises(ValueError, match=r"33 tokens is longer than .* \(block_size = 32\)"):
        randomized()(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
def test_zero_init_begins_with_even_odds_and_still_learns(arch):
    model = GPT(GPTConfig(**TINY, arch=arch, tie_weights=False), zero_init=True)
    idx = torch.randint(97, (4, 32))
    assert model(idx, idx).item() == pytest.approx(math.log(97), abs=1e-4)
    x, rotary = model.wte(idx), None if model.wpe else model.rotary.unsqueeze(-2)
    assert torch.equal(model.h[0](x, rotary, None), x)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(idx, idx)
        loss.backward()
        optimizer.step()
    assert loss < 1
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"arch": "mamba"}, "arch = 'mamba': must be gpt2, qwen3 or llama"),
        ({"n_head": 5}, "n_head = 5 does not divide n_embd = 64"),
        ({"arch": "qwen3", "n_head": 64}, "rotary positions need an even number"),
        ({"arch": "qwen3", "n_kv_head": 3}, "n_kv_head = 3 does not divide n_head = 4"),
        ({"n_kv_head": 2}, "gpt2 has no n_kv_head"),
    ],
)
def test_shapes_that_no_architecture_has_say_so(wrong, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**TINY | wrong)


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
@pytest.mark.parametrize("place", ["embedding", "weights of attention", "attention", "mlp"])
def test_dropout_is_in_four_places_and_only_in_training(arch, place):
    """Another mask each time; here in one place alone."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 1, 2, 32, arch=arch, dropout=0.5))
    ids, block = torch.randint(50, (2, 16)), model.h[0]
    without = dataclasses.replace(model.config, dropout=0.0)
    if place != "embedding":
        model.config = without
    if place != "weights of attention":
        block.attn.config = without
    if place not in ("attention", "mlp"):
        block.dropout.p = 0.0
    elif place == "mlp":
        torch.nn.init.zeros_(block.attn.c_proj.weight)
    else:
        torch.nn.init.zeros_(block.mlp.c_proj.weight)
    with torch.no_grad():
        assert not torch.equal(model(ids), model(ids))
        model.eval()
        assert torch.equal(model(ids), model(ids))
