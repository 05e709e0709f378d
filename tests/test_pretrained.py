"""Weights from and to Hugging Face: init_from, tools.export, and the tokenizers of such folders,
against transformers itself.
"""

import copy
import dataclasses
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import ctranslate2
import numpy as np
import pytest
import torch
from ctranslate2.converters import TransformersConverter
from gguf import GGUFReader
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    pipeline,
)

from formats import gguf, huggingface, pretrained, run_folder
from formats.conversation import CHAT_TEMPLATE, REPLY, format_chat
from formats.data_folder import read_meta
from formats.huggingface import to_hf
from formats.run_folder import CheckpointError
from generating import decode
from generating.load import load_model
from model import GPT, GPTConfig
from tests.conftest import LLAMA_CPP, fails_clearly, run_script
from tests.test_train import SMALL, train_small
from tokenizer_bpe import Tokenizer

# Each form of model and kind of tokenizer, with a context that holds 200 tokens of text.
RUNS = {
    "gpt2, characters": ["--tie_weights=True", "--bias=False"],
    "gpt2": ["--tie_weights=False", "--bias=True"],
    "qwen3": ["--arch=qwen3", "--tie_weights=False", "--zero_init=True"],
    "qwen3, grouped, tied": [
        "--arch=qwen3",
        "--tie_weights=True",
        "--n_kv_head=1",
        "--head_dim=24",
        "--n_inner=96",
    ],
    "qwen3, characters": ["--arch=qwen3", "--tie_weights=True"],
}
SHAPE = {
    "vocab_size": 512,
    "n_layer": 2,
    "n_head": 2,
    "n_embd": 32,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module", params=RUNS)
def trained(request, tmp_path_factory, char_data, bpe_data):
    """A short run of each."""
    folder = tmp_path_factory.mktemp("runs") / request.param.replace(", ", "_")
    data = char_data if "characters" in request.param else bpe_data
    more = [
        "--max_steps=100",
        "--eval_interval=100",
        "--block_size=256",
        "--sample_prompts=The name",
    ]
    result = train_small(data, folder, *more, *RUNS[request.param])
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory, bpe_data):
    """A short run on bpe_data."""
    folder = tmp_path_factory.mktemp("run") / "bpe"
    assert train_small(bpe_data, folder, "--max_steps=10").returncode == 0
    return folder


