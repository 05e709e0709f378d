"""Weights that copy from the context from the start: training/induction.py."""

import pytest
import torch

from model import GPT, IGNORE, GPTConfig
from training.induction import add_induction_head

TINY = {"vocab_size": 97, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64}


def learn_to_copy(shape: dict, induction: bool) -> float:
    """The loss on random text that comes twice, of its second half, after 60 steps."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY | shape, arch="qwen3", tie_weights=False), zero_init=True)
    if induction:
        add_induction_head(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for _ in range(60):
        x = torch.randint(97, (16, 32)).repeat(1, 2)
        y = x.roll(-1, 1)
        y[:, :32] = IGNORE
        y[:, -1] = IGNORE
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@pytest.mark.parametrize("shape", [{}, {"n_kv_head": 1}, {"head_dim": 48}])
def test_a_model_with_induction_heads_learns_to_copy_sooner(shape):
    assert learn_to_copy(shape, induction=True) < 2.5
    assert learn_to_copy(shape, induction=False) > 4
