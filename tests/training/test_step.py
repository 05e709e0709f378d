"""The parts of a step, and what is shown and counted of its speed."""

import json
import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import hardware
from config import Config
from formats import run_log
from model import GPT, IGNORE, GPTConfig
from tests.conftest import train_small
from training import profiling
from training.optimizer import make_optimizer, optimizer_step, reserve_state, skips_bad_steps
from training.schedule import learning_rate_at
from training.step import compile_layers, forward_backward, why_it_fails
from training.terminal import duration

# -- the parts of a step --------------------------------------------------------------------------


def test_the_learning_rate_warms_up_and_ends_at_its_minimum():
    c = Config(learning_rate=1.0, min_lr=0.1, warmup_steps=10)
    rates = [learning_rate_at(step, 100, c) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and max(rates) <= 1.0
    assert rates[-1] == pytest.approx(0.1) and rates[10:] == sorted(rates[10:], reverse=True)
    assert learning_rate_at(99, 100, Config(learning_rate=1.0, warmup_steps=10)) == pytest.approx(
        0.1
    )
    assert learning_rate_at(0, 1, Config(warmup_steps=0)) > 0


def test_wsd_is_constant_and_then_falls_in_a_straight_line_to_nothing():
    c = Config(learning_rate=1.0, warmup_steps=10, lr_schedule="wsd", decay_fraction=0.4)
    rates = [learning_rate_at(step, 100, c) for step in range(100)]
    assert rates[9:60] == [1.0] * 51 and rates[4] == 0.5 and rates[99] == 0.0
    assert rates[79] == pytest.approx(0.5)


def test_weight_decay_falls_on_matrices_only():
    model = GPT(GPTConfig(50, 8, 1, 2, 16))
    config = Config(weight_decay=0.3)
    groups = make_optimizer(model, config, torch.device("cpu")).param_groups
    for group in groups:
        for p in group["params"]:
            assert group["weight_decay"] == (0.3 if p.dim() == 2 else 0.0)
    assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_have_a_learning_rate_of_their_own(tied, optimizer):
    model = GPT(GPTConfig(50, 8, 1, 2, 16, tie_weights=tied))
    config = Config(optimizer=optimizer, embedding_lr=0.2)
    made = make_optimizer(model, config, torch.device("cpu"))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer_step(model, made, torch.amp.GradScaler("cpu", enabled=False), 1e-3, 0.0)
    rates = {p: group["lr"] for group in made.param_groups for p in group["params"]}
    apart = 0.2 * 1e-3 / config.learning_rate  # it follows the schedule
    assert rates[model.wpe.weight] == pytest.approx(apart)
    assert rates[model.wte.weight] == pytest.approx(1e-3 if tied else apart)
    for module in (model.lm_head, model.ln_f):
        assert rates[module.weight] == 1e-3


def test_the_second_moment_can_be_given_in_tokens():
    for batch_size in (8, 64):
        c = Config(batch_size=batch_size, block_size=512, beta2_tokens=1e6)
        beta2 = make_optimizer(GPT(GPTConfig(50, 8, 1, 2, 16)), c, torch.device("cpu")).defaults[
            "betas"
        ][1]
        assert beta2 ** (1e6 / (batch_size * 512)) == pytest.approx(0.5)


def one_step(micro_batch=8, grad_clip=1.0, poison=False, scaled=False):
    """A model after one step on fixed data, the loss and the norm."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    optimizer = make_optimizer(model, Config(), torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    data = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
    loss = forward_backward(
        model,
        data[:, :-1],
        data[:, 1:],
        micro_batch,
        lambda: hardware.autocast(torch.device("cpu"), torch.float32),
        scaler,
    )
    if poison:
        model.wte.weight.grad[3, 3] = math.nan
    return model, loss, optimizer_step(model, optimizer, scaler, 1e-2, grad_clip)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_accumulation_changes_nothing_but_the_memory(micro_batch):
    whole, loss, norm = one_step()
    parts, loss_parts, norm_parts = one_step(micro_batch)
    torch.testing.assert_close((loss, norm), (loss_parts, norm_parts), rtol=1e-5, atol=1e-6)
    for p, q in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_clipping_is_that_of_torch(scaled):
    ours, _, norm = one_step(grad_clip=0.1, scaled=scaled)
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 16, 2, 2, 32))
    data = torch.randint(50, (8, 17), generator=torch.Generator().manual_seed(1))
    model(data[:, :-1], data[:, 1:]).backward()
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item() == pytest.approx(
        norm.item(), rel=1e-4
    )
    groups = [
        {"params": [p for p in model.parameters() if p.dim() == d], "weight_decay": w}
        for d, w in ((2, 0.1), (1, 0.0))
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)).step()
    for p, q in zip(ours.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-4)


def test_a_gradient_that_is_no_number_never_reaches_the_weights():
    torch.manual_seed(0)
    before = GPT(GPTConfig(50, 16, 2, 2, 32)).state_dict()
    model, _, norm = one_step(poison=True)
    assert not norm.isfinite()
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_a_fused_optimizer_that_takes_bad_steps_is_found_out(monkeypatch):
    """As PyTorch's was on mps, which ignored `found_inf`."""
    assert skips_bad_steps(torch.device("cpu"))
    step = torch._fused_adamw_
    ignoring = {"found_inf": None}
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *a, **named: step(*a, **(named | ignoring)))
    assert not skips_bad_steps(torch.device("cpu"))


