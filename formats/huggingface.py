"""Weights <-> a folder in Hugging Face's format.

GPT2LMHeadModel for arch = gpt2, Qwen3ForCausalLM for qwen3. Knows config.json, the names and
layouts of the tensors, and model.safetensors, also in shards. Does not know how models are trained.
"""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Iterable
from pathlib import Path

import torch

from formats import files
from formats.run_folder import CheckpointError
from model import GPTConfig, expected_shapes
from tokenizer_bpe import Tokenizer

# For each architecture: our shape's names and theirs.
SHAPES = {
    "gpt2": {
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd")},
        "block_size": "n_positions",
    },
    "qwen3": {
        "vocab_size": "vocab_size",
        "block_size": "max_position_embeddings",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_kv_head": "num_key_value_heads",
        "n_embd": "hidden_size",
        "n_inner": "intermediate_size",
        "head_dim": "head_dim",
    },
}
TIED = {"gpt2": True, "qwen3": False}  # where config.json lacks tie_word_embeddings
# The only values that model.py builds; the first is that of a config.json without the name.
FIXED = {
    "gpt2": {
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
        "layer_norm_epsilon": [1e-5],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "add_cross_attention": [False],
    },
    "qwen3": {
        "hidden_act": ["silu"],
        "rms_norm_eps": [1e-6],
        "attention_bias": [False],
        "use_sliding_window": [False],
        "rope_scaling": [None],
    },
}
CLASSES = {"gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM"}
# A tensor of our Qwen3 holds these of theirs, one below the other.
QWEN3_LAYER = {
    "ln_1.weight": ["input_layernorm.weight"],
    "attn.c_attn.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "attn.q_norm.weight": ["self_attn.q_norm.weight"],
    "attn.k_norm.weight": ["self_attn.k_norm.weight"],
    "attn.c_proj.weight": ["self_attn.o_proj.weight"],
    "ln_2.weight": ["post_attention_layernorm.weight"],
    "mlp.c_fc.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.c_proj.weight": ["mlp.down_proj.weight"],
}
QWEN3_REST = {
    "wte.weight": ["model.embed_tokens.weight"],
    "ln_f.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
# GPT-2's code had Conv1D, [inputs, outputs], where torch has Linear.
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
MASKS = (".attn.bias", ".attn.masked_bias")  # causal masks in old GPT-2 files
# The files of a folder.
BESIDE_WEIGHTS = ("config.json", "tokenizer.json", "vocab.json", "merges.txt")
SAFETENSORS = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?")


# -- config.json -----------------------------------------------------------------------------------


def read_config(folder: Path) -> GPTConfig:
    """The shape in a config.json.

    Raises CheckpointError for what is missing, and listing all that model.py does not build.
    """
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    arch = values["model_type"]
    if arch not in list(SHAPES):
        raise CheckpointError(
            f"{path} describes the architecture {arch!r}; only gpt2 and qwen3 can be loaded"
        )
    try:
        odd = _not_built_here(arch, values)
        if odd:
            raise ValueError(f"{', '.join(odd)}; model.py does not build that")
        shape = {ours: values[theirs] for ours, theirs in SHAPES[arch].items()}
        if arch == "gpt2":
            shape["n_inner"] = values.get("n_inner")
        else:
            rope = values.get("rope_parameters") or {}
            shape["rope_theta"] = float(values.get("rope_theta") or rope["rope_theta"])
        tied = bool(values.get("tie_word_embeddings", TIED[arch]))
        return GPTConfig(**shape, arch=arch, tie_weights=tied)
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from None
    except (TypeError, ValueError, AttributeError) as error:  # values of another type, too
        raise CheckpointError(f"{path}: {error}") from None


def _not_built_here(arch, values):
    """What a config.json asks for and model.py does not build, in words."""
    odd = []
    for name, allowed in FIXED[arch].items():
        value = values.get(name, allowed[0])
        if value not in allowed:
            odd.append(f"{name} = {value!r}")
    rope = values.get("rope_parameters") or {}
    if rope.get("rope_type", "default") != "default":
        odd.append(f"rope_type = {rope['rope_type']!r}")
    if any(kind != "full_attention" for kind in values.get("layer_types") or []):
        odd.append("layer_types with other than full_attention")
    return odd


def config_values(config: GPTConfig, tokenizer: Tokenizer) -> dict:
    """The content of config.json for a model of ours, with the vocabulary of its tokenizer."""
    arch = config.arch
    values = {"model_type": arch, "architectures": [CLASSES[arch]], "dtype": "float32"}
    values |= {theirs: getattr(config, ours) for ours, theirs in SHAPES[arch].items()}
    values |= {name: allowed[0] for name, allowed in FIXED[arch].items()}
    values |= {"vocab_size": tokenizer.vocab_size, "tie_word_embeddings": config.tie_weights}
    values |= {"bos_token_id": tokenizer.eot_id, "eos_token_id": tokenizer.eot_id}
    if arch == "gpt2":
        values["n_inner"] = config.n_inner
        values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    else:  # transformers reads the second from version 5 on, older programs the first
        values["rope_theta"] = config.rope_theta
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    return values


# -- tensors ---------------------------------------------------------------------------------------


def to_hf(
    config: GPTConfig, tensors: dict[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """A model's tensors under their names and in their layout, float32.

    Ids from vocab_size on, padding, are left out. A GPT-2 without biases gets biases of zeros.
    """
    if config.arch == "gpt2":
        with_biases = expected_shapes(dataclasses.replace(config, bias=True))
        missing = with_biases.keys() - tensors.keys()
        tensors = tensors | {name: torch.zeros(with_biases[name]) for name in missing}
    out = {}
    for name, tensor in tensors.items():
        if name == "lm_head.weight" and config.tie_weights:
            continue
        if name in ("wte.weight", "lm_head.weight"):
            tensor = tensor[:vocab_size]
        if is_transposed(config.arch, name):
            tensor = tensor.t()
        names = their_names(config.arch, name)
        for theirs, part in zip(names, _split(config, tensor, len(names)), strict=True):
            out[theirs] = part.float().contiguous()
    return out


def from_hf(config: GPTConfig, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Their tensors under our names and in our layout, float32.

    What has no place in our model keeps its name, for check_tensors to find.
    """
    left = {}
    for name, tensor in tensors.items():
        if config.arch == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"  # as in the first GPT-2 files
        if not name.endswith(MASKS):
            left[name] = tensor
    out = {}
    for name in expected_shapes(config):
        names = their_names(config.arch, name)
        if all(theirs in left for theirs in names):
            tensor = torch.cat([left.pop(theirs).float() for theirs in names])
            out[name] = tensor.t().contiguous() if is_transposed(config.arch, name) else tensor
    if config.tie_weights and "wte.weight" in out:
        out["lm_head.weight"] = out["wte.weight"]
    return out | left


def is_transposed(arch: str, name: str) -> bool:
    """Whether their tensor is ours transposed. name: ours or theirs."""
    return arch == "gpt2" and name.endswith(TRANSPOSED)


def their_names(arch: str, name: str) -> list[str]:
    """What a tensor of ours is called there; several names where it holds several of theirs."""
    if arch == "gpt2":
        return [name if name == "lm_head.weight" else f"transformer.{name}"]
    layer = re.fullmatch(r"h\.(\d+)\.(.+)", name)
    if not layer:
        return QWEN3_REST[name]
    return [f"model.layers.{layer[1]}.{part}" for part in QWEN3_LAYER[layer[2]]]


def _split(config, tensor, count):
    """Their `count` tensors in one of ours: queries, keys and values, or equal parts."""
    if count == 3:
        heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        return tensor.split([number * config.head_dim for number in heads])
    return tensor.chunk(count)


# -- files -----------------------------------------------------------------------------------------


def needed(names: Iterable[str]) -> list[str]:
    """Those of the files of a folder in this format that are read.

    Raises CheckpointError where the package that reads them is missing.
    """
    _check_package()
    return [name for name in names if name in BESIDE_WEIGHTS or SAFETENSORS.fullmatch(name)]


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder under their names there, of one file or of several with an index.

    Raises CheckpointError for a missing or damaged file.
    """
    index = files.read_json(folder / "model.safetensors.index.json", weight_map=dict)
    names = {"model.safetensors"}
    if index:
        names = {Path(str(name)).name for name in index["weight_map"].values()}
    tensors = {}
    for name in sorted(names):
        tensors |= read_safetensors(folder / name)
    return tensors


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a .safetensors file.

    Raises CheckpointError for a missing or damaged file, and where the package is missing.
    """
    _check_package()
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; weights in pytorch_model.bin become one with transformers:"
            " AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(OUT)"
        ) from None
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged, or no safetensors file ({files.error_message(error)})"
        ) from None


def _check_package():
    if not importlib.util.find_spec("safetensors"):
        raise CheckpointError(
            "the package safetensors is needed for these weights:"
            " pip install safetensors -c constraints.txt"
        )
