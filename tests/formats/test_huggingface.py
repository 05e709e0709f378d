"""formats/huggingface.py: folders of transformers, read in every form, or refused in a sentence."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load, save_file
from transformers import AutoModelForCausalLM

import hardware
from formats import huggingface, pretrained
from formats.run_folder import CheckpointError
from tests.formats.conftest import logits_agree, saved, small_gpt2, small_llama, small_qwen3

MODELS = {"gpt2": small_gpt2, "qwen3": small_qwen3, "llama": small_llama}


@pytest.mark.parametrize("form", ["one file", "shards", "half"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", MODELS)
def test_a_folder_of_transformers_loads_in_every_form(tmp_path, arch, tied, form):
    model = MODELS[arch](tied).to(torch.bfloat16 if form == "half" else torch.float32)
    model.save_pretrained(tmp_path, max_shard_size="30KB" if form == "shards" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (form == "shards")
    source = pretrained.load(tmp_path)
    assert source.config.arch == arch
    assert source.config.tie_weights == tied
    assert source.tokenizer is None
    ours = source.model().eval()
    assert (ours.lm_head.weight is ours.wte.weight) == tied
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    logits_agree(ours, theirs.eval(), 512)


def test_a_gpt2_of_the_first_files_loads(hf_model, tmp_path):
    """With causal masks, without a prefix, and with a config.json of few names."""
    weights = saved(hf_model, tmp_path) / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): t for name, t in load(weights.read_bytes()).items()
    }
    tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(tensors, weights)
    names = ["model_type", "vocab_size", "n_layer", "n_head", "n_embd", "n_positions"]
    names.append("layer_norm_epsilon")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in names}))
    logits_agree(pretrained.load(tmp_path).model().eval(), hf_model, 512)


def test_a_llama_of_the_first_files_loads(tmp_path):
    """With the rotary positions' wavelengths, and a config.json of few names."""
    model = small_llama(tied=False)
    weights = saved(model, tmp_path) / "model.safetensors"
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(load(weights.read_bytes()) | frequencies, weights)
    names = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"]
    names += ["num_attention_heads", "max_position_embeddings", "head_dim"]
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({name: config[name] for name in names}))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    logits_agree(pretrained.load(tmp_path).model().eval(), theirs.eval(), 512)


