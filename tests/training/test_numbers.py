"""The numbers that training logs and prints, each next to one computed here."""

import bisect
import dataclasses
import math
import re
import shutil
import threading
import time
import types

import numpy as np
import pytest
import torch

import hardware
from command_line import duration
from formats import run_folder
from formats.data_folder import read_meta
from model import GPT
from tests.training.conftest import small_run
from train import training_step, validation_loss
from training import distributed
from training.memory import fits_ram, largest_micro_batch, ram_to_come
from training.plan import (
    banner,
    disk_table,
    from_data_sheet,
    hours_table,
    measure,
    measured_here,
    memory_table,
    operations_table,
)
from training.recorder import Recorder, answer_prompts
from training.step import seed_random

T, BATCH = 32, 8  # of small_run
TOKENS = T * BATCH


@pytest.fixture
def run(little_data, tmp_path):
    """A run of 40 steps at a price of 36 an hour, a cent a second."""
    return small_run(little_data, tmp_path / "run", "--max_steps=40", "--cost_per_hour=36")


@pytest.fixture
def clock(monkeypatch):
    """Set the time: clock(seconds) stops the clock there, clock(step=s) adds s for each look.

    Looks of other threads add nothing: fsspec's, which an earlier test started, looks at any time.
    """
    now, thread = [1000.0, 0.0], threading.get_ident()

    def look():
        if threading.get_ident() == thread:
            now[0] += now[1]
        return now[0]

    def set_to(seconds=1000.0, step=0.0):
        now[:] = seconds, step

    for name in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, look)
    return set_to


def flops_per_token(model):
    """6 per weight of blocks and head, and of attention 12 x layers x width x context."""
    blocks = sum(p.numel() for p in model.h.parameters())
    head = model.config.vocab_size * model.config.n_embd
    return 6 * (blocks + head) + 12 * 2 * 32 * T


def take_steps(run, count):
    """Take steps; returns the mean of their losses."""
    before, taken = run.loss_sums.loss_sum.item(), run.loss_sums.good_steps.item()
    for _ in range(count):
        training_step(run)
    return (run.loss_sums.loss_sum.item() - before) / (run.loss_sums.good_steps.item() - taken)


def windows_of(folder):
    """The sequences that fit into the training data from any offset below T."""
    return (read_meta(folder).splits["train"].tokens - T) // T


# -- while it trains ------------------------------------------------------------------------------


def test_the_numbers_of_a_logged_step(run, little_data, clock, monkeypatch, capsys):
    run.device = dataclasses.replace(run.device, peak_flops=1e9)
    flops = flops_per_token(run.model)
    run.clock.started = 900.0
    recorder = Recorder(run)
    for count, step in ((3, 3), (2, 5)):  # the loss is a mean since the line before
        loss = take_steps(run, count)
        # Four processes share the work: the speed is of all, and so is the peak.
        monkeypatch.setattr(distributed, "world_size", 4)
        recorder.step(seconds=0.5)
        monkeypatch.setattr(distributed, "world_size", 1)
        logged, speed = run_folder.read_log(run.folder)[-1], count * TOKENS / 0.5
        assert logged["step"] == step
        assert logged["loss"] == pytest.approx(loss, rel=1e-5)
        assert logged["tokens"] == step * TOKENS
        assert logged["epoch"] == pytest.approx(step * BATCH / windows_of(little_data), abs=1e-6)
        assert logged["lr"] == pytest.approx(3e-3 * step / 5)  # 5 steps of warm-up
        assert logged["tokens_per_second"] == pytest.approx(speed, abs=0.1)
        assert logged["mfu"] == pytest.approx(speed * flops / 4e9, abs=1e-4)
        assert logged["cost"] == 1.0
    first = capsys.readouterr().out.splitlines()[0]
    mfu, left = 3 * TOKENS / 0.5 * flops / 4e9, 37 / 3 * 0.5
    expected = (
        rf"step 3 of 40: loss [\d.]+, MFU {mfu:.1%}, 1,536 tokens/s, cost 1\.00, {left:.0f} s"
    )
    assert re.match(expected, first)


