"""A decoder that is used for one text after the other; on a GPU, its CUDA graph."""

import pytest
import torch

from generating.cache import KVCache
from generating.decode import generate
from generating.decoder import Decoder, make_decoder
from generating.load import LoadedModel
from tests.generating.test_sampling import CONTEXT, PROMPTS, without_cache
from tests.test_model import randomised


def varied(**changes):
    """A model that does not repeat one token, as so small a one else does."""
    model = randomised(**changes)
    model.wpe.weight.data *= 20
    return model


def test_a_decoder_that_is_used_again_changes_no_text():
    model = varied()
    decoder = make_decoder(model, 4)
    for prompts in (PROMPTS, [[9], [4, 4, 4], [2] * 31, [77]], PROMPTS):
        written = list(generate(model, prompts, CONTEXT + 8, decoder=decoder, temperature=0))
        assert written == without_cache(model, prompts, CONTEXT + 8, temperature=0)


def test_a_text_that_was_interrupted_leaves_nothing_in_the_next():
    model = varied()
    decoder = make_decoder(model, 1)
    interrupted = generate(model, [[60, 3]], 20, decoder=decoder, temperature=0)
    for _ in range(10):
        next(interrupted)
    written = list(generate(model, [[5]], 20, decoder=decoder, temperature=0))
    assert written == without_cache(model, [[5]], 20, temperature=0)


def test_two_texts_that_grow_at_the_same_time_do_not_mix():
    model = varied()
    both = [generate(model, [prompt], CONTEXT, temperature=0) for prompt in ([5], [60, 3])]
    rows = list(zip(*both, strict=True))
    for n, prompt in enumerate(([5], [60, 3])):
        assert [ids[n] for ids in rows] == without_cache(model, [prompt], CONTEXT, temperature=0)


def test_a_loaded_model_keeps_its_decoder_for_as_many_sequences(byte_tokenizer):
    loaded = LoadedModel("name", randomised(), byte_tokenizer)
    one = loaded.decoder(1)
    assert loaded.decoder(1) is one
    two = loaded.decoder(2)
    assert two is not one
    assert loaded.decoder(2) is two


def test_a_cache_that_grows_keeps_what_it_has():
    model = varied()
    short, whole = (
        KVCache(model.config, 1, torch.device("cpu"), torch.float32, n) for n in (8, None)
    )
    ids = torch.randint(50, (1, 12))
    for cache in (short, whole):
        cache.set_positions(cache.slots[:8].expand(1, -1), 8, contiguous=True)
        model(ids[:, :8], cache=cache)
    short.grow(16)
    logits = []
    for cache in (short, whole):
        for at in range(8, 12):
            cache.set_positions(cache.slots[at : at + 1].expand(1, -1), at + 1, contiguous=True)
            logits.append(model(ids[:, at : at + 1], cache=cache))
    for a, b in zip(logits[:4], logits[4:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_on_a_gpu_a_text_outgrows_its_first_graph():
    model = randomised(block_size=1200, n_embd=256).cuda().bfloat16()
    decoder = make_decoder(model, 1)
    prompt = list(range(50)) * 10
    written = list(generate(model, [prompt], 40, decoder=decoder, temperature=0))
    assert decoder.cache.length == 1024 and decoder.graph is not None
    assert written == list(generate(model, [prompt], 40, decoder=Decoder(model, 1), temperature=0))


@pytest.mark.gpu
def test_on_a_gpu_a_second_prompt_takes_the_graph_of_the_first():
    model = randomised(block_size=512, n_embd=256).cuda().bfloat16()
    decoder = make_decoder(model, 1)
    first = list(generate(model, [[5, 6]], 50, decoder=decoder, temperature=0))
    graph = decoder.graph
    assert graph is not None
    assert list(generate(model, [[5, 6]], 50, decoder=decoder, temperature=0)) == first
    assert decoder.graph is graph


@pytest.mark.gpu
def test_on_a_gpu_a_token_takes_one_launch_and_one_read():
    model = randomised(block_size=512, n_embd=256).cuda().bfloat16()
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    text = generate(model, [[7]], 60, top_k=50)
    next(text), next(text)  # the prompt's forward, and the recording
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(20):
            next(text)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["cudaGraphLaunch"] == 20
    assert sum(count for name, count in counts.items() if "DtoH" in name) == 20
    assert counts.get("cudaStreamSynchronize", 0) <= 20
