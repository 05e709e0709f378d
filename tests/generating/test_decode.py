"""Decoding with the cache gives the tokens of whole forwards, on a GPU from a CUDA graph; sampling.

A graph is tried without a GPU too: one that records operations instead of kernels.
"""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from generating import decode
from generating.decode import (
    CudaGraphDecoder,
    Decoder,
    KVCache,
    apply_repetition_penalty,
    generate,
    sample,
)
from tests.test_model import FORMS, TINY, randomized

pytestmark = pytest.mark.filterwarnings("error:no CUDA graph")
CONTEXT = TINY["block_size"]
PROMPTS = [[5, 17, 3], [8] * 20, [1], list(range(40, 75))]  # the last is beyond the context


def varied(**changes):
    """A model that does not repeat one token, as so small a one else does."""
    model = randomized(**changes)
    model.wpe.weight.data *= 20
    return model


def whole_forwards(model, texts):
    """The logits of what follows each text, [B, V]."""
    device = model.wte.weight.device
    with torch.inference_mode():
        return torch.cat([model(torch.tensor([text], device=device))[:, -1] for text in texts])


def without_cache(model, prompts, count, generator=None, **settings):
    """The ids that generate must give, from whole forwards, beyond the context too."""
    texts, out = [list(p)[-CONTEXT:] for p in prompts], []
    for _ in range(count):
        logits = whole_forwards(model, texts)
        out.append(sample(logits, generator=generator, **settings).tolist())
        texts = [
            (text if len(text) < CONTEXT else text[-CONTEXT // 2 + 1 :]) + [i]
            for text, i in zip(texts, out[-1], strict=True)
        ]
    return out


# -- a graph without a GPU -------------------------------------------------------------------------


class Recorded:
    """What a CUDA graph is, on the CPU: operations on fixed tensors, to be run again."""

    def __init__(self):
        self.operations = []  # each with its inputs, and the outputs that are no view of one

    def replay(self):
        for function, args, kwargs, outputs in self.operations:
            again = tensors(function(*args, **kwargs))
            for index, output in outputs.items():
                output.copy_(again[index])


class Recording(TorchDispatchMode):
    """Records what is done in this context; as on a GPU, it has no result before the replay."""

    forbidden = ("_local_scalar_dense", "nonzero", "lift_fresh")  # they wait, or send a value

    def __init__(self, graph, capture_error_mode="global"):
        super().__init__()
        self.operations = graph.operations

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        if name in self.forbidden:
            raise RuntimeError(f"{name} is not permitted when a stream is capturing")
        result = function(*args, **kwargs)
        there = {memory(t) for t in tensors((args, kwargs))}
        made = {i: t for i, t in enumerate(tensors(result)) if memory(t) not in there}
        self.operations.append((function, args, kwargs, made))
        return result

    def __exit__(self, *error):
        super().__exit__(*error)
        for *_, made in self.operations:
            for tensor in made.values():
                tensor.fill_(77)


def tensors(tree):
    """All tensors in arguments or results."""
    return [leaf for leaf in tree_leaves(tree) if torch.is_tensor(leaf)]


def memory(tensor):
    """Where a tensor's numbers are; a view has those of another."""
    return tensor.untyped_storage().data_ptr()


@pytest.fixture
def fake_graphs(monkeypatch):
    """PyTorch's CUDA graphs, without CUDA."""
    for name in ("device", "stream"):
        monkeypatch.setattr(torch.cuda, name, contextlib.nullcontext)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", Recording)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)


@pytest.fixture(params=["cpu", "fake graph", pytest.param("cuda", marks=pytest.mark.gpu)])
def make_decoder(request, monkeypatch):
    """A function of a model, which it moves to the device, and a number of rows: their decoder.

    The cache begins so short that a text outgrows it twice.
    """
    monkeypatch.setattr(decode, "FIRST_LENGTH", 8)
    if request.param == "cpu":
        return Decoder
    if request.param == "fake graph":
        request.getfixturevalue("fake_graphs")
        return CudaGraphDecoder
    # A run that was built in this process left TF32 switched on.
    torch.set_float32_matmul_precision("highest")
    return lambda model, rows: decode.make_decoder(model.cuda(), rows)


# -- tokens and logits -----------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[[7]], PROMPTS], ids=["one", "ragged"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0}, {"top_k": 20, "temperature": 0.9}], ids=["greedy", "sampled"]
)
def test_the_cache_changes_nothing_up_to_the_context_and_beyond(make_decoder, prompts, settings):
    model, count = varied(), 2 * CONTEXT
    options = settings | {"decoder": make_decoder(model, len(prompts))}
    generators = [torch.Generator(model.wte.weight.device).manual_seed(1) for _ in range(2)]
    cached = list(generate(model, prompts, count, generator=generators[0], **options))
    assert cached == without_cache(model, prompts, count, generator=generators[1], **settings)
    assert len({tuple(ids) for ids in cached}) > 5  # not stuck on one token


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_the_cache_changes_nothing_in_qwen3(make_decoder, kv_heads):
    model = randomized(arch="qwen3", n_kv_head=kv_heads, tie_weights=False)
    decoder = make_decoder(model, len(PROMPTS))
    written = list(generate(model, PROMPTS, CONTEXT, decoder=decoder, temperature=0))
    assert written == without_cache(model, PROMPTS, CONTEXT, temperature=0)
    assert len({tuple(ids) for ids in written}) > 5


@pytest.mark.parametrize("context", [1, 2, 3])
def test_the_smallest_contexts_go_on_too(make_decoder, context):
    model = randomized(block_size=context)
    assert len(list(generate(model, [[1, 2, 3], [4]], 7, decoder=make_decoder(model, 2)))) == 7


def windowed(q, k, v, dropout):
    """Attention to the last 20 tokens, of which KVCache.attend does not know."""
    distance = torch.arange(q.size(2))[:, None] - torch.arange(q.size(2))
    mask = (distance >= 0) & (distance < 20)
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def shifted(self, x):
    """An MLP of the token before, which the first forward has and a step of one token has not."""
    x = torch.nn.functional.pad(x[:, :-1], (0, 0, 1, 0))
    return self.c_proj(self.c_fc(x).relu())


@pytest.mark.parametrize(
    ("name", "other"), [("causal_attention", windowed), ("MLP.forward", shifted)]
)
def test_a_changed_model_that_the_cache_does_not_fit_goes_without_it(monkeypatch, name, other):
    monkeypatch.setattr(f"model.{name}", other)
    decode.fits_cache.cache_clear()
    model = varied()
    with pytest.warns(UserWarning, match="leaves the cache out"):
        written = list(generate(model, PROMPTS, 40, temperature=0))
    decode.fits_cache.cache_clear()
    assert written == without_cache(model, PROMPTS, 40, temperature=0)


def test_a_sequence_whose_logits_are_nan_leaves_the_others_as_they_are():
    model = randomized(tie_weights=False)
    model.wte.weight.data[5] = torch.nan
    alone = list(generate(model, [[7]], 5, temperature=0))
    both = list(generate(model, [[5], [7]], 5, temperature=0))
    assert both == [[decode.NAN, *ids] for ids in alone]


def test_the_cache_fits_in_bfloat16_too():
    decode.fits_cache.cache_clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert isinstance(decode.make_decoder(randomized(), 1), Decoder)


def test_a_decoder_that_is_used_again_changes_no_text(make_decoder):
    model = varied()
    decoder = make_decoder(model, 4)
    for prompts in ([[9], [4, 4, 4], [2] * 20, [77]], PROMPTS, [[9], [4, 4, 4], [2] * 20, [77]]):
        written = list(generate(model, prompts, 12, decoder=decoder, temperature=0))
        assert written == without_cache(model, prompts, 12, temperature=0)


@pytest.mark.parametrize("shape", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("weights", "cast"),
    [(torch.float32, False), (torch.float32, True), (torch.bfloat16, False)],
    ids=["float32", "autocast", "bfloat16"],
)
def test_a_step_gives_the_logits_of_a_whole_forward(make_decoder, shape, weights, cast):
    """Under autocast as at the evaluations of a run."""
    model = randomized(**shape).to(weights)
    decoder, texts = make_decoder(model, 3), [[5, 17, 3], [8] * 6, [1]]
    assert decoder.cache.keys.dtype == weights
    device = model.wte.weight.device.type
    ids = torch.randint(97, (12, 3), generator=torch.Generator().manual_seed(0))
    with torch.autocast(device, torch.bfloat16) if cast else contextlib.nullcontext():
        with torch.inference_mode():
            logits = decoder.prefill(texts)
        for step in ids.tolist():
            exact = whole_forwards(model, texts)
            close = 1e-4 if exact.dtype == torch.float32 else 0.05
            assert (logits - exact).abs().max() < close * exact.abs().max()
            for text, next_id in zip(texts, step, strict=True):
                text.append(next_id)
            with torch.inference_mode():
                logits = decoder.step(texts)


def test_where_a_graph_cannot_be_recorded_the_text_is_the_same(fake_graphs, monkeypatch):
    def fails(graph, **options):
        raise RuntimeError("operation not permitted")

    monkeypatch.setattr(torch.cuda, "graph", fails)
    model = varied()
    with pytest.warns(match="no CUDA graph .operation not permitted.: generation is slower"):
        written = list(generate(model, [[7]], 9, decoder=CudaGraphDecoder(model, 1), temperature=0))
    assert written == without_cache(model, [[7]], 9, temperature=0)


def test_a_cache_that_grows_keeps_what_it_has():
    model, ids = varied(), torch.randint(50, (1, 12))
    logits = []
    for length in (8, CONTEXT):
        cache = KVCache(model.config, 1, torch.device("cpu"), torch.float32, length)
        cache.set_range(0, 8)
        model(ids[:, :8], cache=cache)
        if length == 8:
            cache.grow(32)
        cache.set_positions(cache.slots[None, 8:12], read_until=12)
        logits.append(model(ids[:, 8:], cache=cache))
    assert torch.equal(*logits)


def test_a_cache_is_as_long_as_its_text_needs_and_not_as_the_context():
    model = randomized(block_size=4096)
    decoder = Decoder(model, 1)
    for prompt, length in (([7], 512), ([7] * 600, 1024), ([7] * 3000, 4096)):
        list(generate(model, [prompt], 1, decoder=decoder))
        assert decoder.cache.length == length


# -- sampling --------------------------------------------------------------------------------------


def greedy(model, prompt, count, **settings):
    """The ids that follow one prompt."""
    return [i for (i,) in generate(model, [prompt], count, temperature=0, **settings)]


def test_the_repetition_penalty_counts_the_text():
    model = randomized()
    assert len(set(greedy(model, [5], 25))) < 25
    assert len(set(greedy(model, [5], 25, repetition_penalty=1e9))) == 25


def test_the_repetition_penalty_counts_the_prompt_beyond_the_context_too():
    torch.manual_seed(0)
    prompts = [torch.randperm(TINY["vocab_size"])[:60].tolist() for _ in range(20)]
    (drawn,) = generate(randomized(), prompts, 1, temperature=0, repetition_penalty=1e9)
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
        ({"top_p": 0.75, "temperature": 2.0}, [1, 2, 3]),
        ({"vocab_size": 2}, [0, 1]),
    ],
)
def test_sampling_takes_only_what_the_settings_allow(settings, ids):
    torch.manual_seed(0)
    logits = torch.log(torch.tensor([[0.05, 0.5, 0.3, 0.1, 0.05]])).repeat(4000, 1)
    assert sample(logits, **settings).unique().tolist() == ids


