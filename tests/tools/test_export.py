"""tools/export.py and formats/gguf.py: what is exported, run by the programs that it is for."""

import ast
import json
import shlex

import ctranslate2
import numpy as np
import pytest
import torch
from ctranslate2.converters import TransformersConverter
from gguf import GGUFReader
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    pipeline,
)

from formats import pretrained, run_folder
from formats.conversation import PLAIN
from formats.data_folder import IN_REPLY
from formats.huggingface import to_hf
from formats.pretrained import Pretrained
from formats.run_folder import CheckpointError
from generating import decode
from generating.load import load_model
from generating.text import Conversation
from model import GPT, GPTConfig
from tests.conftest import (
    fails_clearly,
    llama_cpp,
    ok,
    prepare,
    prose,
    reciting,
    run_code,
    run_script,
    trained,
    write_conversations,
)
from tests.formats.conftest import logits_agree
from tokenizer_bpe import EOT, QWEN35_PATTERN, Tokenizer
from tools import export

PROMPT = "The name of the"
HINDI = "हिन्दी में लिखते हैं, क्या?\n\n"
# Each form of model and kind of tokenizer, with a context that holds 100 tokens of text.
RUNS = {
    "gpt2, tied, no biases": ["--tie_weights=True", "--bias=False"],
    "gpt2": ["--tie_weights=False", "--bias=True"],
    "qwen3, grouped, tied": [],  # its shape is that of grouped_qwen3
    "llama, characters": ["--arch=llama", "--tie_weights=False", "--zero_init=True"],
    "llama, grouped, words with marks": ["--arch=llama", "--n_kv_head=1", "--tie_weights=False"],
}


def prompt_for(tokenizer):
    """A prompt in the words of the text that the tokenizer was trained on."""
    return HINDI if tokenizer.pattern == QWEN35_PATTERN else PROMPT


def greedy(model, tokenizer, prompt, count):
    """Our own greedy continuation, up to the end of the text."""
    ids = tokenizer.encode(prompt).tolist()
    vocab_size = tokenizer.vocab_size
    new = [i for (i,) in decode.generate(model, [ids], count, temperature=0, vocab_size=vocab_size)]
    if tokenizer.eot_id in new:
        new = new[: new.index(tokenizer.eot_id)]
    return tokenizer.decode(new)


def assert_greedy(model, tokenizer, prompt, new, count):
    """Assert that a greedy continuation is one of ours. Two tokens may be equally likely."""
    ids = tokenizer.encode(prompt).tolist()
    new = [*new, tokenizer.eot_id][:count]
    logits = model(torch.tensor([[*ids, *new]]))[0, len(ids) - 1 : -1]
    chosen = logits[torch.arange(len(new)), new]
    torch.testing.assert_close(chosen, logits.amax(1), rtol=0, atol=1e-3)


def grouped_qwen3(folder):
    """A folder of transformers with a small Qwen3 whose queries share keys and values."""
    shape = {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "intermediate_size": 96,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    }
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=RUNS)
def exported(request, tmp_path_factory, char_data, bpe_data):
    """A short run of each, the folder that holds its exports, our own model, and its tokenizer.

    The exports are hf/ for transformers and run.gguf; characters have none of the latter.
    """
    folder = tmp_path_factory.mktemp("exported")
    run, out = folder / "run", folder / "out"
    data, targets = bpe_data, ["--out", out / "hf", "--gguf", out / "run.gguf"]
    if "characters" in request.param:
        data, targets = char_data, ["--out", out / "hf"]
    if "marks" in request.param:
        (folder / "text.txt").write_text(prose() + 300 * HINDI, encoding="utf-8")
        data = prepare(folder / "text.txt", folder / "data", "--vocab_size", 512)
    more = ["--max_steps=40", "--eval_interval=40", "--block_size=128", *RUNS[request.param]]
    if "qwen3" in request.param:
        more.append(f"--init_from={grouped_qwen3(folder / 'start')}")
    trained(data, run, *more)
    export.main([str(word) for word in (run, *targets)])
    model, tokenizer, _ = load_model(run_folder.find(run), torch.device("cpu"))
    assert (model.config.n_kv_head < model.config.n_head) == ("grouped" in request.param)
    return run, out, model, tokenizer


