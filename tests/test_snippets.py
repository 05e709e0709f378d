"""The Python on the pages, run from another folder."""

import re

import numpy as np
import torch

from formats import pretrained, run_folder
from formats.data_folder import read_meta, tokenizer_file
from model import GPT, GPTConfig
from tests.conftest import ROOT, ok, prepare, run_code, train_command
from tokenizer_bpe import EOT, Tokenizer

FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(page, words, folder, replaced, before="", after=""):
    """Run the block of a page that has these words; returns what it printed."""
    (code,) = [block for block in FENCE.findall((ROOT / page).read_text()) if words in block]
    for old, new in replaced.items():
        assert old in code
        code = code.replace(old, new)
    path = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
    return ok(run_code("\n".join((path, before, code, after)), cwd=folder)).stdout


def test_text_and_logits_from_a_run(bpe_run, tmp_path):
    replaced = {"/home/me/gpt2/checkpoints/demo": str(bpe_run), "/home/me/gpt2": str(ROOT)}
    printed = run(
        "docs/code.md", "open_checkpoint", tmp_path, replaced, after="print(logits.shape)"
    )
    assert re.search(r"torch.Size\(\[1, \d+, 512\]\)", printed)


def test_a_search_over_a_setting(char_data, tmp_path):
    arguments = train_command(char_data, tmp_path, "--max_steps=5")[1:]
    run("docs/code.md", "for rate in", tmp_path, {'"config/demo.py"': str(arguments)[1:-1]})
    runs = sorted((tmp_path / "checkpoints").iterdir())
    assert [folder.name for folder in runs] == ["muon_lr_0.02", "muon_lr_0.04"]
    assert all(run_folder.read_best(folder)["step"] == 5 for folder in runs)


def test_sequences_that_are_not_text(tmp_path):
    games = "games = [['e2e4', 'e7e5', 'g1f3'], ['d2d4', 'd7d5']] * 50"
    run("docs/data.md", "symbols", tmp_path, {}, before=games)
    data = prepare(tmp_path / "games.jsonl", tmp_path / "games", "--tokenizer", "char")
    meta = read_meta(data)
    assert meta.vocab_size == 5 + 1
    tokenizer = Tokenizer.load(tokenizer_file(data, meta))
    assert [ord(c) - 0x10000 for c in tokenizer.decode(range(1, 6))] == [0, 1, 2, 3, 4]


def test_tokens_of_nanogpt(bpe_data, tmp_path):
    ids = np.fromfile(bpe_data / "train.bin", np.uint16)
    np.concatenate((np.zeros(512, np.uint16), ids)).tofile(tmp_path / "train.bin")
    replaced = {"Tokenizer.gpt2()": f"Tokenizer.load({str(bpe_data)!r})"}
    run(
        "docs/from-nanogpt.md",
        "memmap",
        tmp_path,
        replaced | {"offset=0": "offset=1024", "1_000_000": "1_000"},
    )
    text = (tmp_path / "text.txt").read_text("utf-8")
    assert text == Tokenizer.load(bpe_data).decode(ids)
    assert text.endswith(EOT)


def test_weights_of_nanogpt(bpe_data, tmp_path):
    shape = {"vocab_size": 512, "block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(**shape, bias=False))
    saved = {"_orig_mod.transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}
    for name, tensor in model.state_dict().items():
        inner = name if name.startswith("lm_head.") else f"transformer.{name}"
        saved[f"_orig_mod.{inner}"] = tensor
    torch.save({"model": saved, "model_args": shape | {"bias": False}}, tmp_path / "ckpt.pt")
    replaced = {"Tokenizer.gpt2()": f"Tokenizer.load({str(bpe_data)!r})"}
    run("docs/from-nanogpt.md", "ckpt.pt", tmp_path, replaced)
    x = torch.randint(512, (2, 16))
    found = pretrained.load(tmp_path / "exported/nanogpt")
    torch.testing.assert_close(found.model()(x), model(x))
