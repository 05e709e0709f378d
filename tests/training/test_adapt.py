"""The ways of computing that few runs ask for: none changes what is learned, or what is saved."""

import contextlib
import copy

import pytest
import torch
from torch.nn import functional as F

import config
from model import GPT, IGNORE, GPTConfig
from tests.conftest import losses, train_small
from training import fp8, low_memory
from training.step import compile_layers, why_it_fails

SHAPE = {"vocab_size": 208, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
ARCHS = [{"arch": "gpt2"}, {"arch": "qwen3", "tie_weights": False}]


def model_and_batch(**changes):
    """A small model, and tokens with targets, of which some do not count."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | changes))
    tokens = torch.randint(model.config.vocab_size, (4, 33))
    y = tokens[:, 1:].clone()
    y[0, :7] = IGNORE
    return model, tokens[:, :-1], y


def loss_and_gradients(model, x, y):
    """The loss in float32, and each parameter's gradient by name."""
    model.zero_grad()
    loss = model(x, y)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(one, other, tolerance=1e-6):
    """Equal losses and gradients, these against the largest of each parameter."""
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).abs().max() < tolerance * max(1, gradient.abs().max())


@pytest.mark.parametrize("arch", ARCHS, ids=["gpt2", "qwen3"])
@pytest.mark.parametrize("chunks", [2, 5])
def test_a_loss_in_chunks_is_the_same(arch, chunks):
    model, x, y = model_and_batch(**arch)
    plain = loss_and_gradients(model, x, y)
    keys, logits = model.state_dict().keys(), model(x)
    low_memory.use_chunked_loss(model, chunks)
    assert_same(plain, loss_and_gradients(model, x, y))
    assert model.state_dict().keys() == keys and torch.equal(model(x), logits)


@pytest.mark.parametrize("arch", ARCHS, ids=["gpt2", "qwen3"])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_checkpointed_activations_give_the_same_gradients(arch, dropout):
    model, x, y = model_and_batch(dropout=dropout, **arch)
    torch.manual_seed(1)
    plain = loss_and_gradients(model, x, y)
    low_memory.use_activation_checkpointing(model)
    torch.manual_seed(1)
    assert_same(plain, loss_and_gradients(model, x, y))


def test_a_chunk_is_all_that_lives_of_the_logits():
    model, x, y = model_and_batch(vocab_size=4096)
    low_memory.use_chunked_loss(model, 8)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x, y)
    assert max(t.numel() for t in kept) <= 4096 * 32  # the head's gradient, no logits


def test_a_chunk_of_equal_targets_stays_within_float16():
    torch.manual_seed(0)
    y, w = torch.rand(4096, 64) + 30, torch.zeros(128, 64)
    targets = torch.zeros(4096, dtype=torch.int64)  # so the sum for row 0 has one sign
    w.requires_grad_()
    with torch.autocast("cpu", torch.float16):
        low_memory.ChunkedLoss.apply(y, w, targets, 1).backward()
    expected = (1 / 128 - 1) * y.mean(0)
    torch.testing.assert_close(w.grad[0], expected, rtol=1e-2, atol=0)


def test_chunks_and_checkpoints_compile():
    model, x, y = model_and_batch()
    plain = loss_and_gradients(model, x, y)
    low_memory.use_chunked_loss(model, 4)
    low_memory.use_activation_checkpointing(model)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    compiled = compile_layers(model)
    assert why_it_fails(compiled, x, y, contextlib.nullcontext, scaler) is None
    loss = compiled(x, y)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_same(plain, (loss.item(), gradients), 1e-5)


# -- the head in 8 bits ---------------------------------------------------------------------------


def dequantised(x, dtype, largest=None):
    """What 8 bits leave of x."""
    x8, scale = fp8.to_float8(x, dtype, largest)
    return x8.float() * scale