def test_transformers_computes_the_same_and_writes_the_same(exported):
    _, out, model, tokenizer = exported
    prompt = prompt_for(tokenizer)
    hf = AutoModelForCausalLM.from_pretrained(out / "hf")
    assert hf.config.tie_word_embeddings == model.config.tie_weights
    logits_agree(model, hf.eval(), tokenizer.vocab_size)
    write = pipeline("text-generation", model=str(out / "hf"))
    text = write(prompt, do_sample=False, max_new_tokens=100)[0]["generated_text"]
    assert text == prompt + greedy(model, tokenizer, prompt, 100)
    # Its own settings stay within the context, however long a prompt is.
    assert write(prompt)[0]["generated_text"].startswith(prompt)
    context = model.config.block_size
    assert hf.generate(torch.ones(1, context - 3, dtype=torch.int64)).size(1) <= context


def test_the_card_says_what_the_model_is(exported):
    run, out, model, tokenizer = exported
    card = (out / "hf/README.md").read_text(encoding="utf-8")
    assert f"{run_folder.evaluation_at(run, 40)['val_loss']:.4f} nats" in card
    assert ("without biases" in card) == (model.config.arch == "gpt2" and not model.config.bias)
    assert ("llama-completion" in card) == (tokenizer.kind != "char")


def test_the_card_has_the_numbers_of_the_best_step(tmp_path):
    run = reciting(tmp_path / "run", "The quick, brown!", step=400)
    reciting(run, "A newer one.", step=500)
    run_folder.write_best(run, 400, 2.0)
    losses = [(300, 3.0, 1.125), (400, 2.0, 0.75), (500, 4.0, 1.5)]
    log = [{"step": s, "val_loss": loss, "bits_per_byte": bits} for s, loss, bits in losses]
    run_folder.write_log(run, log)
    export.main([str(run), "--out", str(tmp_path / "hf")])
    tensors = load_file(tmp_path / "hf/model.safetensors").values()
    parameters = sum(tensor.numel() for tensor in tensors)
    assert {tensor.dtype for tensor in tensors} == {torch.float32}
    card = (tmp_path / "hf/README.md").read_text(encoding="utf-8")
    for words in (
        f"A GPT-2 language model of {parameters:,} parameters, trained from scratch",
        "on 400,000 tokens.",
        "its loss is 2.0000 nats per token (perplexity 7.39),\n0.7500 bits per byte.",
        "| shape | 1 layer x 36, 1 head, context 36 tokens |",
        "| tokenizer | byte-level BPE, 257 ids |",
        "| head | not tied to the embedding |",
        "| data | `data/recited`: 900 tokens for training, 100 for validation |",
        "| training | 400 steps, 0.50 epochs, 1 min 30 s |",
        "| batch_size | 48 |",
        f"It saw {400_000 / parameters:.1f} tokens per parameter",
        "follows no instructions",
        "`<|endoftext|>` (id 0)",
    ):
        assert words in card


def test_the_card_of_a_run_from_weights_names_them(tmp_path):
    source = pretrained.load(reciting(tmp_path / "run", "A text."))
    run_folder.write_log(tmp_path / "run", [{"step": 1, "val_loss": None}])  # it was not finite
    source.state["settings"]["init_from"] = "hf://openai-community/gpt2"
    export.write_card(tmp_path, source, 1000, "hf", chat=True)
    card = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "trained from the weights of `hf://openai-community/gpt2` on 1,000 tokens." in card
    assert "\nbase_model: openai-community/gpt2\n---\n" in card
    assert "tokens per parameter" not in card  # it saw more
    assert "follows no instructions" not in card


def test_ctranslate2_writes_the_same(exported, tmp_path):
    _, out, model, tokenizer = exported
    TransformersConverter(str(out / "hf")).convert(str(tmp_path / "ct2"))
    prompt = prompt_for(tokenizer)
    ids = tokenizer.encode(prompt).tolist()
    tokens = AutoTokenizer.from_pretrained(out / "hf").convert_ids_to_tokens(ids)
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), device="cpu", compute_type="float32")
    (written,) = generator.generate_batch([tokens], max_length=50, include_prompt_in_result=False)
    assert_greedy(model, tokenizer, prompt, written.sequences_ids[0], 50)


@pytest.mark.parametrize("exported", [r for r in RUNS if "characters" not in r], indirect=True)
def test_llama_cpp_writes_the_same(exported):
    _, out, model, tokenizer = exported
    prompt = prompt_for(tokenizer)
    theirs = llama_cpp(out / "run.gguf", prompt, 50)
    assert theirs["prompt"] == tokenizer.encode(prompt).tolist()
    assert theirs["template"] is None
    assert_greedy(model, tokenizer, prompt, theirs["ids"], 50)
    assert theirs["text"] == tokenizer.decode(theirs["ids"])


