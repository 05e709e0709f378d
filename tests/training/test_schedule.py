"""schedule.py: the learning rate, what is due when, and budgets over all starts of a run."""

import time

import pytest
import torch

from config import Config
from training.schedule import Clock, Schedule, learning_rate_at, weight_decay_at
from training.state import Counters

CPU = torch.device("cpu")


def rates(config, steps=100):
    """The learning rate of each step."""
    return [learning_rate_at(step, steps, config) for step in range(steps)]


def test_the_learning_rate_warms_up_and_falls_to_its_minimum():
    found = rates(Config(learning_rate=1.0, min_lr=0.2, warmup_steps=10))
    assert found[0] == pytest.approx(0.1)
    assert found[9] == pytest.approx(1.0)
    assert found[10:] == sorted(found[10:], reverse=True)
    assert found[-1] == pytest.approx(0.2)


def test_the_last_learning_rate_is_a_tenth_of_the_peak():
    assert rates(Config(learning_rate=1.0, warmup_steps=10))[-1] == pytest.approx(0.1)


def test_a_single_step_has_a_learning_rate():
    assert rates(Config(warmup_steps=0), 1)[0] > 0


def test_wsd_is_constant_and_then_falls_in_a_straight_line_to_nothing():
    found = rates(Config(learning_rate=1.0, warmup_steps=10, lr_schedule="wsd"))
    assert found[4] == 0.5
    assert found[9:50] == [1.0] * 41
    assert found[74] == pytest.approx(0.5)
    assert found[99] == 0.0


def test_the_cosine_is_half_way_down_in_the_middle_between_warm_up_and_end():
    config = Config(learning_rate=1.0, min_lr=0.2, warmup_steps=20)
    found = rates(config, 101)
    assert found[60] == pytest.approx(0.6)
    assert found[40] == pytest.approx(0.2 + 0.8 * (0.5 + 0.25 * 2**0.5))
    assert learning_rate_at(150, 101, config) == pytest.approx(0.2)


def test_wsd_of_a_step_or_two_ends_at_its_minimum():
    config = Config(learning_rate=1.0, warmup_steps=0, lr_schedule="wsd")
    assert rates(config, 1) == [0.0]
    assert rates(config, 2) == [1.0, 0.0]


@pytest.mark.parametrize("steps", [100, 3000])
@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("optimizer, peak", [("muon", 0.03), ("adamw", 4e-3)])
def test_a_weight_decay_that_is_not_set_follows_from_the_epochs(steps, schedule, optimizer, peak):
    config = Config(weight_decay=None, optimizer=optimizer, muon_lr=0.03, learning_rate=4e-3)
    config.lr_schedule = schedule
    decay = weight_decay_at(steps, 4.0, config) * peak / 4e-3
    in_all = sum(decay * rate for rate in rates(config, steps))
    assert in_all == pytest.approx(3 * 0.9)
    assert weight_decay_at(steps, 0.5, config) == 0.0


def test_no_step_of_a_very_short_run_flips_its_weights():
    config = Config(weight_decay=None, warmup_steps=0, lr_schedule="wsd")
    for steps in (1, 2, 3):
        assert weight_decay_at(steps, 8.0, config) * config.learning_rate <= 1


def make_schedule(step=0, total_steps=100, evaluated=0, **settings):
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


def test_a_save_is_due_at_its_interval_and_once_each():
    schedule = make_schedule(save_interval=10)
    assert steps_due(schedule, lambda: schedule.save_due(False), schedule.mark_saved) == [
        10,
        20,
        30,
        40,
    ]
    assert not schedule.save_due(False)


def test_a_save_by_the_clock_is_due_once_a_period_and_never_while_one_is_written(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    schedule = make_schedule(save_minutes=1.0)

    def due(busy=False):
        now[0] += 7
        return schedule.save_due(busy)

    assert steps_due(schedule, due, schedule.mark_saved) == [9, 18, 27, 36]
    assert not due(busy=True)
    now[0] += 60
    assert not due(busy=True)
    assert due()


def test_a_save_comes_before_each_evaluation_and_at_the_end():
    schedule = make_schedule(total_steps=40, eval_interval=15)
    assert steps_due(schedule, lambda: schedule.save_due(False), schedule.mark_saved) == [
        15,
        30,
        40,
    ]


def test_log_lines_are_due_at_their_interval_and_at_the_end():
    schedule = make_schedule(total_steps=25, log_interval=10)
    schedule.counters.step = 25
    assert schedule.log_due and schedule.done and schedule.steps_left == 0
    schedule.counters.step = 20
    assert schedule.log_due and not schedule.done and schedule.steps_left == 5
    schedule.counters.step = 19
    assert not schedule.log_due and not schedule.check_due
    assert make_schedule(step=30, total_steps=25).done


@pytest.mark.parametrize(("log_interval", "due"), [(4, [4, 8, 12]), (100, [10, 20, 30, 40])])
def test_nan_is_looked_for_at_least_every_ten_steps(log_interval, due):
    schedule = make_schedule(log_interval=log_interval)
    found = steps_due(schedule, lambda: schedule.check_due, lambda: None)
    assert found[: len(due)] == due


def test_an_evaluation_is_due_once_and_at_the_last_step():
    schedule = make_schedule(total_steps=40, eval_interval=15)
    assert steps_due(schedule, lambda: schedule.evaluation_due, schedule.mark_evaluated) == [
        15,
        30,
        40,
    ]
    assert not make_schedule(step=30, evaluated=30, eval_interval=15).evaluation_due


@pytest.mark.parametrize(
    ("limit", "name"),
    [({"max_hours": 1.0}, 1), ({"max_cost": 2.0, "cost_per_hour": 2.0}, 2)],
)
def test_a_budget_counts_the_starts_before(monkeypatch, limit, name):
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)  # no time passes
    config = Config(**limit)
    for hours, exceeded in ((0.5, 0), (1.0, 0), (1.0001, name)):
        clock = Clock(config, Counters(running_s=3600 * hours), CPU, time.monotonic())
        assert clock.exceeded() == exceeded
        assert clock.running_s == 3600 * hours
        assert clock.cost == (pytest.approx(2 * hours) if "max_cost" in limit else None)


def test_training_time_excludes_pauses(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    counters = Counters()
    clock = Clock(Config(), counters, CPU, time.monotonic())
    now[0] = 5.0
    with clock.paused():
        now[0] = 65.0
    now[0] = 68.0
    assert clock.since_log() == 8.0
    assert counters.elapsed_s == 8.0
    assert clock.since_log() == 0.0
