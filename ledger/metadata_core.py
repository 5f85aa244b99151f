"""The ledger's record: its fragments, and the transitions that are allowed (ledger protocol §1.2).

    none --decide_ledger_creation--> OPEN ------------------decide_close_by_writer------------------> CLOSED
                              |  ^                                                              ^
                              |  +--decide_ensemble_change                                      |
                              +--decide_recovery_start--> IN_RECOVERY --decide_close_by_recovery--+

    any --decide_bookie_replacement--> the same state, another bookie in one final fragment (bookie/maintenance)

Each transition gets the record *as it is stored now* and returns `RecordToStore` (store this, by compare-and-set on the
version just read), `RecordAlreadyStored` (nothing to do: the stored record is the outcome) or `LedgerTransitionRefused`
(give up, and why). It decides by content, not by who wrote: after a compare-and-set of unknown outcome the caller reads
and asks again, and its own write, if it did arrive, is `RecordAlreadyStored`. CLOSED is final: no transition leaves it
(§1.2, no forced re-recovery). So at most one end of a ledger is ever stored, and a later recovery adopts it.
Guards: tests/ledger/test_metadata.py.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import pairwise

import msgspec

from ..metadata.records import CLOSED, IN_RECOVERY, OPEN, Fragment, LedgerRecord
from .writer_core import Striping

UNSYNCED_PROPERTIES = {"durability": "memory"}
"""The properties of a ledger whose bookies answer its writer's adds before their sync (ledger/handle.py)."""


def is_answered_from_memory(record: LedgerRecord) -> bool:
    """Returns whether the bookies answer the adds of the ledger's writer before their sync."""
    return record.properties.get("durability") == "memory"


class LedgerTransitionRefusal(enum.Enum):
    """The reason why a change of a ledger's record is not allowed."""

    FENCED = "another client is recovering the ledger"
    ENDED = "the ledger is closed"
    DELETED = "the ledger does not exist any more"
    FRAGMENTS_CHANGED = "the ledger's last fragment is not the one that recovery read"
    NOT_FINAL = "the fragment is the last of a ledger that is not closed: its writer may still add to it"
    MOVED_ON = "the bookie that was to be replaced is not in the fragment any more"


class RecordToStore(msgspec.Struct, frozen=True):
    """Result of a transition: the caller must store `record`, by compare-and-set on the version that it has read."""

    record: LedgerRecord


class RecordAlreadyStored(msgspec.Struct, frozen=True):
    """Result of a transition: nothing must be stored. The stored `record` is already what the transition would make of
    it, or the ledger has ended in another way that counts."""

    record: LedgerRecord


class LedgerTransitionRefused(msgspec.Struct, frozen=True):
    """Result of a transition: it is not allowed, for this `reason`. The caller must give it up."""

    reason: LedgerTransitionRefusal


LedgerTransition = RecordToStore | RecordAlreadyStored | LedgerTransitionRefused


def make_ledger_record(
    ledger_id: int, striping: Striping, ensemble: Sequence[str], *, key: bytes, token: str, created_ms: int,
    properties: Mapping[str, str],
) -> LedgerRecord:  # fmt: skip
    """Returns the record of a new OPEN ledger with one fragment on the bookies `ensemble`, which must be distinct.
    `key`: the ledger's master key (20 bytes). `token`: random, by which the creator recognises the record.
    `created_ms`: the time of day, in ms since the epoch."""
    assert len(ensemble) == striping.ensemble_size, "an ensemble has one bookie per slot"
    assert len(set(ensemble)) == len(ensemble), "the bookies of an ensemble are distinct"
    return LedgerRecord(
        ledger_id=ledger_id, state=OPEN, ensemble_size=striping.ensemble_size, write_quorum=striping.write_quorum,
        ack_quorum=striping.ack_quorum, key=key, token=token, fragments=(Fragment(0, tuple(ensemble)),),
        created_ms=created_ms, properties=dict(properties),
    )  # fmt: skip


def get_striping_of_record(record: LedgerRecord) -> Striping:
    """Returns the striping of the ledger: its ensemble size and its quorums. Raises InvalidConfiguration if the record
    has an impossible combination."""
    return make_striping(record.ensemble_size, record.write_quorum, record.ack_quorum)


@lru_cache(maxsize=64)
def make_striping(ensemble_size: int, write_quorum: int, ack_quorum: int) -> Striping:
    """Returns the striping with these three numbers. The result is cached, because most ledgers of a cluster have the
    same numbers. Raises InvalidConfiguration unless `ensemble_size` >= `write_quorum` >= `ack_quorum` >= 1."""
    return Striping(ensemble_size, write_quorum, ack_quorum)


