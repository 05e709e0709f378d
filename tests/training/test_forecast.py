"""The forecast of a run's final loss: on the committed curves of finished runs, and in a run."""

import json
import math

import numpy as np
import pytest

import config
from formats import run_log
from tests.conftest import ROOT, train_small
from training import forecast
from training.schedule import learning_rates


def finished_runs():
    """(name, shares, losses, learning rates) of the runs behind benchmarks/time_to_loss.py."""
    for task in ("shakespeare", "sources"):
        path = ROOT / f"benchmarks/results/time_to_loss_{task}_cpu.json"
        result = json.loads(path.read_text())
        for recipe in ("GPT-2", "modern"):
            c = config.load(result["settings"][recipe])
            rates = learning_rates(c.max_steps, c)
            for curve in result["curves"][recipe]:
                losses = [loss for _, loss in curve]
                shares = [min(1, n * c.eval_interval / c.max_steps) for n in range(1, len(losses))]
                yield f"{task}, {recipe}", [*shares, 1.0], losses, rates


def forecasts(shares, losses, rates):
    """(share, forecast) at each evaluation from a quarter of the run on, but the last."""
    for known in range(1, len(losses)):
        if shares[known - 1] >= 0.25:
            found = forecast.forecast(shares[:known], losses[:known], rates)
            if found:
                yield shares[known - 1], found


def test_forecasts_of_finished_runs_are_near_and_their_intervals_hold():
    off, inside = [], []
    for _, shares, losses, rates in finished_runs():
        for _, found in forecasts(shares, losses, rates):
            off.append(abs(found.loss / losses[-1] - 1))
            inside.append(found.low <= losses[-1] <= found.high)
    assert len(off) > 100
    assert np.median(off) < 0.015 and np.mean(np.array(off) < 0.02) > 0.7
    assert np.mean(inside) > 0.85


def test_a_curve_that_follows_the_model_is_continued():
    rates = np.minimum(1, 2 * (1 - np.linspace(0, 1, 1001)))  # wsd
    ways = np.cumsum(rates)

    def loss(share):
        at = np.interp(share, np.linspace(0, 1, 1001), ways)
        return (
            2.0 + 1.5 * (at / 100) ** -0.5 + 0.12 * np.interp(share, np.linspace(0, 1, 1001), rates)
        )

    shares = np.arange(1, 16) / 20
    found = forecast.forecast(shares, loss(shares), rates)
    assert found.low < loss(1.0) < found.high and abs(found.loss / loss(1.0) - 1) < 0.01
    early = forecast.forecast(shares[:5], loss(shares[:5]), rates)
    assert early.high - early.low > 2 * (found.high - found.low)  # the fall of the rate is to come
    fallen = loss(shares) - 0.8 * (shares > 0.5)  # as where a model comes to copy
    left = forecast.forecast(shares, fallen, rates)
    assert left.high - left.low > 3 * (found.high - found.low)


def test_nothing_is_said_too_early():
    rates = np.linspace(1, 0.1, 1001)
    assert forecast.forecast([0.1, 0.2], [3.0, 2.5], rates) is None
    warming = np.concatenate((np.linspace(0, 1, 501), np.linspace(1, 0, 500)))
    assert forecast.forecast([0.1, 0.2, 0.3, 0.4], [4.0, 3.0, 2.5, 2.4], warming) is None
    assert forecast.forecast([0.1, 0.2, 0.3, 0.4], [4.0, 3.0, 2.5, 2.4], np.zeros(9)) is None
    assert forecast.forecast([0.1, 0.2, 0.3], [4.0, math.nan, 2.5], rates) is None


def test_three_losses_above_their_intervals_are_noticed_and_finished_runs_never_were():
    for name, shares, losses, rates in finished_runs():
        for known in range(7, len(losses) + 1, 4):
            assert not forecast.strayed(shares[:known], losses[:known], rates), (name, known)
    _, shares, losses, rates = next(finished_runs())
    bad = [*losses[:10], *(np.array(losses[10:13]) * 1.1)]
    assert forecast.strayed(shares[:13], bad, rates)
    assert not forecast.strayed(shares[:12], bad[:12], rates)
    better = [*losses[:10], *(np.array(losses[10:13]) * 0.9)]
    assert not forecast.strayed(shares[:13], better, rates)


def test_the_usual_causes_follow_from_the_training_loss():
    assert "by heart" in forecast.usual_causes([2.0, 1.8, 1.6, 1.4], epoch=9.0)
    assert "learning rate" in forecast.usual_causes([2.0, 1.8, 2.6, 3.4], epoch=9.0)
    assert "learning rate" in forecast.usual_causes([2.0, 1.8, 1.6, 1.4], epoch=0.5)


@pytest.fixture(scope="module")
def memorised(tmp_path_factory):
    """A data set whose training text a small model soon knows by heart: 3,000 characters."""
    from tests.conftest import prose, run_script

    folder = tmp_path_factory.mktemp("memorised")
    (folder / "text.txt").write_text(prose()[:3_000] + "\n" + prose()[100_000:101_500])
    arguments = ("--tokenizer", "char", "--val_fraction", "0.3", "--out", folder / "data")
    result = run_script("prepare_data.py", folder / "text.txt", *arguments)
    assert result.returncode == 0, result.stderr
    return folder / "data"


def test_a_run_says_where_it_will_end_and_once_that_it_has_strayed(memorised, tmp_path):
    result = train_small(
        memorised, tmp_path / "run", "--max_steps=900", "--eval_interval=30", "--learning_rate=1e-2"
    )
    assert result.returncode == 0, result.stderr
    assert "expected at the end" in result.stdout
    assert result.stdout.count("off course: ") == 1 and "by heart" in result.stdout
    log = run_log.read(tmp_path / "run")
    evaluations = [record for record in log if "val_loss" in record]
    assert "forecast" not in evaluations[1] and "forecast" not in evaluations[-1]
    loss, low, high = evaluations[3]["forecast"]
    assert low < loss < high
    assert sum(record.get("event") == "off course" for record in log) == 1