@pytest.mark.parametrize("arch", MODELS)
def test_tied_weights_may_have_either_name_but_not_two_values(tmp_path, arch):
    model = MODELS[arch](tied=True)
    weights = saved(model, tmp_path) / "model.safetensors"
    plain = load(weights.read_bytes())
    embedding = huggingface.their_names(arch, "wte.weight")[0]
    head = {"lm_head.weight": plain[embedding].clone()}
    others = {name: tensor for name, tensor in plain.items() if name != embedding}
    for tensors in (plain | head, others | head):
        save_file(tensors, weights, metadata={"format": "pt"})
        logits_agree(pretrained.load(tmp_path).model().eval(), model, 512)

    head["lm_head.weight"][0, 0] += 1
    save_file(plain | head, weights, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="differs from the embedding, but its config"):
        pretrained.load(tmp_path)
    saved(model, tmp_path, tie_word_embeddings=False)
    save_file(plain | head, weights, metadata={"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    logits_agree(pretrained.load(tmp_path).model().eval(), theirs.eval(), 512)


@pytest.mark.parametrize(
    ("arch", "config"),
    [
        ("gpt2", {"tie_word_embeddings": None, "add_cross_attention": None}),
        ("qwen3", {"attention_bias": None, "rope_scaling": {"type": "default"}, "rope_theta": 1e6}),
        ("qwen3", {"rope_parameters": {"rope_theta": 1e6}, "rope_theta": 5e5}),
        ("llama", {"rope_scaling": {"rope_type": "default", "rope_theta": 1e6}}),
        ("llama", {"rope_parameters": None, "rope_theta": 1e6, "mlp_bias": None}),
    ],
)
def test_null_and_rotary_positions_without_scaling_are_the_defaults(tmp_path, arch, config):
    model = MODELS[arch](arch == "gpt2")
    plain = huggingface.read_config(saved(model, tmp_path))
    assert huggingface.read_config(saved(model, tmp_path, **config)) == plain


@pytest.mark.parametrize(
    ("arch", "config", "words"),
    [
        ("gpt2", {"model_type": "mamba"}, "'mamba'; only gpt2, qwen3 and llama can be loaded"),
        ("gpt2", {"n_layer": "2"}, "n_layer = '2', but it must be a number above 0"),
        ("gpt2", {"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            "gpt2",
            {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
            "activation_function = 'relu', scale_attn_by_inverse_layer_idx = True",
        ),
        (
            "gpt2",
            {"n_inner": 64},
            "first h.0.mlp.c_fc.weight: (128, 32), expected (64, 32); both must",
        ),
        ("gpt2", {"n_layer": 3}, "first h.2.ln_1.weight: missing"),
        ("gpt2", {"n_layer": 1}, "transformer.h.1.attn.c_attn.bias: no such tensor"),
        ("gpt2", {"n_head": 3}, "n_head = 3 does not divide"),
        (
            "qwen3",
            {"attention_bias": True, "hidden_act": "gelu"},
            "hidden_act = 'gelu', attention_bias = True",
        ),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn'"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "rope_type = 'llama3'"),
        ("llama", {"rope_scaling": "linear"}, "rope_type = 'linear'"),
        ("llama", {"rope_parameters": {"type": "linear", "factor": 2}}, "rope_type = 'linear'"),
        (
            "llama",
            {"hidden_act": "gelu", "attention_bias": True, "mlp_bias": True, "pretraining_tp": 2},
            "hidden_act = 'gelu', attention_bias = True, mlp_bias = True, pretraining_tp = 2",
        ),
        ("llama", {"hidden_size": None}, "hidden_size = None, but it must be a number above 0"),
    ],
)
def test_another_architecture_is_refused_in_a_sentence(tmp_path, arch, config, words):
    with pytest.raises(CheckpointError, match=re.escape(words)):
        pretrained.load(saved(MODELS[arch](), tmp_path, **config))


def test_weights_beyond_the_free_memory_are_not_read(hf_model, tmp_path, monkeypatch):
    folder = saved(hf_model, tmp_path)
    needed = 4 * hf_model.num_parameters()
    monkeypatch.setattr(hardware, "free_ram", lambda: needed)
    pretrained.load(folder)
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(hardware, "free_ram", lambda: needed - 1)
    with pytest.raises(
        CheckpointError, match=r"take 0\.0 GB of memory in float32, and 0\.0 GB are"
    ):
        pretrained.load(folder)


def test_damaged_weights_are_named(hf_model, tmp_path):
    weights = saved(hf_model, tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        pretrained.load(tmp_path)


def test_shards_of_another_save_are_not_mixed_in(tmp_path):
    """The older files stay where a program saves over them with another size of the shards."""
    model = small_gpt2()
    model.save_pretrained(tmp_path, max_shard_size="30KB")
    older = {path: path.read_bytes() for path in tmp_path.glob("*-of-*.safetensors")}
    model.transformer.wpe.weight.data.zero_()
    saved(model, tmp_path)
    for path, content in older.items():
        path.write_bytes(content)
    logits_agree(pretrained.load(tmp_path).model().eval(), model, 512)

    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    with pytest.raises(CheckpointError, match=r"two models, .*delete the files that model\.safe"):
        pretrained.load(tmp_path)


def test_a_missing_package_is_named_before_weights_are_fetched_too(hf_model, tmp_path, monkeypatch):
    saved(hf_model, tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        pretrained.load(tmp_path)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        huggingface.check_weights(["config.json", "model.safetensors"], "hf://ORG/NAME")
