"""formats/fingerprint.py: changes of model.py as people make them, which keep names and shapes."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import model
from formats.fingerprint import FINGERPRINTS, fingerprint, same
from formats.huggingface import from_hf, to_hf
from formats.run_folder import CheckpointError
from model import GPT, GPTConfig


def windowed(q, k, v, dropout):
    """Attention to the last 500 tokens."""
    distance = torch.arange(q.size(2))[:, None] - torch.arange(q.size(2))
    mask = (distance >= 0) & (distance < 500)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def in_float32(q, k, v, dropout):
    """Attention in one precision, whatever that of the values is, and without a scale."""
    scores = q.float() @ k.float().transpose(2, 3)
    return scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1) > 0, -torch.inf).softmax(-1) @ v


def capped(self, x, targets):
    """Logits below 30."""
    return 30 * torch.tanh(self.lm_head(self.ln_f(x)) / 30)


CHANGES = {
    "squared ReLU": ("gpt2", "gelu", lambda x: F.relu(x).square()),
    "exact GELU": ("gpt2", "gelu", F.gelu),
    "a window": ("llama", "causal_attention", windowed),
    "in float32": ("gpt2", "causal_attention", in_float32),
    "no positions": ("qwen3", "rotate", lambda x, rotary: x),
    "capped logits": ("qwen3", "GPT.head", capped),
}


@pytest.mark.parametrize("arch", FINGERPRINTS)
def test_the_fingerprint_is_that_of_the_architecture_whatever_the_size(arch):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    for config in (GPTConfig(97, arch=arch), GPTConfig(500, 64, 1, 1, 32, arch=arch, dropout=0.5)):
        assert same(fingerprint(config), FINGERPRINTS[arch])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("arch", "name", "other"), CHANGES.values(), ids=CHANGES)
def test_a_changed_model_is_not_exported(monkeypatch, arch, name, other):
    owner, _, name = f"model.{name}".rpartition(".")
    monkeypatch.setattr(f"{owner}.{name}", other)
    config = GPTConfig(97, 32, 1, 2, 16, arch=arch)
    with torch.autocast("cpu", torch.bfloat16):
        found = fingerprint(config)
    assert found == fingerprint(config) > 0
    with pytest.raises(CheckpointError, match="computes something else than"):
        to_hf(config, GPT(config).state_dict(), 97)


@pytest.mark.parametrize("arch", FINGERPRINTS)
def test_what_only_training_computes_is_neither_exported_nor_read(monkeypatch, arch):
    class Predicting(GPT):
        def __init__(self, *args):
            super().__init__(*args)
            self.later = torch.nn.Linear(16, 16)  # for the token after the next

        def head(self, x, targets):
            return super().head(x, targets) + self.training

    config = GPTConfig(97, 32, 1, 2, 16, arch=arch)
    plain = to_hf(config, GPT(config).state_dict(), 97)
    for name in ("formats.fingerprint.GPT", "formats.shapes.GPT"):
        monkeypatch.setattr(name, Predicting)
    theirs = to_hf(config, Predicting(config).state_dict(), 97)
    assert theirs.keys() == plain.keys()
    assert from_hf(config, theirs, Path()).keys() == GPT(config).state_dict().keys()


def test_a_changed_model_that_does_not_run_at_this_size_has_the_fingerprint_0(monkeypatch):
    monkeypatch.setattr(model.Attention, "forward", lambda *inputs: 1 / 0)
    assert fingerprint(GPTConfig(97)) == 0.0
