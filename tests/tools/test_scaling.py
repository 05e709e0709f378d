"""tools/scaling.py: the law, the plan, and the tool itself from a text to a preset that trains."""

import itertools
import json
import math
import os
import re
import signal
import threading
import time

import numpy as np
import pytest

import config
from config import ConfigError
from formats import run_log
from formats.data_folder import read_meta
from tests.conftest import fails_clearly, run_script
from tools import scaling, scaling_fit, scaling_runs
from tools.scaling_runs import Study
from training import RunError

# A small run that takes a second to save.
SAVES = """
import pathlib, signal, sys, time
here = pathlib.Path(__file__).parent
signal.signal(signal.SIGINT, signal.SIG_IGN)
def save(*_):
    time.sleep(1)
    (here / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, save)
(here / "trains").touch()
time.sleep(60)
"""
TRUE = np.log([0.3, 0.9, 1.2, 0.4, 0.45])  # A, B, E, alpha, beta
SMALL = ["--block_size=16", "--batch_size=8", "--device=cpu"]


def runs_of_a_law(noise):
    """Twelve small runs that follow TRUE but for so much noise: N, D, losses, operations."""
    sizes = np.repeat([6e4, 1.6e5, 4.3e5, 7.2e5], 3)
    tokens = np.tile([1e5, 3e5, 9e5], 4)
    logs = scaling_fit.log_loss(TRUE, sizes, tokens)
    logs = logs + noise * np.random.default_rng(1).standard_normal(12)
    return sizes, tokens, np.exp(logs), 6 * sizes * tokens


@pytest.fixture(scope="module")
def law():
    """The law fitted to runs that follow TRUE closely."""
    return scaling_fit.fit(*runs_of_a_law(noise=0.002))


def test_the_law_is_found_and_its_interval_holds(law):
    for sizes, tokens in ((1e6, 1e6), (2e6, 2e6), (4e6, 8e6)):
        true = float(np.exp(scaling_fit.log_loss(TRUE, sizes, tokens)))
        low, high = law.interval(sizes, tokens, 6 * sizes * tokens)
        assert abs(law.loss(sizes, tokens) / true - 1) < 0.05 and low < true < high
    near, far = law.interval(1e6, 1e6, 6e12), law.interval(1e8, 1e8, 6e16)
    assert far[1] / far[0] > near[1] / near[0]
    middle = law.loss(1e8, 1e8)  # short runs do not show how far a loss may fall
    assert not law.saw_copying and middle / far[0] > far[1] / middle


def test_one_run_that_went_wrong_moves_the_law_little(law):
    sizes, tokens, losses, computes = runs_of_a_law(noise=0.002)
    losses[5] *= 1.2
    after = scaling_fit.fit(sizes, tokens, losses, computes).loss(2e6, 4e6)
    assert abs(after / law.loss(2e6, 4e6) - 1) < 0.02


def test_repeated_tokens_count_for_less():
    assert scaling_fit.effective_tokens(5e6, 1e7) == 5e6
    assert scaling_fit.effective_tokens(2e7, 1e7) == pytest.approx(1.97e7, rel=0.01)
    assert scaling_fit.effective_tokens(1e12, 1e7) == pytest.approx(16.4e7, rel=0.01)


@pytest.fixture(scope="module")
def demo(bpe_data):
    """The demo's recipe on a small text, and the sizes of its family."""
    c = config.load(["config/demo.py", "--block_size=32", "--batch_size=8"])
    return c, scaling_runs.family(c, read_meta(bpe_data))


def test_a_family_grows_and_learning_rates_follow(demo):
    c, sizes = demo
    assert all(a.flops < b.flops for a, b in itertools.pairwise(sizes))
    shape = (c.n_layer, c.n_embd)
    own = next(size for size in sizes if (size.n_layer, size.n_embd) == shape)
    assert own.n_head == c.n_head
    assert scaling_runs.settings_of(c, own, c.max_steps)["muon_lr"] == c.muon_lr
    gpt2 = config.load(["config/gpt2_small.py"])
    narrow, wide = (scaling_runs.settings_of(gpt2, size, 1000) for size in (sizes[0], sizes[-1]))
    assert narrow["learning_rate"] > wide["learning_rate"]
    assert narrow["warmup_steps"] == 100  # of 1,000 steps, not the preset's 2,000


def test_small_runs_fit_into_their_minutes(demo):
    _, sizes = demo

    def step_seconds(size):
        return size.flops * 256 / 1e11

    plan = scaling_runs.small_runs(sizes, step_seconds, 600, 256, 10_000_000)
    seconds = sum(step_seconds(size) * steps for size, steps in plan)
    assert 250 < seconds <= 1.01 * 0.6 * 600
    assert len({size for size, _ in plan}) >= 3 and min(steps for _, steps in plan) >= 50
    longer = scaling_runs.small_runs(sizes, step_seconds, 60_000, 256, 10**9)
    assert longer[-1][0].flops > plan[-1][0].flops


