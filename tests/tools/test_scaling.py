"""What will my money buy: the law, the plan, and the tool itself on a small text."""

import contextlib
import itertools
import math

import numpy as np
import pytest

import config
from formats import run_log
from formats.data_folder import read_meta
from tests.conftest import fails_clearly, run_script
from tools import (
    scaling,
    scaling_family,
    scaling_fit,
    scaling_plan,
    scaling_runs,
    scaling_study,
)
from training.errors import RunError

TRUE = np.log([0.3, 0.9, 1.2, 0.4, 0.45])  # A, B, E, alpha, beta


def runs_of_a_law(noise):
    """Twelve small runs that follow TRUE but for so much noise: N, D, losses, operations."""
    sizes = np.repeat([6e4, 1.6e5, 4.3e5, 7.2e5], 3)
    tokens = np.tile([1e5, 3e5, 9e5], 4)
    logs = scaling_fit.log_loss(TRUE, *scaling_fit.logs_of(sizes, tokens))
    logs = logs + noise * np.random.default_rng(1).standard_normal(12)
    return sizes, tokens, np.exp(logs), 6 * sizes * tokens


def test_the_law_behind_small_runs_is_found_and_its_interval_holds():
    law = scaling_fit.fit(*runs_of_a_law(noise=0.003))
    for sizes, tokens in ((1e6, 1e6), (2e6, 2e6), (4e6, 8e6)):
        true = float(np.exp(scaling_fit.log_loss(TRUE, *scaling_fit.logs_of(sizes, tokens))))
        low, high = law.interval(sizes, tokens, 6 * sizes * tokens)
        assert abs(law.loss(sizes, tokens) / true - 1) < 0.05 and low < true < high
    near, far = law.interval(1e6, 1e6, 6e12), law.interval(1e8, 1e8, 6e16)
    assert far[1] / far[0] > near[1] / near[0]
    middle = law.loss(1e8, 1e8)  # short runs do not show how far a loss may fall
    assert not law.copies and middle / far[0] > far[1] / middle


def test_one_run_that_went_wrong_moves_the_law_little():
    sizes, tokens, losses, computes = runs_of_a_law(noise=0.002)
    before = scaling_fit.fit(sizes, tokens, losses, computes).loss(2e6, 4e6)
    losses[5] *= 1.2
    after = scaling_fit.fit(sizes, tokens, losses, computes).loss(2e6, 4e6)
    assert abs(after / before - 1) < 0.02


def test_repeated_tokens_count_for_less():
    assert scaling_fit.effective_tokens(5e6, 1e7) == 5e6
    assert scaling_fit.effective_tokens(2e7, 1e7) == pytest.approx(1.97e7, rel=0.01)
    assert scaling_fit.effective_tokens(1e12, 1e7) == pytest.approx(16.4e7, rel=0.01)


@pytest.fixture(scope="module")
def demo(bpe_data):
    """The demo's recipe on a small text, and the sizes of its family."""
    c = config.load(["config/demo.py", "--block_size=32", "--batch_size=8"])
    return c, scaling_family.family(c, read_meta(bpe_data))


def test_a_family_grows_and_learning_rates_follow(demo):
    c, sizes = demo
    assert all(a.flops < b.flops for a, b in itertools.pairwise(sizes))
    shape = (c.n_layer, c.n_embd)
    own = next(size for size in sizes if (size.n_layer, size.n_embd) == shape)
    assert own.n_head == c.n_head
    assert scaling_family.settings_of(c, own, c.max_steps)["muon_lr"] == c.muon_lr
    gpt2 = config.load(["config/gpt2_small.py"])
    narrow, wide = (scaling_family.settings_of(gpt2, size, 1000) for size in (sizes[0], sizes[-1]))
    assert narrow["learning_rate"] > wide["learning_rate"]
    assert narrow["warmup_steps"] == 100  # of 1,000 steps, not the preset's 2,000


def test_small_runs_fit_into_their_minutes(demo):
    _, sizes = demo

    def step_seconds(size):
        return size.flops * 256 / 1e11

    plan = scaling_plan.small_runs(sizes, step_seconds, 600, 256, 10_000_000)
    seconds = sum(step_seconds(run.size) * run.steps for run in plan)
    assert 250 < seconds <= 1.01 * 0.6 * 600
    assert len({run.size for run in plan}) >= 3 and min(run.steps for run in plan) >= 50
    longer = scaling_plan.small_runs(sizes, step_seconds, 60_000, 256, 10**9)
    assert longer[-1].size.flops > plan[-1].size.flops


