"""Weights that lean toward copying from the start: training/induction.py."""

import pytest
import torch

import config as settings
from config import ConfigError
from model import GPT, IGNORE, GPTConfig
from training.induction import add_induction_head
from training.start import from_scratch

TINY = {"vocab_size": 97, "block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 64}


def learn_to_copy(induction: bool) -> float:
    """The loss on random text that comes twice, of its second half, after 60 steps.

    The length of the text changes with each step, so that positions do not help.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY, arch="qwen3", tie_weights=False), zero_init=True)
    if induction:
        add_induction_head(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    for step in range(60):
        length = 16 + 7 * step % 17
        x = torch.randint(97, (16, length)).repeat(1, 2)
        y = x.roll(-1, 1)
        y[:, :length] = IGNORE
        y[:, -1] = IGNORE
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def test_a_model_with_induction_heads_learns_to_copy_sooner():
    assert learn_to_copy(induction=True) < 3
    assert learn_to_copy(induction=False) > 4


@pytest.mark.parametrize(
    "line",
    [
        "--arch=qwen3 --induction_init",
        "config/demo.py --n_layer=1",
        "config/demo.py --n_kv_head=1",
        "config/demo.py --arch=llama",  # it has no norm that sets the sizes of queries and keys
    ],
)
def test_a_new_run_without_the_layers_for_it_is_refused_and_an_older_one_continues(line):
    config = settings.load(line.split())  # the settings of a run, which a checkpoint may have
    with pytest.raises(ConfigError, match=r"induction_init needs .* induction_init = False"):
        from_scratch(config, vocab_size=512)