@pytest.fixture(scope="module")
def hf_model():
    """A small GPT-2 of transformers with random weights, biases included."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(**SHAPE)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.1)
    return model


def logits_agree(model, hf, vocab_size):
    """Assert that two models give the same logits, to 1e-4, over the whole context."""
    idx = torch.randint(
        vocab_size, (3, model.config.block_size), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[..., :vocab_size], hf(idx).logits, rtol=0, atol=1e-4)


# -- out ------------------------------------------------------------------------------------------


def greedy(model, tokenizer, prompt, count):
    """Our own greedy continuation: ids up to the end of the text, and the text."""
    ids = tokenizer.encode(prompt).tolist()
    new = [
        i
        for (i,) in decode.generate(
            model, [ids], count, temperature=0, vocab_size=tokenizer.vocab_size
        )
    ]
    new = new[: new.index(tokenizer.eot_id)] if tokenizer.eot_id in new else new
    return new, tokenizer.decode(new)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """The run as a folder for transformers and as GGUF files, and our own model of it."""
    out = tmp_path_factory.mktemp("exported")
    result = run_script(
        "-m", "tools.export", trained, "--out", out / "hf", "--gguf", out / "run.gguf"
    )
    assert result.returncode == 0, result.stderr
    model, tokenizer, state = load_model(run_folder.find(trained), torch.device("cpu"))
    return out, model, tokenizer, state


def test_an_export_computes_the_same_and_writes_the_same(exported, trained):
    out, model, tokenizer, state = exported
    folder = out / "hf"
    hf, hf_tokenizer = (
        AutoModelForCausalLM.from_pretrained(folder),
        AutoTokenizer.from_pretrained(folder),
    )
    assert (
        type(hf).__name__
        == {"gpt2": "GPT2LMHeadModel", "qwen3": "Qwen3ForCausalLM"}[model.config.arch]
    )
    assert hf.config.tie_word_embeddings == model.config.tie_weights
    logits_agree(model, hf.eval(), tokenizer.vocab_size)

    prompt = "The name of the"
    ids = hf_tokenizer(prompt)["input_ids"]
    assert ids == tokenizer.encode(prompt).tolist() and hf_tokenizer.decode(ids) == prompt
    write = pipeline("text-generation", model=str(folder))
    assert write(prompt)[0]["generated_text"].startswith(
        prompt
    )  # its own settings stay within the context
    text = write(prompt, do_sample=False, max_new_tokens=200)[0]["generated_text"]
    assert text == prompt + greedy(model, tokenizer, prompt, 200)[1]

    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1
    card = (folder / "README.md").read_text(encoding="utf-8")
    logged = next(
        r for r in run_folder.read_log(trained) if r.get("val_loss") and r["step"] == state["step"]
    )
    assert (
        f"{logged['val_loss']:.4f} nats" in card
        and str(state["settings"]["data_dir"]) in card
        and "context 256" in card
    )
    assert ("without biases" in card) == (model.config.arch == "gpt2" and not model.config.bias)
    assert ("characters" in card) == (tokenizer.kind == "char")
    assert "](curve.png)" in card and (folder / "curve.png").read_bytes().startswith(b"\x89PNG")
    fails_clearly(run_script("-m", "tools.export", trained, "--out", folder), "is there already")


def test_an_export_comes_back_as_it_was(trained, exported):
    there, back = pretrained.load(run_folder.find(trained)), pretrained.load(exported[0] / "hf")
    biases = back.config.arch == "gpt2"
    assert dataclasses.replace(
        there.config, bias=biases
    ) == back.config and there.tokenizer.same_as(back.tokenizer)
    for name, tensor in there.tensors.items():
        assert torch.equal(tensor, back.tensors[name])
    assert all(not back.tensors[name].any() for name in back.tensors.keys() - there.tensors.keys())


def test_ctranslate2_writes_the_same(exported, tmp_path):
    out, model, tokenizer, _ = exported
    TransformersConverter(str(out / "hf")).convert(str(tmp_path / "ct2"))
    prompt = "The name of the"
    tokens = AutoTokenizer.from_pretrained(out / "hf").convert_ids_to_tokens(
        tokenizer.encode(prompt).tolist()
    )
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), device="cpu", compute_type="float32")
    (result,) = generator.generate_batch(
        [tokens], max_length=50, sampling_topk=1, include_prompt_in_result=False
    )
    assert result.sequences_ids[0] == greedy(model, tokenizer, prompt, 50)[0]


@pytest.mark.skipif(
    not (LLAMA_CPP / "node_modules").exists(), reason="needs llama.cpp: make .venv/llama_cpp"
)
def test_llama_cpp_writes_the_same(exported):
    out, model, tokenizer, _ = exported
    prompt = "The name of the"
    done = subprocess.run(
        ["node", LLAMA_CPP / "complete.mjs", out / "run.gguf", prompt, "50"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    assert theirs["prompt"] == tokenizer.encode(prompt).tolist() and theirs["template"] is None
    ids, text = greedy(model, tokenizer, prompt, 50)
    assert theirs["ids"] == ids and theirs["text"] == text
    assert (out / "run.Modelfile").read_text().startswith("FROM ./run.gguf\n")


def test_padding_is_left_out_of_an_export():
    config = GPTConfig(
        vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=8, tie_weights=False
    )
    out = to_hf(config, GPT(config).state_dict(), 50)
    assert out["transformer.wte.weight"].shape == out["lm_head.weight"].shape == (50, 8)


def test_what_gguf_cannot_hold_is_said_and_nothing_is_written(bpe_run, tmp_path):
    def export(*more):
        return run_script("-m", "tools.export", bpe_run, *more)

    fails_clearly(export(), "--out FOLDER, --gguf FILE")
    fails_clearly(export("--gguf", tmp_path / "a.bin"), "must end in .gguf")
    (tmp_path / "there.gguf").touch()
    fails_clearly(
        export("--out", tmp_path / "hf", "--gguf", tmp_path / "there.gguf"),
        "there.gguf is there already",
    )
    assert not (tmp_path / "hf").exists()

    source = pretrained.load(run_folder.find(bpe_run))
    narrow = dataclasses.replace(source.config, n_embd=40, n_head=2, head_dim=20, n_inner=64)
    with pytest.raises(
        CheckpointError, match=r"n_embd = 40.* multiple of that; take --gguf_type f16"
    ):
        gguf.check(tmp_path / "a.gguf", narrow, source.tokenizer, "q8_0")
    words = {
        "type": "Split",
        "pattern": {"Regex": r"\w+|\W+"},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    cut = source.tokenizer.description | {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [words, level]}
    }
    with pytest.raises(CheckpointError, match="this tokenizer has another"):
        gguf.check(tmp_path / "a.gguf", source.config, Tokenizer(cut), "f16")


def test_smaller_numbers_make_smaller_files(bpe_run, tmp_path):
    source, sizes = pretrained.load(run_folder.find(bpe_run)), {}
    for kind in ("f32", "f16", "q8_0"):
        gguf.write(tmp_path / f"{kind}.gguf", source.config, source.tensors, source.tokenizer, kind)
        sizes[kind] = sum(
            t.data.nbytes
            for t in GGUFReader(tmp_path / f"{kind}.gguf").tensors
            if len(t.shape) == 2 and "position" not in t.name
        )
    assert sizes["f32"] == 2 * sizes["f16"] and sizes["q8_0"] == sizes["f16"] * 34 / 64


def test_models_of_conversations_say_how_to_talk_to_them(tmp_path):
    asked = [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "More "},
    ]
    lines = [
        json.dumps({"messages": [*asked, {"role": "assistant", "content": f"Number {n}."}]})
        for n in range(300)
    ]
    (tmp_path / "chat.jsonl").write_text("\n".join(lines))
    assert (
        run_script(
            "prepare_data.py",
            tmp_path / "chat.jsonl",
            "--vocab_size",
            300,
            "--out",
            tmp_path / "data",
        ).returncode
        == 0
    )
    assert (
        train_small(tmp_path / "data", tmp_path / "run", "--max_steps=2", "--arch=qwen3").returncode
        == 0
    )
    result = run_script(
        "-m",
        "tools.export",
        tmp_path / "run",
        "--out",
        tmp_path / "hf",
        "--gguf",
        tmp_path / "run.gguf",
    )
    assert result.returncode == 0, result.stderr
    theirs = AutoTokenizer.from_pretrained(tmp_path / "hf").apply_chat_template(
        asked, tokenize=False, add_generation_prompt=True
    )
    assert theirs == format_chat(asked) + REPLY
    template = GGUFReader(tmp_path / "run.gguf").get_field("tokenizer.chat_template").contents()
    assert template == CHAT_TEMPLATE
    assert 'PARAMETER stop "\\n\\nUser:"' in (tmp_path / "run.Modelfile").read_text()


def test_no_checkpoint_to_export(tmp_path):
    fails_clearly(
        run_script("-m", "tools.export", tmp_path / "none", "--out", tmp_path / "hf"),
        "no checkpoint at",
    )


# -- in -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["safetensors", "shards", "pickle", "old pickle", "half"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_folder_of_transformers_loads_in_every_form(hf_model, tmp_path, form, tied):
    hf = GPT2LMHeadModel(GPT2Config(**SHAPE, tie_word_embeddings=tied)).eval()
    hf.load_state_dict(hf_model.state_dict())
    if not tied:
        hf.lm_head.weight.data.normal_(std=0.1)
    if form == "half":
        hf = hf.to(torch.bfloat16)
    hf.save_pretrained(tmp_path, max_shard_size="30KB" if form == "shards" else "1GB")
    if "pickle" in form:  # as the first GPT-2 folders were: no prefix, causal masks inside
        (tmp_path / "model.safetensors").unlink()
        old = {
            k.removeprefix("transformer."): v
            for k, v in hf.state_dict().items()
            if not (tied and k == "lm_head.weight")
        }
        old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        torch.save(
            old, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "pickle"
        )
    assert len(list(tmp_path.glob("*.safetensors"))) == {"safetensors": 1, "half": 1}.get(
        form, len(list(tmp_path.glob("model-*")))
    )
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
    huggingface.check_tensors(tmp_path, config, huggingface.from_hf(config, hf.state_dict()))
    with torch.device("meta"):
        assert GPT(config).num_parameters() == parameters == hf.num_parameters()


@pytest.fixture(scope="module", params=["as many heads", "grouped, tied"])
def qwen3_model(request):
    """A small Qwen3 of transformers with random weights."""
    torch.manual_seed(0)
    grouped = request.param != "as many heads"
    shape = {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
        "num_key_value_heads": 2 if grouped else 4,
        "intermediate_size": 96,
        "max_position_embeddings": 64,
        "tie_word_embeddings": grouped,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    for name, p in model.named_parameters():
        p.data.normal_(mean=float("norm" in name), std=0.1)
    return model


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


def test_a_qwen3_with_its_own_tokenizer_is_prepared_for_and_tuned(qwen3_model, text_file, tmp_path):
    hf_tokenizer = HFTokenizer(models.BPE())
    hf_tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(gguf.QWEN2_PATTERN), "isolated")
    hf_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    hf_tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    hf_tokenizer.train([str(text_file)], trainer)
    hf_tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    folder = saved(qwen3_model, tmp_path / "hf")
    hf_tokenizer.save(str(folder / "tokenizer.json"))
    text = "Cafe\u0301 na\u00efve, it's 1234 o'clock\n\n  \u4f60\u597d\uff01"
    assert Tokenizer.load(folder).encode(text).tolist() == hf_tokenizer.encode(text).ids

    result = run_script(
        "prepare_data.py", text_file, "--tokenizer", folder, "--out", tmp_path / "data"
    )
    assert result.returncode == 0, result.stderr
    where = [
        f"--data_dir={tmp_path / 'data'}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        f"--init_from={folder}",
    ]
    quick = [
        "--batch_size=4",
        "--max_steps=2",
        "--eval_batches=1",
        "--compile=False",
        "--learning_rate=0",
        "--dtype=float32",
    ]
    plan = run_script("train.py", "config/finetune.py", *where, *quick, "--dry_run=True")
    assert plan.returncode == 0 and f"{qwen3_model.num_parameters():,}" in plan.stdout, plan.stderr
    result = run_script("train.py", "config/finetune.py", *where, *quick)
    assert result.returncode == 0, result.stderr
    model, _, _ = load_model(run_folder.find(tmp_path / "run"), torch.device("cpu"))
    logits_agree(model, qwen3_model, 512)


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


def saved(hf_model, folder, **config):
    """The model in a folder, with values of config.json replaced."""
    hf_model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


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


def test_damaged_files_and_pickles_that_execute_code_are_refused(hf_model, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "executed"),)

    weights = saved(hf_model, tmp_path) / "model.safetensors"
    whole = weights.read_bytes()
    for damaged in (whole[:-10], whole[:100], b"", b"\xff" * 100):
        weights.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="damaged"):
            pretrained.load(tmp_path)
    weights.unlink()
    for content in ({"wte.weight": Evil()}, None):
        (
            torch.save(content, tmp_path / "pytorch_model.bin")
            if content
            else (tmp_path / "pytorch_model.bin").write_bytes(b"")
        )
        with pytest.raises(
            CheckpointError, match="execute code" if content else "cannot be loaded"
        ):
            pretrained.load(tmp_path)
    assert not (tmp_path / "executed").exists()
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        pretrained.load(tmp_path)


# -- training from there --------------------------------------------------------------------------


def without_shape():
    """The small settings, the shape left to the weights."""
    return [s for s in SMALL if not s.startswith(("--n_", "--block_size"))]


def test_a_run_starts_from_weights_and_then_continues_itself(bpe_run, bpe_data, tmp_path):
    def train(*more):
        return run_script(
            "train.py",
            f"--data_dir={bpe_data}",
            f"--checkpoint_dir={tmp_path / 'run'}",
            *without_shape(),
            *more,
        )

    start = shutil.copytree(bpe_run, tmp_path / "start")
    first = train(f"--init_from={start}", "--block_size=16", "--learning_rate=0", "--max_steps=1")
    assert first.returncode == 0 and f"the weights of {start}" in first.stdout, first.stderr
    ours, theirs = pretrained.load(tmp_path / "run"), pretrained.load(start)
    assert ours.config == dataclasses.replace(theirs.config, block_size=16)
    assert all(torch.equal(t, ours.tensors[name]) for name, t in theirs.cut_to(16).items())

    shutil.rmtree(start)  # the run goes on where the weights that it started from are gone
    second = train(f"--init_from={start}", "--block_size=16", "--max_steps=2")
    assert (
        second.returncode == 0
        and "does not read again" in second.stdout
        and "continues at step 1" in second.stdout
    ), second.stderr


def test_the_preset_trains_from_a_folder_of_transformers(hf_model, bpe_data, tmp_path):
    saved(hf_model, tmp_path / "hf")
    shutil.copy(bpe_data / "tokenizer.json", tmp_path / "hf")
    where = [
        f"--data_dir={bpe_data}",
        f"--checkpoint_dir={tmp_path / 'run'}",
        f"--init_from={tmp_path / 'hf'}",
    ]
    quick = [
        "--batch_size=4",
        "--max_steps=3",
        "--eval_batches=1",
        "--compile=False",
        "--warmup_steps=1",
        "--learning_rate=0",
        "--dtype=float32",
        "--log_interval=1",
    ]
    result = run_script("train.py", "config/finetune.py", *where, *quick)
    assert result.returncode == 0, result.stderr
    model, _, _ = load_model(run_folder.find(tmp_path / "run"), torch.device("cpu"))
    logits_agree(model, hf_model, 512)


def test_contradictions_are_listed_and_other_tokenizers_explained(
    hf_model, bpe_run, char_data, bpe_data, tmp_path
):
    def train(data, source, *more):
        return run_script(
            "train.py",
            f"--data_dir={data}",
            f"--checkpoint_dir={tmp_path / 'run'}",
            f"--init_from={source}",
            *without_shape(),
            *more,
        )

    fails_clearly(
        train(bpe_data, bpe_run, "--n_layer=3", "--block_size=64", "--n_embd=32"),
        "n_layer: 2 in the weights, 3 in the settings",
        "block_size: 32 in the weights, 64",
        "shorter",
    )
    fails_clearly(train(char_data, bpe_run), "another tokenizer", "char of", "--tokenizer")
    fails_clearly(train(char_data, saved(hf_model, tmp_path / "hf")), "vocabulary of", "512")
    fails_clearly(train(bpe_data, tmp_path), "no checkpoint at")
    assert not (tmp_path / "run").exists()


# -- tokenizers -----------------------------------------------------------------------------------


def test_text_is_prepared_with_the_tokenizer_of_a_run_or_of_a_folder_of_transformers(
    bpe_run, bpe_data, text_file, tmp_path
):
    assert run_script("-m", "tools.export", bpe_run, "--out", tmp_path / "hf").returncode == 0
    AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(
        tmp_path / "saved"
    )  # as transformers itself writes it
    model = json.loads((tmp_path / "hf" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (tmp_path / "old" / "merges.txt").write_text(
        "#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]),
        encoding="utf-8",
    )
    expected = np.fromfile(bpe_data / "train.bin", read_meta(bpe_data).dtype)
    for n, source in enumerate([bpe_run, tmp_path / "saved", tmp_path / "old"]):
        result = run_script(
            "prepare_data.py", text_file, "--tokenizer", source, "--out", tmp_path / f"data{n}"
        )
        assert result.returncode == 0, result.stderr
        assert np.array_equal(np.fromfile(tmp_path / f"data{n}" / "train.bin", "uint16"), expected)
        assert Tokenizer.load(tmp_path / f"data{n}").same_as(Tokenizer.load(bpe_data))
    (tmp_path / "old" / "merges.txt").write_text("#version: 0.2\nnot there\n", encoding="utf-8")
    fails_clearly(
        run_script(
            "prepare_data.py",
            text_file,
            "--tokenizer",
            Path(tmp_path / "old"),
            "--out",
            tmp_path / "data9",
        ),
        "vocab.json",
    )