def test_what_allows_no_plan_is_said_in_a_sentence(demo):
    _, sizes = demo
    with pytest.raises(scaling_plan.PlanError, match="too few for the smallest run"):
        scaling_plan.small_runs(sizes, lambda size: 0.1, 600, 4096, 10_000)
    with pytest.raises(scaling_plan.PlanError, match="raise --minutes"):
        scaling_plan.small_runs(sizes, lambda size: 10.0, 600, 4096, 10_000_000)
    with pytest.raises(scaling_plan.PlanError, match="not fit into the memory"):
        scaling_plan.small_runs(sizes, lambda size: None, 600, 4096, 10_000_000)


def test_the_best_size_is_looked_for_from_any_start(demo):
    _, sizes = demo
    law = scaling_fit.fit(*runs_of_a_law(noise=0.002))
    asked = []

    def make(size):
        asked.append(size)
        steps = int(1e14 / size.flops / 1000)
        return scaling_plan.offer(size, steps, 1.0, 1000, 10**9, law)

    found = [scaling_plan.offers(sizes, make, start) for start in (0, 5, 12)]
    best = {min(offers, key=lambda o: o.loss).size for offers in found}
    assert len(best) == 1
    asked.clear()
    scaling_plan.offers(sizes, make, sizes.index(best.pop()))
    assert len(asked) == 3


SMALL = ["--block_size=16", "--batch_size=2", "--device=cpu"]


def test_from_a_text_to_a_preset_that_trains(bpe_data, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling_family, "LEAST_LAYERS", 1)  # sooner done
    for minutes in (0.4, 0.8, 2, 8):  # a busy machine needs more
        command = ["--data", str(bpe_data), "--hours", "0.002", *SMALL]
        command += [f"--minutes={minutes}", f"--out={tmp_path / 'study'}"]
        with contextlib.suppress(scaling_plan.PlanError):
            scaling.main(command)
            break
    told = capsys.readouterr().out
    assert "bits per byte" in told and "<<" in told
    found = scaling_study.read(tmp_path / "study")
    assert len(found.runs) >= scaling_plan.LEAST_RUNS
    best = found.recommended
    effective = scaling_fit.effective_tokens(best["tokens"], found.unique)
    assert found.law.loss(best["size"]["weights"], effective) == pytest.approx(best["loss"])
    preset = tmp_path / "study" / "recommended.py"
    chosen = config.load([str(preset)])
    assert chosen.n_embd == best["size"]["n_embd"]
    assert (chosen.max_steps, chosen.epochs) == (best["steps"], None)
    before = preset.read_text()
    scaling.main(command)  # nothing is trained or measured a second time
    assert " after " not in capsys.readouterr().out and preset.read_text() == before
    trained = run_script("train.py", preset, "--max_steps=40")
    assert trained.returncode == 0, trained.stderr
    drawn = run_script("-m", "tools.report", found.run)
    assert drawn.returncode == 0, drawn.stderr
    page = (found.run / "report.html").read_text(encoding="utf-8")
    assert "final loss predicted" in page
    log = found.run / "log.jsonl"  # as before the first evaluation
    log.write_text("".join(r for r in log.read_text().splitlines(True) if "val_loss" not in r))
    early = run_script("-m", "tools.report", found.run)
    assert early.returncode == 0, early.stderr


def test_bad_input_is_a_sentence(bpe_data, char_data, tmp_path):
    tool = ["-m", "tools.scaling", "--data", bpe_data, "--out", tmp_path / "none"]
    fails_clearly(run_script(*tool), "give one budget")
    fails_clearly(run_script(*tool, "--max_cost", "5"), "--cost_per_hour")
    fails_clearly(run_script(*tool, "--hours", "two"), "two: it must be a number above 0")
    fails_clearly(run_script(*tool, "--hours", "1", "--batch_size=4096"), "too few", "add text")
    fails_clearly(run_script(*tool, "--hours", "1", "--n_inner=64"), "n_inner")
    for budget in (("--hours", "1e-5"), ("--flops", "1e3")):  # before the small runs take minutes
        nothing = run_script(*tool, *budget, "--block_size=16", "--batch_size=2", timeout=60)
        fails_clearly(nothing, "the budget pays for fewer than 50 steps", "raise the budget")
    (tmp_path / "file").touch()
    fails_clearly(
        run_script(*tool, "--hours", "1", "--out", tmp_path / "file"), "it must be a folder"
    )
    fails_clearly(run_script(*tool, "--hours", "1", "config/demo.py"), "stands behind --preset")
    replies = run_script(*tool, "--hours", "1", "--loss_on=assistant")
    fails_clearly(replies, "no mask of the assistant's tokens")


