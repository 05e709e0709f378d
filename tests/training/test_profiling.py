"""training/profiling.py: which work a profile counts. How a trace is read: test_step.py."""

import torch

import hardware
from training.profiling import STEPS, WARMUP, Profiler


def test_what_was_launched_before_the_watched_steps_is_waited_for(tmp_path, monkeypatch):
    steps, waited_after, profiles = 0, [], []
    monkeypatch.setattr(hardware, "synchronize", lambda device: waited_after.append(steps))
    profiler = Profiler(tmp_path, torch.device("cpu"), lambda *profile: profiles.append(profile))
    for _ in range(WARMUP + STEPS):
        torch.ones(4).sum()
        steps += 1
        profiler.step()
    assert waited_after == [WARMUP] and len(profiles) == 1
