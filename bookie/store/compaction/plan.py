"""The decision of garbage collection, from facts on each log: which entry logs are deleted, which are moved, and why.

A log's *live bytes* are the records of its ledgers without a tombstone, summed over its extents; they are never stored,
always counted again (BookKeeper #4607). `decide` gives each log one action and its reason, the first row that fits:

| reason | action | |
|---|---|---|
| DEAD | delete | closed, nothing in it lives |
| OPEN | keep | it still grows; `worth_rolling` says when it should be closed first |
| UNREADABLE | keep | its index is damaged; the next start rebuilds it from the log |
| SPARSE | compact | live share below `minor_share` (minor) or `major_share` (major) |
| SMALL | compact | major, and below `small_bytes`: several small logs become one, if there are at least two |
| LIVE | keep | |
| WAITS | keep | compact in the next major compaction, but this is a minor one |

`batches` puts the logs to move into groups, each of which fits into one cold log: a move is atomic.
Guarded by tests/bookie/store/test_compaction.py.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

HOLDERS_MAX = 10


class Action(enum.Enum):
    """The step that compaction takes with an entry log."""

    KEEP = "keep"
    DELETE = "delete"
    COMPACT = "compact"


class KeepReason(enum.Enum):
    """The reason for an action; the module's table has the rules."""

    DEAD = "nothing in it lives"
    OPEN = "it still grows"
    UNREADABLE = "its index is damaged: a restart rebuilds it"
    SPARSE = "little of it lives"
    SMALL = "it is small"
    LIVE = "enough of it lives"
    WAITS = "major compaction will move it"


class CompactionState(enum.Enum):
    """Whether an entry log is open for writing, and to which writer."""

    HOT = "hot"  # open for checkpoints
    COLD = "cold"  # open for compaction
    CLOSED = "closed"


class Holder(NamedTuple):
    """A living ledger, because of which a log is not deleted."""

    ledger: int
    live_bytes: int


class LogFacts(NamedTuple):
    """The bytes of a log's two files, of all its records, and of the records of living ledgers."""

    log: int
    state: CompactionState
    bytes: int
    data_bytes: int
    live_bytes: int
    live_extents: int
    ledgers: int  # how many hold it
    holders: tuple[Holder, ...]  # the largest, at most `HOLDERS_MAX`
    readable: bool = True

    @property
    def live_share(self) -> float:
        """Returns the live share of the records, not of the files: a log that was just compacted has 1.0, however small
        it is."""
        return self.live_bytes / self.data_bytes if self.data_bytes else 0.0


class LogPlan(NamedTuple):
    """The action that `decide` chose for a log, and its reason."""

    facts: LogFacts
    action: Action
    reason: KeepReason


class CompactionPolicy(NamedTuple):
    """The shares, sizes and rates that decide what is compacted, and how fast."""

    minor_share: float = 0.2
    major_share: float = 0.5
    small_bytes: int = 64 << 20
    bytes_per_s: int = 32 << 20
    full_share: float = 0.9

    def on_a_full_disk(self) -> CompactionPolicy:
        """Returns the policy for a full disk: a move gives back dead bytes, whenever the next major one is due."""
        return self._replace(minor_share=max(self.minor_share, self.full_share))


def decide(logs: Sequence[LogFacts], policy: CompactionPolicy, *, major: bool) -> list[LogPlan]:
    """Returns one plan per log, in the order given."""
    closed = [log for log in logs if log.state is CompactionState.CLOSED and log.live_bytes]
    small = [log for log in closed if log.bytes < policy.small_bytes]
    return [_decide(log, policy, major, len(small) > 1 and log in small) for log in logs]


def _decide(log: LogFacts, policy: CompactionPolicy, major: bool, small: bool) -> LogPlan:
    if log.state is not CompactionState.CLOSED:
        return LogPlan(log, Action.KEEP, KeepReason.OPEN)
    if not log.readable:
        return LogPlan(log, Action.KEEP, KeepReason.UNREADABLE)
    if not log.live_bytes:
        return LogPlan(log, Action.DELETE, KeepReason.DEAD)
    if log.live_share < (policy.major_share if major else policy.minor_share):
        return LogPlan(log, Action.COMPACT, KeepReason.SPARSE)
    if small and major:
        return LogPlan(log, Action.COMPACT, KeepReason.SMALL)
    waits = small or log.live_share < policy.major_share
    return LogPlan(log, Action.KEEP, KeepReason.WAITS if waits else KeepReason.LIVE)


def worth_rolling(log: LogFacts, share: float) -> bool:
    """Whether the log is an open one that compaction would move if it were closed."""
    return log.state is not CompactionState.CLOSED and log.data_bytes > 0 and log.readable and log.live_share < share


def batches(moves: Sequence[LogFacts], bytes_max: int, extents_max: int, logs_max: int) -> list[list[LogFacts]]:
    """Groups of logs whose living bytes and extents stay below the limits, or that are one log; sparse ones first."""
    groups: list[list[LogFacts]] = []
    size = extents = 0
    for log in sorted(moves, key=lambda log: (log.live_share, log.log)):
        full = size + log.live_bytes > bytes_max or extents + log.live_extents > extents_max
        if not groups or full or len(groups[-1]) >= logs_max:
            groups.append([])
            size = extents = 0
        groups[-1].append(log)
        size += log.live_bytes
        extents += log.live_extents
    return groups
