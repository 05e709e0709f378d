"""What the repetition penalty changes, and what sampling allows."""

import pytest
import torch

from generating.decode import apply_repetition_penalty, generate, sample
from tests.test_model import TINY, randomised


def greedy(model, prompt, count, **settings):
    """The ids that follow one prompt."""
    return [i for (i,) in generate(model, [prompt], count, temperature=0, **settings)]


def test_the_repetition_penalty_counts_the_text():
    model = randomised()
    assert len(set(greedy(model, [5], 25))) < 25
    assert len(set(greedy(model, [5], 25, repetition_penalty=1e9))) == 25


def test_the_repetition_penalty_counts_the_prompt():
    torch.manual_seed(0)
    prompts = [torch.randperm(TINY["vocab_size"])[:30].tolist() for _ in range(20)]
    (drawn,) = generate(randomised(), prompts, 1, temperature=0, repetition_penalty=1e9)
    assert [i for i, prompt in zip(drawn, prompts, strict=True) if i in prompt] == []


def test_the_repetition_penalty_lowers_logits_of_either_sign():
    seen = torch.tensor([[True, True, False]])
    logits = apply_repetition_penalty(torch.tensor([[2.0, -0.5, 1.0]]), seen, 2.0)
    assert logits.tolist() == [[1.0, -1.0, 1.0]]


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"temperature": 0}, [1]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.75}, [1, 2]),
        ({"top_p": 0.81}, [1, 2, 3]),
        ({"top_p": 0}, [1]),
        ({"vocab_size": 2}, [0, 1]),
    ],
)
def test_sampling_takes_only_what_the_settings_allow(settings, ids):
    torch.manual_seed(0)
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.3, 0.1, 0.05]])).repeat(4000, 1)
    assert sample(logits, **settings).unique().tolist() == ids


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.9999}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_temperature_is_a_power_of_the_probabilities(settings, temperature):
    torch.manual_seed(0)
    p = torch.tensor([0.1, 0.6, 0.1, 0.2])
    drawn = sample(p.log().repeat(4000, 1), temperature=temperature, **settings)
    expected = p ** (1 / temperature)
    assert torch.allclose(drawn.bincount() / 4000, expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 20, "top_p": 0.9}, {}])
def test_sampling_needs_no_value_from_the_device(settings):
    logits = torch.empty(3, 97, device="meta")  # has none
    assert sample(logits, vocab_size=90, **settings).shape == (3,)
