"""How many processors this process may use. For preparing too, which does without PyTorch.

Reads the limits of Linux's control groups, of versions 1 and 2; for memory too.
"""

import math
import os
import re
from pathlib import Path

SYSTEM = Path("/")  # holds Linux's proc and sys


def usable() -> int:
    """Processors that this process may use, by its affinity and by the quotas of its groups."""
    count = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    return min(count, quota() or count)


def quota() -> int | None:
    """Processors whose time this process may use, rounded up; None if no group sets a limit."""
    shares = [text.split() for text in group_limits("cpu.max").values()]
    for group, time in group_limits("cpu.cfs_quota_us", "cpu").items():  # of version 1
        shares.append([time, (group / "cpu.cfs_period_us").read_text()])
    return min((math.ceil(int(time) / int(period)) for time, period in shares), default=None)


def group_limits(name: str, controller: str = "") -> dict[Path, str]:
    """The content of a file of limits in each control group around this process, by its folder.

    All of them hold; those without a limit are left out. A container sees its own group as the
    root, and a job of Slurm or a service of systemd is in a group below it. controller: of version
    1, where each has groups of its own.
    """
    root, own = SYSTEM / "sys/fs/cgroup" / controller, SYSTEM / "proc/self/cgroup"
    line = rf"^\d+:([^:]+,)?{controller}(,[^:]+)?:/(?P<path>.*)"  # controllers may share groups
    path = re.search(line, own.read_text(), re.MULTILINE) if own.exists() else None
    group = root / path["path"] if path else root
    folders = [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]
    found = {folder: (folder / name).read_text() for folder in folders if (folder / name).exists()}
    return {folder: text for folder, text in found.items() if not text.startswith(("max", "-1"))}
