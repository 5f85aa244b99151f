"""Turns: each side has one in each round, and the side that was last is first in the next round.

Before each turn all written pages go to the disk and the machine rests, so that no side pays for what another one
wrote. Beside the figures of a turn are the machine's stolen time, which the host gave to other guests, and how busy
the machine was in the rest before it: with idle servers and other work, that the turn competes with.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ..harness import progress

Figures = dict[str, float]


class Load(Protocol):
    def turn(self, number: int, seconds: float) -> Figures:
        """The figures of one turn of so many measured seconds; `number` counts the turns of this load from 0."""


@dataclass(frozen=True)
class Turn:
    figures: Figures
    stolen_percent: float
    busy_percent: float


@dataclass
class Turns:
    """By side. A side whose turn failed has no more turns, and the reason in `failed`."""

    taken: dict[str, list[Turn]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)


def rest(pause_s: float) -> float:
    """Written pages go to the disk; then the machine rests, and how busy it is then is told."""
    os.sync()
    before = processor_times()
    time.sleep(pause_s)
    return busy_percent(before, processor_times())


def processor_times() -> str:
    """The first line of /proc/stat: what all processors did since the start of the machine."""
    return Path("/proc/stat").read_text().split("\n", 1)[0]


def stolen_percent(before: str, after: str) -> float:
    """Of the time of all processors between two such lines, what the host gave to other guests."""
    return _percent(before, after, STEAL)


def busy_percent(before: str, after: str) -> float:
    """Of the time of all processors between two such lines, what this machine worked."""
    return _percent(before, after, USER, NICE, SYSTEM, IRQ, SOFTIRQ)


USER, NICE, SYSTEM, IDLE, IOWAIT, IRQ, SOFTIRQ, STEAL = range(8)
"""Columns of the line; the times of guests of our own, which follow, are within user and nice."""


def _percent(before: str, after: str, *columns: int) -> float:
    ticks = [[int(word) for word in line.split()[1:9]] for line in (before, after)]
    spent = [now - then for then, now in zip(*ticks, strict=True)]
    return round(100 * sum(spent[each] for each in columns) / sum(spent), 2) if sum(spent) else 0.0


def take(
    loads: Mapping[str, Load],
    *,
    rounds: int,
    seconds: float,
    quiet: Callable[[], float],
    times: Callable[[], str] = processor_times,
) -> Turns:
    """`quiet` runs before each turn, and says how busy the machine was. An error of a load ends that load alone."""
    turns = Turns({name: [] for name in loads})
    for number in range(rounds):
        for name in loads if number % 2 == 0 else reversed(loads):  # type: ignore[call-overload]
            if name in turns.failed:
                continue
            busy = quiet()
            before = times()
            try:
                figures = loads[name].turn(number, seconds)
            except Exception as error:
                turns.failed[name] = f"turn {number + 1}: {type(error).__name__}: {error}"
                progress(f"  {name}, {turns.failed[name]}")
                continue
            turns.taken[name].append(Turn(figures, stolen_percent(before, times()), busy))
            told = ", ".join(f"{figure} {value:,.2f}" for figure, value in figures.items())
            stolen = turns.taken[name][-1].stolen_percent
            progress(f"  round {number + 1}/{rounds}, {name}: {told}; {stolen} % stolen, {busy} % busy before")
    return turns