def test_too_few_small_runs_say_how_many_minutes_would_do(demo):
    _, sizes = demo

    def refusal(step_s, minutes, unique=10_000_000):
        with pytest.raises(ConfigError) as refused:
            scaling_runs.small_runs(sizes, lambda size: step_s, 60 * minutes, 4096, unique)
        return str(refused.value)

    words = refusal(10.0, 10)
    minutes = int(re.search(r"take --minutes (\d+)", words)[1])
    assert "10 minutes are too few on this machine" in words and "text" not in words
    for faster in (1.0, 1.1, 0.9):
        plan = scaling_runs.small_runs(
            sizes, lambda size, s=faster: 10.0 * s, 60 * minutes, 4096, 10_000_000
        )
        assert len(plan) >= scaling_runs.LEAST_RUNS
    assert "the text has 60,000 tokens" in refusal(1e-3, 10, unique=60_000)
    assert "memory" in refusal(math.inf, 10)


class Machine:
    """A study of a machine with a given speed, as offers() sees one. asked: the sizes timed."""

    tokens_a_step, unique = 1000, 10**9

    def __init__(self, sizes, flops_per_second, fits=math.inf):
        self.sizes, self.speed, self.fits = sizes, flops_per_second, fits
        self.asked = []

    def flops_a_step(self, size):
        return size.flops * self.tokens_a_step

    def step_seconds(self, size, steps):
        self.asked.append(size)
        return self.flops_a_step(size) / self.speed if size.n_embd <= self.fits else math.inf


def test_the_best_size_is_found_wherever_the_search_begins(demo, law):
    _, sizes = demo
    budget = scaling.parse_args(["--data", "d", "--hours=10", "--preset=p"])[0]
    best = set()
    for speed in (1e7, 1e9, 1e12):  # what the small runs made believe
        machine = Machine(sizes, 3e9)
        found = scaling.offers(machine, law, budget, speed)
        best.add(min(found, key=lambda o: o.loss).size)
    assert len(best) == 1
    largest = best.pop()
    machine = Machine(sizes, 3e9, fits=sizes[1].n_embd)
    found = scaling.offers(machine, law, budget, 3e9)
    assert min(found, key=lambda o: o.loss).size == sizes[1] != largest


def test_from_a_text_to_a_preset_that_trains(bpe_data, tmp_path, monkeypatch, capsys):
    # A given speed, and few runs of few steps, so that no machine is too slow.
    monkeypatch.setattr(Study, "step_seconds", lambda self, size, steps=0: size.flops / 2e6)
    few = {"SIZES": 2, "THIRDS": 2, "STRIDE": 1, "LEAST_RUNS": 4, "LEAST_LAYERS": 1}
    for name, count in few.items():
        monkeypatch.setattr(scaling_runs, name, count)
    monkeypatch.setattr(scaling, "FACTORS", (1.0, 2.0))
    folder = tmp_path / "study"
    command = ["--data", str(bpe_data), "--hours=0.5", "--minutes=2", f"--out={folder}", *SMALL]
    scaling.main(command)
    told = capsys.readouterr().out
    assert "bits per byte" in told and "<<" in told
    assert len(list(folder.glob("*_steps_*/log.jsonl"))) == 5  # with one of the sweep
    best = json.loads((folder / "scaling.json").read_text())["recommended"]
    preset = folder / "recommended.py"
    chosen = config.load([str(preset)])
    assert chosen.n_embd == best["size"]["n_embd"]
    assert (chosen.max_steps, chosen.epochs) == (best["steps"], None)

    # Once more: what is there is not trained again, and one that was cut off is.
    before = preset.read_text()
    cut = next(folder.glob("*_steps_1"))
    (cut / "log.jsonl").unlink()
    scaling.main(command)
    assert capsys.readouterr().out.count(": loss ") == 1 and preset.read_text() == before
    with pytest.raises(ConfigError, match="other settings"):
        scaling.main([*command, "--weight_decay=0.3"])

    trained = run_script("train.py", preset, "--max_steps=40")
    assert trained.returncode == 0, trained.stderr
    run = folder / best["run"]
    assert run_script("-m", "tools.report", run).returncode == 0
    assert "final loss predicted" in (run / "report.html").read_text(encoding="utf-8")
    assert (folder / "scaling.png").read_bytes().startswith(b"\x89PNG")


