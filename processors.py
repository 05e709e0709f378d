"""How many processors this process may use. For preparing too, which does without PyTorch."""

import math
import os
from pathlib import Path

LIMIT = Path("/sys/fs/cgroup/cpu.max")  # version 2 of Linux's control groups


def usable() -> int:
    """Processors that this process may use, by its affinity and by its container's quota."""
    count = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return min(count, quota() or count)


def quota() -> int | None:
    """Processors whose time this container may use, rounded up; None if LIMIT sets no limit."""
    if not LIMIT.exists():
        return None
    time, period = LIMIT.read_text().split()
    return None if time == "max" else math.ceil(int(time) / int(period))
