"""A slower machine: this process and all that it starts share so many cores, by a cgroup of its own (root, Linux)."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")
NAME = "magnetar-peers"
PERIOD_US = 10_000
"""In each the group runs until its share is used: short, so that latencies are those of slow cores, not of pauses."""


def slow_down(cores: float, root: Path = CGROUPS) -> None:
    """Raises OSError when the kernel, or its rights, do not let it."""
    quota_us = round(cores * PERIOD_US)
    if (root / "cgroup.controllers").exists():
        (root / "cgroup.subtree_control").write_text("+cpu")
        group = root / NAME
        group.mkdir(exist_ok=True)
        (group / "cpu.max").write_text(f"{quota_us} {PERIOD_US}")
    else:
        group = root / "cpu" / NAME
        group.mkdir(exist_ok=True)
        (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
        (group / "cpu.cfs_quota_us").write_text(str(quota_us))
    (group / "cgroup.procs").write_text(str(os.getpid()))
