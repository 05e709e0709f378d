"""Muon against PyTorch's own, and in our step."""

import pytest
import torch

from config import Config
from model import GPT, GPTConfig
from training.optimizer import Muon, make_optimizer, orthogonalize

CPU = torch.device("cpu")


def optimizer_of(params, **more):
    """Muon for parameters of one shape."""
    group = {"params": params, "num_fused": 1, "momentum": 0.95, "weight_decay": 0.1}
    group |= {"dtype": torch.float32} | more
    return Muon([group], lr=0.02, fused=True)


def parameters(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def set_gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float16, 0.01), (torch.bfloat16, 0.03), (torch.float32, 0.005)]
)
def test_iterates_in_16_bits_on_momentum_of_any_size(dtype, near):
    """float16 has no numbers as small as these."""
    x = 1e-6 * torch.randn(3, 96, 32, generator=torch.Generator().manual_seed(1))
    exact, rounded = orthogonalize(1e6 * x), orthogonalize(x, dtype)
    assert rounded.dtype == dtype
    assert (rounded - exact).norm() < near * exact.norm()


@pytest.mark.parametrize("shape", [(64, 32), (32, 64)])
def test_steps_as_pytorch_does(shape):
    ours, theirs = parameters(shape, shape), parameters(shape, shape)
    start = [p.detach().clone() for p in ours]
    optimizer = optimizer_of(ours)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="original"
    )
    for seed in range(3):
        set_gradients(ours, seed)
        set_gradients(theirs, seed)
        optimizer.step()
        reference.step()
    for p, q, was in zip(ours, theirs, start, strict=True):  # theirs iterates in bf16
        assert (p - q).norm() < 0.03 * (q - was).norm()


def test_query_key_and_value_are_three_matrices():
    (fused,) = parameters((96, 32))
    separate = [torch.nn.Parameter(p.clone()) for p in fused.detach().split(32)]
    set_gradients([fused], 1)
    for p, g in zip(separate, fused.grad.split(32), strict=True):
        p.grad = g.clone()
    optimizer_of([fused], num_fused=3).step()
    optimizer_of(separate).step()
    torch.testing.assert_close(fused.detach(), torch.cat([p.detach() for p in separate]))


def test_a_stack_of_matrices_is_updated_matrix_by_matrix():
    separate = parameters(*[(16, 32)] * 4)
    stacked = torch.nn.Parameter(torch.stack([p.detach() for p in separate]))
    set_gradients(separate, 0)
    stacked.grad = torch.stack([p.grad for p in separate])
    optimizer_of([stacked], num_fused=4).step()
    optimizer_of(separate).step()
    torch.testing.assert_close(stacked.detach(), torch.stack([p.detach() for p in separate]))


def test_gradients_are_divided_by_the_scale():
    ours, plain = parameters((32, 32)), parameters((32, 32))
    clipped, optimizer = optimizer_of(ours), optimizer_of(plain)
    for seed, scale in enumerate((4.0, 1.5)):
        set_gradients(ours, seed)
        set_gradients(plain, seed)
        ours[0].grad *= scale
        clipped.grad_scale, clipped.found_inf = torch.tensor(scale), torch.tensor(0.0)
        clipped.step()
        optimizer.step()
    torch.testing.assert_close(ours[0], plain[0])


def test_a_matrix_without_a_gradient_takes_one_of_zeros():
    one, other = (parameters((32, 32), (32, 32)) for _ in range(2))
    for pair in (one, other):
        optimizer = optimizer_of(pair)
        set_gradients(pair, 0)
        optimizer.step()
        pair[1].grad = None if pair is one else torch.zeros(32, 32)
        optimizer.step()
    assert torch.equal(one[1], other[1])


def test_a_gradient_with_nan_changes_neither_weights_nor_momentum():
    (p,) = parameters((32, 32))
    optimizer = optimizer_of([p])
    set_gradients([p], 0)
    optimizer.step()
    momentum = optimizer.state[p]["momentum_buffer"]
    before = [p.detach().clone(), momentum.clone()]
    p.grad[3, 3] = torch.nan
    optimizer.grad_scale, optimizer.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    optimizer.step()
    assert torch.equal(before[0], p)
    assert torch.equal(before[1], momentum)


@pytest.mark.parametrize(
    ("shape", "fused"),
    [
        ({}, [3, 1, 1, 1]),
        ({"arch": "qwen3", "tie_weights": False}, [3, 1, 2, 1]),
        ({"arch": "llama", "n_kv_head": 1}, [4, 1, 2, 1]),
    ],
)
def test_every_parameter_has_one_group(shape, fused):
    model = GPT(GPTConfig(100, 16, 2, 2, 32, **shape))
    config = Config(optimizer="muon", dtype="bfloat16", muon_momentum=0.9)
    made = make_optimizer(model, config, CPU, 0.002)
    groups = [group for group in made.param_groups if "num_fused" in group]
    found = [p for group in made.param_groups for p in group["params"]]
    assert len(found) == len(set(found)) == len(list(model.parameters()))
    assert [group["num_fused"] for group in groups] == fused
    for group in made.param_groups:
        muon = "num_fused" in group
        assert group["initial_lr"] == (0.02 if muon else 3e-4)
        share = 0.002 if group["params"][0].dim() == 2 else 0  # of the weights, at the peak
        assert group["initial_lr"] * group["weight_decay"] == pytest.approx(share)
    for group in groups:
        assert (group["dtype"], group["momentum"]) == (torch.bfloat16, 0.9)
        assert len(group["params"]) == 2  # one per layer


def test_parameters_of_another_model_have_their_groups():
    """Experts in a stack, a second head, and gates in gpt2's MLP; layers that are frozen."""
    model = GPT(GPTConfig(100, 16, 2, 2, 32))
    model.h[0].mlp.c_fc = torch.nn.Linear(32, 2 * model.config.n_inner)
    model.h[0].experts = torch.nn.Parameter(torch.zeros(4, 32, 64))
    model.second = torch.nn.Linear(32, 100, bias=False)
    model.h[1].requires_grad_(False)
    config = Config(optimizer="muon", learning_rate=1e-3, embedding_lr=0.2)
    groups = make_optimizer(model, config, CPU, 0.002).param_groups
    rates = {p: group["initial_lr"] for group in groups for p in group["params"]}
    fused = {p: group.get("num_fused") for group in groups for p in group["params"]}
    assert rates[model.second.weight] == rates[model.lm_head.weight] == 1e-3
    assert rates[model.wpe.weight] == 0.2
    assert (fused[model.h[0].experts], fused[model.h[0].mlp.c_fc.weight]) == (4, 2)
    assert not rates.keys() & set(model.h[1].parameters())


def test_a_learning_rate_of_0_leaves_the_other_rates_as_they_are():
    model = GPT(GPTConfig(100, 16, 2, 2, 32, tie_weights=False))
    config = Config(optimizer="muon", learning_rate=0.0, muon_lr=0.02, embedding_lr=0.3)
    groups = make_optimizer(model, config, CPU, decay=0.002).param_groups
    rates = {group["initial_lr"]: group["weight_decay"] for group in groups}
    assert rates == {0.3: 0.002 / 0.3, 0.0: 0.0, 0.02: 0.002 / 0.02}
    config = Config(optimizer="muon", learning_rate=0.3, muon_lr=0.02, embedding_lr=0.0)
    groups = make_optimizer(model, config, CPU, decay=0.002).param_groups
    assert {group["initial_lr"] for group in groups} == {0.3, 0.0, 0.02}
