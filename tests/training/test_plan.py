"""training/plan.py: what --dry_run prints, and what it computes for GPUs that are not here."""

import dataclasses
import re

import pytest
import torch

import config
from hardware import Device, autocast
from model import GPT, GPTConfig
from tests.conftest import trained
from tests.training.conftest import small_run
from training import distributed
from training.memory import activations, memory, memory_here
from training.optimizer import make_optimizer
from training.plan import banner, from_data_sheet, hours_table
from training.start import model_shape


def planned(vocab_size, *arguments):
    """Settings, and a model and optimizer that take no memory."""
    c = config.load([*arguments])
    meta = torch.device("meta")
    with meta:
        model = GPT(model_shape(c, vocab_size))
    return c, model, make_optimizer(model, c, meta, decay=0.0)


def test_a_large_vocabulary_is_rounded_up_to_a_multiple_of_64():
    for size, rounded in ((257, 257), (1024, 1024), (1088, 1088), (50_257, 50_304)):
        assert model_shape(config.Config(), size).vocab_size == rounded


def test_frozen_layers_have_no_optimizer_state():
    c, model, _ = planned(512, "config/demo.py")
    parameters = model.num_parameters()
    model.h.requires_grad_(False)
    model.wte.requires_grad_(False)
    optimizer = make_optimizer(model, c, torch.device("meta"), decay=0.0)
    needed = memory(c, model, optimizer, 1, from_data_sheet("A100"))
    assert needed["weights"] == 4 * parameters
    assert needed["optimizer"] == 8 * (model.lm_head.weight.numel() + model.ln_f.weight.numel())


def test_a_dry_run_prints_the_plan_and_writes_nothing(char_data, tmp_path):
    arguments = ["--dry_run=True", "--cost_per_hour=8", "--max_steps=3600000"]
    out = trained(char_data, tmp_path / "run", *arguments).stdout
    step_s = float(re.search(r"([\d.]+) s per step, [\d,]+ tokens/s, measured on cpu", out)[1])
    (row,) = re.findall(r"^here +([\d,]+) h (\d+) min +([\d,.]+) ", out, re.MULTILINE)
    hours, minutes, cost = (float(number.replace(",", "")) for number in row)
    assert hours + minutes / 60 == pytest.approx(1000 * step_s, abs=0.6)  # it is rounded
    assert cost == pytest.approx(8 * (hours + minutes / 60), abs=8 / 60)
    assert not (tmp_path / "run").exists()


def test_a_text_much_too_small_for_the_model_is_a_warning(char_data, tmp_path):
    assert "will overfit" not in banner(small_run(char_data, tmp_path / "run"))
    run = small_run(char_data, tmp_path / "run", "--n_embd=512")
    assert "will overfit" in banner(run)
    run.config.init_from = "trained weights"
    assert "will overfit" not in banner(run)


def test_a_batch_that_has_no_divisor_near_the_micro_batch_is_a_warning(char_data, tmp_path):
    for batch, warned in ((97, True), (96, False), (62, False)):
        run = small_run(char_data, tmp_path, f"--batch_size={batch}", "--micro_batch_size=32")
        words = "micro_batch_size = 32 does not divide the 97 sequences of a step, and the next"
        assert (words in banner(run)) == warned


def test_the_banner_knows_which_attention_pytorch_takes(char_data, tmp_path):
    for dropout, kernel in ((0.0, "flash"), (0.1, "math")):
        run = small_run(char_data, tmp_path / kernel, f"--dropout={dropout}")
        assert run.attention_backend() == kernel


def test_the_plan_of_a_finished_run_says_that_it_is_finished(char_data, tmp_path):
    trained(char_data, tmp_path, "--max_steps=5")
    partial = tmp_path / ".step_00000010.partial"  # of a process that trains it further
    partial.mkdir()
    result = trained(char_data, tmp_path, "--max_steps=5", "--dry_run")
    assert partial.exists()
    assert "already finished, at step 5" in result.stdout
    assert "micro-batch" not in result.stdout


