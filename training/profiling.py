"""--profile: where the time of a few steps goes, as a table and as a Chrome trace in the run's
folder.

Knows the names of the parts that step.py and run.py mark with torch.profiler.record_function, not
what they do.
"""

import json
import os
from bisect import bisect_right
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

PARTS = ("data", "forward", "backward", "optimizer")
WARMUP, STEPS = 3, 5


class Profiler:
    """Watches STEPS steps after WARMUP others; `done` is called once with their table and {part:
    seconds a step}.
    """

    def __init__(self, folder: Path, device: torch.device, done):
        self.path, self.done = folder / "trace.json", done
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
        self.profile = profile(
            activities=activities,
            schedule=schedule(wait=WARMUP - 1, warmup=1, active=STEPS, repeat=1),
            on_trace_ready=self.read,
        )
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # its own lines would stand between ours
        self.profile.start()

    def step(self):
        """A step has ended."""
        self.profile.step()

    def read(self, finished):
        """Write the trace and count it up."""
        finished.export_chrome_trace(str(self.path))
        seconds = read_trace(json.loads(self.path.read_text())["traceEvents"])
        self.done(
            table(seconds) + f"\nfor chrome://tracing or ui.perfetto.dev: {self.path}", seconds
        )


def read_trace(events: list[dict]) -> dict[str, float]:
    """{part: seconds a step} of a Chrome trace: on a GPU those in which its kernels ran, counted to
    the part that launched them, and "other", the rest of the step: idle between kernels
    included.
    """
    spans = [e for e in events if e.get("ph") == "X"]
    steps = [
        e for e in spans if e["name"].startswith("ProfilerStep#") and e["cat"] == "user_annotation"
    ]
    ranges = sorted(
        (e["ts"], e["ts"] + e["dur"], e["name"])
        for e in spans
        if e["name"] in PARTS and e["cat"] == "user_annotation"
    )
    kernels = [e for e in spans if e["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")]
    seconds = dict.fromkeys((*PARTS, "other"), 0.0)
    if kernels:
        launched = {
            e["args"]["correlation"]: e["ts"]
            for e in spans
            if e["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
        }
        for kernel in kernels:
            at = launched.get(kernel["args"].get("correlation"), kernel["ts"])
            i = bisect_right(ranges, (at, float("inf"), "")) - 1
            seconds[ranges[i][2] if i >= 0 and at < ranges[i][1] else "other"] += (
                kernel["dur"] / 1e6
            )
        # The GPU lags behind the steps that launch its work: from its first kernel to its last.
        whole = max(k["ts"] + k["dur"] for k in kernels) - min(k["ts"] for k in kernels)
    else:
        for start, end, name in ranges:
            seconds[name] += (end - start) / 1e6
        whole = sum(e["dur"] for e in steps)
    seconds["other"] = whole / 1e6 - sum(seconds[part] for part in PARTS)
    return {part: s / len(steps) for part, s in seconds.items()}


def table(seconds: dict[str, float]) -> str:
    """The parts of a step with their milliseconds and shares."""
    whole = sum(seconds.values())
    rows = [
        f"{part:12}{1e3 * s:10.2f} ms{s / whole:9.1%}"
        for part, s in [*seconds.items(), ("step", whole)]
    ]
    return f"profile of {STEPS} steps:\n" + "\n".join(rows)