@pytest.mark.parametrize("exported", [r for r in RUNS if "characters" not in r], indirect=True)
def test_a_folder_of_transformers_gives_the_same_file(exported, tmp_path):
    """As after a LoRA was merged into an export."""
    _, out, _, _ = exported
    export.main([str(out / "hf"), "--gguf", str(tmp_path / "run.gguf")])
    ours, theirs = GGUFReader(out / "run.gguf"), GGUFReader(tmp_path / "run.gguf")
    assert [f.contents() for f in theirs.fields.values()] == [
        f.contents() for f in ours.fields.values()
    ]
    tensors = {tensor.name: tensor.data for tensor in theirs.tensors}
    assert tensors.keys() == {tensor.name for tensor in ours.tensors}
    assert all(np.array_equal(tensors[tensor.name], tensor.data) for tensor in ours.tensors)


def test_a_folder_of_transformers_keeps_its_chat_template(tmp_path):
    """If its form is known; another is refused."""
    run = reciting(tmp_path / "run", "User: Hi\n\nAssistant: Hello.", masks={})
    export.main([str(run), "--out", str(tmp_path / "hf")])
    export.main([str(tmp_path / "hf"), "--gguf", str(tmp_path / "a.gguf")])
    fields = GGUFReader(tmp_path / "a.gguf").fields
    assert fields["tokenizer.chat_template"].contents() == PLAIN.chat_template
    with pytest.raises(CheckpointError, match="for a GGUF file of it, leave out --out"):
        export.main([str(tmp_path / "hf"), "--out", str(tmp_path / "more")])
    (tmp_path / "hf/chat_template.jinja").write_text("[INST] {{ messages[0].content }}")
    with pytest.raises(CheckpointError, match=r"not known here.*convert_hf_to_gguf"):
        export.main([str(tmp_path / "hf"), "--gguf", str(tmp_path / "b.gguf")])


def test_padding_is_left_out_of_an_export():
    config = GPTConfig(
        vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=8, tie_weights=False
    )
    out = to_hf(config, GPT(config).state_dict(), 50)
    assert out["transformer.wte.weight"].shape == out["lm_head.weight"].shape == (50, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "--out FOLDER, --gguf FILE"),
        (["--gguf", "a.bin"], "must end in .gguf"),
        (["--out", "hf", "--gguf", "there.gguf"], "there.gguf already exists"),
        (["--gguf", "other.gguf"], "other.Modelfile already exists"),
        (["--out", "there"], "there already exists; choose another --out"),
        (["--gguf", "link.gguf"], "link.gguf already exists"),
    ],
)
def test_a_wrong_target_is_a_sentence_and_nothing_is_written(bpe_run, tmp_path, options, words):
    there = {tmp_path / name for name in ("there", "there.gguf", "other.Modelfile")}
    for path in there:
        path.touch()
    (tmp_path / "link.gguf").symlink_to("nowhere")
    there.add(tmp_path / "link.gguf")
    result = run_script("-m", "tools.export", bpe_run, *options, cwd=tmp_path)
    fails_clearly(result, words)
    assert set(tmp_path.iterdir()) == there


CONFIGS = {
    "gpt2": {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "dtype": "float32",
        "vocab_size": 257,
        "n_layer": 3,
        "n_head": 4,
        "n_embd": 32,
        "n_inner": 80,
        "n_positions": 48,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "resid_pdrop": 0.25,
        "embd_pdrop": 0.25,
        "attn_pdrop": 0.25,
    },
    "qwen3": {
        "model_type": "qwen3",
        "architectures": ["Qwen3ForCausalLM"],
        "dtype": "float32",
        "vocab_size": 257,
        "max_position_embeddings": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "intermediate_size": 80,
        "head_dim": 24,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "use_sliding_window": False,
        "max_window_layers": 3,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "rope_theta": 5e5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
    },
}
CONFIGS["llama"] = {
    **{name: value for name, value in CONFIGS["qwen3"].items() if "window" not in name},
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "mlp_bias": False,
    "pretraining_tp": 1,
}