def test_the_numbers_of_an_evaluation_and_of_the_end(run, little_data, clock, capsys):
    run.clock.started, run.clock.elapsed_s = 900.0, 3725.0
    recorder, means = Recorder(run), []
    for part in range(2):  # the training loss is a mean since the evaluation before
        for _ in range(2):
            means.append(take_steps(run, 5))
            recorder.step(seconds=2.0)
        run.saver.best = 1.5 if part else None
        recorder.evaluation(2.0)
    out = capsys.readouterr().out
    epoch = 20 * BATCH / windows_of(little_data)
    val = read_meta(little_data).splits["val"]
    bits = 2.0 / math.log(2) * val.tokens / val.text_bytes
    assert (
        f"step 20 of 40, epoch {epoch:.2f}: training loss {np.mean(means[2:]):.4f}, validation loss"
        f" 2.0000, {bits:.3f} bits per byte, best 1.5000, 640 tokens/s, cost 1.00, 8 s left"
    ) in out
    assert "best 2.0000" in out.partition("step 20")[0]
    assert run_folder.evaluation_at(run.folder, 20)["bits_per_byte"] == pytest.approx(bits)
    saved, *_ = run.snapshot()
    assert saved["epoch"] == pytest.approx(epoch, abs=1e-6)
    assert (saved["tokens"], saved["best_val_loss"]) == (20 * TOKENS, 1.5)
    recorder.summary("finished")
    assert (
        f"finished: 20 steps, {20 * TOKENS:,} tokens in 1 h 2 min of training, cost 1.00"
        in capsys.readouterr().out
    )


def test_the_memory_of_a_gpu_is_logged_and_in_the_last_lines(run, clock, monkeypatch, capsys):
    take_steps(run, 1)
    run.clock.started = 900.0
    run.device = dataclasses.replace(run.device, torch=torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 12_340_000_000)
    recorder = Recorder(run)
    recorder.step(seconds=1.0)
    recorder.summary("finished")
    assert run_folder.read_log(run.folder)[-1]["peak_memory_gb"] == 12.34
    assert ", cost 1.00, at most 12.3 GB of GPU memory\n" in capsys.readouterr().out


def test_a_step_that_is_evaluated_has_one_line(run, clock, capsys):
    take_steps(run, 10)
    recorder = Recorder(run)
    recorder.step(seconds=1.0)
    recorder.evaluation(2.0)
    assert capsys.readouterr().out.count("step 10 of 40") == 1


def test_a_run_that_ends_no_better_than_guessing_says_so(run, little_data, capsys):
    take_steps(run, 1)
    run.saver.finish(run.step, run.snapshot)
    recorder, guessing = Recorder(run), math.log(read_meta(little_data).vocab_size)
    for loss, said in ((guessing - 0.01, False), (guessing + 0.01, True)):
        recorder.evaluation(loss)
        recorder.summary("finished")
        assert (f"no better than guessing ({guessing:.2f})" in capsys.readouterr().out) == said


def test_a_resumed_run_goes_on_with_its_clocks_and_its_means(run, little_data, clock):
    before = take_steps(run, 3)
    run.clock.elapsed_s = 50.0
    run.clock.started = 900.0
    run.saver.finish(run.step, run.snapshot)
    clock(2000.0)
    again = small_run(little_data, run.folder, "--max_steps=40", "--cost_per_hour=36")
    clock(2020.0)
    recorder = Recorder(again)
    after = take_steps(again, 2)
    recorder.step(seconds=1.0)
    logged = run_folder.read_log(run.folder)[-1]
    assert logged["loss"] == pytest.approx((3 * before + 2 * after) / 5, rel=1e-5)
    assert logged["tokens"] == 5 * TOKENS
    assert logged["tokens_per_second"] == 2 * TOKENS  # the three steps were before
    assert logged["elapsed_s"] == 50.0
    assert logged["cost"] == 1.2


@pytest.mark.parametrize(("more", "largest"), [([], 1.0), (["--grad_clip=0.05"], 0.05)])
def test_gradients_are_clipped_and_their_norm_before_is_logged(
    little_data, tmp_path, more, largest
):
    run = small_run(little_data, tmp_path / "run", *more)
    with torch.no_grad():
        run.model.ln_f.weight.mul_(20)  # so that they are large
    recorder = Recorder(run)
    norms = []
    for p in run.model.parameters():  # as the backward leaves them
        p.register_post_accumulate_grad_hook(lambda p: norms.append(p.grad.norm()))
    training_step(run)
    norm = torch.stack(norms).norm().item()
    recorder.step(seconds=1.0)
    assert run_folder.read_log(run.folder)[-1]["grad_norm"] == pytest.approx(norm, rel=1e-3)
    assert norm > 2
    moments = [state["exp_avg"] for state in run.optimizer.state.values()]
    clipped = torch.cat([moment.flatten() for moment in moments]).norm() / 0.1  # AdamW's 1 - beta1
    assert clipped == pytest.approx(largest, rel=1e-3)


