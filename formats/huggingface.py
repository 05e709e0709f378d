"""Weights <-> a folder in Hugging Face's format.

GPT2LMHeadModel for arch = gpt2, Qwen3ForCausalLM for qwen3, LlamaForCausalLM for llama. Knows
config.json, the names and layouts of the tensors, and model.safetensors, whole or in shards. Does
not know how models are trained. "Theirs" are Hugging Face's names and tensors, "ours" model.py's.
"""

import dataclasses
import importlib.util
import re
from collections.abc import Collection, Iterable
from pathlib import Path

import torch

from command_line import our_file
from formats import files, run_folder
from formats.fingerprint import FINGERPRINTS, fingerprint, same
from formats.run_folder import CheckpointError
from formats.shapes import expected_shapes
from model import GPTConfig
from tokenizer_bpe import CONFIGS

# For each architecture: {our name: theirs} for the shape.
MODERN_SHAPE = {
    "vocab_size": "vocab_size",
    "block_size": "max_position_embeddings",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
}
SHAPES = {
    "gpt2": {
        **{name: name for name in ("vocab_size", "n_layer", "n_head", "n_embd", "n_inner")},
        "block_size": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    "qwen3": MODERN_SHAPE,
    "llama": MODERN_SHAPE,
}
DERIVED = ("n_inner", "n_kv_head", "head_dim", "norm_eps")  # null: model.py derives them
# The only values that model.py supports; the first is the default if config.json does not have one.
MODERN_FIXED = {"hidden_act": ["silu"], "attention_bias": [False], "rope_scaling": [None]}
FIXED = {
    "gpt2": {
        "activation_function": ["gelu_new", "gelu_pytorch_tanh"],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "add_cross_attention": [False],
    },
    "qwen3": MODERN_FIXED | {"use_sliding_window": [False]},
    "llama": MODERN_FIXED | {"mlp_bias": [False], "pretraining_tp": [1]},
}
CLASSES = {"gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}
GPT2 = re.compile(r"(w[tp]e|lm_head|(h\.\d+\.)?(ln_[12f]|attn\.c_\w+|mlp\.c_\w+))\.(weight|bias)")
# {our tensor: theirs, which it holds concatenated along the rows}, for qwen3 and llama.
MODERN_LAYER = {
    "ln_1.weight": ["input_layernorm.weight"],
    "attn.c_attn.weight": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "attn.q_norm.weight": ["self_attn.q_norm.weight"],
    "attn.k_norm.weight": ["self_attn.k_norm.weight"],
    "attn.c_proj.weight": ["self_attn.o_proj.weight"],
    "ln_2.weight": ["post_attention_layernorm.weight"],
    "mlp.c_fc.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "mlp.c_proj.weight": ["mlp.down_proj.weight"],
}
MODERN_REST = {
    "wte.weight": ["model.embed_tokens.weight"],
    "ln_f.weight": ["model.norm.weight"],
    "lm_head.weight": ["lm_head.weight"],
}
# GPT-2 stores these as Conv1D, [inputs, outputs]; torch's Linear is [outputs, inputs].
TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
# Buffers that old files store with the weights: causal masks and rotary frequencies.
COMPUTED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
# The other files of a folder.
NEXT_TO_WEIGHTS = (*CONFIGS, "chat_template.jinja", "tokenizer.json", "vocab.json")
WHOLE = "model.safetensors"
SAFETENSORS = re.compile(r"model(-\d+-of-(\d+))?\.safetensors")


# -- config.json -----------------------------------------------------------------------------------


def read_config(folder: Path) -> GPTConfig:
    """The model's shape from a folder's config.json. Raises as config_of() does."""
    path = folder / "config.json"
    return config_of(files.read_json(path), path)


def config_of(values: dict, path: str | Path) -> GPTConfig:
    """The model's shape from the values of a config.json; path: its name, for messages.

    Raises CheckpointError, which lists everything that model.py does not support.
    """
    arch = values["model_type"]
    if arch not in SHAPES:
        raise CheckpointError(
            f"{path} describes the architecture {arch!r}; only gpt2, qwen3 and llama can be loaded"
        )
    values = {name: value for name, value in values.items() if value is not None}
    # The name and the place that transformers 5 reads first, and those of older programs.
    rope = values.pop("rope_scaling", None) or values.get("rope_parameters") or {}
    rope = rope if isinstance(rope, dict) else {"rope_type": rope}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    tied = values.get("tie_word_embeddings", arch == "gpt2")  # transformers' defaults
    odd = []
    for name, allowed in FIXED[arch].items():
        if values.get(name, allowed[0]) not in allowed:
            odd.append(f"{name} = {values[name]!r}")
    if rope_type != "default":
        odd.append(f"rope_type = {rope_type!r}")
    if any(kind != "full_attention" for kind in values.get("layer_types", [])):
        odd.append("layer_types with other than full_attention")
    if values.get("quantization_config"):
        odd.append("quantization_config")
    if odd:
        raise CheckpointError(f"{path}: {', '.join(odd)}; model.py does not build that")
    values["rope_theta"] = rope.get("rope_theta") or values.get("rope_theta", 10_000.0)
    shape = {ours: values.get(theirs) for ours, theirs in SHAPES[arch].items()}
    for ours, value in shape.items():
        if value is None and ours in DERIVED:
            continue
        if not isinstance(value, int | float) or value <= 0:
            name = SHAPES[arch][ours]
            raise CheckpointError(f"{path}: {name} = {value!r}, but it must be a number above 0")
    try:
        return GPTConfig(**shape, arch=arch, tie_weights=tied)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_end_ids(folder: Path) -> list[int]:
    """The ids that end a text, from generation_config.json, else from config.json."""
    for name in ("generation_config.json", "config.json"):
        value = files.read_json(folder / name).get("eos_token_id")
        if value is not None:
            return value if isinstance(value, list) else [value]
    return []


def read_chat_template(folder: Path) -> str:
    """The Jinja template for the model's conversations; "" if it has none."""
    template = files.read_json(folder / "tokenizer_config.json").get("chat_template")
    # It may also be null, or a list of named templates.
    return files.read_text(folder / "chat_template.jinja") or str(template or "")


def config_values(config: GPTConfig, vocab_size: int, end_id: int | None) -> dict:
    """The content of config.json for a model of ours.

    vocab_size: without padding ids. end_id: of end-of-text.
    """
    arch = config.arch
    values = {"model_type": arch, "architectures": [CLASSES[arch]], "dtype": "float32"}
    values |= {theirs: getattr(config, ours) for ours, theirs in SHAPES[arch].items()}
    values |= {name: allowed[0] for name, allowed in FIXED[arch].items()}
    values |= {"vocab_size": vocab_size, "tie_word_embeddings": config.tie_weights}
    values |= {"bos_token_id": end_id, "eos_token_id": end_id}
    if arch == "gpt2":
        values |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), config.dropout)
    else:  # transformers 5 reads rope_theta here
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if arch == "qwen3":  # mistral.rs and candle refuse a file without it
        values["max_window_layers"] = config.n_layer
    return values


