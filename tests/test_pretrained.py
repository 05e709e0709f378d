"""Weights from and to Hugging Face: init_from, tools.export, and the tokenizers of such folders, against transformers itself."""
import dataclasses
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, pipeline

import checkpoint
import pretrained
import sampling
from checkpoint import CheckpointError
from generate import load_model
from metadata import read_meta
from model import GPT, GPTConfig
from tests.conftest import fails_clearly, run_script
from tests.test_train import SMALL, train_small
from tokenizer_bpe import Tokenizer
from tools.export import export, hf_config, to_hf

RUNS = {"char": ["--tie_weights=True", "--bias=False"], "bpe": ["--tie_weights=False", "--bias=True"]}
SHAPE = {"vocab_size": 512, "n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32, "bos_token_id": 0, "eos_token_id": 0}


@pytest.fixture(scope="module", params=RUNS)
def run_folder(request, tmp_path_factory, char_data, bpe_data):
    """A short run of each kind of tokenizer, head and biases."""
    folder = tmp_path_factory.mktemp("runs") / request.param
    result = train_small(char_data if request.param == "char" else bpe_data, folder, "--max_steps=20", "--sample_prompts=The name", *RUNS[request.param])
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
    idx = torch.randint(vocab_size, (3, model.config.block_size), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(idx)[..., :vocab_size], hf(idx).logits, rtol=0, atol=1e-4)


# -- out ------------------------------------------------------------------------------------------------------------------


def test_an_export_computes_the_same_and_writes_the_same(run_folder, tmp_path):
    result = run_script("-m", "tools.export", run_folder, "--out", tmp_path / "hf")
    assert result.returncode == 0, result.stderr
    model, tokenizer, state = load_model(checkpoint.find(run_folder), torch.device("cpu"))
    hf, hf_tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert hf.config.tie_word_embeddings == model.config.tie_weights
    logits_agree(model, hf.eval(), tokenizer.vocab_size)

    prompt = "The name of the"
    ids = hf_tokenizer(prompt)["input_ids"]
    assert ids == tokenizer.encode(prompt).tolist() and hf_tokenizer.decode(ids) == prompt
    write = pipeline("text-generation", model=str(tmp_path / "hf"))
    assert write(prompt)[0]["generated_text"].startswith(prompt)  # its own settings stay within the context
    room = model.config.block_size - len(ids)
    text = write(prompt, do_sample=False, max_new_tokens=room)[0]["generated_text"]
    ours = [new[0] for new in sampling.generate(model, [ids], room, temperature=0)]
    ours = ours[: ours.index(tokenizer.eot_id)] if tokenizer.eot_id in ours else ours
    assert text == prompt + tokenizer.decode(ours)

    assert len({path.stat().st_mode for path in (tmp_path / "hf").iterdir()}) == 1
    card = (tmp_path / "hf" / "README.md").read_text(encoding="utf-8")
    logged = next(r for r in checkpoint.read_log(run_folder) if r.get("val_loss") and r["step"] == state["step"])
    assert f"{logged['val_loss']:.4f} nats" in card and str(state["settings"]["data_dir"]) in card and "context 32" in card
    assert ("without biases" in card) == (not model.config.bias) and ("characters" in card) == (tokenizer.kind == "char")
    fails_clearly(run_script("-m", "tools.export", run_folder, "--out", tmp_path / "hf"), "is there already")


def test_an_export_comes_back_as_it_was(run_folder, tmp_path):
    folder = checkpoint.find(run_folder)
    export(folder, tmp_path / "hf")
    there, back = pretrained.load(folder), pretrained.load(tmp_path / "hf")
    assert dataclasses.replace(there.config, bias=True) == back.config and there.tokenizer.same_as(back.tokenizer)
    for name, tensor in there.tensors.items():
        assert torch.equal(tensor, back.tensors[name])
    assert all(not back.tensors[name].any() for name in back.tensors.keys() - there.tensors.keys())


def test_padding_is_left_out_of_an_export():
    config = GPTConfig(vocab_size=64, block_size=8, n_layer=1, n_head=1, n_embd=8, tie_weights=False)
    out = to_hf(config, GPT(config).state_dict(), 50)
    assert out["transformer.wte.weight"].shape == out["lm_head.weight"].shape == (50, 8)


def test_settings_that_gpt2_lacks_are_named(bpe_run):
    tokenizer = Tokenizer.load(checkpoint.find(bpe_run))
    assert hf_config(GPTConfig(512, zero_init=True), tokenizer)["vocab_size"] == 512
    with pytest.raises(CheckpointError, match="position = rotary, shortcut = True"):
        hf_config(GPTConfig(512, position="rotary", shortcut=True), tokenizer)


def test_no_checkpoint_to_export(tmp_path):
    fails_clearly(run_script("-m", "tools.export", tmp_path / "none", "--out", tmp_path / "hf"), "no checkpoint at")


# -- in -------------------------------------------------------------------------------------------------------------------


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
        old = {k.removeprefix("transformer."): v for k, v in hf.state_dict().items() if not (tied and k == "lm_head.weight")}
        old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        torch.save(old, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=form == "pickle")
    assert len(list(tmp_path.glob("*.safetensors"))) == {"safetensors": 1, "half": 1}.get(form, len(list(tmp_path.glob("model-*"))))
    source = pretrained.load(tmp_path)
    assert source.tokenizer is None and source.config == GPTConfig(512, 32, 2, 2, 32, tie_weights=tied)
    model = GPT(source.config).eval()
    model.load_state_dict(source.tensors)
    logits_agree(model, hf.float(), 512)


@pytest.mark.parametrize(("shape", "parameters"), [
    ((12, 12, 768), 124_439_808), ((24, 16, 1024), 354_823_168), ((36, 20, 1280), 774_030_080), ((48, 25, 1600), 1_557_611_200),
])  # fmt: skip
def test_all_four_sizes_have_the_right_tensors(tmp_path, shape, parameters):
    layers, heads, width = shape
    hf_shape = GPT2Config(n_layer=layers, n_head=heads, n_embd=width)
    hf_shape.save_pretrained(tmp_path)
    with torch.device("meta"):
        hf = GPT2LMHeadModel(hf_shape)
    config = pretrained.read_hf_config(tmp_path)
    assert config == GPTConfig(50257, 1024, layers, heads, width)
    pretrained.check_tensors(tmp_path, config, pretrained.from_hf(hf.state_dict()))
    with torch.device("meta"):
        assert GPT(config).num_parameters() == parameters == hf.num_parameters()


def saved(hf_model, folder, **config):
    """The model in a folder, with values of config.json replaced."""
    hf_model.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


@pytest.mark.parametrize(("config", "words"), [
    ({"model_type": "llama"}, "'llama'"),
    ({"activation_function": "relu", "scale_attn_by_inverse_layer_idx": True}, "activation_function = 'relu', scale_attn_by_inverse_layer_idx = True"),
    ({"n_inner": 64}, "n_inner = 64"),
    ({"n_layer": 3}, "h.2.attn.c_attn.bias: missing"),
    ({"vocab_size": 500}, "(512, 32), expected (500, 32)"),
    ({"n_head": 3}, "n_head = 3 does not divide"),
])  # fmt: skip
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
        torch.save(content, tmp_path / "pytorch_model.bin") if content else (tmp_path / "pytorch_model.bin").write_bytes(b"")
        with pytest.raises(CheckpointError, match="execute code" if content else "cannot be loaded"):
            pretrained.load(tmp_path)
    assert not (tmp_path / "executed").exists()
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        pretrained.load(tmp_path)


# -- training from there --------------------------------------------------------------------------------------------------


def without_shape():
    """The small settings, the shape left to the weights."""
    return [s for s in SMALL if not s.startswith(("--n_", "--block_size"))]


def test_a_run_starts_from_weights_and_then_continues_itself(bpe_run, bpe_data, tmp_path):
    def train(*more):
        return run_script("train.py", f"--data_dir={bpe_data}", f"--checkpoint_dir={tmp_path / 'run'}", *without_shape(), *more)

    start = shutil.copytree(bpe_run, tmp_path / "start")
    first = train(f"--init_from={start}", "--block_size=16", "--learning_rate=0", "--max_steps=1")
    assert first.returncode == 0 and f"the weights of {start}" in first.stdout, first.stderr
    ours, theirs = pretrained.load(tmp_path / "run"), pretrained.load(start)
    assert ours.config == dataclasses.replace(theirs.config, block_size=16)
    assert all(torch.equal(t, ours.tensors[name]) for name, t in theirs.cut_to(16).items())

    shutil.rmtree(start)  # the run goes on where the weights that it started from are gone
    second = train(f"--init_from={start}", "--block_size=16", "--max_steps=2")
    assert second.returncode == 0 and "does not read again" in second.stdout and "continues at step 1" in second.stdout, second.stderr


def test_the_preset_trains_from_a_folder_of_transformers(hf_model, bpe_data, tmp_path):
    saved(hf_model, tmp_path / "hf")
    shutil.copy(bpe_data / "tokenizer.json", tmp_path / "hf")
    where = [f"--data_dir={bpe_data}", f"--checkpoint_dir={tmp_path / 'run'}", f"--init_from={tmp_path / 'hf'}"]
    quick = ["--batch_size=4", "--max_steps=3", "--eval_batches=1", "--compile=False", "--warmup_steps=1", "--learning_rate=0", "--dtype=float32", "--log_interval=1"]
    result = run_script("train.py", "config/finetune.py", *where, *quick)
    assert result.returncode == 0, result.stderr
    model, _, _ = load_model(checkpoint.find(tmp_path / "run"), torch.device("cpu"))
    logits_agree(model, hf_model, 512)


def test_contradictions_are_listed_and_other_tokenizers_explained(hf_model, bpe_run, char_data, bpe_data, tmp_path):
    def train(data, source, *more):
        return run_script("train.py", f"--data_dir={data}", f"--checkpoint_dir={tmp_path / 'run'}", f"--init_from={source}", *without_shape(), *more)

    fails_clearly(train(bpe_data, bpe_run, "--n_layer=3", "--block_size=64", "--n_embd=32"), "n_layer: 2 in the weights, 3 in the settings", "block_size: 32 in the weights, 64", "shorter")
    fails_clearly(train(char_data, bpe_run), "another tokenizer", "char of", "--tokenizer")
    fails_clearly(train(char_data, saved(hf_model, tmp_path / "hf")), "vocabulary of", "512")
    fails_clearly(train(bpe_data, tmp_path), "no checkpoint at")
    assert not (tmp_path / "run").exists()


# -- tokenizers -----------------------------------------------------------------------------------------------------------


def test_text_is_prepared_with_the_tokenizer_of_a_run_or_of_a_folder_of_transformers(bpe_run, bpe_data, text_file, tmp_path):
    export(checkpoint.find(bpe_run), tmp_path / "hf")
    AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")  # as transformers itself writes it
    model = json.loads((tmp_path / "hf" / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    (tmp_path / "old" / "merges.txt").write_text("#version: 0.2\n" + "".join(" ".join(pair) + "\n" for pair in model["merges"]), encoding="utf-8")
    expected = np.fromfile(bpe_data / "train.bin", read_meta(bpe_data).dtype)
    for n, source in enumerate([bpe_run, tmp_path / "saved", tmp_path / "old"]):
        result = run_script("prepare_data.py", text_file, "--tokenizer", source, "--out", tmp_path / f"data{n}")
        assert result.returncode == 0, result.stderr
        assert np.array_equal(np.fromfile(tmp_path / f"data{n}" / "train.bin", "uint16"), expected)
        assert Tokenizer.load(tmp_path / f"data{n}").same_as(Tokenizer.load(bpe_data))
    (tmp_path / "old" / "merges.txt").write_text("#version: 0.2\nnot there\n", encoding="utf-8")
    fails_clearly(run_script("prepare_data.py", text_file, "--tokenizer", Path(tmp_path / "old"), "--out", tmp_path / "data9"), "vocab.json")
