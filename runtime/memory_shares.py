"""Divides the memory of a process (`memory_bytes`) among the parts that use memory. Pure.

    found = plan_memory(budget, shares, given)
    settings = found.apply_to_config(settings, "broker")    sets the settings that the operator has not set

A `MemoryShare` is all the memory that one setting limits: with 64 MiB of `memtable_bytes` it may be three times that.
Each share first gets its minimum. The rest is divided by weight, and no share gets more than its maximum. So a larger
budget makes no share smaller. A setting that the operator has set keeps its value, and the other shares get the rest.

Raises InvalidConfiguration if the budget is less than the sum of the minimums, or than the sum of the given values and
the other minimums. Guards: tests/runtime/test_shares.py.

Also in this file, each below its heading: the memory of this machine, or of the container that this process runs in
(machine); the settings of a process as a whole, whatever it runs (settings).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec
from msgspec import Meta

from ..proto.errors import InvalidConfiguration
from ..proto.names import parse_number
from .config import load, replace_settings

Config = TypeVar("Config", bound=msgspec.Struct)

MIB = 1 << 20
NO_LIMIT = 1 << 50
"""The most of a share that may take whatever is there."""


class MemoryShare(NamedTuple):
    """The part of a process's memory that one setting limits: the smallest and largest value of the setting, and the
    weight of this part when memory is divided among the parts."""

    name: str  # in metrics and documents
    setting: str  # with its section, as in a file: bookie.store.memtable_bytes
    unit_bytes: int  # of memory, for each of the setting's value
    weight: int
    least: int  # values of the setting
    most: int
    what: str  # takes this memory

    def multiply_share(self, count: int) -> MemoryShare:
        """Returns this share multiplied by `count`, for a process with `count` parts that all have this setting."""
        return self._replace(unit_bytes=self.unit_bytes * count, weight=self.weight * count)


class MemoryPlan(NamedTuple):
    """How the memory of a process is divided among its shares."""

    budget: int
    shares: Sequence[MemoryShare]
    values: Mapping[str, int]  # setting → its value

    @property
    def limits(self) -> dict[str, int]:
        """Returns how many bytes each share gets, by the name of the share."""
        return {each.name: self.values[each.setting] * each.unit_bytes for each in self.shares}

    def apply_to_config(self, config: Config, section: str) -> Config:
        """Returns a copy of `config`, the configuration of `section`, with the values of the plan."""
        own = {name.partition(".")[2]: value for name, value in self.values.items() if name.startswith(section + ".")}
        return replace_settings(config, own)


def compute_minimum_bytes(shares: Sequence[MemoryShare], given: Mapping[str, int]) -> int:
    """Returns the smallest number of bytes with which the process can run. `given`: the values of the settings that the
    operator has set."""
    return sum(given.get(each.setting, each.least) * each.unit_bytes for each in shares)


def plan_memory(budget: int, shares: Sequence[MemoryShare], given: Mapping[str, int]) -> MemoryPlan:
    """Divides the bytes `budget` among the shares, and returns the plan. `given`: the values of the settings that the
    operator has set. Raises InvalidConfiguration if the budget is too small for the shares."""
    needed = compute_minimum_bytes(shares, given)
    if needed > budget:
        raise _too_small(budget, needed, shares, given)
    values = {each.setting: given.get(each.setting, each.least) for each in shares}
    left, open_ = budget - needed, [each for each in shares if each.setting not in given]
    while open_:
        weights = sum(each.weight for each in open_)
        full = [each for each in open_ if each.least * each.unit_bytes + left * each.weight // weights >= _most(each)]
        if not full:
            for each in open_:
                values[each.setting] = each.least + left * each.weight // weights // each.unit_bytes
            break
        for each in full:
            values[each.setting] = each.most
            left -= _most(each) - each.least * each.unit_bytes
            open_.remove(each)
    found = MemoryPlan(budget, shares, values)
    assert sum(found.limits.values()) <= budget, "more is shared out than there is"
    return found


def _most(share: MemoryShare) -> int:
    return share.most * share.unit_bytes


def _too_small(
    budget: int, needed: int, shares: Sequence[MemoryShare], given: Mapping[str, int]
) -> InvalidConfiguration:
    least = compute_minimum_bytes(shares, {})
    if not given:
        text = f"memory_bytes is {_mib(budget)}; this process needs {_mib(needed)} at least"
    else:
        taken = ", ".join(
            f"{each.setting} = {given[each.setting]} ({_mib(given[each.setting] * each.unit_bytes)})"
            for each in sorted(shares, key=lambda each: -given.get(each.setting, 0) * each.unit_bytes)
            if each.setting in given
        )
        text = (
            f"memory_bytes is {_mib(budget)}; with {taken} this process needs {_mib(needed)}: set memory_bytes to "
            f"that, or smaller values, or leave them out (then {_mib(least)} suffice)"
        )
    return InvalidConfiguration(text, setting="process.memory_bytes", allowed=f"≥ {needed}")


def _mib(size: int) -> str:
    return f"{-(-size // MIB):,} MiB"


# ------------------------------------------------------------------------------------------------------- machine
# The memory of this machine, or of the container that this process runs in.


CGROUPS = Path("/sys/fs/cgroup")


def measure_machine_memory(root: Path = CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Returns the bytes of memory that this process could use: the memory of the machine, or the smallest limit of its
    control groups (versions 1 and 2) and of their parents, whichever is less."""
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
    """Returns the memory limit in bytes, or None if no limit is set."""
    text = _text(path).strip()
    return parse_number(text) or None


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


# ------------------------------------------------------------------------------------------------------ settings
# The settings of a process as a whole, whatever it runs.


MACHINE_SHARE = 4
"""Divisor of the machine's memory, without the setting. Its page cache serves reads, and other processes run."""


class ProcessConfig(msgspec.Struct, frozen=True):
    """The setting that every process has: how many bytes of memory it may use."""

    memory_bytes: Annotated[int, Meta(ge=0)] = 0  # shared out to all that takes memory; 0: a quarter of the machine's


def compute_process_memory(
    file: str | None, option: int | None, shares: Sequence[MemoryShare], given: Mapping[str, int], most: int = NO_LIMIT,
    processes: int = 1,
) -> int:  # fmt: skip
    """Returns how many bytes of memory this process may use: an equal share of the memory that is set for all
    `processes` together. If none is set, an equal share of a quarter of the machine's memory (at most `most`), but
    never less than the process needs with the settings `given`. Raises InvalidConfiguration if the setting is invalid.
    """
    process = load(ProcessConfig, "process", file=file, overrides={"memory_bytes": option})
    needed = compute_minimum_bytes(shares, given)
    own = process.memory_bytes // processes
    return own or max(needed, min(most, measure_machine_memory() // MACHINE_SHARE) // processes)