def find_fragment_of_entry(record: LedgerRecord, entry: int) -> tuple[Fragment, int]:
    """Returns (fragment that contains the entry, last entry that this fragment may contain). The second value is -1 if
    the fragment is the last one of the record, which bounds no entry."""
    at = bisect_right(record.fragments, entry, key=lambda fragment: fragment.first_entry) - 1
    assert at >= 0, "the first fragment of a ledger begins at entry 0"
    end = record.fragments[at + 1].first_entry - 1 if at + 1 < len(record.fragments) else -1
    return record.fragments[at], end


def decide_ledger_creation(current: LedgerRecord | None, mine: LedgerRecord) -> LedgerTransition | None:
    """Decides the creation of a ledger (none → OPEN). `current`: the stored record, None if there is none; `mine`: the
    record to create. Returns None if another process has created a ledger with this id. If `current` has the token of
    `mine`, an earlier attempt of the caller has created it (§1.1)."""
    if current is None:
        return RecordToStore(mine)
    return RecordAlreadyStored(current) if current.token == mine.token else None


def decide_close_by_writer(current: LedgerRecord | None, last_entry: int, length: int) -> LedgerTransition:
    """Decides the close by the ledger's writer (OPEN → CLOSED), at its LAC (last add confirmed), never at its LAP (last
    add pushed) (M18). `current`: the stored record, None if there is none. `length`: the payload bytes up to
    `last_entry`.

    Returns `RecordAlreadyStored` if the ledger is CLOSED already: its stored end is the valid one, even if it differs.
    Returns `LedgerTransitionRefused` with FENCED if a recovery is running, with DELETED if there is no record."""
    if current is None:
        return LedgerTransitionRefused(LedgerTransitionRefusal.DELETED)
    if current.state == OPEN:
        return RecordToStore(msgspec.structs.replace(current, state=CLOSED, last_entry=last_entry, length=length))
    return (
        RecordAlreadyStored(current)
        if current.state == CLOSED
        else LedgerTransitionRefused(LedgerTransitionRefusal.FENCED)
    )


def decide_ensemble_change(
    current: LedgerRecord | None, first_entry: int, failed: Sequence[tuple[int, str]], others: Mapping[int, str]
) -> LedgerTransition:
    """Decides a change of the ensemble by the ledger's writer (OPEN → OPEN): from `first_entry` (its LAC + 1) on, the
    bookies `others[slot]` replace the failed ones. `current`: the stored record, None if there is none.

    A slot changes only while the failed bookie is still in it. So if an earlier attempt was stored, the result is
    `RecordAlreadyStored`, and the stored ensemble is the one to use. `others` must be the same in every attempt, so
    that an attempt that is still on its way cannot store anything else. The new fragment replaces one that begins at
    the same entry.

    Returns `LedgerTransitionRefused` with DELETED if there is no record, ENDED if the ledger is CLOSED, FENCED if a
    recovery is running."""
    if current is None:
        return LedgerTransitionRefused(LedgerTransitionRefusal.DELETED)
    if current.state != OPEN:
        return LedgerTransitionRefused(
            LedgerTransitionRefusal.ENDED if current.state == CLOSED else LedgerTransitionRefusal.FENCED
        )
    last = current.fragments[-1]
    assert first_entry >= last.first_entry, "an ensemble never changes below the last fragment's first entry"
    bookies = list(last.bookies)
    for slot, bookie in failed:
        if bookies[slot] == bookie:
            bookies[slot] = others.get(slot, bookie)
    if tuple(bookies) == last.bookies:
        return RecordAlreadyStored(current)
    kept = current.fragments[:-1] if last.first_entry == first_entry else current.fragments
    record = msgspec.structs.replace(current, fragments=(*kept, Fragment(first_entry, tuple(bookies))))
    check_ledger_record(record)
    return RecordToStore(record)


def decide_recovery_start(current: LedgerRecord | None) -> LedgerTransition:
    """Decides the begin of a recovery (OPEN → IN_RECOVERY). `current`: the stored record, None if there is none.
    Returns `RecordAlreadyStored` if the ledger is IN_RECOVERY (the caller joins that recovery) or CLOSED
    (nothing is to be recovered), and `LedgerTransitionRefused` with DELETED if there is no record."""
    if current is None:
        return LedgerTransitionRefused(LedgerTransitionRefusal.DELETED)
    if current.state == OPEN:
        return RecordToStore(msgspec.structs.replace(current, state=IN_RECOVERY))
    return RecordAlreadyStored(current)


