"""Shared by the tests of formats: small models of transformers, and how two models compare."""

import json

import pytest
import torch


def small_gpt2(tied=True):
    """A small GPT-2 of transformers with random weights, biases included."""
    from transformers import GPT2Config, GPT2LMHeadModel  # seconds, which the other tests save

    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}
    shape["layer_norm_epsilon"] = 0.01
    ids = {"vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**shape, **ids, tie_word_embeddings=tied)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.1)
    return model


def small_qwen3(tied=True, arch="qwen3"):
    """A small Qwen3 of transformers with random weights; two queries share keys if it is tied."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2 if tied else 4, "head_dim": 16}
    sizes = {"vocab_size": 512, "max_position_embeddings": 64, "tie_word_embeddings": tied}
    numbers = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 0.01}
    torch.manual_seed(0)
    config = AutoConfig.for_model(arch, **shape, **heads, **sizes, **numbers)
    model = AutoModelForCausalLM.from_config(config).eval()
    for name, p in model.named_parameters():
        p.data.normal_(mean=float("norm" in name), std=0.1)
    return model


def small_llama(tied=True):
    """As small_qwen3, a Llama."""
    return small_qwen3(tied, "llama")


@pytest.fixture(scope="module")
def hf_model():
    """One for tests that only read it."""
    return small_gpt2()


def logits_agree(model, hf, vocab_size):
    """Assert that two models give the same logits, to 1e-4, over the whole context."""
    idx = torch.randint(
        vocab_size, (3, model.config.block_size), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[..., :vocab_size], hf(idx).logits, rtol=0, atol=1e-4)


def saved(hf_model, folder, **config):
    """The model in a folder, with values of config.json replaced."""
    hf_model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder
