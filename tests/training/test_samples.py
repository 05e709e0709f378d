"""training/samples.py: the answers to sample_prompts."""

import contextlib

from model import GPT, GPTConfig
from tokenizer_bpe import Tokenizer
from training.samples import NEW_TOKENS, answer_prompts


def test_the_same_weights_give_the_same_answers_and_training_goes_on():
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
