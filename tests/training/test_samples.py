"""training/samples.py: the answers to sample_prompts."""

import contextlib

import pytest
import torch

import config as settings
from config import ConfigError
from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer
from training.samples import NEW_TOKENS, answer_prompts, without_unknown_characters


def test_the_same_weights_give_the_same_answers_and_training_goes_on():
    torch.manual_seed(1)
    model = GPT(GPTConfig(257, 32, 1, 1, 16, dropout=0.5)).train()
    prompts = ["The", "", "A"]
    first, second = (
        answer_prompts(model, Tokenizer.from_merges([]), prompts, 1, contextlib.nullcontext)
        for _ in range(2)
    )
    assert first == second
    assert [answer["prompt"] for answer in first] == prompts
    assert all(0 < len(answer["text"]) <= NEW_TOKENS for answer in first)
    assert model.training


def test_only_a_prompt_that_was_typed_has_to_be_of_known_characters(tmp_path, capsys):
    tokenizer = Tokenizer.characters("абв once")
    preset = tmp_path / "mine.py"
    preset.write_text("sample_prompts = ['Once', 'once', 'аб']\n", encoding="utf-8")
    config = settings.load([str(preset)])
    assert without_unknown_characters(config, tokenizer).sample_prompts == ["once", "аб"]
    said = capsys.readouterr().out
    assert said.startswith("sample_prompts: 'Once': ")
    assert "U+004F" in said
    typed = settings.load([str(preset), "--sample_prompts=Once"])
    with pytest.raises(ConfigError, match="choose another, or --sample_prompts=\\[\\]"):
        without_unknown_characters(typed, tokenizer)
