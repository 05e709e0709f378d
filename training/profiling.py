"""--profile: where the time of a few steps goes, as a table and as a Chrome trace.

Knows the names of the parts of a step that the trainer marks with torch.profiler.record_function,
not what they do.
"""

import json
import os
from bisect import bisect_right
from pathlib import Path

import torch
from torch.profiler import profile, schedule

import hardware

PARTS = ("data", "forward", "backward", "optimizer")
WARMUP, STEPS = 3, 5
ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


class Profiler:
    """Profiles STEPS steps after WARMUP others.

    done: called once, with their table and {part: seconds a step}.
    """

    def __init__(self, folder: Path, device: torch.device, done):
        self.path, self.device, self.done = folder / "trace.json", device, done
        self.steps = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "9")  # else it prints lines between ours
        watched = schedule(wait=WARMUP - 1, warmup=1, active=STEPS, repeat=1)
        self.profile = profile(schedule=watched, on_trace_ready=self.read)
        self.profile.start()

    def step(self) -> None:
        """A step has ended."""
        self.steps += 1
        if self.steps == WARMUP:  # what earlier steps launched must not run in those that count
            hardware.synchronize(self.device)
        self.profile.step()

    def read(self, finished: profile) -> None:
        """Write the trace and count it up."""
        finished.export_chrome_trace(str(self.path))
        seconds = read_trace(json.loads(self.path.read_text(encoding="utf-8"))["traceEvents"])
        self.done(
            f"{table(seconds)}\nfor chrome://tracing or ui.perfetto.dev: {self.path}", seconds
        )


def read_trace(events: list[dict]) -> dict[str, float]:
    """{part: seconds a step} of a Chrome trace, and "other" for the rest of a step.

    On a GPU these are the seconds in which its kernels ran, each counted to the part that launched
    it: the backward's are launched by another thread than the one that marks it. The rest includes
    the gaps between kernels.
    """
    events = [e for e in events if e.get("ph") == "X"]
    marks = [e for e in events if e["cat"] == "user_annotation"]
    steps = [e for e in marks if e["name"].startswith("ProfilerStep#")]
    parts = sorted((e["ts"], e["ts"] + e["dur"], e["name"]) for e in marks if e["name"] in PARTS)
    kernels = [e for e in events if e["cat"] in ON_A_GPU]
    launched = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e["cat"] in LAUNCHES and "correlation" in e.get("args", {})
    }
    micros = dict.fromkeys((*PARTS, "other"), 0.0)
    for kernel in kernels:
        at = launched.get(kernel["args"].get("correlation"), kernel["ts"])
        micros[part_at(parts, at)] += kernel["dur"]
    if kernels:
        # The GPU works later than the steps that launch its work: first kernel to last.
        whole = max(k["ts"] + k["dur"] for k in kernels) - min(k["ts"] for k in kernels)
    else:
        for start, end, name in parts:
            micros[name] += end - start
        whole = sum(e["dur"] for e in steps)
    micros["other"] = whole - sum(micros[part] for part in PARTS)
    return {part: value / 1e6 / len(steps) for part, value in micros.items()}


def part_at(parts: list[tuple[float, float, str]], at: float) -> str:
    """The part that was going on at a time. parts: (start, end, name), sorted."""
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