def test_several_gpus_share_the_hours_and_the_batch(char_data, tmp_path, monkeypatch):
    run, hours = small_run(char_data, tmp_path, "--max_steps=1000000000", "--n_embd=512"), []
    for count, batch in ((1, 8), (4, 2)):
        monkeypatch.setattr(distributed, "world_size", count)
        head, row = hours_table(run)[:2]
        assert row.endswith(f"micro-batch {batch} in 16 GB"), row
        found = re.search(r"(\d+) h (\d+) min", row)
        hours.append(int(found[1]) + int(found[2]) / 60)
    assert hours[0] / hours[1] == pytest.approx(4, rel=0.02)
    needed = memory_here(run, run.local_batch)
    assert needed.pop("peak") == sum(needed.values())  # gradients are kept
    assert "of the peak speed of 4 GPUs" in head


def test_a_micro_batch_fits_when_there_is_room_for_the_tokens_too(char_data, tmp_path):
    run, t4 = small_run(char_data, tmp_path, "--n_embd=256"), from_data_sheet("T4")
    less, more = (memory(run.config, run.model, run.optimizer, n, t4) for n in (1000, 2000))
    sequence = (more["activations"] - less["activations"]) / 1000

    def fits(share, tokens=0.0):
        """Whether sequences for a share of T4's and V100's memory, both 16 GB, are one batch."""
        batch = int(share * t4.memory / sequence / 2) * 2
        run.config = dataclasses.replace(run.config, batch_size=batch)
        run.data.train.bytes = int(tokens * t4.memory)
        rows = {row[:15].strip(): row for row in hours_table(run)}
        t4s, v100s = (f"micro-batch {batch} in 16 GB" in rows[name] for name in ("T4", "V100"))
        assert t4s == v100s
        return t4s

    assert fits(0.9)
    assert not fits(0.95)
    assert not fits(0.9, tokens=0.04)  # on the GPU
    assert fits(0.9, tokens=0.2)  # not on the GPU


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_keeps_what_is_planned_on_a_cpu(dtype, dropout):
    cpu, tokens = Device(torch.device("cpu"), dtype, "cpu", None, None), torch.zeros(2, 256).long()
    kept, found, planned = {}, [], []

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    for layers in (1, 2):
        model = GPT(GPTConfig(64, 256, layers, n_head=4, n_embd=256, dropout=dropout))
        kept.clear()
        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t),
            autocast(cpu.torch, dtype),
        ):
            model(tokens, tokens)
        for p in model.parameters():
            kept.pop(p.data_ptr(), None)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
        planned.append(activations(config.Config(), model.config, 2, cpu))
    if dtype == torch.bfloat16:  # copies of the weights, which memory() counts
        planned[1] += 2 * 12 * 256**2
    assert found[1] - found[0] == pytest.approx(planned[1] - planned[0], rel=0.12)


def test_a_token_of_a_long_context_needs_no_more_memory_on_a_cpu():
    cpu, per_token = Device(torch.device("cpu"), torch.bfloat16, "cpu", None, None), {}
    for context in (1024, 2048, 2049, 8192):
        whole = planned(32_000, "config/gpt2_small.py", f"--block_size={context}")
        per_token[context] = (
            memory(*whole, 2, cpu)["activations"] - 2 * whole[1].num_parameters()
        ) / context
    assert per_token[8192] == pytest.approx(per_token[2049])
    assert per_token[2049] < per_token[1024] < per_token[2048] < 2 * per_token[2049]


def test_gpt2_small_fits_16_gb_at_its_full_batch():
    t4, whole = from_data_sheet("T4"), planned(32_000, "config/gpt2_small.py")
    plain = memory(*whole, 64, t4)
    assert plain["weights"] == 4 * 134_601_216
    assert plain["optimizer"] == 8 * 134_601_216
    muon = memory(*planned(32_000, "config/gpt2_small.py", "--optimizer=muon"), 64, t4)
    assert muon["optimizer"] == 8 * 134_601_216 - 4 * 12 * 12 * 768**2  # one moment of matrices
    assert plain["peak"] < 0.9 * t4.memory
    # Without accumulation the gradients appear while the activations, which are more, go.
    assert plain["peak"] == 12 * 134_601_216 + plain["activations"]
    split = memory(*whole, 8, t4)
    assert split["peak"] == 16 * 134_601_216 + split["activations"] < 0.5 * t4.memory
    saving = planned(32_000, "config/gpt2_small.py", "--activation_checkpointing")
    assert memory(*saving, 64, t4)["peak"] < 0.5 * plain["peak"]
