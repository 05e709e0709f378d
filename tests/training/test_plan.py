"""training/plan.py: what --dry_run prints, and what it computes for GPUs that are not here."""

from dataclasses import replace

import torch

import config
from model import GPT
from tests.conftest import train_small
from tests.training.conftest import small_run
from training.banner import banner
from training.optimizer import make_optimizer
from training.plan import as_sold, checkpoint_bytes, decimals, memory, memory_table
from training.setup import model_shape
from training.state import Progress, State


def planned(vocab_size, *arguments):
    """Settings, and a model and optimiser that take no memory."""
    c = config.load([*arguments])
    meta = torch.device("meta")
    with meta:
        model = GPT(model_shape(c, vocab_size))
    return c, State(model, make_optimizer(model, c, meta), None, Progress())


def test_a_dry_run_prints_the_plan_and_writes_nothing(char_data, tmp_path):
    arguments = ["--dry_run=True", "--cost_per_hour=8", "--max_steps=1000", "--shard=True"]
    result = train_small(char_data, tmp_path / "run", *arguments)
    assert result.returncode == 0, result.stderr
    for words in (
        "parameters",
        "FLOPs a token",
        "activations",
        "each of 8 GPUs",
        "a checkpoint",
        "A100",
        "on each of 8",
        "H200",
        "here",
        "tokens/s, measured on cpu",
    ):
        assert words in result.stdout
    assert not (tmp_path / "run").exists()


def test_a_mac_shares_its_memory_and_the_plan_says_so(char_data, tmp_path):
    run = small_run(char_data, tmp_path / "run")
    assert "own memory" not in "\n".join(memory_table(run))
    run.device = replace(run.device, torch=torch.device("mps"), memory=12 << 30, peak_flops=5e12)
    assert "may use 12.9 GB of the machine's own memory" in memory_table(run)[-1]
    assert "5.0 TFLOP/s, measured now" in banner(run)


def test_a_text_much_too_small_for_the_model_is_a_warning(char_data, tmp_path):
    assert "by heart" not in banner(small_run(char_data, tmp_path / "run"))
    assert "by heart" in banner(small_run(char_data, tmp_path / "run", "--n_embd=512"))


def test_small_numbers_of_a_plan_keep_two_digits():
    assert [decimals(n) for n in (1234.5, 0.25, 0.0021, 0)] == ["1,234.50", "0.25", "0.0021", "0"]


def test_gpt2_small_fits_16_gb_at_its_full_batch():
    preset, t4 = "config/gpt2_small.py", as_sold("T4")
    plain = memory(*planned(32_000, preset, "--loss_chunks=1"), 64, t4)
    saving = memory(*planned(32_000, preset, "--activation_checkpointing"), 64, t4)
    assert plain["weights"] == 4 * 134_601_216 and plain["optimizer"] == 8 * 134_601_216
    assert saving["peak"] < 0.5 * t4.memory < t4.memory < plain["peak"]
    assert memory(*planned(32_000, preset), 8, t4)["peak"] < 0.5 * t4.memory


def test_each_of_eight_gpus_holds_an_eighth_of_gpt2_xl():
    c, state = planned(50_257, "config/gpt2_xl.py")
    rounded_up = 47 * c.n_embd  # the vocabulary of 50,257 to 50,304
    assert c.shard and state.model.num_parameters() == 1_557_611_200 + rounded_up  # as published
    one, each = (memory(c, state, 8, as_sold("H100"), gpus) for gpus in (1, 8))
    for name in ("weights", "gradients", "optimizer"):
        assert each[name] == one[name] // 8
    assert 40e9 < one["peak"] < 50e9 and each["peak"] < 27e9  # as config/gpt2_xl.py says


def test_a_small_micro_batch_leaves_muon_the_memory_of_its_step():
    c, state = planned(32_000, "config/gpt2_small_modern.py")
    small, large = (memory(c, state, size, as_sold("H200")) for size in (1, 64))
    held = sum(small[name] for name in ("weights", "gradients", "optimizer"))
    blocks = sum(p.numel() for p in state.model.h.parameters())
    assert held + 7 * blocks < small["peak"] < held + 12 * blocks  # bytes
    assert large["peak"] < held + large["activations"]


def test_the_copy_of_a_save_is_larger_where_it_is_page_locked():
    _, state = planned(32_000, "config/gpt2_small.py")
    assert round(checkpoint_bytes(state) / 1e9, 2) == 1.62
    assert round(checkpoint_bytes(state, page_locked=True) / 1e9, 2) == 2.47
