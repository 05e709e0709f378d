"""Decoding with the cache gives the tokens of whole forwards; what sampling allows."""

import pytest
import torch

from generating.decode import apply_repetition_penalty, generate, sample
from tests.test_model import TINY, randomised

CONTEXT = TINY["block_size"]
PROMPTS = [[5, 17, 3], [8] * 20, [1], list(range(40, 75))]  # the last is beyond the context


def without_cache(model, prompts, count, generator=None, **settings):
    """The ids that generate must give, from whole forwards, beyond the context too."""
    texts, out = [list(p)[-CONTEXT:] for p in prompts], []
    for _ in range(count):
        logits = torch.cat([model(torch.tensor([text]))[:, -1] for text in texts]).detach()
        out.append(sample(logits, generator=generator, **settings).tolist())
        texts = [
            (text if len(text) < CONTEXT else text[-CONTEXT // 2 + 1 :]) + [i]
            for text, i in zip(texts, out[-1], strict=True)
        ]
    return out


@pytest.mark.parametrize(
    "prompts",
    [[[7]], PROMPTS],
    ids=["one", "ragged"],
)
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"top_k": 20, "temperature": 0.9}], ids=["greedy", "sampled"]
)
def test_the_cache_changes_nothing_up_to_the_context_and_beyond(prompts, settings):
    model = randomised()
    model.wpe.weight.data *= 20  # else so small a model repeats one token
    generators = [torch.Generator().manual_seed(1) for _ in range(2)]
    count = 2 * CONTEXT
    cached = list(generate(model, prompts, count, generator=generators[0], **settings))
    assert cached == without_cache(model, prompts, count, generator=generators[1], **settings)
    assert len({tuple(ids) for ids in cached}) > 5  # not stuck on one token


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_cache_changes_nothing_in_qwen3(kv_heads):
    model = randomised(arch="qwen3", n_kv_head=kv_heads, tie_weights=False)
    written = list(generate(model, PROMPTS, CONTEXT, temperature=0))
    assert written == without_cache(model, PROMPTS, CONTEXT, temperature=0)


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_go_on_too(context):
    assert len(list(generate(randomised(block_size=context), [[1, 2, 3], [4]], 7))) == 7


def test_a_row_does_not_depend_on_its_neighbours():
    model = randomised()
    together = list(generate(model, PROMPTS, 40, temperature=0))
    for row, prompt in enumerate(PROMPTS):
        assert [ids[row] for ids in together] == [
            i for (i,) in generate(model, [prompt], 40, temperature=0)
        ]


def test_in_bfloat16_the_cache_is_close():
    model = randomised().to(torch.bfloat16)
    ids = [i for (i,) in generate(model, [[5]], CONTEXT - 1, temperature=0)]
    logits = model(torch.tensor([[5, *ids]])).float()[0]
    chosen = logits[torch.arange(CONTEXT - 1), ids]
    assert (logits[:-1].amax(-1) - chosen).max() < 0.1


def test_the_repetition_penalty_counts_the_text():
    model = randomised()
    plain = [i for (i,) in generate(model, [[5]], 25, temperature=0)]
    penalised = [i for (i,) in generate(model, [[5]], 25, temperature=0, repetition_penalty=1e9)]
    assert len(set(plain)) < 25
    assert len(set(penalised)) == 25


def test_the_repetition_penalty_counts_the_prompt():
    torch.manual_seed(0)
    prompts = [torch.randperm(TINY["vocab_size"])[:30].tolist() for _ in range(20)]
    (drawn,) = generate(randomised(), prompts, 1, temperature=0, repetition_penalty=1e9)
    assert [i for i, prompt in zip(drawn, prompts, strict=True) if i in prompt] == []


def test_the_repetition_penalty_lowers_logits_of_either_sign():
    seen = torch.tensor([[True, True, False]])
    logits = apply_repetition_penalty(torch.tensor([[2.0, -0.5, 1.0]]), seen, 2.0)
    assert logits.tolist() == [[1.0, -1.0, 1.0]]


def test_sampling_takes_only_what_the_settings_allow():
    torch.manual_seed(0)
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.3, 0.1, 0.05]])).repeat(4000, 1)
    assert sample(logits, temperature=0).unique().tolist() == [1]
    assert sample(logits, top_k=2).unique().tolist() == [1, 2]
    assert sample(logits, top_p=0.75).unique().tolist() == [1, 2]
    assert sample(logits, top_p=0.81).unique().tolist() == [1, 2, 3]
    assert sample(logits, top_p=0).unique().tolist() == [1]
    assert sample(logits, vocab_size=2).unique().tolist() == [0, 1]
    counts = sample(logits).bincount() / 4000
    assert torch.allclose(counts, torch.tensor([0.05, 0.5, 0.3, 0.1, 0.05]), atol=0.03)
    assert torch.equal(
        sample(logits, generator=torch.Generator().manual_seed(5)),
        sample(logits, generator=torch.Generator().manual_seed(5)),
    )


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.9999}])
def test_the_temperature_is_a_power_of_the_probabilities(settings):
    torch.manual_seed(0)
    p = torch.tensor([0.1, 0.6, 0.1, 0.2])
    for temperature in (0.5, 2.0):
        drawn = sample(p.log().repeat(4000, 1), temperature=temperature, **settings)
        expected = p ** (1 / temperature)
        assert torch.allclose(drawn.bincount() / 4000, expected / expected.sum(), atol=0.03)


def test_a_seed_draws_what_torch_multinomial_draws():
    logits = torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    for n in range(50):
        one, other = (torch.Generator().manual_seed(n) for _ in range(2))
        expected = torch.multinomial(logits.softmax(-1), 1, generator=other)[:, 0]
        assert torch.equal(sample(logits, generator=one), expected)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 20, "top_p": 0.9}, {}])
def test_sampling_needs_no_value_from_the_device(settings):
    logits = torch.empty(3, 97, device="meta")  # has none
    assert sample(logits, vocab_size=90, **settings).shape == (3,)
