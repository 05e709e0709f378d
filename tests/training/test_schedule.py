"""schedule.py: the learning rate, what is due when, and budgets over all starts of a run."""

import dataclasses
import time

import pytest
import torch

from config import Config
from tests.training.conftest import small_run
from training.schedule import (
    Clock,
    Counters,
    Schedule,
    full_rate_steps,
    lr_multiplier,
    peak_decay,
)

CPU = torch.device("cpu")
COSINE = {"learning_rate": 1.0, "warmup_steps": 20, "min_lr": 0.2}
WSD = {"learning_rate": 1.0, "warmup_steps": 10, "lr_schedule": "wsd"}


@pytest.mark.parametrize(
    ("settings", "total_steps", "expected"),
    [
        (COSINE, 100, {0: 0.05, 9: 0.5, 19: 1.0, 20: 1.0}),  # a warm-up
        (COSINE, 100, {40: 0.2 + 0.8 * (0.5 + 0.25 * 2**0.5), 60: 0.6, 100: 0.2, 150: 0.2}),
        (COSINE | {"min_lr": None}, 100, {100: 0.1}),  # by default a tenth of the peak
        (COSINE | {"warmup_steps": 0}, 1, {0: 1.0}),
        (WSD, 100, {4: 0.5, 9: 1.0, 30: 1.0, 50: 1.0, 75: 0.5, 100: 0.0}),
        (WSD, 100, {99: 0.02}),  # the last step trains, too
        (WSD | {"warmup_steps": 0}, 1, {0: 1.0}),
    ],
)
def test_the_learning_rate_of_a_step(settings, total_steps, expected):
    config = Config(**settings)
    found = {step: lr_multiplier(step, total_steps, config) for step in expected}
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings", [COSINE, COSINE | {"min_lr": None}, WSD, WSD | {"min_lr": 0.1}]
)
@pytest.mark.parametrize("warmup_steps", [0, 1, 20])
def test_the_sum_of_the_learning_rates_is_that_of_all_steps(settings, warmup_steps):
    config = Config(**settings | {"learning_rate": 0.5, "warmup_steps": warmup_steps})
    for total_steps, close in [(n, 1e-6) for n in (1, 2, 3, 20, 21, 22, 101, 1000)] + [
        (25_001, 1e-4)
    ]:
        rates = [lr_multiplier(step, total_steps, config) for step in range(total_steps)]
        assert full_rate_steps(total_steps, config) == pytest.approx(sum(rates), rel=close)
    assert peak_decay(10**9, 8.0, dataclasses.replace(config, weight_decay=None)) > 0


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_a_weight_decay_that_is_not_set_follows_from_the_epochs(optimizer):
    config = Config(weight_decay=None, optimizer=optimizer, muon_lr=0.03, learning_rate=4e-3)
    decay = peak_decay(1000, 4.0, config)
    rates = [lr_multiplier(step, 1000, config) for step in range(1000)]
    assert decay * sum(rates) == pytest.approx(3 * 0.9)
    assert peak_decay(1000, 0.5, config) == 0.0


def test_the_optimizer_of_a_run_has_the_weight_decay_of_its_epochs(little_data, tmp_path):
    run = small_run(little_data, tmp_path, "--weight_decay=None", "--epochs=4")
    decay = peak_decay(run.schedule.total_steps, 4.0, run.config)
    groups = run.optimizer.param_groups
    found = max(group["weight_decay"] * group["initial_lr"] for group in groups)
    assert found == pytest.approx(decay, rel=0.01)  # whole steps: a little more than 4 epochs


def test_no_step_of_a_very_short_run_flips_its_weights():
    config = Config(weight_decay=None, warmup_steps=0, lr_schedule="wsd")
    for steps in (1, 2, 3):
        assert peak_decay(steps, 8.0, config) <= 1


def make_schedule(step=0, total_steps=40, evaluated=0, **settings):
    """A Schedule at a step of a run that began there."""
    config = Config(**{"save_interval": 0, "save_minutes": 0, "eval_interval": 0} | settings)
    return Schedule(config, Counters(step=step), total_steps, evaluated, validates=True)


def steps_due(schedule, due, done):
    """The steps up to 40 at which `due` says so; `done` is then called."""
    found = []
    for step in range(1, 41):
        schedule.counters.step = step
        if due():
            found.append(step)
            done()
    return found


def test_a_save_by_the_clock_is_due_once_a_period_and_never_while_one_is_written(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    schedule = make_schedule(total_steps=100, save_minutes=1.0)

    def due(busy=False):
        now[0] += 7
        return schedule.save_due(busy)

    assert steps_due(schedule, due, schedule.mark_saved) == [9, 18, 27, 36]
    now[0] += 60
    assert not due(busy=True)
    assert due()


@pytest.mark.parametrize(
    ("due", "settings", "steps"),
    [
        (lambda s: s.log_due, {"log_interval": 15}, [15, 30, 40]),
        (lambda s: s.check_due, {"log_interval": 15}, [10, 20, 30, 40]),  # NaN: ten at most
        (lambda s: s.check_due, {"log_interval": 8}, [8, 16, 24, 32, 40]),
        (lambda s: s.evaluation_due, {"eval_interval": 15}, [15, 30, 40]),
        (lambda s: s.save_due(False), {"save_interval": 9}, [9, 18, 27, 36, 40]),
        (lambda s: s.save_due(False), {"eval_interval": 15}, [15, 30, 40]),  # it precedes each
    ],
)
def test_what_is_due_at_its_interval_and_at_the_end(due, settings, steps):
    schedule = make_schedule(**settings)

    def done():
        schedule.mark_saved()
        schedule.mark_evaluated()

    assert steps_due(schedule, lambda: due(schedule), done) == steps


def test_a_run_that_starts_at_its_end_or_beyond_is_done():
    assert not make_schedule(step=39).done
    for step in (40, 50):
        schedule = make_schedule(step=step, evaluated=40)
        assert schedule.done
        assert schedule.steps_left == 0
        assert not schedule.evaluation_due
        assert not schedule.save_due(False)


@pytest.mark.parametrize(
    ("limit", "index"),
    [({"max_hours": 1.0}, 1), ({"max_cost": 2.0, "cost_per_hour": 2.0}, 2)],
)
def test_a_budget_counts_the_starts_before(monkeypatch, limit, index):
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)  # no time passes
    for hours, exceeded in ((0.5, 0), (1.0, 0), (1.0001, index)):
        clock = Clock(Config(**limit), CPU, time.monotonic(), running_s=3600 * hours)
        assert clock.exceeded() == exceeded
        assert clock.running_s == 3600 * hours
        assert clock.cost == (pytest.approx(2 * hours) if "max_cost" in limit else None)


def test_training_time_excludes_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = Clock(Config(), CPU, time.monotonic())
    now[0] = 5.0
    with clock.paused():
        now[0] = 65.0
    now[0] = 68.0
    assert clock.since_log() == 8.0
    assert clock.elapsed_s == 8.0
    assert clock.since_log() == 0.0
