"""formats/gguf.py: all that llama.cpp reads of a file, as its loader looks for it."""

import gguf as package
import pytest
import torch
from gguf import GGUFReader

from formats import gguf
from formats.conversation import PLAIN
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from model import GPT, GPTConfig
from tokenizer_bpe import ALPHABET, EOT, Tokenizer

ADDED = ["<E>", "<think>", "<|fim_pad|>"]  # the last two are not special, as in Qwen3's file
TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "gpt-2",
    "tokenizer.ggml.tokens": [
        "<|unused0|>",
        *sorted(ALPHABET.values()),
        "th",
        "the",
        EOT,
        *ADDED,
    ],
    # 1: normal, 3: control, 4: user-defined, 5: unused
    "tokenizer.ggml.token_type": [5, *[1] * 258, 3, 3, 4, 3],
    "tokenizer.ggml.merges": ["t h", "th e"],
    "tokenizer.ggml.bos_token_id": 259,
    "tokenizer.ggml.eos_token_id": 259,
    "tokenizer.ggml.add_bos_token": False,
}
METADATA = {
    "gpt2": {
        "general.architecture": "gpt2",
        "general.name": "my model",
        "general.file_type": 1,  # float16
        "gpt2.context_length": 48,
        "gpt2.embedding_length": 32,
        "gpt2.block_count": 3,
        "gpt2.feed_forward_length": 80,
        "gpt2.attention.head_count": 4,
        "gpt2.attention.layer_norm_epsilon": pytest.approx(1e-3),
    },
}
for arch in ("qwen3", "llama"):
    METADATA[arch] = {
        "general.architecture": arch,
        "general.name": "my model",
        "general.file_type": 1,
        f"{arch}.context_length": 48,
        f"{arch}.embedding_length": 32,
        f"{arch}.block_count": 3,
        f"{arch}.feed_forward_length": 80,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.head_count_kv": 2,
        f"{arch}.attention.key_length": 24,
        f"{arch}.attention.value_length": 24,
        f"{arch}.attention.layer_norm_rms_epsilon": pytest.approx(1e-3),
        f"{arch}.rope.dimension_count": 24,
        f"{arch}.rope.freq_base": 5e5,
    }
GROUPED = {"n_kv_head": 2, "head_dim": 24, "rope_theta": 5e5, "norm_eps": 1e-3}
SHAPES = {"gpt2": {"norm_eps": 1e-3}, "qwen3": GROUPED, "llama": GROUPED}
MODERN = {"token_embd.weight", "output_norm.weight"}
REST = {
    "gpt2": {"token_embd.weight", "position_embd.weight", "output_norm.weight", "output_norm.bias"},
    "qwen3": MODERN,
    "llama": MODERN,
}


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", METADATA)
def test_a_file_says_all_that_its_programs_need(arch, tied, tmp_path):
    tokenizer = Tokenizer.train(["th\nthe"], 259)
    del tokenizer.description["model"]["vocab"][EOT]
    added = tokenizer.description["added_tokens"]
    added[0]["id"] = 259
    for i, token in enumerate(ADDED, start=260):
        added.append(added[0] | {"id": i, "content": token, "special": token == "<E>"})
    if tied:  # as older files write them
        model = tokenizer.description["model"]
        model["merges"] = [" ".join(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(tokenizer.description)
    sizes = {"block_size": 48, "n_layer": 3, "n_head": 4, "n_embd": 32, "n_inner": 80}
    config = GPTConfig(320, **sizes, arch=arch, tie_weights=tied, **SHAPES[arch])
    source = Pretrained(tmp_path, config, GPT(config).state_dict(), tokenizer, {})
    gguf.write(tmp_path / "my model.gguf", source, PLAIN if tied else None)

    file = GGUFReader(tmp_path / "my model.gguf")
    found = {
        name: field.contents()
        for name, field in file.fields.items()
        if not name.startswith("GGUF.")  # which the package counts
    }
    template = {"tokenizer.chat_template": PLAIN.chat_template} if tied else {}
    assert found == METADATA[arch] | TOKENIZER | template
    outside = {tensor.name for tensor in file.tensors if not tensor.name.startswith("blk.")}
    assert outside == REST[arch] | (set() if tied else {"output.weight"})
    for tensor in file.tensors:
        in_half = len(tensor.shape) == 2 and tensor.name != "position_embd.weight"
        expected = package.GGMLQuantizationType.F16 if in_half else package.GGMLQuantizationType.F32
        assert tensor.tensor_type == expected, tensor.name
    values = {tensor.name: torch.from_numpy(tensor.data.copy()) for tensor in file.tensors}
    exact = source.tensors["wte.weight"][: tokenizer.vocab_size]  # the rest is padding
    assert torch.equal(values["token_embd.weight"], exact.half())
    exact = source.tensors["h.2.mlp.c_proj.weight"]  # which Hugging Face's GPT-2 has transposed
    assert torch.equal(values["blk.2.ffn_down.weight"], exact.half())


def test_llama_cpp_has_the_rows_that_turn_together_next_to_each_other():
    rows = torch.arange(12.0).expand(2, 12).T  # of two heads
    assert gguf.paired(rows, 6)[:, 0].tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]


def splitting_by(pattern):
    """A tokenizer that splits text into words by an expression of its own."""
    split = {"type": "Split", "behavior": "Isolated", "invert": False}
    split["pattern"] = {"Regex": pattern}
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    described = Tokenizer.train([], 257).description
    described["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    return Tokenizer(described)


def test_llama_cpp_has_its_own_names_for_expressions():
    assert gguf.check(splitting_by(gguf.QWEN2_PATTERN)) == "qwen2"
    assert gguf.check(splitting_by(gguf.LLAMA3_PATTERN)) == "llama-bpe"
    assert gguf.check(splitting_by(gguf.QWEN35_PATTERN)) == "qwen35"


def test_a_tokenizer_that_llama_cpp_lacks_is_refused():
    with pytest.raises(CheckpointError, match="the tokenizer splits words by"):
        gguf.check(splitting_by(r"\w+|\W+"))
    with pytest.raises(CheckpointError, match="no tokenizer of characters"):
        gguf.check(Tokenizer.characters("abc"))
