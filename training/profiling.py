"""--profile: where the time of a few steps goes, as a table and as a Chrome trace.

Knows the names of the parts that step.py, optimizer.py and trainer.py mark with
torch.profiler.record_function, not what they do.
"""

import json
import os
from bisect import bisect_right
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

import hardware

PARTS = ("data", "forward", "backward", "optimizer")
WARMUP, STEPS = 3, 5
ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Profiler:
    """Watches STEPS steps after WARMUP others.

    done: called once, with their table and {part: seconds a step}.
    """

    def __init__(self, folder: Path, device: torch.device, done):
        self.path, self.done = folder / "trace.json", done
        self.device, self.steps = device, 0
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.profile = profile(
            activities=activities,
            schedule=schedule(wait=WARMUP - 1, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=self.read,
        )
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its own lines would stand between ours
        self.profile.start()

    def step(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self.steps == WARMUP:
            # What earlier steps launched would still run, and count, in those that are watched.
            # At their end PyTorch waits by itself.
            hardware.synchronize(self.device)
        self.profile.step()

    def read(self, finished) -> None:
        """Write the trace and count it up."""
        finished.export_chrome_trace(str(self.path))
        seconds = read_trace(json.loads(self.path.read_text())["traceEvents"])
        where = f"for chrome://tracing or ui.perfetto.dev: {self.path}"
        self.done(f"{table(seconds)}\n{where}", seconds)


def read_trace(events: list[dict]) -> dict[str, float]:
    """{part: seconds a step} of a Chrome trace, and "other" for the rest of a step.

    On a GPU the seconds in which its kernels ran, counted to the part that launched them; the rest
    includes the time between kernels.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    marks = [e for e in spans if e["cat"] == "user_annotation"]
    steps = [e for e in marks if e["name"].startswith("ProfilerStep#")]
    parts = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in marks if e["name"] in PARTS)
    kernels = [e for e in spans if e["cat"] in ON_A_GPU]
    seconds = dict.fromkeys((*PARTS, "other"), 0.0)
    if kernels:
        launched = launch_times(spans)
        for kernel in kernels:
            at = launched.get(kernel["args"].get("correlation"), kernel["ts"])
            seconds[part_at(parts, at)] += kernel["dur"] / 1e6
        # The GPU lags behind the steps that launch its work: from its first kernel to its last.
        whole = max(k["ts"] + k["dur"] for k in kernels) - min(k["ts"] for k in kernels)
    else:
        for start, end, name in parts:
            seconds[name] += (end - start) / 1e6
        whole = sum(e["dur"] for e in steps)
    seconds["other"] = whole / 1e6 - sum(seconds[part] for part in PARTS)
    return {part: s / len(steps) for part, s in seconds.items()}


def launch_times(spans: list[dict]) -> dict[int, float]:
    """{correlation: when the CPU launched it} of what ran on the GPU."""
    times = {}
    for e in spans:
        if e["cat"] in LAUNCHES and "correlation" in e.get("args", {}):
            times[e["args"]["correlation"]] = e["ts"]
    return times


def part_at(parts: list[tuple[float, float, str]], at: float) -> str:
    """The part that was going on at a time. parts: (start, end, name), by start."""
    i = bisect_right(parts, (at, float("inf"), "")) - 1
    if i >= 0 and at < parts[i][1]:
        return parts[i][2]
    return "other"


def table(seconds: dict[str, float]) -> str:
    """The parts of a step with their milliseconds and shares."""
    whole = sum(seconds.values())
    lines = [f"profile of {STEPS} steps:"]
    for part, s in [*seconds.items(), ("step", whole)]:
        lines.append(f"{part:12}{1e3 * s:10.2f} ms{s / whole:9.1%}")
    return "\n".join(lines)
