"""formats/huggingface.py: folders of transformers, read in every form, or refused in a sentence."""

import copy
import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from formats import huggingface, pretrained
from formats.run_folder import CheckpointError
from model import GPT, GPTConfig
from tests.conftest import run_script
from tests.formats.conftest import SHAPE, logits_agree, saved


@pytest.mark.parametrize("form", ["safetensors", "old safetensors", "shards", "half"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers_loads_in_every_form(hf_model, tmp_path, form, tied):
    hf = GPT2LMHeadModel(GPT2Config(**SHAPE, tie_word_embeddings=tied)).eval()
    hf.load_state_dict(hf_model.state_dict())
    if not tied:
        hf.lm_head.weight.data.normal_(std=0.1)
    if form == "half":
        hf = hf.to(torch.bfloat16)
    hf.save_pretrained(tmp_path, max_shard_size="30KB" if form == "shards" else "1GB")
    if form == "old safetensors":  # of transformers before May 2023, with causal masks
        path = tmp_path / "model.safetensors"
        masks = {"transformer.h.0.attn.bias": torch.ones(1, 1, 32, 32).tril().to(torch.uint8)}
        masks["transformer.h.1.attn.bias"] = masks["transformer.h.0.attn.bias"].bool()
        save_file(load_file(path) | masks, path)
    expected = len(list(tmp_path.glob("model-*"))) if form == "shards" else 1
    assert len(list(tmp_path.glob("*.safetensors"))) == expected
    source = pretrained.load(tmp_path)
    assert source.tokenizer is None and source.config == GPTConfig(
        512, 32, 2, 2, 32, tie_weights=tied
    )
    model = GPT(source.config).eval()
    model.load_state_dict(source.tensors)
    logits_agree(model, hf.float(), 512)


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        ((12, 12, 768), 124_439_808),
        ((24, 16, 1024), 354_823_168),
        ((36, 20, 1280), 774_030_080),
        ((48, 25, 1600), 1_557_611_200),
    ],
)
def test_all_four_sizes_have_the_right_tensors(tmp_path, shape, parameters):
    layers, heads, width = shape
    hf_shape = GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    hf_shape.save_pretrained(tmp_path)
    with torch.device("meta"):
        hf = GPT2LMHeadModel(hf_shape)
    config = huggingface.read_config(tmp_path)
    assert config == GPTConfig(50257, 1024, layers, heads, width)
    huggingface.from_hf(config, hf.state_dict(), tmp_path)
    with torch.device("meta"):
        assert GPT(config).num_parameters() == parameters == hf.num_parameters()


@pytest.mark.parametrize("form", ["safetensors", "shards", "half"])
def test_a_folder_of_qwen3_loads_in_every_form(qwen3_model, tmp_path, form):
    hf = copy.deepcopy(qwen3_model).to(torch.bfloat16 if form == "half" else torch.float32)
    hf.save_pretrained(tmp_path, max_shard_size="50KB" if form == "shards" else "1GB")
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (form == "shards")
    source = pretrained.load(tmp_path)
    assert (
        source.config.arch == "qwen3"
        and source.config.head_dim == 16
        and source.config.rope_theta == 1e6
    )
    model = GPT(source.config).eval()
    model.load_state_dict(source.tensors)
    logits_agree(
        model, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval(), 512
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"attention_bias": True, "hidden_act": "gelu"},
            "hidden_act = 'gelu', attention_bias = True",
        ),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "rope_type = 'yarn'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"num_hidden_layers": 3}, "h.2.attn.c_attn.weight: missing"),
        ({"num_key_value_heads": 3}, "n_kv_head = 3 does not divide"),
        ({"head_dim": 15}, "heads of 15"),
    ],
)
def test_a_qwen3_that_is_none_is_refused_in_a_sentence(qwen3_model, tmp_path, config, words):
    with pytest.raises(CheckpointError, match=re.escape(words)):
        pretrained.load(saved(qwen3_model, tmp_path, **config))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "llama"}, "'llama'"),
        (
            {"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True},
            "activation_function = 'relu', scale_attn_by_inverse_layer_idx = True",
        ),
        ({"n_inner": 64}, "h.0.mlp.c_fc.bias: (128,), expected (64,)"),
        ({"n_layer": 3}, "h.2.attn.c_attn.bias: missing"),
        ({"vocab_size": 500}, "(512, 32), expected (500, 32)"),
        ({"n_head": 3}, "n_head = 3 does not divide"),
    ],
)
def test_another_architecture_is_refused_in_a_sentence(hf_model, tmp_path, config, words):
    with pytest.raises(CheckpointError, match=re.escape(words)):
        pretrained.load(saved(hf_model, tmp_path, **config))


def test_damaged_files_are_refused(hf_model, tmp_path):
    weights = saved(hf_model, tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-10], whole[:100], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            pretrained.load(tmp_path)
    weights.unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors is missing; .*save_pretrained"):
        pretrained.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": [-1, -512]},
        {"data_offsets": [0, 10**15]},
        {"dtype": "F99"},
        {"shape": None},
        "another's",
    ],
)
def test_a_header_that_lies_is_refused(hf_model, tmp_path, change):
    weights = saved(hf_model, tmp_path) / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    first, second, *_ = (name for name in header if name != "__metadata__")
    header[first] |= header[second] if change == "another's" else change
    changed = json.dumps(header).encode()
    weights.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        pretrained.load(tmp_path)


def test_a_shard_that_is_missing_is_a_sentence(hf_model, tmp_path):
    hf_model.save_pretrained(tmp_path, max_shard_size="30KB")
    min(tmp_path.glob("model-*.safetensors")).unlink()
    with pytest.raises(CheckpointError, match=r"do not fit their description: .*: missing"):
        pretrained.load(tmp_path)


def test_a_missing_package_is_named(hf_model, tmp_path):
    saved(hf_model, tmp_path)
    code = (
        "import sys; sys.modules['safetensors'] = None; from formats import pretrained;"
        f"pretrained.load({str(tmp_path)!r})"
    )
    result = run_script("-c", code)
    assert "CheckpointError" in result.stderr and "pip install safetensors" in result.stderr


def test_a_missing_package_is_named_before_the_weights_are_fetched(monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(CheckpointError, match="pip install safetensors"):
        huggingface.needed(["config.json", "model.safetensors"])
