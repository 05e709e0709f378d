"""What model.py computes, as a number: whoever changes it may leave all names and shapes alone."""

import contextlib
import dataclasses

import torch

from model import GPT, GPTConfig

# Long, since attention may be limited to a window; deep, since layers may differ.
SMALL = {"vocab_size": 64, "block_size": 512, "n_layer": 4, "n_head": 4, "n_embd": 32}
SMALL |= {"n_inner": 48, "head_dim": 8, "rope_theta": 10_000.0, "norm_eps": 1e-5}
SMALL |= {"bias": True, "dropout": 0.0, "tie_weights": False}
IDS = [n * n % 64 for n in range(512)]
# Of the architectures as transformers and llama.cpp compute them.
FINGERPRINTS = {"gpt2": 34.1111563, "qwen3": 16.6746196, "llama": 16.9516945}


def whole(model, ids):
    """Logits of what follows, [1, V], from one forward of all ids."""
    return model(torch.tensor([ids]))[:, -1]


def fingerprint(config: GPTConfig, last_logits=whole) -> float:
    """The norm of a small model's last logits, which tells apart what two model.py compute.

    Weights and text follow from formulas. config: gives the architecture, and values of the fields
    that someone has added to GPTConfig. last_logits: another way to get them. 0.0 if a changed
    model does not run at this size, or not in this way.
    """
    # float32: a changed model may cast to it. No run must end because of this.
    for dtype in (torch.float64, torch.float32):
        with contextlib.suppress(Exception), torch.no_grad(), torch.autocast("cpu", enabled=False):
            return last_logits(small_model(config).to(dtype), IDS).norm().item()
    return 0.0


def small_model(config: GPTConfig) -> GPT:
    """The small model, on the CPU in float64, which every CPU computes alike.

    Leaves the state of random numbers as it is.
    """
    heads = 2 if config.modern else SMALL["n_head"]
    with torch.random.fork_rng(devices=[]):
        model = GPT(dataclasses.replace(config, **SMALL, n_kv_head=heads)).double().eval()
    for value in model.state_dict().values():
        value.copy_((torch.arange(value.numel()) ** 2 % 1009 / 504 - 1).view_as(value))
    return model


def same(a: float, b: float) -> bool:
    """Whether two fingerprints are equal but for rounding, in float32 by 0.000004."""
    return abs(a - b) < 5e-5
