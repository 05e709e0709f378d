"""A model and its tokenizer as one GGUF file, which llama.cpp, Ollama and LM Studio run.

The package `gguf` knows the layout of the file and the names of its tensors; this file knows what
of ours goes where.
"""

from pathlib import Path

import gguf
import torch

from formats import huggingface
from formats.conversation import CHAT_TEMPLATE
from formats.files import atomic_write, writing
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import GPT2_PATTERN, Tokenizer, spell

# The type of the matrices, and of the file; norms, biases and positions are float32.
F32 = gguf.GGMLQuantizationType.F32
TYPES = {
    "f32": (F32, gguf.LlamaFileType.ALL_F32),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
}
BLOCK = 32  # numbers; q8_0 stores a row in such blocks
# How text is split into words before merging: the expression, and llama.cpp's name for it.
QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
PRE = {GPT2_PATTERN: "gpt-2", QWEN2_PATTERN: "qwen2"}


def write(
    path: Path, source: Pretrained, kind: str = "f16", name: str = "model", chat: bool = False
) -> None:
    """Write the file, whole or not at all.

    kind: of TYPES. chat: whether it was trained on conversations. Raises CheckpointError for what
    the format cannot hold.
    """
    config, tokenizer = source.config, source.tokenizer
    pre = check(config, tokenizer, kind)
    with atomic_write(path) as partial:
        writer = gguf.GGUFWriter(partial, config.arch)
        add_shape(writer, config, kind, name)
        add_tokenizer(writer, tokenizer, pre, chat)
        tensors = huggingface.to_hf(config, source.tensors, tokenizer.vocab_size)
        add_tensors(writer, config, tensors, kind)
        with writing(path, "choose a --gguf on another disk"):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def check(config: GPTConfig, tokenizer: Tokenizer, kind: str) -> str:
    """llama.cpp's name for how the tokenizer splits words.

    Raises CheckpointError for what GGUF cannot hold.
    """
    widths = {
        "n_embd": config.n_embd,
        "n_inner": config.n_inner,
        "n_head x head_dim": config.n_head * config.head_dim,
    }
    odd = [f"{name} = {width}" for name, width in widths.items() if width % BLOCK]
    if kind == "q8_0" and odd:
        raise CheckpointError(
            f"{', '.join(odd)}: q8_0 needs multiples of {BLOCK}; take --gguf_type f16"
        )
    if tokenizer.kind == "char":
        return "gpt-2"
    if tokenizer.pattern not in PRE:
        raise CheckpointError(
            f"the tokenizer splits words by {tokenizer.pattern!r}; llama.cpp knows the expressions"
            " of GPT-2 and Qwen only, and would encode prompts differently"
        )
    return PRE[tokenizer.pattern]


def add_shape(writer, config: GPTConfig, kind: str, name: str) -> None:
    """Write the numbers from which llama.cpp builds the model."""
    writer.add_name(name)
    writer.add_file_type(TYPES[kind][1])
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    if config.arch == "gpt2":
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_head_count_kv(config.n_kv_head)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(config.rope_theta)


def add_tokenizer(writer, tokenizer: Tokenizer, pre: str, chat: bool) -> None:
    """Write vocabulary and merges, in the byte-level alphabet of tokenizer.json."""
    model = tokenizer.description["model"]
    vocab, merges = model["vocab"], model["merges"]
    if tokenizer.kind == "char":
        vocab, merges = characters_as_bytes(tokenizer)
    tokens = [f"<|unused{i}|>" for i in range(tokenizer.vocab_size)]
    types = [gguf.TokenType.UNUSED] * tokenizer.vocab_size
    for token, i in vocab.items():
        tokens[i] = token
        types[i] = gguf.TokenType.NORMAL
    for added in tokenizer.description["added_tokens"]:
        tokens[added["id"]] = added["content"]
        types[added["id"]] = gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(tokenizer.eot_id)
    writer.add_eos_token_id(tokenizer.eot_id)
    writer.add_add_bos_token(False)
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)


def characters_as_bytes(tokenizer: Tokenizer) -> tuple[dict[str, int], list[str]]:
    """A character-level tokenizer as byte-level BPE: merges join each character's bytes."""
    vocab = {}
    # llama.cpp needs at least one merge; no UTF-8 has this byte. A dict, to keep each merge once.
    merges = {" ".join(spell(b"\xc0\xc0")): None}
    for char, i in tokenizer.description["model"]["vocab"].items():
        if i == tokenizer.eot_id:
            continue
        text = spell(char.encode())
        vocab[text] = i
        for end in range(1, len(text)):
            merges[f"{text[:end]} {text[end]}"] = None
    return vocab, list(merges)


def add_tensors(writer, config: GPTConfig, tensors: dict[str, torch.Tensor], kind: str) -> None:
    """Write the weights. tensors: as Hugging Face names and lays them out, float32."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.arch.upper()], config.n_layer)
    for theirs, tensor in tensors.items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if huggingface.is_transposed(config.arch, theirs):
            tensor = tensor.t().contiguous()
        is_matrix = tensor.dim() == 2 and "position" not in name
        stored = TYPES[kind][0] if is_matrix else F32
        data = gguf.quants.quantize(tensor.numpy(), stored)
        writer.add_tensor(name, data, raw_dtype=stored)
