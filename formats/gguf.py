"""A model and its tokenizer as one GGUF file, which llama.cpp, Ollama and LM Studio run.

The package `gguf` knows the layout of the file and the names of its tensors; this module maps our
values to them.
"""

from pathlib import Path

import gguf
import torch

from formats import huggingface
from formats.conversation import END, Form
from formats.files import atomic_write, writing
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from model import GPTConfig
from tokenizer_bpe import (
    DIGITS_PATTERN,
    GPT2_PATTERN,
    LLAMA3_PATTERN,
    QWEN2_PATTERN,
    QWEN35_PATTERN,
    Tokenizer,
)

# llama.cpp's names for the expressions that split text into words before merging.
PRE = {
    GPT2_PATTERN: "gpt-2",
    DIGITS_PATTERN: "smollm",
    QWEN2_PATTERN: "qwen2",
    LLAMA3_PATTERN: "llama-bpe",
    QWEN35_PATTERN: "qwen35",
}


def write(path: Path, source: Pretrained, form: Form | None) -> None:
    """Write the file, whole or not at all.

    form: of the conversations that the model was trained on; None if it saw none. Raises
    CheckpointError as `check` does.
    """
    config, tokenizer = source.config, source.tokenizer
    pre = check(tokenizer)
    with atomic_write(path) as partial:
        writer = gguf.GGUFWriter(partial, config.arch)
        writer.add_name(path.stem)
        add_shape(writer, config)
        add_tokenizer(writer, tokenizer, pre, form)
        tensors = huggingface.to_hf(config, source.tensors, tokenizer.vocab_size)
        add_tensors(writer, config, tensors)
        with writing(path, "choose a --gguf on another disk"):
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()


def check(tokenizer: Tokenizer) -> str:
    """llama.cpp's name for the way a tokenizer splits text into words.

    Raises CheckpointError if llama.cpp does not support it.
    """
    if tokenizer.kind == "char":
        raise CheckpointError("llama.cpp has no tokenizer of characters; export to --out FOLDER")
    if tokenizer.pattern not in PRE:
        raise CheckpointError(
            f"the tokenizer splits words by {tokenizer.pattern!r:.60}, which llama.cpp lacks: it"
            " would encode prompts differently; export to --out FOLDER"
        )
    return PRE[tokenizer.pattern]


def add_shape(writer, config: GPTConfig) -> None:
    """Write the hyperparameters from which llama.cpp builds the model."""
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(config.block_size)
    writer.add_embedding_length(config.n_embd)
    writer.add_block_count(config.n_layer)
    writer.add_feed_forward_length(config.n_inner)
    writer.add_head_count(config.n_head)
    if config.arch == "gpt2":
        writer.add_layer_norm_eps(config.norm_eps)
    else:
        writer.add_head_count_kv(config.n_kv_head)
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
        writer.add_layer_norm_rms_eps(config.norm_eps)
        writer.add_rope_dimension_count(config.head_dim)  # candle refuses a file without it
        writer.add_rope_freq_base(config.rope_theta)


def add_tokenizer(writer, tokenizer: Tokenizer, pre: str, form: Form | None) -> None:
    """Write vocabulary and merges, in the byte-level alphabet of tokenizer.json.

    form: as in write.
    """
    model = tokenizer.description["model"]
    tokens = [f"<|unused{i}|>" for i in range(tokenizer.vocab_size)]
    types = [gguf.TokenType.UNUSED] * tokenizer.vocab_size
    for token, i in model["vocab"].items():
        tokens[i] = token
        types[i] = gguf.TokenType.NORMAL
    for added in tokenizer.description["added_tokens"]:
        tokens[added["id"]] = added["content"]
        is_text = added["content"] in tokenizer.ordinary
        types[added["id"]] = gguf.TokenType.USER_DEFINED if is_text else gguf.TokenType.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokenizer.eot_id)
    writer.add_eos_token_id(form.markers.get(END, tokenizer.eot_id) if form else tokenizer.eot_id)
    writer.add_add_bos_token(False)
    if form:
        writer.add_chat_template(form.chat_template)


def add_tensors(writer, config: GPTConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write the weights: matrices in float16; norms, biases and positions in float32.

    tensors: float32, with Hugging Face's names and layouts.
    """
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[config.arch.upper()], config.n_layer)
    for theirs, tensor in tensors.items():
        name = names.get_name(theirs, try_suffixes=(".weight", ".bias"))
        if huggingface.is_transposed(config.arch, theirs):
            tensor = tensor.t().contiguous()
        if config.arch == "llama" and theirs.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = paired(tensor, config.head_dim)
        is_matrix = tensor.dim() == 2 and "position" not in name
        writer.add_tensor(name, (tensor.half() if is_matrix else tensor).numpy())


def paired(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Reorder the rows of a query or key matrix to llama.cpp's layout for the architecture `llama`.

    Rotary embeddings rotate row i of a head's first half together with row i of its second half;
    in this layout the two rows are adjacent. weight: [heads x D, C].
    """
    halves = weight.view(-1, 2, head_dim // 2, weight.size(-1))
    return halves.transpose(1, 2).reshape(weight.shape)
