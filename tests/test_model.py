"""model.py: shape, equality with Hugging Face's models, initialisation, the cache, errors."""

import dataclasses
import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import config
from formats import huggingface
from generating.cache import KVCache
from model import GPT, IGNORE, GPTConfig
from ops import stream_dtype

QWEN3 = {"arch": "qwen3", "tie_weights": False}
GROUPED = {"arch": "qwen3", "n_kv_head": 2, "head_dim": 24, "n_inner": 80, "rope_theta": 1e6}
TINY = {"vocab_size": 97, "block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 64}


def randomised(**changes):
    """A tiny model whose biases and norms are not at their initial values."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY | changes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.05)
    return model


def huggingface_twin(model):
    """transformers' GPT2LMHeadModel with the same weights, which it lays out [in, out]."""
    from transformers import GPT2Config, GPT2LMHeadModel

    c = model.config
    hf = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=c.vocab_size,
            n_positions=c.block_size,
            n_embd=c.n_embd,
            n_layer=c.n_layer,
            n_head=c.n_head,
            tie_word_embeddings=c.tie_weights,
        )
    ).eval()
    transposed = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
    weights = {
        ("" if k.startswith("lm_head") else "transformer.") + k: (
            v.t() if k.endswith(transposed) else v
        )
        for k, v in model.state_dict().items()
    }
    missing, unexpected = hf.load_state_dict(weights, strict=False)
    assert not unexpected and all("attn.bias" in k or "masked_bias" in k for k in missing)
    return hf


@pytest.mark.parametrize("tied", [True, False])
def test_logits_equal_those_of_transformers(tied):
    model = randomised(tie_weights=tied)
    idx = torch.randint(97, (2, 32))
    with torch.no_grad():
        ours, theirs = model(idx), huggingface_twin(model)(idx).logits
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shape", [QWEN3, GROUPED], ids=["as many heads", "grouped queries"])
def test_qwen3s_logits_equal_those_of_transformers(shape, tied):
    from transformers import Qwen3Config, Qwen3ForCausalLM

    model = randomised(**shape | {"tie_weights": tied})
    c = model.config
    names = huggingface.SHAPES["qwen3"]
    rope = {"rope_type": "default", "rope_theta": c.rope_theta}
    hf = Qwen3Config(
        **{theirs: getattr(c, ours) for ours, theirs in names.items()},
        rope_parameters=rope,
        tie_word_embeddings=tied,
    )
    hf = Qwen3ForCausalLM(hf).eval()
    missing, unexpected = hf.load_state_dict(
        huggingface.to_hf(c, model.state_dict(), 97), strict=False
    )
    assert not unexpected and missing == (["lm_head.weight"] if tied else [])
    hf.tie_weights()
    idx = torch.randint(97, (2, 32))
    with torch.no_grad():
        assert (model(idx) - hf(idx).logits).abs().max() < 1e-4


def of_preset(name, vocab_size):
    """The model of a preset, without memory for its weights."""
    settings = config.load([f"config/{name}.py"]).recorded()
    names = {field.name for field in dataclasses.fields(GPTConfig)} & settings.keys()
    with torch.device("meta"):
        return GPT(GPTConfig(vocab_size, **{name: settings[name] for name in names}))


def test_gpt2_small_has_its_parameters():
    model = of_preset("gpt2_small", 32000)
    assert model.num_parameters() == 134_601_216
    assert model.flops_per_token() == pytest.approx(714e6, rel=1e-3)


def test_gpt2_small_modern_has_the_same_budget():
    model = of_preset("gpt2_small_modern", 32000)
    assert model.num_parameters() == pytest.approx(134_601_216, rel=0.01)


def test_gpt2_medium_has_its_parameters():
    model = of_preset("gpt2_medium", 50257)
    assert model.num_parameters() == 354_823_168  # as published


def test_initialisation_is_gpt2s():
    torch.manual_seed(0)
    model = GPT(GPTConfig(1000, 64, 6, 4, 128))
    assert model.wte.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.h[0].attn.c_attn.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for proj in (model.h[3].attn.c_proj, model.h[3].mlp.c_proj):
        assert proj.weight.std().item() == pytest.approx(0.02 / math.sqrt(12), rel=0.05)
        assert not proj.bias.any()
    loss = model(torch.randint(1000, (4, 64)), torch.randint(1000, (4, 64)))
    assert loss.item() == pytest.approx(math.log(1000), abs=0.1)


@pytest.mark.parametrize("shape", [{}, QWEN3], ids=["gpt2", "qwen3"])
def test_with_bfloat16_between_the_layers_the_loss_is_the_same(shape, monkeypatch):
    """As a GPU computes it: a CPU keeps float32 there."""
    model, idx, seen = randomised(**shape), torch.randint(97, (2, 32)), []
    for block in model.h:
        block.register_forward_hook(lambda block, inputs, output: seen.append(output.dtype))
    exact = model(idx, idx)
    monkeypatch.setattr("model.stream_dtype", lambda x: torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(idx, idx)
    assert seen == [torch.float32] * 3 + [torch.bfloat16] * 3
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), abs=0.02)