@pytest.mark.parametrize("arch", CONFIGS)
def test_transformers_reads_each_setting(arch, tmp_path):
    sizes = {"block_size": 48, "n_layer": 3, "n_head": 4, "n_embd": 32, "n_inner": 80}
    shape = {"tie_weights": True, "dropout": 0.25}
    if arch != "gpt2":
        shape = {"tie_weights": False, "n_kv_head": 2, "head_dim": 24, "rope_theta": 5e5}
    config = GPTConfig(320, **sizes, arch=arch, **shape)
    described = Tokenizer.train([], 257).description
    vocab = described["model"]["vocab"].items()  # as in GPT-2's, its end is the last
    described["model"]["vocab"] = {token: (n - 1) % 257 for token, n in vocab}
    described["added_tokens"][0]["id"] = 256
    tokenizer = Tokenizer(described)
    source = Pretrained(tmp_path, config, {}, tokenizer, {})
    export.write_settings(tmp_path, source, PLAIN if arch == "gpt2" else None)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIGS[arch]
    generation = GenerationConfig.from_pretrained(tmp_path)
    sampling = generation.do_sample, generation.temperature, generation.top_k
    assert sampling == (True, 0.8, 200)
    assert (generation.max_length, generation.max_new_tokens) == (48, None)
    ends = generation.bos_token_id, generation.eos_token_id, generation.pad_token_id
    assert ends == (256, 256, 256)

    tokenizer.save(tmp_path / "tokenizer.json")
    written = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert written["clean_up_tokenization_spaces"] is False  # which older versions did
    assert written["model_input_names"] == ["input_ids", "attention_mask"]  # they added a third
    reader = AutoTokenizer.from_pretrained(tmp_path)
    assert reader.model_max_length == 48
    assert reader.all_special_tokens == [EOT]
    names = reader.bos_token, reader.eos_token, reader.pad_token, reader.unk_token
    assert names == (EOT, EOT, EOT, EOT)
    ids = tokenizer.encode("A b !  c ,d").tolist()
    assert reader("A b !  c ,d").input_ids == ids  # nothing is added, and nothing tidied
    assert reader.decode([*ids, tokenizer.eot_id], skip_special_tokens=True) == "A b !  c ,d"
    assert reader.chat_template == (PLAIN.chat_template if arch == "gpt2" else None)


MODELFILE = '''FROM ./my model.gguf
TEMPLATE """{{ .Prompt }}"""
PARAMETER num_ctx 48
PARAMETER temperature 0.8
PARAMETER repeat_penalty 1
PARAMETER stop "<|endoftext|>"
'''
CHAT_MODELFILE = '''FROM ./my model.gguf
TEMPLATE """{{ range .Messages }}{{ if eq .Role "user" }}User: {{ .Content }}

{{ else if eq .Role "assistant" }}Assistant:{{ if ne (printf "%.1s" .Content) " " }} {{ end }}\
{{ .Content }}{{ if ne (slice (printf "  %s" .Content) (len .Content)) "\\n\\n" }}

{{ end }}{{ else if eq .Role "system" }}System: {{ .Content }}

{{ else if eq .Role "tool" }}Tool: {{ .Content }}

{{ end }}{{ end }}Assistant:"""
PARAMETER num_ctx 8192
PARAMETER temperature 0.8
PARAMETER repeat_penalty 1
PARAMETER stop "<|endoftext|>"
PARAMETER stop "

User:"
'''


@pytest.mark.parametrize(
    ("form", "context", "text"), [(None, 48, MODELFILE), (PLAIN, 40960, CHAT_MODELFILE)]
)
def test_ollama_gets_the_form_that_the_model_was_trained_on(tmp_path, form, context, text):
    gguf, modelfile = tmp_path / "my model.gguf", tmp_path / "my model.Modelfile"
    source = Pretrained(tmp_path, GPTConfig(257, context), {}, Tokenizer.train([], 257), {})
    export.write_modelfile(gguf, source, form)
    assert modelfile.read_text(encoding="utf-8") == text
    template = "<|im_start|>system\nBe kind.<|im_end|>"
    (tmp_path / "chat_template.jinja").write_text(template)
    export.write_modelfile(gguf, source, form)
    expected = text.replace("PARAMETER num_ctx", 'SYSTEM """Be kind."""\nPARAMETER num_ctx')
    assert modelfile.read_text(encoding="utf-8") == expected


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("demo-1.5_b", "demo-1.5_b"),
        ("My Model", "my-model"),
        ("Größe 1", "grosse-1"),
        ("模型", "model"),
    ],
)
def test_ollama_gets_a_name_that_it_takes(text, name):
    assert export.ollama_name(text) == name


