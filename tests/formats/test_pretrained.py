"""formats/pretrained.py: runs that start from weights, and text prepared for them."""

import dataclasses
import os
import shutil
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as HFTokenizer
from transformers import AutoTokenizer

import config
import hardware
from formats import gguf, pretrained, run_folder
from formats.address import AddressError, Folder
from formats.run_folder import CheckpointError
from generating.load import load_model
from model import GPT, GPTConfig
from tests import warm_start
from tests.conftest import ROOT, SMALL, fails_clearly, ok, prepare, run_script
from tests.formats.conftest import logits_agree, saved, small_gpt2, small_qwen3
from tests.preparing.hub import Hub
from tokenizer_bpe import Tokenizer, TokenizerError
from tools import evaluate, export
from training.start import check_tokenizer, from_weights


def train(data, run, source, *more):
    """Train in the folder `run` from the weights at `source`, in their shape."""
    where = [f"--data_dir={data}", f"--checkpoint_dir={run}", f"--init_from={source}"]
    small = [s for s in SMALL if not s.startswith(("--n_", "--block_size"))]
    return run_script("train.py", *where, *small, *more)


def test_a_pickle_that_would_execute_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return open, (str(tmp_path / "executed"), "w")

    torch.save({"w": Evil()}, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        pretrained.load_tensors(tmp_path / "model.pt")
    assert not (tmp_path / "executed").exists()


def test_a_checkpoint_without_a_newer_setting_loads_with_its_default():
    shape = {"vocab_size": 97, "block_size": 32, "n_layer": 3, "n_head": 4, "n_embd": 64}
    assert pretrained.read_shape(Path("run"), {"model": shape}) == GPTConfig(**shape)
    with pytest.raises(CheckpointError, match=r"does not fit .* 'position'"):
        pretrained.read_shape(Path("run"), {"model": shape | {"position": "rotary"}})


def test_a_change_of_model_py_since_the_training_is_a_warning(bpe_run, monkeypatch, capsys):
    step = run_folder.find(bpe_run)
    pretrained.load(step)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("model.gelu", torch.relu)
    pretrained.load(step)
    assert f"{step}: model.py computes something else" in capsys.readouterr().err


@pytest.mark.parametrize("assign", [False, True])
def test_weights_of_another_model_py_are_a_sentence(assign):
    shape = {"vocab_size": 97, "block_size": 32, "n_layer": 1, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(**shape))
    weights = model.state_dict()
    pretrained.fill(model, weights, Path("step"), assign)
    weights["wpe.weight"] = torch.zeros(16, 32)
    weights["gate"] = weights.pop("ln_f.weight")
    with pytest.raises(CheckpointError, match=r"another wpe.weight, ln_f.weight, gate; undo"):
        pretrained.fill(model, weights, Path("step"), assign)


def test_a_shorter_context_keeps_the_first_positions():
    positions = torch.arange(6.0).view(3, 2)
    tensors = {"wpe.weight": positions, "wte.weight": positions}
    cut = pretrained.Pretrained(Path(), None, tensors, None, {}).cut_to(2)
    assert cut["wpe.weight"].tolist() == [[0, 1], [2, 3]]
    assert cut["wte.weight"] is positions


def test_a_run_starts_from_weights_and_then_continues_itself(bpe_run, bpe_data, tmp_path):
    start, run = shutil.copytree(bpe_run, tmp_path / "start"), tmp_path / "run"
    changes = ["--block_size=16", "--learning_rate=0", "--max_steps=1"]
    first = ok(train(bpe_data, run, start, *changes))
    assert f"the weights of {start}" in first.stdout
    ours, theirs = pretrained.load(run), pretrained.load(start)
    assert ours.config == dataclasses.replace(theirs.config, block_size=16)
    for name, tensor in theirs.cut_to(16).items():
        assert torch.equal(tensor, ours.tensors[name])

    preset = tmp_path / "preset.py"
    for given, context in ((8, 8), (512, theirs.config.block_size)):  # for weights of any context
        preset.write_text(f"block_size = {given}\n")
        c = config.load([str(preset), f"--init_from={start}", f"--data_dir={bpe_data}"])
        assert from_weights(c, theirs.tokenizer).shape.block_size == context
    shutil.rmtree(start)  # the run goes on where the weights that it started from are gone
    same = os.path.relpath(start, ROOT)
    second = ok(train(bpe_data, run, same, preset, "--max_steps=2"))
    assert "continues at step 1" in second.stdout
    other = train(bpe_data, run, bpe_run, "--block_size=16", "--max_steps=2")
    fails_clearly(other, f"init_from: {same} in the checkpoint, {bpe_run} now", "checkpoint_dir")


def test_shorter_sequences_leave_rotary_weights_their_context(bpe_data, tmp_path, capsys):
    start, run = tmp_path / "start", tmp_path / "run"
    small_qwen3().save_pretrained(start)
    shutil.copy(bpe_data / "tokenizer.json", start)
    for steps in (1, 2):  # the second continues the first
        result = ok(train(bpe_data, run, start, "--block_size=16", f"--max_steps={steps}"))
        assert "context 16," in result.stdout
    assert pretrained.load(run).config == pretrained.load(start).config
    evaluate.main([str(run), str(start), "--data", str(bpe_data), "--block_size=64"])
    evaluate.main([str(run)])
    assert ", context 16 " in capsys.readouterr().out


def test_a_folder_of_transformers_may_lie_at_an_address(hf_model, tmp_path, monkeypatch, capsys):
    from tests.training.store import Store

    monkeypatch.chdir(tmp_path)
    hf_model.save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    (tmp_path / "hf/flax_model.msgpack").write_text("not needed")
    with Store() as store:
        there = Folder("s3://bucket/hf")
        for file in (tmp_path / "hf").iterdir():
            there.put(file, file.name)
        found, here = pretrained.load("s3://bucket/hf"), pretrained.load(tmp_path / "hf")
        assert found.config == here.config
        assert found.tensors.keys() == here.tensors.keys()
        for name, tensor in found.tensors.items():
            assert torch.equal(tensor, here.tensors[name])
        assert not (found.path / "flax_model.msgpack").exists()
        with pytest.raises(CheckpointError, match="no checkpoint at s3://bucket/none"):
            pretrained.load("s3://bucket/none")
        assert pretrained.resolve("s3://bucket/hf") == found.path
        assert capsys.readouterr().err.count("fetching") == 1
        small_gpt2(tied=False).save_pretrained(tmp_path / "other")
        for file in (tmp_path / "other").iterdir():
            there.put(file, file.name)
        for name in there.list():
            if "-of-" in name:
                there.remove(name)
        assert not pretrained.load("s3://bucket/hf").config.tie_weights
        Folder("s3://bucket/words").put(tmp_path / "hf/config.json", "config.json")
        pretrained.fetch("s3://bucket/words", weights=False)
        store.failing = 1
        with pytest.raises(AddressError, match="s3://bucket/words cannot be reached"):
            pretrained.resolve("s3://bucket/words")
        assert pretrained.resolve("s3://bucket/hf") == found.path
        assert "Using the copy in" in capsys.readouterr().err


def test_weights_that_cannot_be_loaded_are_not_fetched(hf_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    address = saved(hf_model, tmp_path / "hf", model_type="qwen2").as_uri()
    with pytest.raises(CheckpointError, match=f"^{address}/config.json describes the architecture"):
        pretrained.load(address)
    saved(hf_model, tmp_path / "hf")
    monkeypatch.setattr(hardware, "free_ram", lambda: 1000)
    with pytest.raises(CheckpointError, match=f"^the weights in {address} take"):
        pretrained.load(address)
    assert "fetching" not in capsys.readouterr().err


def test_fetched_weights_stay_when_the_tokenizer_alone_is_fetched(hf_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    address = saved(hf_model, tmp_path / "hf").as_uri()
    here = pretrained.fetch(address)
    monkeypatch.setattr(hardware, "free_ram", lambda: 1000)
    assert pretrained.fetch(address, weights=False) == here
    saved(hf_model, tmp_path / "hf", note="changed")
    assert pretrained.fetch(address, weights=False) == here
    assert "changed" in (here / "config.json").read_text()
    assert (here / "model.safetensors").exists()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    get = Folder.get_large

    def get_as_it_changes(*arguments):
        get(*arguments)
        saved(hf_model, tmp_path / "hf", note="in the middle")

    monkeypatch.setattr(Folder, "get_large", get_as_it_changes)
    (here / "fetched.json").unlink()
    with pytest.raises(AddressError, match="changed while it was fetched; start again"):
        pretrained.fetch(address)


def test_a_qwen3_with_its_own_tokenizer_is_prepared_for_and_tuned(text_file, tmp_path):
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
    folder = saved(small_qwen3(), tmp_path / "hf")
    hf_tokenizer.save(str(folder / "tokenizer.json"))

    data = prepare(text_file, tmp_path / "data", "--tokenizer", folder)
    run = tmp_path / "run"
    ok(train(data, run, folder, "config/finetune.py", "--learning_rate=0", "--max_steps=2"))
    model, _, _ = load_model(run_folder.find(run), torch.device("cpu"))
    logits_agree(model, small_qwen3(), 512)


def test_contradictions_are_listed_and_other_tokenizers_explained(
    hf_model, bpe_run, char_data, bpe_data, tmp_path
):
    run = tmp_path / "run"
    fails_clearly(
        train(bpe_data, run, bpe_run, "--n_layer=3", "--block_size=64", "--n_embd=32"),
        "n_layer: 2 in the weights, 3 now",
        "block_size: 32 in the weights, 64",
        "shorter",
    )
    fails_clearly(train(char_data, run, bpe_run), "another tokenizer", "--tokenizer")
    folder = saved(hf_model, tmp_path / "hf")
    advice = f"512); put their tokenizer.json into {folder}, and prepare the text with it"
    fails_clearly(train(char_data, run, folder), "another tokenizer", advice)
    fails_clearly(train(bpe_data, run, tmp_path), "no checkpoint at")
    tied = saved(small_qwen3(), tmp_path / "tied")
    shutil.copy(bpe_data / "tokenizer.json", tied)
    fails_clearly(train(bpe_data, run, tied, "--embedding_lr=0.1"), "embedding_lr would", "qwen3")
    assert not run.exists()


def test_weights_without_a_tokenizer_fit_ids_with_a_little_padding(hf_model, bpe_data, tmp_path):
    found = pretrained.load(saved(hf_model, tmp_path))
    for size, fits in ((511, False), (512, True), (575, True), (576, False)):
        found.config = dataclasses.replace(found.config, vocab_size=size)
        refused = pytest.raises(CheckpointError, match="has another tokenizer than the weights")
        with nullcontext() if fits else refused:
            check_tokenizer("data", Tokenizer.load(bpe_data), found)


def test_text_is_prepared_with_the_tokenizer_of_a_run_or_of_a_folder_of_transformers(
    bpe_run, bpe_data, text_file, tmp_path
):
    ok(run_script("-m", "tools.export", bpe_run, "--out", tmp_path / "hf"))
    # as transformers itself writes it
    AutoTokenizer.from_pretrained(tmp_path / "hf").save_pretrained(tmp_path / "saved")
    assert Tokenizer.load(tmp_path / "saved").same_as(Tokenizer.load(bpe_data))
    data = prepare(text_file, tmp_path / "data", "--tokenizer", bpe_run)
    assert (data / "train.bin").read_bytes() == (bpe_data / "train.bin").read_bytes()
    assert Tokenizer.load(data).same_as(Tokenizer.load(bpe_data))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["config.json", "pytorch_model.bin"], r"has no model.safetensors; .* become .*save_pre"),
        (["config.json", "model-q4.gguf"], "has no model.safetensors; .* GGUF files"),
        (
            ["model-q4.gguf"],
            "no checkpoint at .*; this program writes GGUF files and does not read",
        ),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter.*merge_and_unload"),
        (["config.json"], "has no model.safetensors; .* repeat the download"),
        (["config.json", "model-00002-of-00003.safetensors"], "1 of the 3 files of its weights"),
    ],
)
@pytest.mark.parametrize("where", ["disk", "address"])
def test_weights_that_are_not_read_are_a_sentence(
    hf_model, names, words, where, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    if "config.json" in names:
        hf_model.config.save_pretrained(folder)
    with pytest.raises(CheckpointError, match=words):
        pretrained.load(folder if where == "disk" else folder.as_uri())
    assert not list(tmp_path.glob("checkpoints/**/*.safetensors"))  # nothing was fetched


@pytest.mark.skipif(os.name == "nt", reason="needs permissions")
def test_models_are_found_next_to_a_folder_that_nobody_may_read(hf_model, tmp_path):
    saved(hf_model, tmp_path / "hf")
    (tmp_path / "private").mkdir(mode=0)  # such as those of services in /tmp; root reads it
    with pytest.raises(CheckpointError, match=f"give one of them: {tmp_path.as_posix()}/hf$"):
        pretrained.load(tmp_path)


def test_weights_without_the_file_that_describes_them_are_a_sentence(hf_model, tmp_path):
    folder = saved(hf_model, tmp_path / "hf")
    assert "which has neither steps nor a log" in run_folder.what_is_there(folder)
    config = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(config[:50])  # half downloaded
    with pytest.raises(CheckpointError, match=r"no valid config.json that names the architecture"):
        pretrained.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no valid config.json that names the architecture"):
        pretrained.load(folder)


def test_the_folder_of_a_model_in_a_cache_is_named(hf_model, tmp_path):
    """Hugging Face keeps a model at models--ORG--NAME/snapshots/COMMIT."""
    inner = saved(hf_model, tmp_path / "models--ORG--NAME/snapshots/0a1b")
    for outer in inner.parents[:2]:
        with pytest.raises(CheckpointError, match=f"give one of them: {inner.as_posix()}"):
            pretrained.load(outer)


def test_a_pointer_in_place_of_a_large_file_is_explained(hf_model, tmp_path):
    folder = saved(hf_model, tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0a1b\nsize 12345\n"
    (folder / "model.safetensors").write_text(pointer)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged.* git lfs pull"):
        pretrained.load(folder)
    (folder / "tokenizer.json").write_text(pointer)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is not .* git lfs pull"):
        pretrained.load(folder)


def test_weights_saved_from_a_compiled_model_are_those_of_the_model(hf_model, tmp_path):
    folder = saved(hf_model, tmp_path / "hf")
    theirs = load((folder / "model.safetensors").read_bytes())
    save_file({f"_orig_mod.{k}": v for k, v in theirs.items()}, folder / "model.safetensors")
    logits_agree(pretrained.load(folder).model(), hf_model, hf_model.config.vocab_size)


def test_code_that_comes_with_weights_is_not_run(hf_model, tmp_path):
    code = "modeling_own.OwnForCausalLM"
    folder = saved(hf_model, tmp_path / "hf", model_type="own", auto_map={"AutoModel": code})
    (folder / "modeling_own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')")
    with pytest.raises(CheckpointError, match="describes the architecture 'own'; only gpt2"):
        pretrained.load(folder)
    assert not (tmp_path / "executed").exists()


def test_an_address_is_known_by_how_the_hub_writes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AddressError, match=r"is a page; .* is hf://ORG/NAME"):
        pretrained.load("https://huggingface.co/ORG/NAME/tree/main")
    with pytest.raises(CheckpointError, match="a model on the Hugging Face Hub is hf://ORG/NAME"):
        pretrained.load("ORG/NAME")
    with pytest.raises(CheckpointError, match="it does not exist; there are none"):
        pretrained.load("checkpoints/none")


def test_a_model_of_the_hub_is_tried_before_it_is_trained(bpe_run, text_file, tmp_path):
    folder = tmp_path / "hub/ORG/NAME"
    export.main([str(bpe_run), "--out", str(folder)])
    here = tmp_path / "checkpoints/.fetched/hf/ORG/NAME"
    words = [ROOT / "prepare_data.py", text_file, "--tokenizer", "hf://ORG/NAME", "--out", "data"]
    with Hub(tmp_path / "hub") as hub:

        def run(*command):
            process = warm_start.Process(command, tmp_path, variables=hub.environment)
            return process.complete(timeout=300)

        ok(run(*words))
        assert {"tokenizer.json", "config.json"} <= {path.name for path in here.iterdir()}
        assert not (here / "model.safetensors").exists()

        text = run(ROOT / "generate.py", "--checkpoint", "hf://ORG/NAME", "--prompt", "The name")
        assert text.stdout.startswith("The name"), text.stderr
        assert "fetching hf://ORG/NAME" in text.stderr
        assert f"[{here.relative_to(tmp_path)}: " in text.stderr
        scored = run("-m", "tools.evaluate", "hf://ORG/NAME", "--data", "data")
        assert f"{here.relative_to(tmp_path)}  " in scored.stdout, scored.stderr
        assert "fetching" not in scored.stderr
        none = run(ROOT / "generate.py", "--checkpoint", "hf://ORG/NONE", "--prompt", "x")
        fails_clearly(none, "hf://ORG/NONE cannot be reached")