@pytest.mark.parametrize(
    ("autocast", "between"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
        (None, torch.float32),
    ],
)
def test_between_the_layers_is_bfloat16_on_a_gpu_with_autocast_to_it(autocast, between):
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")
    on_cpu = torch.empty(2, 3)
    torch.set_autocast_enabled("cuda", autocast is not None)
    torch.set_autocast_dtype("cuda", autocast or torch.float16)
    try:
        assert stream_dtype(x) == between
        with torch.autocast("cpu", torch.bfloat16):
            assert stream_dtype(on_cpu) == torch.float32
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)


def test_loss_is_the_mean_cross_entropy_of_what_is_not_ignored():
    model = randomised()
    idx, targets = torch.randint(97, (2, 16)), torch.randint(97, (2, 16))
    targets[0, :5] = IGNORE
    logits = model(idx)
    picked = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    assert model(idx, targets).item() == pytest.approx(
        -picked[targets != IGNORE].mean().item(), rel=1e-5
    )


def test_no_token_sees_what_comes_after_it():
    model = randomised()
    idx = torch.randint(97, (1, 32))
    changed = idx.clone()
    changed[0, 20:] = (changed[0, 20:] + 1) % 97
    assert torch.equal(model(idx)[0, :20], model(changed)[0, :20])


def test_tied_weights_are_one_tensor_and_count_once():
    tied, untied = (
        GPT(GPTConfig(**TINY, tie_weights=True)),
        GPT(GPTConfig(**TINY, tie_weights=False)),
    )
    assert untied.num_parameters() - tied.num_parameters() == 97 * 64
    assert tied.lm_head.weight is tied.wte.weight


def test_without_bias_there_is_none():
    assert not [
        name for name, _ in GPT(GPTConfig(**TINY, bias=False)).named_parameters() if "bias" in name
    ]


def test_a_sequence_beyond_the_context_is_a_sentence():
    with pytest.raises(ValueError, match=r"33 tokens is longer than .* \(block_size = 32\)"):
        randomised()(torch.zeros(1, 33, dtype=torch.int64))


@pytest.mark.parametrize("changes", [{}, QWEN3, GROUPED], ids=["gpt2", "qwen3", "grouped queries"])
def test_the_logits_are_the_same_with_and_without_the_cache(changes):
    model, idx = randomised(**changes), torch.randint(97, (2, 32))
    cache = KVCache(model.config, 2, idx.device, torch.float32)
    with torch.no_grad():
        parts = []
        for start, end in ((0, 20), *((i, i + 1) for i in range(20, 32))):
            cache.set_positions(torch.arange(start, end).expand(2, -1))
            parts.append(model(idx[:, start:end], cache=cache))
        assert (torch.cat(parts, 1) - model(idx)).abs().max() < 1e-4


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
def test_zero_init_begins_with_even_odds_and_still_learns(arch):
    model = GPT(GPTConfig(**TINY, arch=arch, tie_weights=False), zero_init=True)
    idx = torch.randint(97, (4, 32))
    assert model(idx, idx).item() == pytest.approx(math.log(97), abs=1e-4)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss = model(idx, idx)
        loss.backward()
        optimizer.step()
    assert loss < 1 and all(p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"arch": "llama"}, "arch = 'llama'"),
        ({"n_head": 5}, "n_head = 5 does not divide n_embd = 64"),
        ({"arch": "qwen3", "n_head": 64}, "rotary positions need an even number"),
        ({"arch": "qwen3", "n_kv_head": 3}, "n_kv_head = 3 does not divide n_head = 4"),
        ({"n_kv_head": 2}, "arch = qwen3's"),
    ],
)
def test_shapes_that_no_architecture_has_say_so(wrong, words):
    with pytest.raises(ValueError, match=words):
        GPTConfig(**TINY | wrong)


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
@pytest.mark.parametrize("place", ["embedding", "attention", "mlp"])
def test_dropout_is_in_three_places_and_only_in_training(arch, place):
    """Another mask each time; in the weights of attention there is one too, for gpt2 and qwen3."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 1, 2, 32, arch=arch, dropout=0.5))
    ids = torch.randint(50, (2, 16))
    if place != "attention":
        model.h[0].attn.dropout = 0.0
    if place != "mlp":
        model.h[0].mlp.dropout = 0.0
    if place != "embedding":
        model.config.dropout = 0.0
    with torch.no_grad():
        assert not torch.equal(model(ids), model(ids))
        model.eval()
        assert torch.equal(model(ids), model(ids))
