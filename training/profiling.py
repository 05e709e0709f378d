"""--profile: where the time of a few steps goes, as a table and as a Chrome trace.

Knows a step's parts only by the names that the trainer gives them with
torch.profiler.record_function.
"""

import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import profile, schedule

import hardware
from training import distributed
from training.run import Run

PARTS = ("data", "forward", "backward", "optimizer")
WARMUP, STEPS = 3, 5
PROFILED_STEPS = WARMUP + STEPS  # the run must have this many left


class Profiler:
    """Profiles STEPS steps after WARMUP steps.

    done: called once, with a table and {part: seconds per step}.
    """

    def __init__(self, folder: Path, device: torch.device, done):
        self.path, self.device, self.done = folder / "trace.json", device, done
        self.steps = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # silences its messages
        watched = schedule(wait=WARMUP - 1, warmup=1, active=STEPS, repeat=1)
        self.profile = profile(schedule=watched, on_trace_ready=self.read)
        self.profile.start()

    def step(self) -> None:
        """Tell the profiler that a step has ended."""
        self.steps += 1
        if self.steps in (WARMUP, PROFILED_STEPS):  # finish the GPU's queue in these steps
            hardware.synchronize(self.device)
        self.profile.step()

    def read(self, finished: profile) -> None:
        """Write the trace, and pass the table to `done`."""
        finished.export_chrome_trace(str(self.path))
        seconds = seconds_by_part(finished.key_averages())
        text = f"{table(seconds)}\nfor chrome://tracing or ui.perfetto.dev: {self.path}"
        self.done(text, seconds)


def open_profiler(run: Run, done: Callable) -> Profiler | None:
    """A Profiler if the setting asks for it and enough steps are left. done: as in Profiler."""
    if not run.config.profile or not distributed.is_main:
        return None
    if run.schedule.steps_left < PROFILED_STEPS:
        left = run.schedule.steps_left
        print(f"no profile: it takes {PROFILED_STEPS} steps, and the run has {left} left")
        return None
    return Profiler(run.folder, run.device.torch, done)


def seconds_by_part(averages) -> dict[str, float]:
    """{part: seconds per step}, and "other" for the rest of a step.

    On a GPU, the time of kernels. A different thread launches those of the backward pass, outside
    its annotation, so they are computed as all kernels minus those of the other parts.
    """
    # On a GPU each kernel is an event, and so is each annotation.
    total = {event.key: event for event in averages if event.device_type == DeviceType.CPU}
    on_gpu = [event for event in averages if event.device_type != DeviceType.CPU]
    kernels = sum(e.self_device_time_total for e in on_gpu if not e.is_user_annotation)
    by = "device_time_total" if kernels else "cpu_time_total"
    micros = {part: getattr(total[part], by) for part in PARTS}
    if kernels:
        micros["backward"] = kernels - sum(micros[part] for part in PARTS if part != "backward")
    micros["other"] = total["ProfilerStep*"].cpu_time_total - sum(micros.values())
    return {part: value / 1e6 / STEPS for part, value in micros.items()}


def table(seconds: dict[str, float]) -> str:
    """A table of the parts of a step, in milliseconds and as shares."""
    whole = sum(seconds.values())
    lines = [f"profile of {STEPS} steps:"]
    for part, s in [*seconds.items(), ("step", whole)]:
        lines.append(f"{part:12}{1e3 * s:10.2f} ms{s / whole:9.1%}")
    return "\n".join(lines)