def test_bad_input_is_a_sentence(bpe_data, tmp_path):
    tool = ["-m", "tools.scaling", "--data", bpe_data, "--out", tmp_path / "none"]
    fails_clearly(run_script(*tool), "--hours --max_cost --flops is required")
    fails_clearly(run_script(*tool, "--max_cost", "5"), "--cost_per_hour")
    fails_clearly(run_script(*tool, "--hours", "two"), "two: it must be a number above 0")
    fails_clearly(run_script(*tool, "--hours", "0.1"), "6 minutes, less than", "lower --minutes")
    fails_clearly(run_script(*tool, "--hours", "1", "--batch_size=4096"), "too few", "add text")
    fails_clearly(run_script(*tool, "--hours", "1", "--n_inner=64"), "n_inner")
    fails_clearly(run_script(*tool, "--hours", "1", "--widht=3"), "widht")
    fails_clearly(run_script(*tool, "--flops", "1e3", *SMALL), "raise the budget")
    fails_clearly(run_script(*tool, "--hours", "1", "config/demo.py"), "one preset")
    fails_clearly(run_script(*tool, "--hours", "1", "--loss_on=assistant"), "no mask")
    (tmp_path / "file").touch()
    fails_clearly(run_script(*tool, "--hours", "1", "--out", tmp_path / "file"), "is a file")
    assert not (tmp_path / "none").exists()


def test_without_scipy_its_command_is_named_before_anything_is_trained(bpe_data, tmp_path):
    code = "import runpy, sys; sys.modules['scipy'] = None; sys.argv[1:] = {}\n"
    code += "runpy.run_module('tools.scaling', run_name='__main__')"
    words = ["--data", str(bpe_data), "--hours", "1", "--out", str(tmp_path / "none")]
    result = run_script("-c", code.format(words))
    fails_clearly(result, "scipy is missing", "pip install scipy", status=1)
    assert not (tmp_path / "none").exists()


def test_small_runs_that_diverge_are_worse_than_all_others(bpe_data, tmp_path):
    arguments = ["config/demo.py", f"--data_dir={bpe_data}", "--n_layer=1", "--n_embd=32"]
    arguments += [*SMALL, "--max_bad_steps=2"]
    settings = {"max_steps": 30, "eval_batches": 2, "optimizer": "adamw", "learning_rate": 1e30}
    settings["sample_prompts"] = []
    assert scaling_runs.train(tmp_path / "run", arguments, settings) == math.inf
    assert scaling_runs.final_loss(tmp_path / "run") == math.inf

    start = {"step": 0, "event": "start", "total_steps": 5}
    run_log.write(tmp_path, [start, {"step": 5, "val_loss": None}])
    assert scaling_runs.final_loss(tmp_path) == math.inf
    run_log.write(tmp_path, [start, {"step": 4, "val_loss": 2.0}])
    assert scaling_runs.final_loss(tmp_path) is None

    with pytest.raises(RunError, match="n_layer"):
        scaling_runs.train(tmp_path / "other", [*arguments, "--n_layer=0"], settings)

    well = [{"loss": 3.0}] * scaling_runs.LEAST_RUNS
    assert scaling_runs.converged([*well, {"loss": math.inf}]) == well
    with pytest.raises(ConfigError, match=r"1 of 6 small runs diverged"):
        scaling_runs.converged([*well[1:], {"loss": math.inf}])


def test_a_size_is_timed_here_unless_it_does_not_fit(bpe_data, tmp_path, monkeypatch):
    study = Study(str(bpe_data), "config/demo.py", SMALL, tmp_path / "study")
    monkeypatch.setattr(scaling_runs, "TIMED_S", 0.0)
    assert 0 < study.step_seconds(study.sizes[0]) < math.inf

    def fails_with(message):
        def check(run):
            raise RunError(message)

        monkeypatch.setattr(scaling_runs, "check_ram", check)

    fails_with("out of memory on cpu with a single sequence of 16 tokens")
    assert study.step_seconds(study.sizes[0]) == math.inf
    fails_with("another trainer is at work")
    with pytest.raises(RunError, match="another trainer"):
        study.step_seconds(study.sizes[1])


def test_the_table_counts_the_bytes_of_replies_alone_where_the_loss_does(
    chat_data, tmp_path, capsys, law
):
    replies = read_meta(chat_data).splits["val"].mask
    arguments = [*SMALL, "--loss_on=assistant"]
    study = Study(str(chat_data), "config/demo.py", arguments, tmp_path / "study")
    budget = scaling.parse_args(["--data", "d", "--hours=10", "--preset=p"])[0]
    offer = scaling.offer(study, law, study.sizes[0], budget, 0.1)
    scaling.print_offers(study, [offer], offer, 0.0)
    bits = offer.loss / math.log(2) * replies.tokens / replies.text_bytes
    assert f"{bits:.3f} (" in capsys.readouterr().out


def test_ctrl_c_waits_until_the_small_run_has_saved(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling_runs, "TRAIN", tmp_path / "train.py")
    (tmp_path / "train.py").write_text(SAVES)

    def ctrl_c():
        while not (tmp_path / "trains").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=ctrl_c, daemon=True).start()
    try:
        with pytest.raises(KeyboardInterrupt):
            scaling_runs.train(tmp_path / "run", [], {})
    finally:
        signal.signal(signal.SIGINT, before)
    assert (tmp_path / "saved").exists()
