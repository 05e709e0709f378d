"""Less memory for the same model: neither what is learned nor what is saved changes."""

import functools

import pytest
import torch

from config import Config
from hardware import Device, autocast
from model import GPT, IGNORE, GPTConfig
from tests.training.conftest import small_run
from training import fit
from training.compiling import compile_layers

SHAPE = {"vocab_size": 208, "block_size": 32, "n_layer": 2, "n_head": 2, "n_embd": 32}
ARCHS = [{"arch": "gpt2", "dropout": 0.2}, {"arch": "qwen3", "tie_weights": False}]


def model_and_batch(**changes):
    """A small model, and tokens with targets, of which some do not count."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE | changes))
    tokens = torch.randint(model.config.vocab_size, (4, 33))
    y = tokens[:, 1:].clone()
    y[0, :7] = IGNORE
    return model, tokens[:, :-1], y


def loss_and_gradients(model, x, y):
    """The loss in float32, and each parameter's gradient by name."""
    model.zero_grad()
    torch.manual_seed(1)
    loss = model(x, y)
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(one, other, tolerance=1e-6):
    """Equal losses and gradients, these against the largest of each parameter."""
    assert one[0] == pytest.approx(other[0], abs=tolerance)
    assert one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert (gradient - other[1][name]).abs().max() < tolerance * max(1, gradient.abs().max())


@pytest.mark.parametrize("arch", ARCHS, ids=["gpt2", "qwen3"])
def test_a_loss_in_chunks_is_the_same(arch):
    model, x, y = model_and_batch(**arch)
    plain = loss_and_gradients(model, x, y)
    names, logits = model.state_dict().keys(), model.eval()(x)
    fit.use_chunked_loss(model, 5)
    assert torch.equal(model(x), logits)
    assert_same(plain, loss_and_gradients(model.train(), x, y))
    assert model(x, torch.full_like(y, IGNORE)) == 0
    assert model.state_dict().keys() == names


def test_a_trial_leaves_buffers_as_they_are_and_no_gradients(little_data, tmp_path):
    run = small_run(little_data, tmp_path)
    run.model.register_buffer("forwards", torch.zeros(()))
    run.model.register_forward_pre_hook(lambda model, inputs: model.forwards.add_(1) and None)
    run.model(torch.tensor([[0]]))
    assert run.model.forwards == 1
    assert fit.try_step(run) is None
    assert run.model.forwards == 1
    assert not [p for p in run.model.parameters() if p.grad is not None]


@pytest.mark.parametrize("arch", ARCHS, ids=["gpt2", "qwen3"])
def test_checkpointed_activations_give_the_same_gradients(arch):
    model, x, y = model_and_batch(**arch)
    plain = loss_and_gradients(model, x, y)
    fit.use_activation_checkpointing(model)
    assert_same(plain, loss_and_gradients(model, x, y))


def test_neither_logits_nor_what_layers_compute_is_kept_for_the_backward_pass():
    model, x, y = model_and_batch(vocab_size=4096)
    gpu = Device(torch.device("cuda"), torch.float32, "a GPU", 10**6, None)  # a megabyte
    config = Config(activation_checkpointing=True, micro_batch_size=4, block_size=32)
    fit.apply_memory_options(model, config, gpu)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        model(x, y)
    assert kept
    assert not [t.shape for t in kept if {4096, model.config.n_inner} & {*t.shape}]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_chunks_and_checkpoints_compile(monkeypatch, dtype, tolerance):
    """As far as their code is ours to break: the graphs, without the machine code for them."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    model, x, y = model_and_batch()
    plain = loss_and_gradients(model, x, y)
    fit.use_chunked_loss(model, 4)
    fit.use_activation_checkpointing(model)
    model.zero_grad()
    with autocast(torch.device("cpu"), dtype):
        loss = compile_layers(model)(x, y)
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    assert_same(plain, (loss.item(), gradients), tolerance)


def test_every_shape_of_a_search_is_compiled(char_data, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=1):  # of PyTorch's 8
        for width in (16, 32):
            torch._dynamo.utils.counters.clear()
            run = small_run(char_data, tmp_path, f"--n_embd={width}", "--compile=True")
            assert fit.fit_in_memory(run) is None
            graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
            assert graphs == 2  # a layer, the head


@pytest.mark.parametrize(
    ("gigabytes", "micro_batch", "chunks"), [(None, 64, 1), (80, 64, 1), (16, 64, 8), (16, 8, 1)]
)
def test_the_loss_comes_in_chunks_where_its_logits_fill_the_gpu(gigabytes, micro_batch, chunks):
    memory = gigabytes and gigabytes * 10**9
    device = Device(torch.device("cuda"), torch.bfloat16, "a GPU", memory, None)
    config = Config(batch_size=64, micro_batch_size=micro_batch, block_size=512)
    assert fit.loss_chunks(config, 32_000, device) == chunks