def test_text_without_a_validation_split_is_refused_before_anything_is_trained(text_file, tmp_path):
    prepared = ("--tokenizer", "char", "--val_fraction", "0", "--out", tmp_path / "data")
    assert run_script("prepare_data.py", text_file, *prepared).returncode == 0
    tool = ["-m", "tools.scaling", "--data", tmp_path / "data", "--out", tmp_path / "none"]
    result = run_script(*tool, "--hours", "1")
    fails_clearly(result, tmp_path / "data", "nothing to validate on", "--val_fraction")
    assert not (tmp_path / "none").exists()
    fails_clearly(run_script(*tool, "--hours", "1", "--widht=3"), "widht")


def test_without_scipy_its_command_is_named_before_anything_is_trained(bpe_data, tmp_path):
    code = "import runpy, sys; sys.modules['scipy'] = None; sys.argv[1:] = {}\n"
    code += "runpy.run_module('tools.scaling', run_name='__main__')"
    words = ["--data", str(bpe_data), "--hours", "1", "--out", str(tmp_path / "none")]
    result = run_script("-c", code.format(words))
    fails_clearly(result, "scipy is missing", "pip install scipy", status=1)
    assert not (tmp_path / "none").exists()


def test_small_runs_that_diverge_are_worse_than_all_others(bpe_data, tmp_path):
    arguments = ["config/demo.py", f"--data_dir={bpe_data}", "--n_layer=1", "--n_embd=32"]
    arguments += ["--block_size=16", "--batch_size=2", "--device=cpu", "--max_bad_steps=2"]
    settings = {"max_steps": 30, "eval_batches": 2, "optimizer": "adamw", "learning_rate": 1e30}
    settings |= {"sample_prompts": []}
    assert scaling_runs.train(tmp_path / "run", arguments, settings) == math.inf
    (tmp_path / "run" / "output.txt").unlink()
    assert scaling_runs.train(tmp_path / "run", arguments, settings) == math.inf
    assert not (tmp_path / "run" / "output.txt").exists()  # it was not trained again

    start = {"step": 0, "event": "start", "total_steps": 5}
    run_log.write(tmp_path, [start, {"step": 5, "val_loss": None}])
    assert scaling_runs.final_loss(tmp_path) == math.inf
    run_log.write(tmp_path, [start, {"step": 4, "val_loss": 2.0}])
    assert scaling_runs.final_loss(tmp_path) is None

    with pytest.raises(scaling_runs.RunFailed, match="n_layer"):
        scaling_runs.train(tmp_path / "other", [*arguments, "--n_layer=0"], settings)


def test_the_best_factor_is_below_those_that_diverge():
    losses = {2.0: math.inf, 1.0: math.inf, 0.5: 3.0, 0.25: 2.5, 0.125: 2.6}

    class Study:
        def train(self, size, steps, factor):
            return {"loss": losses[factor]}

    assert scaling.best_factor(Study(), None, 50) == 0.25


def test_a_law_is_fitted_to_what_did_not_diverge():
    well = [{"loss": 3.0}] * scaling_plan.LEAST_RUNS
    assert scaling_plan.finite([*well, {"loss": math.inf}]) == well
    with pytest.raises(scaling_plan.PlanError, match=r"1 of 6 small runs diverged"):
        scaling_plan.finite([*well[1:], {"loss": math.inf}])


def test_what_ends_a_measurement_is_no_lack_of_memory_unless_it_says_so(
    bpe_data, tmp_path, monkeypatch
):
    study = scaling.Study(str(bpe_data), "config/demo.py", SMALL, tmp_path / "study")
    study.claim_folder()

    def fails_with(message):
        def check(run):
            raise RunError(message)

        monkeypatch.setattr(scaling, "check_ram", check)

    fails_with("out of memory on cpu with a single sequence of 16 tokens")
    assert study.step_seconds(study.sizes[0]) is None
    fails_with("another trainer is at work")
    with pytest.raises(RunError, match="another trainer"):
        study.step_seconds(study.sizes[1])


def test_the_table_counts_the_bytes_of_replies_alone_where_the_loss_does(
    chat_data, tmp_path, capsys, demo
):
    _, sizes = demo
    law = scaling_fit.fit(*runs_of_a_law(noise=0.002))
    offer = scaling_plan.offer(sizes[0], 100, 1.0, 1000, 10**9, law)
    replies = read_meta(chat_data).splits["val"].mask
    arguments = [*SMALL, "--loss_on=assistant"]
    study = scaling.Study(str(chat_data), "config/demo.py", arguments, tmp_path / "study")
    scaling.print_offers(study, [offer], offer, 0.0)
    bits = offer.loss / math.log(2) * replies.tokens / replies.text_bytes
    assert f"{bits:.3f} (" in capsys.readouterr().out
