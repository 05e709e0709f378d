"""The parts of a step, and the profile of a few."""

import contextlib
import json
import math
import re

import pytest
import torch

from config import Config
from formats import run_folder
from model import GPT, IGNORE, GPTConfig
from tests.conftest import run_script, trained
from training import profiling
from training.compiling import compile_layers
from training.fit import use_chunked_loss
from training.optimizer import (
    clip_gradients,
    make_optimizer,
    set_learning_rates,
    update_weights,
)
from training.schedule import peak_decay
from training.step import evaluate, forward_backward

CPU = torch.device("cpu")
UNSCALED = torch.amp.GradScaler("cpu", enabled=False)


def optimizer_for(model, config, device=CPU):
    """The optimizer of a run of one epoch."""
    return make_optimizer(model, config, device, peak_decay(1, 1.0, config))


def update(model, optimizer, scaler=UNSCALED, multiplier=1.0, grad_clip=0.0):
    """Step along the gradients that are there; returns their norm before clipping."""
    set_learning_rates(optimizer, multiplier)
    norm = clip_gradients(model, optimizer, scaler, grad_clip)
    update_weights(optimizer, scaler, norm)
    return norm


def test_weight_decay_falls_on_matrices_only():
    model = GPT(GPTConfig(50, 8, 1, 2, 16))
    groups = optimizer_for(model, Config(weight_decay=0.3)).param_groups
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == pytest.approx(0.3 if p.dim() == 2 else 0.0)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


def test_the_averages_are_as_long_as_the_settings_say():
    made = optimizer_for(GPT(GPTConfig(50, 8, 1, 2, 16)), Config(beta1=0.5, beta2=0.6))
    assert {group["betas"] for group in made.param_groups} == {(0.5, 0.6)}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_have_a_learning_rate_of_their_own(tied, optimizer):
    model = GPT(GPTConfig(50, 8, 1, 2, 16, tie_weights=tied))
    config = Config(optimizer=optimizer, learning_rate=1e-2, embedding_lr=0.2)
    made = optimizer_for(model, config)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    update(model, made, multiplier=0.1)
    found = {p: group["lr"] for group in made.param_groups for p in group["params"]}
    apart = 0.02  # it follows the schedule
    assert found[model.wpe.weight] == pytest.approx(apart)
    assert found[model.wte.weight] == pytest.approx(1e-3 if tied else apart)
    for module in (model.lm_head, model.ln_f):
        assert found[module.weight] == 1e-3


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_evaluation_sums_the_loss_of_what_counts(dropout):
    model = GPT(GPTConfig(50, 8, 1, 2, 16, dropout=dropout))
    x = torch.randint(50, (6, 8))
    y = x.roll(-1, 1)
    y[2:, ::3] = IGNORE
    total, count = evaluate(model, [(x[:1], y[:1]), (x[1:], y[1:])], contextlib.nullcontext)
    assert model.training
    assert count == 2 * 8 + 4 * 5
    assert total / count == pytest.approx(model.eval()(x, y).item())
    assert evaluate(model, [], contextlib.nullcontext) == (0, 0)


class Regularized(GPT):
    """A model whose loss in training has a term that no evaluation counts."""

    def head(self, x, targets):
        loss = super().head(x, targets)
        return loss + 100 if self.training else loss


@pytest.mark.parametrize("prepare", [lambda model: None, lambda model: use_chunked_loss(model, 4)])
def test_an_evaluation_leaves_out_what_only_training_computes(prepare):
    model, x = Regularized(GPTConfig(50, 8, 1, 2, 16)), torch.randint(50, (4, 8))
    expected = model.eval()(x, x).item()
    prepare(model.train())
    with torch.compiler.set_stance("force_eager"):
        compiled = compile_layers(model)
        compiled.eval()  # as a trial that failed leaves it
        total, count = evaluate(compiled, [(x, x)], contextlib.nullcontext)
        assert total / count == pytest.approx(expected)
        assert compiled(x, x).item() == pytest.approx(expected + 100)


