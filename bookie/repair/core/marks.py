"""The decisions of the auditor: which bookies are lost, and which mark a ledger gets. Pure.

A ledger is marked when a bookie that one of its fragments names

    LOST        was not registered for longer than the grace (`Absences`)
    DEPARTING   is to be emptied: an operator said so
    INCOMPLETE  is registered, and lacks entries that it should have
    DAMAGED     is registered, and reports damaged entries
    RETURNED    was LOST or DEPARTING when the ledger was marked, and is not any more: to be compared

or when a recovery of it was begun and did not end. `judge` gives the mark that the ledger should have, from its record,
the facts and its present mark: the same facts give the same mark, whichever auditor judges and however often. A mark's
`since_ms` is that of its first appearance; when its bookies change it is new to the workers: no attempts, no waiting.

The auditor takes marks away only when the ledger was deleted, or names none of the marked bookies any more. That a
ledger is whole again is found by a worker, which compares (core/copies.py).
Guards: tests/bookie/repair/test_marks.py.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping

import msgspec

from ....metadata.records import IN_RECOVERY, LedgerRecord, UnderReplicatedRecord


class RepairReason(enum.Enum):
    """The reason why a bookie's copies are missing."""

    LOST = "lost"
    DEPARTING = "departing"
    INCOMPLETE = "incomplete"
    DAMAGED = "damaged"
    RETURNED = "returned"


GONE = (RepairReason.LOST.value, RepairReason.DEPARTING.value)


class Stuck(enum.Enum):
    """The reason why a worker could not make a ledger whole: it stays marked and is tried again."""

    NO_TARGET = "no other bookie can take the copy"
    LOST = "no bookie has the entry any more"
    UNDECIDED = "no bookie can tell where the ledger ends"
    UNREACHABLE = "a bookie does not answer"
    OPEN = "its writer may still be there"
    FAILED = "the copy failed"


class Absences:
    """The times since which bookies are not registered. Begins anew with each auditor: a bookie gets all the grace."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._since: dict[str, float] = {}

    def observe(self, now: float, names: Iterable[str], present: Collection[str]) -> frozenset[str]:
        """Notes which of `names` are absent at `now`; returns those that are absent for longer than the grace period.
        """
        for name in names:
            self._since.setdefault(name, now)
        for name in [name for name in self._since if name in present]:
            del self._since[name]
        return frozenset(name for name, since in self._since.items() if now - since >= self._grace_s)

    def check(self, now: float) -> None:
        assert all(since <= now for since in self._since.values()), "no bookie is absent since a time in the future"


def placed(record: LedgerRecord) -> dict[str, None]:
    """Returns every bookie that a fragment names, in order, once."""
    return {bookie: None for fragment in record.fragments for bookie in fragment.bookies}


def judge(
    record: LedgerRecord | None, gone: Mapping[str, RepairReason], found: Mapping[str, RepairReason],
    mark: UnderReplicatedRecord | None, now_ms: int,
) -> UnderReplicatedRecord | None:  # fmt: skip
    """The mark that the ledger should have; None: none. `gone`: LOST and DEPARTING; `found`: the reasons of the others.

    A reason that was found stays until a worker has repaired the ledger, also when it is not found again.
    """
    if record is None:
        return None
    bookies: dict[str, str] = {}
    before = {} if mark is None else mark.bookies
    for bookie in sorted(placed(record)):
        if bookie in gone:
            bookies[bookie] = gone[bookie].value
        elif bookie in found:
            bookies[bookie] = found[bookie].value
        elif bookie in before:
            bookies[bookie] = RepairReason.RETURNED.value if before[bookie] in GONE else before[bookie]
    in_recovery = record.state == IN_RECOVERY
    if not bookies and not in_recovery:
        return None
    if mark is None:
        return UnderReplicatedRecord(
            ledger_id=record.ledger_id, bookies=bookies, in_recovery=in_recovery, since_ms=now_ms
        )
    return mark if (mark.bookies, mark.in_recovery) == (bookies, in_recovery) else _changed(mark, bookies, in_recovery)


def _changed(mark: UnderReplicatedRecord, bookies: dict[str, str], in_recovery: bool) -> UnderReplicatedRecord:
    return msgspec.structs.replace(
        mark, bookies=bookies, in_recovery=in_recovery, attempts=0, stuck="", last_error="", retry_ms=0
    )


def failed(
    mark: UnderReplicatedRecord, stuck: Stuck, error: str, now_ms: int, retry_min_s: float, retry_max_s: float
) -> UnderReplicatedRecord:
    """Returns the mark after a try that did not make the ledger whole: the next try waits twice as long as the one
    before."""
    wait_s = back_off_s(mark.attempts + 1, retry_min_s, retry_max_s)
    return msgspec.structs.replace(
        mark, attempts=mark.attempts + 1, stuck=stuck.value, last_error=error, retry_ms=now_ms + int(1000 * wait_s)
    )


def back_off_s(attempts: int, retry_min_s: float, retry_max_s: float) -> float:
    """Returns the seconds that a ledger waits after `attempts` failed tries."""
    return min(retry_max_s, retry_min_s * 2.0 ** min(attempts - 1, 30)) if attempts else 0.0


def waits_s(
    mark: UnderReplicatedRecord, now_ms: int, seen_s: float, retry_min_s: float, retry_max_s: float
) -> float:  # fmt: skip
    """Returns how long the ledger waits for its next try; `seen_s`: how long the reader has known this mark.

    `retry_ms` is of the clock of the worker that failed, which may be a day off. So it counts for no more than the
    back-off that the mark's attempts ask for, measured with the reader's own clock from when it saw the mark.
    """
    bound_s = back_off_s(mark.attempts, retry_min_s, retry_max_s) - seen_s
    return max(0.0, min((mark.retry_ms - now_ms) / 1000, bound_s))


def hurried(mark: UnderReplicatedRecord) -> UnderReplicatedRecord:
    """Returns the mark that is tried at once, as something changed that may help. Its attempts are kept, so that it is
    not tried in a tight loop."""
    return msgspec.structs.replace(mark, retry_ms=0)