class Seen(TorchDispatchMode):
    """The operations that PyTorch is asked for."""

    def __init__(self):
        super().__init__()
        self.all, self.working = [], []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "aten":
            self.all.append(function._schema.name)
            if not function.is_view:
                self.working.append(function._schema.name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("arch", ["gpt2", "qwen3"])
@pytest.mark.parametrize(("optimizer", "working"), [("adamw", 20), ("muon", 85)])
def test_an_update_is_as_few_operations_for_many_layers_and_never_waits(arch, optimizer, working):
    counts = []
    for layers in (2, 12):
        model = GPT(GPTConfig(100, 16, layers, 2, 32, arch=arch))
        config = Config(optimizer=optimizer, dtype="bfloat16")
        made = make_optimizer(model, config, torch.device("cpu"))
        reserve_state(made)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        with Seen() as seen:
            optimizer_step(model, made, torch.amp.GradScaler("cpu", enabled=False), 1e-3, 1.0)
        assert "aten::_local_scalar_dense" not in seen.all
        counts.append((len(seen.all), len(seen.working)))
    assert counts[0] == counts[1] and counts[0][1] <= working


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_memory_of_the_optimizer_can_be_taken_before_its_first_step(optimizer):
    states = []
    for early in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(50, 16, 2, 2, 32))
        made = make_optimizer(model, Config(optimizer=optimizer), torch.device("cpu"))
        if early:
            reserve_state(made)
            taken = {id(t) for state in made.state.values() for t in state.values()}
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        made.step()
        states.append(made.state_dict()["state"])
    assert taken == {id(t) for state in made.state.values() for t in state.values()}
    assert states[0].keys() == states[1].keys()
    for number, plain in states[0].items():
        reserved = states[1][number]
        assert plain.keys() == reserved.keys()
        for name, value in plain.items():
            assert value.dtype == reserved[name].dtype and torch.equal(value, reserved[name])


def test_durations_as_people_say_them():
    assert [duration(s) for s in (42.2, 61, 3599, 7800)] == [
        "42 s",
        "1 min 1 s",
        "59 min 59 s",
        "2 h 10 min",
    ]


# -- speed: what may not change, and what is shown ------------------------------------------------


def test_compiled_layers_in_bf16_give_the_loss_and_gradients_of_plain_ones_in_fp32():
    torch.manual_seed(0)
    model = GPT(GPTConfig(50, 300, 2, 2, 64, tie_weights=True))
    x, y = torch.randint(50, (2, 2, 300), generator=torch.Generator().manual_seed(1))
    scaler, cpu = torch.amp.GradScaler("cpu", enabled=False), torch.device("cpu")
    results = []
    for dtype in (torch.float32, torch.bfloat16):

        def cast(dtype=dtype):
            return hardware.autocast(cpu, dtype)

        forward = model
        if dtype == torch.bfloat16:
            forward = compile_layers(model)
            assert why_it_fails(forward, x, y, cast, scaler) is None
        loss = forward_backward(forward, x, y, 2, cast, scaler)
        results.append([loss, *(p.grad.clone() for p in model.parameters())])
        model.zero_grad()
    nothing = forward_backward(forward, x, torch.full_like(y, IGNORE), 2, cast, scaler)
    assert nothing == 0 and not any(p.grad.any() for p in model.parameters())
    assert results[1][0] == pytest.approx(float(results[0][0]), abs=1e-3)
    for plain, compiled in zip(*results, strict=True):
        assert (
            torch.nn.functional.cosine_similarity(plain.flatten(), compiled.flatten(), dim=0) > 0.99
            or plain.norm() < 1e-4
        )


def test_profile_writes_a_table_and_a_trace(char_data, tmp_path):
    result = train_small(char_data, tmp_path / "run", "--max_steps=12", "--profile=True")
    assert result.returncode == 0, result.stderr
    rows = dict(
        re.findall(
            r"^(data|forward|backward|optimizer|other|step) +([\d.]+) ms",
            result.stdout,
            re.MULTILINE,
        )
    )
    assert len(rows) == 6 and sum(
        float(v) for k, v in rows.items() if k != "step"
    ) == pytest.approx(float(rows["step"]), abs=0.1)
    seconds = next(
        r["seconds_a_step"] for r in run_log.read(tmp_path / "run") if r.get("event") == "profile"
    )
    assert min(seconds[part] for part in profiling.PARTS) > 0
    assert "traceEvents" in json.loads((tmp_path / "run" / "trace.json").read_text())


def test_a_trace_of_a_gpu_counts_kernels_to_the_part_that_launched_them():
    def event(name, cat, ts, dur, **args):
        return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "args": args}

    trace = [
        event("ProfilerStep#3", "user_annotation", 0, 100),
        event("forward", "user_annotation", 10, 20),
        event("backward", "user_annotation", 40, 20),
        event("cudaLaunchKernel", "cuda_runtime", 12, 2, correlation=1),
        event("cudaLaunchKernel", "cuda_runtime", 45, 2, correlation=2),
        event("cuLaunchKernel", "cuda_driver", 35, 2, correlation=3),
        event("k1", "kernel", 20, 300, correlation=1),
        event("k3", "kernel", 330, 10, correlation=3),
        event("k2", "kernel", 340, 500, correlation=2),
    ]
    seconds = profiling.read_trace(trace)
    assert (
        seconds["forward"] == pytest.approx(300e-6)
        and seconds["backward"] == pytest.approx(500e-6)
        and seconds["data"] == 0
    )
    assert seconds["other"] == pytest.approx(
        20e-6
    )  # one kernel outside all parts, and the gap before it
