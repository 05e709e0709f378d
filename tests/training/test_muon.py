"""Muon against PyTorch's own, and in our step."""

import pytest
import torch

import hardware
from config import Config
from model import GPT, GPTConfig
from training.muon import Muon, orthogonalize
from training.optimizer import make_optimizer


def optimizer_of(params, **group):
    return Muon(
        [
            {
                "params": params,
                "muon": 1,
                "momentum": 0.95,
                "weight_decay": 0.0,
                "dtype": torch.float32,
            }
            | group
        ],
        lr=0.02,
        fused=True,
    )


def matrices(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(params, seed):
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def test_singular_values_come_near_one():
    for shape in ((3, 64, 64), (2, 32, 128), (2, 128, 32)):
        low, high = torch.linalg.svdvals(
            orthogonalize(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
        ).aminmax()
        assert high < 1.3 and (low > 0.3 or shape[1] == shape[2])


@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float16, 0.01), (torch.bfloat16, 0.03), (torch.float32, 0.005)]
)
def test_iterates_in_16_bits_on_momentum_of_any_size(dtype, near):
    """float16 has no numbers as small as these."""
    x = 1e-6 * torch.randn(3, 96, 32, generator=torch.Generator().manual_seed(1))
    exact, low = orthogonalize(1e6 * x), orthogonalize(x, dtype)
    assert low.dtype == dtype and (low - exact).norm() < near * exact.norm()


def test_iterates_in_the_precision_of_the_run():
    model = GPT(GPTConfig(100, 16, 2, 2, 32))
    for name, dtype in hardware.DTYPES.items():
        config = Config(optimizer="muon", dtype=name)
        groups = make_optimizer(model, config, torch.device("cpu")).param_groups
        assert {group["dtype"] for group in groups if group["muon"]} == {dtype}


def test_steps_as_pytorch_does():
    shapes = (64, 32), (32, 64), (64, 32)
    ours, theirs = matrices(*shapes), matrices(*shapes)
    start = [p.detach().clone() for p in ours]
    optimizer = optimizer_of(ours, weight_decay=0.1)
    reference = torch.optim.Muon(
        theirs, lr=0.02, momentum=0.95, weight_decay=0.1, adjust_lr_fn="original"
    )
    for seed in range(3):
        gradients(ours, seed)
        gradients(theirs, seed)
        optimizer.step()
        reference.step()
    for p, q, was in zip(ours, theirs, start, strict=True):  # theirs iterates in bf16
        assert (p - q).norm() < 0.03 * (q - was).norm()


def test_query_key_and_value_are_three_matrices():
    (whole,) = matrices((96, 32))
    parts = [torch.nn.Parameter(p.clone()) for p in whole.detach().split(32)]
    gradients([whole], 1)
    for p, g in zip(parts, whole.grad.split(32), strict=True):
        p.grad = g.clone()
    optimizer_of([whole], muon=3).step()
    optimizer_of(parts).step()
    torch.testing.assert_close(whole.detach(), torch.cat([p.detach() for p in parts]))


def test_clipping_and_bad_gradients_without_waiting_for_the_device():
    ours, plain = matrices((32, 32)), matrices((32, 32))
    a, b = optimizer_of(ours), optimizer_of(plain)
    for seed in range(2):
        gradients(ours, seed)
        gradients(plain, seed)
        ours[0].grad *= 4
        a.grad_scale, a.found_inf = torch.tensor(4.0), torch.tensor(0.0)
        a.step()
        b.step()
    torch.testing.assert_close(ours[0], plain[0])
    before, momentum = ours[0].detach().clone(), a.state[ours[0]]["momentum_buffer"].clone()
    ours[0].grad[3, 3] = torch.nan
    a.grad_scale, a.found_inf = torch.tensor(torch.nan), torch.tensor(1.0)
    a.step()
    assert torch.equal(before, ours[0]) and torch.equal(
        momentum, a.state[ours[0]]["momentum_buffer"]
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("shape", "matrices"),
    [
        ({}, {3: 2, 1: 6}),
        ({"arch": "qwen3"}, {3: 2, 2: 2, 1: 4}),
        ({"arch": "qwen3", "n_kv_head": 1}, {4: 2, 2: 2, 1: 4}),
    ],
)
def test_every_parameter_has_one_group(tied, shape, matrices):
    model = GPT(GPTConfig(100, 16, 2, 2, 32, tie_weights=tied, **shape))
    groups = make_optimizer(model, Config(optimizer="muon"), torch.device("cpu")).param_groups
    found = [p for g in groups for p in g["params"]]
    assert len(found) == len(set(found)) == len(list(model.parameters()))
    assert {g["muon"]: len(g["params"]) for g in groups if g["muon"]} == matrices
    assert all(p.size(0) % g["muon"] == 0 for g in groups if g["muon"] for p in g["params"])