def test_the_products_of_the_head_are_those_of_rounded_numbers():
    torch.manual_seed(0)
    x, w = torch.randn(48, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    upstream = torch.randn(48, 96).softmax(-1) / 48  # of a mean over 48 tokens
    fp8.FP8Linear.apply(x, w).float().backward(upstream)
    low_x, low_w = (dequantised(t.detach(), fp8.E4M3) for t in (x, w))
    low_gradient = dequantised(upstream.bfloat16(), fp8.E5M2, torch.tensor(16 / 48))
    for got, exact in ((x.grad, low_gradient @ low_w), (w.grad, low_gradient.t() @ low_x)):
        assert (got - exact).abs().max() < 0.01 * exact.abs().max()  # bfloat16's rounding
    assert F.cosine_similarity(x.grad.flatten(), (upstream @ w).flatten(), dim=0) > 0.99


def test_a_gradient_beyond_its_bound_is_cut_and_one_that_is_no_number_stays():
    x8, scale = fp8.to_float8(torch.tensor([3.0, -3.0, torch.nan]), fp8.E5M2, torch.tensor(1.0))
    assert (x8.float() * scale)[:2].tolist() == [1.0, -1.0] and x8.float()[2].isnan()


def test_a_head_in_8_bits_trains_and_generates_as_before():
    model, x, y = model_and_batch(tie_weights=False)
    keys, logits, plain = model.state_dict().keys(), model(x), loss_and_gradients(model, x, y)
    model.lm_head = fp8.FP8Head(model.lm_head)
    assert_same(plain, loss_and_gradients(model, x, y))  # in 16 bits where it is not compiled
    compiled = torch.compile(model, backend="eager")
    loss, gradients = loss_and_gradients(compiled, x, y)
    gradients = {name.removeprefix("_orig_mod."): g for name, g in gradients.items()}
    assert loss != plain[0]
    assert loss == pytest.approx(plain[0], abs=1e-2)
    for name, gradient in gradients.items():
        assert F.cosine_similarity(gradient.flatten(), plain[1][name].flatten(), dim=0) > 0.98
    assert model.state_dict().keys() == keys and torch.equal(model.eval()(x), logits)


def test_a_head_in_8_bits_takes_multiples_of_16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda")
    assert fp8.why_not(gpu, torch.bfloat16, 50304, 768, 512) is None
    assert "50,257 x 768" in fp8.why_not(gpu, torch.bfloat16, 50257, 768, 512)
    assert "block_size = 500" in fp8.why_not(gpu, torch.bfloat16, 50304, 768, 500)


def test_a_device_whose_products_in_8_bits_fail_keeps_the_plain_head(monkeypatch):
    cpu = torch.device("cpu")
    assert fp8.trial(cpu) is None  # PyTorch's CPU build has them

    def refuse(*_, **__):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nmore")

    monkeypatch.setattr(torch, "_scaled_mm", refuse)
    assert fp8.trial(cpu) == "a trial of its products failed: CUBLAS_STATUS_NOT_SUPPORTED"


@pytest.mark.parametrize("conflict", ["loss_chunks=4", "shard=True", "loss_on=assistant"])
def test_a_head_in_8_bits_with_what_it_does_not_go_with_is_refused(conflict):
    sentence = f"fp8_head = True does not go with {conflict.replace('=', ' = ')}"
    with pytest.raises(config.ConfigError, match=sentence):
        config.load(["--fp8_head=True", f"--{conflict}"])


# -- whole runs and plans -------------------------------------------------------------------------


def test_a_run_with_less_memory_learns_the_same(char_data, tmp_path):
    more = ["--max_steps=10", "--dtype=float32"]
    result = train_small(char_data, tmp_path / "plain", *more, "--fp8_head=True")
    assert result.returncode == 0, result.stderr
    assert "sm_89" in result.stdout  # this device computes the head in 16 bits, and says so
    saving = ["--activation_checkpointing=True", "--loss_chunks=4"]
    result = train_small(char_data, tmp_path / "saving", *more, *saving)
    assert result.returncode == 0, result.stderr
    plain, other = losses(tmp_path / "plain"), losses(tmp_path / "saving")
    assert other[0] == pytest.approx(plain[0], abs=1e-4)
    assert other[1] == pytest.approx(plain[1], abs=1e-4)


def test_copies_of_a_model_are_still_possible():
    model, x, y = model_and_batch()
    low_memory.use_chunked_loss(model, 2)
    assert copy.copy(model)(x, y).item() == model(x, y).item()