def test_commands_are_quoted(bpe_run, tmp_path):
    target = tmp_path / "it's mine"
    gguf_file = target.with_suffix(".gguf")
    said = run_script("-m", "tools.export", bpe_run, "--out", target, "--gguf", gguf_file).stdout
    card = (target / "README.md").read_text(encoding="utf-8")
    for text, name in ((said, str(gguf_file)), (card, gguf_file.name)):
        (line,) = (line for line in text.splitlines() if "llama-completion" in line)
        assert shlex.split(line)[2] == name
    load = next(line for line in card.splitlines() if line.startswith("print(pipeline("))
    assert ast.parse(load)
    assert '"it\'s mine"' in load


# tools.export on a disk that takes 50 KB of each file.
SMALL_DISK = """
import resource, runpy
_, most = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, most))
runpy.run_module("tools.export", run_name="__main__")
"""


@pytest.mark.parametrize("option, name", [("--out", "folder"), ("--gguf", "file.gguf")])
def test_a_disk_that_fills_up_in_the_middle_is_a_sentence(bpe_run, tmp_path, option, name):
    result = run_code(SMALL_DISK, bpe_run, option, tmp_path / name)
    fails_clearly(result, "the disk took only a part of", "make room, or choose", status=1)
    assert not list(tmp_path.iterdir())


SAID = [
    {"role": "system", "content": "You are kind.\nAnd brief."},
    {"role": "user", "content": " Hello?  Überraschung: ½ 日本 \n\nAssistant: quoted "},
    {"role": "assistant", "content": "Good day.\n\n- 1\n- 2\n"},
    {"role": "user", "content": "(More)\t'tis 2024\n    code()"},
    {"role": "assistant", "content": "...no\n\n\nUser is a word"},
    {"role": "user", "content": ""},
    {"role": "assistant", "content": "123"},
]


@pytest.fixture(scope="module")
def chat_export(tmp_path_factory):
    """A folder with the data of conversations, a run on it, and both of its exports."""
    folder = tmp_path_factory.mktemp("chat")
    write_conversations(folder / "chat.jsonl", [SAID] * 200)
    flags = ["--vocab_size", 300, "--val_fraction", 0.2]
    data = prepare(folder / "chat.jsonl", folder / "data", *flags)
    trained(data, folder / "run", "--max_steps=2", "--arch=qwen3")
    targets = ["--out", folder / "hf", "--gguf", folder / "run.gguf"]
    result = ok(run_script("-m", "tools.export", folder / "run", *targets))
    (folder / "said.txt").write_text(result.stdout)
    return folder


def test_models_of_conversations_say_how_to_talk_to_them(chat_export):
    template = GGUFReader(chat_export / "run.gguf").get_field("tokenizer.chat_template").contents()
    assert template == PLAIN.chat_template
    assert "llama-cli -m" in (chat_export / "said.txt").read_text()


def test_training_chat_and_exports_have_the_same_tokens_of_a_conversation(chat_export):
    ours = Tokenizer.load(chat_export / "data")
    theirs = AutoTokenizer.from_pretrained(chat_export / "hf")
    ids = np.fromfile(chat_export / "data/train.bin", np.uint16).tolist()
    trained = ids[: ids.index(ours.eot_id)]
    mask = np.fromfile(chat_export / "data/train.mask.bin", np.uint8) & IN_REPLY > 0

    def of_template(messages, prompt):
        return theirs.apply_chat_template(
            messages, add_generation_prompt=prompt, tokenize=True, return_dict=False
        )

    assert of_template(SAID, prompt=False) == trained
    wide = GPT(GPTConfig(300, 2000, 1, 1, 8))
    for n, message in enumerate(SAID):
        if message["role"] != "assistant":
            continue
        conversation = Conversation(wide, ours, SAID[0]["content"])
        conversation.messages = SAID[1 : n - 1]
        prompt = conversation.prompt(SAID[n - 1]["content"])
        assert prompt == trained[: len(prompt)] == of_template(SAID[:n], prompt=True)
        # What was trained on begins where the prompt ends, and ends with what stops the reply.
        assert not mask[len(prompt) - 1]
        assert mask[len(prompt)]
        end = len(prompt) + int(np.argmin(mask[len(prompt) :]))
        reply = ours.decode(ids[len(prompt) : end])
        (stop,) = PLAIN.stop
        assert reply.removesuffix(EOT).removesuffix(stop).strip() == message["content"].strip()
        assert reply.endswith((stop, EOT))