# -- tensors ---------------------------------------------------------------------------------------


def to_hf(
    config: GPTConfig, tensors: dict[str, torch.Tensor], vocab_size: int
) -> dict[str, torch.Tensor]:
    """Convert our tensors to their names and layouts, float32.

    Drops the rows of padding ids, from vocab_size on. A GPT-2 without biases gets zeros for them.
    Raises CheckpointError if model.py has been changed and computes something else than they do.
    """
    if not same(fingerprint(config), FINGERPRINTS[config.arch]):
        raise CheckpointError(
            f"model.py computes something else than {CLASSES[config.arch]}, as other programs would"
            " from these weights; such a model has no export, and runs here alone"
        )
    if config.arch == "gpt2":
        with_biases = expected_shapes(dataclasses.replace(config, bias=True))
        missing = with_biases.keys() - tensors.keys()
        tensors = tensors | {name: torch.zeros(with_biases[name]) for name in missing}
    out = {}
    for name, tensor in tensors.items():
        names = their_names(config.arch, name)
        if not names or (name == "lm_head.weight" and config.tie_weights):
            continue
        if name in ("wte.weight", "lm_head.weight"):
            tensor = tensor[:vocab_size]
        if is_transposed(config.arch, name):
            tensor = tensor.t()
        for theirs, part in zip(names, _split(config, tensor, len(names)), strict=True):
            out[theirs] = part.float().contiguous()
    return out