def test_a_step_whose_gradients_alone_are_nan_counts_as_bad(run):
    def spoil(p):
        p.grad[0] = math.nan

    recorder, good = Recorder(run), take_steps(run, 1)
    hook = run.model.ln_f.weight.register_post_accumulate_grad_hook(spoil)
    training_step(run)
    hook.remove()
    recorder.step(seconds=1.0)
    logged = run_folder.read_log(run.folder)[-1]
    assert (logged["bad_steps"], logged["grad_norm"]) == (1, None)
    assert logged["loss"] == pytest.approx(good, rel=1e-5)


@pytest.mark.parametrize(("batches", "windows"), [(0, None), (2, 16)])
def test_a_validation_loss_is_the_mean_of_its_windows(run, little_data, batches, windows):
    ids = torch.from_numpy(np.fromfile(little_data / "val.bin", np.uint16).astype(np.int64))
    starts = list(range(0, len(ids) - 1, T))
    if windows:
        whole = (len(ids) - 1) // T
        starts = [i * whole // windows * T for i in range(windows)]
    total = count = 0
    with torch.no_grad():
        for start in starts:
            x, y = ids[start : start + T], ids[start + 1 : start + T + 1]
            logits = run.model.eval()(x[: len(y)][None])[0]
            total += torch.nn.functional.cross_entropy(logits, y, reduction="sum").item()
            count += len(y)
    run.model.train()
    run.config = dataclasses.replace(run.config, eval_batches=batches)
    run.micro_batch = 2
    run.device = dataclasses.replace(run.device, dtype=torch.float32)
    assert validation_loss(run, lambda: False) == pytest.approx(total / count, rel=1e-4)
    forwards = []
    run.model.register_forward_pre_hook(lambda *_: forwards.append(1))
    assert validation_loss(run, lambda: True) is None
    assert not forwards  # a signal does not wait for the rest


def test_samples_are_drawn_without_dropout(run):
    model = GPT(dataclasses.replace(run.model.config, dropout=0.8))
    for p in model.parameters():  # so that what dropout leaves out decides
        torch.nn.init.normal_(p)
    answers = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        cast = run.cast
        answers.append(answer_prompts(model, run.data.tokenizer, ["The "], 7, cast))
        assert model.training
    assert answers[0] == answers[1]


def test_what_a_model_draws_follows_from_the_step_without_dropout_too(run):
    drawn = []
    run.model.ln_f.register_forward_hook(lambda *_: drawn.append(torch.rand(()).item()))
    for step in (3, 4, 3):
        run.counters.step = step
        training_step(run)
    third = len(drawn) // 3
    first, other, again = drawn[:third], drawn[third : 2 * third], drawn[2 * third :]
    assert first == again != other


def test_dropout_is_another_in_each_step_process_and_run(run, monkeypatch):
    drawn = []
    for seed, rank, step in ((7, 0, 0), (7, 1, 0), (7, 0, 1), (8, 0, 0), (7, 0, 0)):
        monkeypatch.setattr(distributed, "rank", rank)
        seed_random(seed, step)
        drawn.append(torch.rand(3).tolist())
    assert drawn[4] == drawn[0]
    assert len({str(numbers) for numbers in drawn}) == 4


# -- before it trains -----------------------------------------------------------------------------


def test_the_banner_counts_the_model_the_data_and_the_steps(run, little_data, tmp_path):
    meta, printed = read_meta(little_data), banner(run)
    parameters = sum(p.numel() for p in run.model.parameters())
    train, val = (meta.splits[name].tokens for name in ("train", "val"))
    assert f"{parameters:,} parameters, 2 layers x 32, context 32, vocabulary" in printed
    assert f"{train:,} tokens in RAM; {val:,} for validation" in printed
    assert "256 tokens = 8 x 32\n" in printed
    assert f"40 steps, one epoch is {windows_of(little_data) / 8:.1f} steps\n" in printed
    smaller = small_run(little_data, tmp_path / "other", "--micro_batch_size=2")
    assert "256 tokens = 8 x 32, micro-batches of 2 sequences\n" in banner(smaller)


def test_a_batch_larger_than_the_data_is_a_warning(little_data, tmp_path):
    windows = windows_of(little_data)
    enough = ["--batch_size=" + str(windows), "--micro_batch_size=8"]
    assert "repeats" not in banner(small_run(little_data, tmp_path / "run", *enough))
    run = small_run(little_data, tmp_path / "run", "--batch_size=1000", "--epochs=1")
    assert f"batch_size = 1000 is more than the {windows} sequences" in banner(run)
    assert f"run         1 step, one epoch is {windows / 1000:.2g} steps" in banner(run)
    x, _ = run.data.train.batch(0, 1000, 7)
    assert len(x) == 1000
    assert len(torch.unique(x[:windows], dim=0)) == windows  # each before any comes again


def test_the_plan_counts_operations_memory_and_disk(run):
    model = run.model
    parameters, flops = sum(p.numel() for p in model.parameters()), flops_per_token(model)
    run.device = dataclasses.replace(run.device, dtype=torch.float32)
    run.schedule.counters.step = 10  # 30 are left
    text = "\n".join(operations_table(run) + memory_table(run) + disk_table(run))
    in_all = [f"{flops / 1e3:.3g} kFLOP per token", f"{flops * TOKENS / 1e6:.3g} MFLOP per step"]
    assert (
        ", ".join([*in_all, f"{flops * TOKENS * 30 / 1e9:.3g} GFLOP for 7,680 tokens in all"])
        in text
    )
    residuals, inputs = 2 * 32, 14 * 32  # of a token and layer, each of 4 bytes
    mlp = 9 * 32  # whose gradients are there too, as are those of the logits
    numbers = T * (2 * (residuals + inputs) + mlp + 2 * model.config.vocab_size)
    state, gradients, activations = 12 * parameters, 4 * parameters, 4 * 4 * numbers
    activations *= 2  # it is not compiled
    row = re.search(r"^ +4 +(.*)", text, re.MULTILINE)[1].split()
    units = {"kB": 1e3, "MB": 1e6}
    found = [float(size) * units[unit] for size, unit in zip(row[::2], row[1::2], strict=True)]
    expected = [gradients, gradients, 8 * parameters, activations]
    expected.append(state + gradients + activations)  # at the peak
    assert found == pytest.approx(expected, rel=0.01)
    assert f"a checkpoint   {12 * parameters / 1e3:.3g} kB; 2 and the best are kept" in text
    assert f"up to {4 * 12 * parameters / 1e6:.3g} MB more" in text
    take_steps(run, 1)
    run.saver.finish(run.step, run.snapshot)
    files = (run_folder.steps(run.folder)[-1] / name for name in ("model.pt", "optimizer.pt"))
    assert sum(file.stat().st_size for file in files) == pytest.approx(12 * parameters, rel=0.2)


def test_a_cpu_without_memory_for_one_sequence_is_found_before_it_is_used(run, monkeypatch):
    parameters = sum(p.numel() for p in run.model.parameters())
    run.device = dataclasses.replace(run.device, dtype=torch.float32)
    activations = 4 * T * (2 * (2 * 32 + 14 * 32) + 9 * 32 + 2 * run.model.config.vocab_size)
    needed = 12 * parameters + 2 * activations  # moments and gradients; the weights are there
    needed += 12 * parameters  # a checkpoint's copy
    monkeypatch.setattr(hardware, "free_ram", lambda: needed)
    run.compiles = False
    assert fits_ram(run, 1)
    assert "more memory" not in banner(run)
    with monkeypatch.context() as two:  # processes, of which one copies
        two.setattr(distributed, "local_world_size", 2)
        assert ram_to_come(run, 1) == 2 * needed - 12 * parameters
    monkeypatch.setattr(hardware, "free_ram", lambda: needed - 1)
    assert f"warning     training takes up to {needed / 1e9:.1f} GB more memory" in banner(run)
    assert "one sequence does not fit in the memory of cpu" in measured_here(run)
    run.counters.step = run.schedule.total_steps
    assert "more memory" not in banner(run)  # a finished run takes none
    monkeypatch.setattr(hardware, "free_ram", lambda: None)  # it is not known
    assert fits_ram(run, 1)


def test_a_disk_without_room_for_the_checkpoints_is_a_warning(run, monkeypatch):
    in_all = 4 * 12 * sum(p.numel() for p in run.model.parameters())
    for free, warned in ((in_all, False), (in_all - 1, True)):
        usage = types.SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        warning = f"warning     the checkpoints take up to {in_all / 1e6:,.0f} MB more"
        assert (warning in banner(run)) == warned


@pytest.mark.parametrize(
    # Bytes that a token takes in both layers, the values of one MLP, the logits of an id.
    ("name", "settings", "token", "mlp", "logit"),
    [
        # float16; the residuals are float32, and the logits' gradient has a place of its own.
        ("V100", "--arch=gpt2", 2 * (2 * 4 * 32 + 2 * 14 * 32), 9 * 32, 2 * 2),
        ("A100", "--arch=gpt2", 2 * (2 * 2 * 32 + 2 * 14 * 32), 9 * 32, 2),  # bfloat16
        ("A100", "--activation_checkpointing", 4 * 32 + (4 * 32 + 2 * 14 * 32), 9 * 32, 2),
        ("A100", "--arch=qwen3", 2 * (2 * 2 * 32 + 2 * 10 * 32 + 2 * 3 * 96), 32 + 3 * 96, 2),
        ("A100", "--arch=llama", 2 * (2 * 2 * 32 + 2 * 8 * 32 + 2 * 3 * 96), 32 + 3 * 96, 2),
    ],
)
def test_the_least_memory_in_which_a_plan_fits_the_batch(
    little_data, tmp_path, name, settings, token, mlp, logit
):
    run = small_run(little_data, tmp_path / "run", settings)
    parameters = sum(p.numel() for p in run.model.parameters())
    activations = BATCH * T * (token + 2 * mlp + logit * run.model.config.vocab_size)
    activations += 2 * parameters + 2**25  # the weights in 16 bits, and cuBLAS's workspace
    peak = 12 * parameters + max(4 * parameters, activations)  # no gradients are added up

    def fits(memory):
        return largest_micro_batch(run, dataclasses.replace(from_data_sheet(name), memory=memory))

    least = bisect.bisect_left(range(10**8), BATCH, key=fits)
    assert least == pytest.approx((peak + run.data.train.bytes) / 0.92, abs=100)


def test_the_hours_of_a_plan_are_the_operations_at_two_fifths_of_the_peak(little_data, tmp_path):
    long = ["--max_steps=1000000000", "--cost_per_hour=2"]
    run = small_run(little_data, tmp_path / "run", *long)
    run.counters.step = 250_000_000
    seconds = 7.5e8 * TOKENS * flops_per_token(run.model) / 0.4
    table = "\n".join(hours_table(run))
    for name, tflops in (("T4", 65), ("A100", 312), ("H100", 989)):
        took = seconds / (tflops * 1e12)
        cost = 2 * took / 3600
        assert re.search(rf"^{name} +{duration(took)} +{cost:,.2f} ", table, re.MULTILINE), table


@pytest.mark.parametrize(
    ("micro_batch", "a_look", "seconds"),
    # Forward and backward take a look at the clock, and so does the update.
    [(8, 0.1, 0.2), (2, 0.1, 0.5), (1, 2.0, 18.0)],
)
def test_a_trial_counts_all_micro_batches_and_one_update(
    little_data, tmp_path, clock, micro_batch, a_look, seconds
):
    more = [f"--micro_batch_size={micro_batch}", "--max_steps=100000", "--cost_per_hour=36"]
    run = small_run(little_data, tmp_path / "run", *more)
    run.counters.step = 25_000
    clock(step=a_look)
    weights = run.model.wte.weight.clone()
    assert measure(run) == (pytest.approx(seconds), micro_batch)
    assert torch.equal(run.model.wte.weight, weights)
    shown = measured_here(run)
    took = 75_000 * seconds  # of the steps that are left
    expected = rf"here +{duration(took)} +{took / 100:,.2f} +{seconds:.3f} s per step"
    assert re.search(expected, shown)
    assert f"{TOKENS / seconds:,.0f} tokens/s" in shown
    assert f"micro-batch {micro_batch}" in shown


@pytest.mark.parametrize("may", [True, False])
def test_a_trial_on_a_cpu_compiles_if_it_may(little_data, tmp_path, may):
    run = small_run(little_data, tmp_path / "run", "--compile=True")
    with torch._dynamo.config.patch(disable=True):  # what would be compiled runs as it is
        measure(run, 0.0, may_compile=may)
    assert run.compiles == (run.compiled is not run.model) == may