def test_top_p_takes_no_more_tokens_than_reach_it():
    torch.manual_seed(0)
    assert len(sample(torch.zeros(400, 4), top_p=0.5).unique()) == 2


def test_noise_of_zero_draws_no_token_of_probability_zero(monkeypatch):
    """An Apple GPU's noise is -0.0 once in 3e7 times (github.com/pytorch/pytorch/issues/192577)."""
    monkeypatch.setattr(torch.Tensor, "exponential_", lambda noise, generator: noise.fill_(-0.0))
    assert sample(torch.tensor([[0.0, 1.0, 5.0]]), top_p=0.5) == 2


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"top_p": 0.9999}])
@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
def test_the_temperature_is_a_power_of_the_probabilities(settings, temperature):
    torch.manual_seed(0)
    p = torch.tensor([0.15, 0.3, 0.2, 0.35])
    drawn = sample(p.log().repeat(4000, 1), temperature=temperature, **settings)
    expected = p ** (1 / temperature)
    assert torch.allclose(drawn.bincount() / 4000, expected / expected.sum(), atol=0.03)


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 20, "top_p": 0.9}, {}])
def test_sampling_needs_no_value_from_the_device(settings):
    logits = torch.empty(3, 97, device="meta")  # has none
    assert sample(logits, vocab_size=90, **settings).shape == (3,)