def from_hf(
    config: GPTConfig, tensors: dict[str, torch.Tensor], folder: Path
) -> dict[str, torch.Tensor]:
    """Convert their tensors to our names and layouts, float32.

    Leaves out what someone has added to model.py. Raises CheckpointError, naming the folder, unless
    the rest fits a model of this shape exactly.
    """
    left = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("_orig_mod.")  # of a model that torch.compile has wrapped
        if config.arch == "gpt2" and not name.startswith(("transformer.", "lm_head.")):
            name = f"transformer.{name}"  # as in the first GPT-2 files
        if not name.endswith(COMPUTED):
            left[name] = tensor
    expected, out, wrong = expected_shapes(config), {}, []
    if config.tie_weights:
        del expected["lm_head.weight"]
        _tie(left, config.arch, folder)
    for name, shape in expected.items():
        names = their_names(config.arch, name)
        if not names:
            continue
        parts = [left.pop(theirs, None) for theirs in names]
        if any(part is None for part in parts):
            wrong.append(f"{name}: missing")
            continue
        tensor = torch.cat([part.float() for part in parts])
        out[name] = tensor.t().contiguous() if is_transposed(config.arch, name) else tensor
        if out[name].shape != shape:
            wrong.append(f"{name}: {tuple(out[name].shape)}, expected {shape}")
    wrong += [f"{name}: no such tensor" for name in left]
    if wrong:
        raise CheckpointError(
            f"the weights in {folder} do not fit config.json: {len(wrong)} of them, first"
            f" {wrong[0]}; both must come from the same model"
        )
    if config.tie_weights:
        out["lm_head.weight"] = out["wte.weight"]
    return out


def _tie(tensors, arch, folder):
    """Keep the embedding alone of their two names for it; a file may have either or both."""
    head = tensors.pop("lm_head.weight", None)
    if head is None:
        return
    embedding = tensors.setdefault(their_names(arch, "wte.weight")[0], head)
    if not torch.equal(embedding, head):
        raise CheckpointError(
            f"the weights in {folder} have an lm_head.weight that differs from the embedding, but"
            " its config.json ties the two: write tie_word_embeddings = false there"
        )


def is_transposed(arch: str, name: str) -> bool:
    """True if their layout of a tensor is the transpose of ours. name: ours or theirs."""
    return arch == "gpt2" and name.endswith(TRANSPOSED)


def their_names(arch: str, name: str) -> list[str]:
    """Their names for one of our tensors, which may hold several of theirs.

    Empty for a tensor that someone has added to model.py.
    """
    if arch == "gpt2":
        own = [name if name == "lm_head.weight" else f"transformer.{name}"]
        return own if GPT2.fullmatch(name) else []
    layer = re.fullmatch(r"h\.(\d+)\.(.+)", name)
    if not layer:
        return MODERN_REST.get(name, [])
    return [f"model.layers.{layer[1]}.{part}" for part in MODERN_LAYER.get(layer[2], [])]


def _split(config, tensor, count):
    """Split one of our tensors into their `count`: queries, keys and values, or equal parts."""
    if count == 3:
        heads = (config.n_head, config.n_kv_head, config.n_kv_head)
        return tensor.split([number * config.head_dim for number in heads])
    return tensor.chunk(count)


# -- files -----------------------------------------------------------------------------------------


def weights_among(names: Iterable[str]) -> list[str]:
    """The files of weights: the whole one, which transformers also prefers, or else the shards."""
    found = sorted(filter(SAFETENSORS.fullmatch, names))
    return [WHOLE] if WHOLE in found else found


def check_weights(names: Collection[str], folder: str | Path) -> None:
    """Raises CheckpointError if a folder lacks weights, any shard of them, or has those of two.

    Also if the package safetensors is missing. names: the files in the folder.
    """
    found = weights_among(names)
    if not found:
        hint = run_folder.other_format(names) or "if you downloaded it, repeat the download"
        raise CheckpointError(f"{folder} has no {WHOLE}; {hint}")
    totals = {int(SAFETENSORS.fullmatch(name)[2] or 1) for name in found}
    if len(totals) > 1:
        raise CheckpointError(
            f"{folder} holds the weights of two models, in {files.few(found)}; delete the files"
            f" that {WHOLE}.index.json does not name"
        )
    if len(found) < max(totals):
        raise CheckpointError(
            f"{folder} has {len(found)} of the {max(totals)} files of its weights; repeat the"
            " download"
        )
    if not importlib.util.find_spec("safetensors"):
        raise CheckpointError(
            "the package safetensors is needed for these weights:"
            f" pip install safetensors -c {our_file('constraints.txt')}"
        )


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, from one file or from shards, under their names.

    Raises CheckpointError for a damaged file. The folder has passed check_weights.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    tensors = {}
    for name in weights_among(file.name for file in folder.iterdir()):
        path = folder / name
        try:
            tensors |= load_file(path)
        except (OSError, ValueError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} is damaged, or not a safetensors file ({files.error_message(error)});"
                " repeat the download, or run git lfs pull if git cloned it"
            ) from None
    return tensors
