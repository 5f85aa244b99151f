"""The memory of this machine, or of the container that this process runs in."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...proto.digits import whole

CGROUPS = Path("/sys/fs/cgroup")


def machine_bytes(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """The smallest of the machine's memory and the limits of the control groups that this process is in (cgroup 2 and
    1). A limit of a group above it counts as well."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(found for each in _limits(root, own) if (found := _read(each)) is not None)])


def _limits(root: Path, own: Path) -> Sequence[Path]:
    found = [root / "memory.max", root / "memory/memory.limit_in_bytes"]
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        base, name = (root, "memory.max") if not controllers else (root / "memory", "memory.limit_in_bytes")
        if controllers and "memory" not in controllers.split(","):
            continue
        group = base / path.lstrip("/")
        found += [each / name for each in (group, *group.parents) if each.is_relative_to(base)]
    return found


def _read(path: Path) -> int | None:
    """Returns a limit; None: there is none."""
    text = _text(path).strip()
    return whole(text) or None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