def test_the_decay_of_embeddings_does_not_follow_their_rate():
    decays = {}
    for embedding_lr in (None, 0.2):
        model = GPT(GPTConfig(50, 8, 1, 2, 16, tie_weights=False))
        made = optimizer_for(model, Config(learning_rate=1e-2, embedding_lr=embedding_lr))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)  # so that decay alone changes them
        before = model.wte.weight.detach().clone()
        update(model, made)
        decays[embedding_lr] = (model.wte.weight / before).mean().item()
    assert decays[0.2] == pytest.approx(decays[None], rel=1e-6)
    assert decays[None] == pytest.approx(1 - 1e-2 * 0.1, rel=1e-6)


def model_and_batch():
    """A model, and tokens with their targets: the same each time."""
    torch.manual_seed(0)
    data = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
    return GPT(GPTConfig(50, 16, 2, 2, 32)), data[:, :-1], data[:, 1:]


def one_step(micro_batch=8, grad_clip=1.0, poison=False, scaled=False, device="cpu", **settings):
    """A model after one step on fixed data, the loss and the norm.

    device: whose kind of optimizer steps; the step is taken on the CPU.
    """
    model, x, y = model_and_batch()
    config = Config(**{"learning_rate": 1e-2} | settings)
    optimizer = optimizer_for(model, config, torch.device(device))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    loss = forward_backward(model, x, y, micro_batch, contextlib.nullcontext, scaler)
    if poison:
        model.wte.weight.grad[3, 3] = math.nan
    return model, loss, update(model, optimizer, scaler, grad_clip=grad_clip)


@pytest.mark.parametrize(("device", "scaled"), [("cpu", False), ("cpu", True), ("mps", False)])
def test_a_step_in_micro_batches_with_clipping_is_that_of_torch(device, scaled):
    ours, loss, norm = one_step(micro_batch=2, grad_clip=0.1, scaled=scaled, device=device)
    model, x, y = model_and_batch()
    expected_loss = model(x, y)
    expected_loss.backward()
    expected_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    torch.testing.assert_close(loss, expected_loss.detach(), rtol=1e-5, atol=0)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=0)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)).step()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_clipping_leaves_small_gradients_alone(device):
    clipped, _, norm = one_step(grad_clip=100.0, device=device)
    plain, _, _ = one_step(grad_clip=0.0, device=device)
    assert norm < 100
    for p, q in zip(clipped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("device", ["cpu", "mps"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_gradient_with_nan_never_reaches_the_weights(optimizer, device):
    before = model_and_batch()[0].state_dict()
    model, _, norm = one_step(poison=True, device=device, optimizer=optimizer)
    assert not norm.isfinite()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_profile_writes_a_table_and_a_trace(char_data, tmp_path):
    result = trained(char_data, tmp_path, "--max_steps=12", "--profile=True")
    names = "data|forward|backward|optimizer|other|step"
    rows = re.findall(rf"^({names}) +([\d.]+) ms", result.stdout, re.MULTILINE)
    milliseconds = {name: float(value) for name, value in rows}
    whole = milliseconds.pop("step")
    assert len(milliseconds) == 5
    assert sum(milliseconds.values()) == pytest.approx(whole, abs=0.1)
    (record,) = (r for r in run_folder.read_log(tmp_path) if r.get("event") == "profile")
    assert min(record["seconds_a_step"][part] for part in profiling.PARTS) > 0
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    trace = (tmp_path / "trace.json").read_bytes()
    again = run_script("train.py", tmp_path, "--max_steps=21")  # profiles no second time
    assert not re.search("^profile", again.stdout, re.MULTILINE)
    assert "finished: 21 steps" in again.stdout, again.stderr
    assert (tmp_path / "trace.json").read_bytes() == trace
    again = trained(char_data, tmp_path, "--max_steps=28", "--profile=True")
    assert "no profile: it takes 8 steps, and the run has 7 left" in again.stdout
