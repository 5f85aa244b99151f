"""The settings of a process as a whole, whatever it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from ..config import load
from .machine import machine_bytes
from .shares import NO_LIMIT, Share, least_bytes

MACHINE_SHARE = 4
"""Divisor of the machine's memory, without the setting. Its page cache serves reads, and other processes run."""


class ProcessConfig(msgspec.Struct, frozen=True):
    """Settings of a process."""

    memory_bytes: Annotated[int, Meta(ge=0)] = 0  # shared out to all that takes memory; 0: a quarter of the machine's


def memory_of(
    file: str | None, option: int | None, shares: Sequence[Share], given: Mapping[str, int], most: int = NO_LIMIT,
    processes: int = 1,
) -> int:  # fmt: skip
    """The bytes that the process may share out: what is set, else a quarter of the machine, at most `most`, and never
    less than it needs with the settings that were `given`; of `processes` each has its part of that.
    InvalidConfiguration."""
    process = load(ProcessConfig, "process", file=file, overrides={"memory_bytes": option})
    needed = least_bytes(shares, given)
    own = process.memory_bytes // processes
    return own or max(needed, min(most, machine_bytes() // MACHINE_SHARE) // processes)
