"""The CUDA-graph decoder: kept between prompts, with one read and one launch per token.

On a CPU its graph is replaced by the forward pass that it would replay; what is counted is the
work around it.
"""

import gc
import time
import weakref

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from generating import cuda_graph, decode
from generating.cuda_graph import CudaGraphDecoder, cuda_graph_decoder
from generating.decode import generate, sample
from tests.generating.test_sampling import CONTEXT, PROMPTS, without_cache
from tests.test_model import randomised

READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__")
WAITING_OPS = ("_local_scalar_dense", "nonzero", "multinomial", "masked_select", "equal")


class Forward:
    """Replays a forward pass as a CUDA graph does: into the same logits, seen by no counter."""

    def __init__(self, decoder, model):
        self.decoder = decoder
        self.model = weakref.ref(model)
        self.replays = 0

    def replay(self):
        """Run it."""
        self.replays += 1
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            self.decoder.logits = self.decoder.forward(self.model())


class Reads(TorchFunctionMode):
    """Counts what would read a value from the device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        if name in READS:
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class Ops(TorchDispatchMode):
    """Notes the names of all ops."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.__name__.partition(".")[0])
        return function(*args, **(kwargs or {}))


@pytest.fixture
def recordings(monkeypatch):
    """Makes the CPU take a GPU's path; the list of CudaGraphDecoders that have recorded."""
    made = []

    def record(decoder, model):
        decoder.graph = Forward(decoder, model)
        made.append(decoder)

    monkeypatch.setattr(CudaGraphDecoder, "record", record)
    monkeypatch.setattr(decode, "choose_decoder", cuda_graph_decoder)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    return made


def greedy(model, prompts, count=CONTEXT + 8):
    """What `generate` writes, and what whole forwards write."""
    return list(generate(model, prompts, count, temperature=0)), without_cache(
        model, prompts, count, temperature=0
    )


def test_a_second_prompt_takes_the_recorded_graph_and_its_text_is_its_own(recordings):
    model = randomised()
    model.wpe.weight.data *= 20  # else so small a model repeats one token
    for prompts in (PROMPTS, [[9], [4, 4, 4], [2] * 31, [77]], PROMPTS):
        written, expected = greedy(model, prompts)
        assert written == expected
    assert len(recordings) == 1
    written, expected = greedy(model, [[5]])
    assert written == expected and len(recordings) == 2


def test_where_no_graph_can_be_recorded_the_tokens_are_the_same(recordings, monkeypatch):
    monkeypatch.setattr(CudaGraphDecoder, "record", lambda decoder, model: None)
    written, expected = greedy(randomised(), PROMPTS[:2])
    assert written == expected


def test_weights_that_moved_are_recorded_again(recordings):
    model = randomised()
    greedy(model, [[5]], 3)
    model.double()
    written, expected = greedy(model, [[5]], 3)
    assert written == expected and len(recordings) == 2


def test_two_texts_that_grow_at_the_same_time_do_not_mix(recordings):
    model = randomised()
    model.wpe.weight.data *= 20
    both = [generate(model, [prompt], CONTEXT, temperature=0) for prompt in ([5], [60, 3])]
    rows = list(zip(*both, strict=True))
    for n, prompt in enumerate(([5], [60, 3])):
        assert [ids[n] for ids in rows] == without_cache(model, [prompt], CONTEXT, temperature=0)
    assert len(recordings) == 2


def test_one_is_kept_and_none_outlives_its_model_or_autocast(recordings):
    model = randomised()
    for rows in (1, 2, 2):
        greedy(model, [[5]] * rows, 3)
    assert len(recordings) == 2
    recordings.clear()
    before = len(cuda_graph._kept)
    with torch.autocast("cpu", torch.bfloat16):
        list(generate(model, [[5]] * 2, 3, temperature=0))
    assert model not in cuda_graph._kept
    greedy(model, [[5]], 3)
    recordings.clear()
    del model
    gc.collect()
    assert len(cuda_graph._kept) == before - 1


@pytest.mark.parametrize("settings", [{"temperature": 0}, {"top_k": 20, "top_p": 0.9}, {}])
def test_a_token_takes_one_read_and_one_launch(recordings, settings):
    model = randomised()
    texts = generate(model, [[5], [9, 3]], 20, repetition_penalty=1.1, **settings)
    next(texts), next(texts)  # the prompts' forward, and the recording
    with Reads() as reads, Ops() as ops:
        replays = recordings[0].graph.replays
        for _ in range(10):
            next(texts)
    assert recordings[0].graph.replays == replays + 10
    assert reads.names == ["tolist"] * 10
    assert not {name.lstrip("_") for name in ops.names} & {n.lstrip("_") for n in WAITING_OPS}
    assert len(ops.names) <= 40 * 10  # each is at most a kernel; the graph has 200


def test_sampling_needs_no_value_from_the_device():
    logits = torch.empty(3, 97, device="meta")  # has none
    for settings in ({"temperature": 0}, {"top_k": 20, "top_p": 0.9}, {}):
        assert sample(logits, vocab_size=90, **settings).shape == (3,)


@pytest.mark.gpu
def test_on_a_gpu_the_second_prompt_records_nothing_and_a_token_reads_once():
    model = randomised(block_size=512, n_embd=256).cuda().bfloat16()
    recordings_made = []
    plain = CudaGraphDecoder.record
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CudaGraphDecoder,
            "record",
            lambda decoder, model: (recordings_made.append(1), plain(decoder, model)),
        )
        first = list(generate(model, [[5, 6]], 50, temperature=0))
        start = time.perf_counter()
        assert list(generate(model, [[5, 6]], 50, temperature=0)) == first
        print(f"a second prompt of 50 tokens: {time.perf_counter() - start:.4f} s")
    assert len(recordings_made) == 1
    kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    texts = generate(model, [[7]], 60, top_k=50)
    next(texts), next(texts)
    with torch.profiler.profile(activities=kinds) as profile:
        for _ in range(20):
            next(texts)
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["cudaGraphLaunch"] == 20
    assert sum(count for name, count in counts.items() if "DtoH" in name) == 20
    assert counts.get("cudaStreamSynchronize", 0) <= 20