def decide_close_by_recovery(
    current: LedgerRecord | None, snapshot: Sequence[Fragment], fragments: Sequence[Fragment],
    last_entry: int, length: int,
) -> LedgerTransition:  # fmt: skip
    """Decides the close by a recovery (IN_RECOVERY → CLOSED), with the end that was found (`last_entry`, -1: the ledger
    is empty; `length`: its payload bytes) and, only now, with the ensembles that the recovery changed in memory (M03).
    `current`: the stored record, None if there is none.

    `snapshot`: the fragments as they were when the recovery began; the stored record must still have the same last
    fragment (§1.2). Returns `RecordAlreadyStored` if another recoverer has closed the ledger: its end is the valid one.
    Returns `LedgerTransitionRefused` with DELETED if there is no record, with FRAGMENTS_CHANGED if the ledger is not
    IN_RECOVERY or its last fragment is another one."""
    if current is None:
        return LedgerTransitionRefused(LedgerTransitionRefusal.DELETED)
    if current.state == CLOSED:
        return RecordAlreadyStored(current)
    if current.state != IN_RECOVERY or current.fragments[-1] != snapshot[-1]:
        return LedgerTransitionRefused(LedgerTransitionRefusal.FRAGMENTS_CHANGED)
    kept = current.fragments[:-1]  # earlier fragments are final, and re-replication may have moved them meanwhile
    changed = tuple(fragments[len(snapshot) - 1 :])
    record = msgspec.structs.replace(
        current, state=CLOSED, last_entry=last_entry, length=length, fragments=(*kept, *changed)
    )
    check_ledger_record(record)
    return RecordToStore(record)


def decide_bookie_replacement(current: LedgerRecord | None, first_entry: int, old: str, new: str) -> LedgerTransition:
    """Decides that the bookie `new` takes the place of `old` in one *final* fragment of a ledger, the one that begins
    at `first_entry`, which may be in any state. `new` must already have all the copies. `current`: the stored record,
    None if there is none.

    Final means: the ledger is CLOSED, or the fragment is not the last one (M21). Returns `RecordAlreadyStored` if `new`
    is in the fragment and `old` is not: an earlier attempt, or another worker, has stored the same.

    Returns `LedgerTransitionRefused` with DELETED if there is no record, with NOT_FINAL if the fragment is not final.
    MOVED_ON: the fragment is gone, or has neither or both of the bookies."""
    if current is None:
        return LedgerTransitionRefused(LedgerTransitionRefusal.DELETED)
    at = next((i for i, each in enumerate(current.fragments) if each.first_entry == first_entry), -1)
    if at < 0:
        return LedgerTransitionRefused(LedgerTransitionRefusal.MOVED_ON)
    if current.state != CLOSED and at == len(current.fragments) - 1:
        return LedgerTransitionRefused(LedgerTransitionRefusal.NOT_FINAL)
    bookies = current.fragments[at].bookies
    if old not in bookies:
        return (
            RecordAlreadyStored(current)
            if new in bookies
            else LedgerTransitionRefused(LedgerTransitionRefusal.MOVED_ON)
        )
    if new in bookies:
        return LedgerTransitionRefused(LedgerTransitionRefusal.MOVED_ON)
    changed = Fragment(first_entry, tuple(new if each == old else each for each in bookies))
    fragments = (*current.fragments[:at], changed, *current.fragments[at + 1 :])
    record = msgspec.structs.replace(current, fragments=fragments)
    check_ledger_record(record)
    return RecordToStore(record)


def check_ledger_record(record: LedgerRecord) -> None:
    """Raises AssertionError if the record breaks an invariant of ledger records (docs/design/invariants.md, invariant
    2)."""
    keys = [fragment.first_entry for fragment in record.fragments]
    assert keys[:1] == [0], "the first fragment begins at entry 0"
    assert all(a < b for a, b in pairwise(keys)), "fragment keys strictly increase"
    for fragment in record.fragments:
        assert len(fragment.bookies) == len(set(fragment.bookies)) == record.ensemble_size, (
            "each ensemble has E distinct bookies"
        )
    if record.state == CLOSED:
        assert keys[-1] <= record.last_entry + 1, "a closed ledger's last fragment begins at most one past its end"
