"""A decoder that is used for one text after the other; on a GPU, its CUDA graph."""

import pytest
import torch

from generating.cache import KVCache
from generating.decode import generate
from generating.decoder import Decoder, make_decoder
from tests.generating.test_sampling import CONTEXT, PROMPTS, greedy, varied, without_cache
from tests.test_model import randomised


def test_a_decoder_that_is_used_again_changes_no_text():
    model = varied()
    decoder = make_decoder(model, 4)
    for prompts in (PROMPTS, [[9], [4, 4, 4], [2] * 31, [77]], PROMPTS):
        written = list(generate(model, prompts, CONTEXT + 8, decoder=decoder, temperature=0))
        assert written == without_cache(model, prompts, CONTEXT + 8, temperature=0)


def test_a_cache_that_grows_keeps_what_it_has():
    model, ids = varied(), torch.randint(50, (1, 12))
    logits = []
    for length in (8, CONTEXT):
        cache = KVCache(model.config, 1, torch.device("cpu"), torch.float32, length)
        cache.set_positions(cache.slots[:8].expand(1, -1), 8, contiguous=True)
        model(ids[:, :8], cache=cache)
        cache.grow(32)
        cache.set_positions(cache.slots[8:].expand(1, -1)[:, :4], 12)
        logits.append(model(ids[:, 8:], cache=cache))
    assert torch.equal(*logits)


@pytest.mark.gpu
def test_on_a_gpu_a_text_outgrows_its_first_graph():
    model = randomised(block_size=1200, n_embd=256).cuda().bfloat16()
    decoder = make_decoder(model, 1)
    prompt = list(range(50)) * 10
    written = greedy(model, prompt, 40, decoder=decoder)
    assert decoder.cache.length == 1024
    assert decoder.graph is not None
    assert written == greedy(model, prompt, 40, decoder=Decoder(model, 1))
