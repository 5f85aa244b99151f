"""The invariants of the protocol (docs/design/invariants.md), each checked in the moment in which it could be broken.

| nr | checked | where |
|---|---|---|
| 1, 2 | every record that is stored: allowed transition, fragments well formed, CLOSED never changes | `stored` |
| 3 | every end that a client reports is the stored one | `ended` |
| 4 | nothing confirmed lies beyond the stored end | `confirmed`, `stored` |
| 5 | Qa bookies of the *committed* fragment have synced an entry when it is confirmed | `confirmed` |
| 6 | every confirmed entry can be read in the end, and nothing is read that is not in it | `at_rest`, `was_read` |
| 7 | every entry of a ledger that is being closed has Qa synced copies in its write set | `stored` |
| 8 | confirmations are in order, each once; NOT_STORED is not in the ledger; | `confirmed`, `failed` |
|   | no LAC that anybody is told is above what is confirmed | `copied` |
| 9 | nothing is confirmed while an ensemble change is on its way | `confirmed` |
| 10 | every copy of an entry is what the writer appended there | `copied`, `was_read` |
| 11 | a recovery reads once the fence covers every write set, | `covered` |
|    | and ends on Qw-Qa+1 definite misses of fenced bookies of its snapshot | `recovered` |
| 12 | nothing is confirmed by acks of entries that were sent after the ledger was closed | `confirmed` |
| 13 | recovery of a ledger with a live quorum ends | run.py |
| 14–17 | what the bookie promised | bookie.py |

*Synced* counts copies that the fault atlas took since. Beyond promise only 4, 8, 10, 12, 16 and 17 hold, and that a
loss is reported: no reader gets anything else than what was appended, or an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from magnetar.ledger import metadata_core as m
from magnetar.ledger.reader_core import StoredCopy
from magnetar.ledger.writer_core import EntryOutcome, PendingAddWithPayload, WriterCore, WriterState
from magnetar.metadata.records import CLOSED, IN_RECOVERY, OPEN, LedgerRecord

from .bookie import Bookie

if TYPE_CHECKING:
    from .run import Simulation

ALLOWED = {
    (None, OPEN), (OPEN, OPEN), (OPEN, IN_RECOVERY), (OPEN, CLOSED), (IN_RECOVERY, CLOSED), (IN_RECOVERY, IN_RECOVERY),
    (CLOSED, CLOSED),
}  # fmt: skip


class Violation(AssertionError):
    """A promise was not kept; begins with the invariant's number."""


class Ledger:
    """What happened to one ledger, as only somebody who sees everything knows it."""

    __slots__ = ("acked", "appended", "closed_at", "failed", "last_entry", "read_upto", "sent_at")

    def __init__(self) -> None:
        self.appended: list[bytes] = []
        self.sent_at: list[float] = []
        self.acked = 0  # entries 0 … acked-1
        self.failed: dict[int, EntryOutcome] = {}
        self.closed_at: float | None = None
        self.last_entry = -1  # of the closed ledger, also when it was deleted since
        self.read_upto = -1


def promise(holds: bool, text: str) -> None:
    if not holds:
        raise Violation(text)


class Judge:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._beyond = simulation.options.beyond
        self.ledgers: dict[int, Ledger] = {}
        self.confirmations = 0
        self.changes = 0
        self.losses_seen = 0

    # ------------------------------------------------------------------------------ the writer
    def appended(self, ledger: int, payload: bytes) -> None:
        seen = self.ledgers.setdefault(ledger, Ledger())
        seen.appended.append(payload)
        seen.sent_at.append(self._simulation.scheduler.now)

    def confirmed(self, ledger: int, entry: int, writer: WriterCore[PendingAddWithPayload[bytes]]) -> None:
        seen = self.ledgers[ledger]
        promise(entry == seen.acked, f"8: entry {entry} of ledger {ledger} is confirmed after {seen.acked - 1}")
        promise(entry not in seen.failed, f"8: entry {entry} of ledger {ledger} is confirmed after it failed")
        changing = writer.state in (WriterState.CHANGING, WriterState.SETTLING)
        promise(not changing, f"9: entry {entry} is confirmed while the ensemble is being changed")
        seen.acked += 1
        self.confirmations += 1
        record = self._simulation.register.records.get(ledger)
        if record is None:
            end = seen.last_entry
            promise(entry <= end, f"4: entry {entry} is confirmed, ledger {ledger} ended at {end}")
            return
        if record.state == CLOSED:
            end = record.last_entry
            promise(entry <= end, f"4: entry {entry} is confirmed, ledger {ledger} ends at {end}")
            assert seen.closed_at is not None
            promise(writer.state is WriterState.CLOSED or seen.sent_at[entry] <= seen.closed_at,
                    f"12: entry {entry} of ledger {ledger} was sent after the end and is confirmed")  # fmt: skip
        if not self._beyond:
            self._covered(record, entry, "5: entry {} of ledger {} is confirmed with {} of {} synced copies")

    def _covered(self, record: LedgerRecord, entry: int, text: str) -> None:
        fragment, _ = m.find_fragment_of_entry(record, entry)
        size, ledger, copies = record.ensemble_size, record.ledger_id, 0
        bookies = self._simulation.bookies
        for at in range(record.write_quorum):
            copies += bookies[fragment.bookies[(entry + at) % size]].ever_synced(ledger, entry)
        if copies < record.ack_quorum:
            raise Violation(text.format(entry, ledger, copies, record.ack_quorum))

    def failed(self, ledger: int, entry: int, why: EntryOutcome) -> None:
        seen = self.ledgers[ledger]
        promise(entry >= seen.acked, f"8: entry {entry} of ledger {ledger} fails after it was confirmed")
        promise(entry not in seen.failed, f"8: entry {entry} of ledger {ledger} fails twice")
        seen.failed[entry] = why
        record = self._simulation.register.records.get(ledger)
        if why is EntryOutcome.NOT_STORED and record is not None:
            promise(record.state == CLOSED and record.last_entry < entry,
                    f"8: entry {entry} of ledger {ledger} is said to be not stored, and may be")  # fmt: skip

    # ------------------------------------------------------------------------------ the records
    def stored(self, ledger: int, before: LedgerRecord | None, after: LedgerRecord, by: str) -> None:
        story = self._simulation.story
        state = before.state if before is not None else None
        promise((state, after.state) in ALLOWED, f"1: ledger {ledger} goes from {state} to {after.state}")
        if state == CLOSED:
            assert before is not None
            promise((before.last_entry, before.length) == (after.last_entry, after.length),
                    f"1: the end of ledger {ledger} changes")  # fmt: skip
        keys = [fragment.first_entry for fragment in after.fragments]
        promise(keys == sorted(set(keys)) and keys[0] == 0, f"2: fragments of ledger {ledger} begin at {keys}")
        for fragment in after.fragments:
            promise(len(set(fragment.bookies)) == len(fragment.bookies) == after.ensemble_size,
                    f"2: an ensemble of ledger {ledger} is {fragment.bookies}")  # fmt: skip
        self.changes += before is not None and before.fragments != after.fragments
        if before is not None and not self._beyond:
            self._still_covered(before, after)
        if after.state != CLOSED:
            shown = " ".join(f"{f.first_entry}:{','.join(f.bookies)}" for f in after.fragments)
            story(f"{by} stores ledger {ledger} as {after.state}, fragments {shown}")
            return
        story(f"{by} stores ledger {ledger} as closed at {after.last_entry}, fragments {keys}")
        seen = self.ledgers.setdefault(ledger, Ledger())
        promise(keys[-1] <= after.last_entry + 1, f"2: the last fragment of ledger {ledger} begins behind its end")
        promise(seen.acked <= after.last_entry + 1,
                f"4: ledger {ledger} is closed at {after.last_entry}, {seen.acked} entries are confirmed")  # fmt: skip
        promise(seen.read_upto <= after.last_entry, f"6: entry {seen.read_upto} of ledger {ledger} was read before")
        if state != CLOSED:
            seen.closed_at = self._simulation.scheduler.now
            seen.last_entry = after.last_entry
            promise(after.last_entry < len(seen.appended), f"10: ledger {ledger} ends where nothing was appended")
            promise(after.length == sum(len(payload) for payload in seen.appended[: after.last_entry + 1]),
                    f"10: the length of ledger {ledger} is not that of its entries")  # fmt: skip
        if not self._beyond:
            for entry in range(after.last_entry + 1):
                self._covered(after, entry, "7: entry {} of ledger {} has {} of {} synced copies when it is closed")

    def _still_covered(self, before: LedgerRecord, after: LedgerRecord) -> None:
        """Whoever is put into the record has what is confirmed of its fragment."""
        known = {fragment.first_entry: fragment for fragment in before.fragments}
        acked = self.ledgers[after.ledger_id].acked if after.ledger_id in self.ledgers else 0
        for fragment in after.fragments:
            if known.get(fragment.first_entry, fragment) != fragment:
                end = m.find_fragment_of_entry(after, fragment.first_entry)[1]
                last = acked - 1 if end < 0 else min(end, acked - 1)
                for entry in range(fragment.first_entry, last + 1):
                    self._covered(after, entry, "7: entry {} of ledger {} has {} of {} synced copies where it is put")

    def ended(self, ledger: int, last_entry: int, length: int) -> None:
        record = self._simulation.register.records.get(ledger)
        if record is not None:
            promise((record.state, record.last_entry, record.length) == (CLOSED, last_entry, length),
                    f"3: a client says that ledger {ledger} ends at {last_entry}: {record}")  # fmt: skip

    def recovered(self, record: LedgerRecord, end: int, votes: dict[int, dict[str, int]]) -> None:
        """`votes`: of each entry, the bookies that said for certain that they do not have it."""
        fragment, _ = m.find_fragment_of_entry(record, end + 1)
        write_set = m.get_striping_of_record(record).slots_of_entry(end + 1)
        snapshot = {fragment.bookies[slot] for slot in write_set}
        bookies, ledger = self._simulation.bookies, record.ledger_id
        misses = [name for name in votes.get(end + 1, {}) if name in snapshot and bookies[name].is_fenced(ledger)]
        needed = record.write_quorum - record.ack_quorum + 1
        promise(len(misses) >= needed,
                f"11: ledger {ledger} is ended at {end} on {len(misses)} of {needed} fenced misses")  # fmt: skip

    def covered(self, record: LedgerRecord) -> None:
        """A recovery begins to read: of every write set fewer than Qa bookies may still take adds (§1.7)."""
        names = record.fragments[-1].bookies
        free = [not self._simulation.bookies[name].is_fenced(record.ledger_id) for name in names]
        for first in range(record.ensemble_size):
            left = sum(free[(first + at) % record.ensemble_size] for at in range(record.write_quorum))
            promise(left < record.ack_quorum, f"11: ledger {record.ledger_id} is read with {left} bookies not fenced")

    # ------------------------------------------------------------------------------ copies
    def copied(self, bookie: Bookie, ledger: int, stored: StoredCopy, recovery: bool) -> None:
        seen = self.ledgers[ledger]
        appended = seen.appended
        if stored.lac >= seen.acked and not self._is_in(ledger, stored.lac):
            raise Violation(f"8: {bookie.name} is told LAC {stored.lac} of {ledger}, and {seen.acked - 1} is confirmed")
        if stored.entry >= len(appended) or appended[stored.entry] != stored.payload:
            raise Violation(f"10: {bookie.name} is given another entry {stored.entry} of ledger {ledger}")

    def _is_in(self, ledger: int, entry: int) -> bool:
        """Of a ledger that is closed; of one that was deleted nobody knows."""
        record = self._simulation.register.records.get(ledger)
        return record is None or (record.state == CLOSED and entry <= record.last_entry)

    def was_read(self, ledger: int, stored: StoredCopy) -> None:
        """By somebody who keeps the bounds of reading."""
        seen = self.ledgers[ledger]
        promise(stored.entry < len(seen.appended) and seen.appended[stored.entry] == stored.payload,
                f"10: entry {stored.entry} of ledger {ledger} is read as something else")  # fmt: skip
        seen.read_upto = max(seen.read_upto, stored.entry)
        record = self._simulation.register.records.get(ledger)
        if record is not None and record.state == CLOSED:
            promise(stored.entry <= record.last_entry, f"6: {ledger}:{stored.entry} is read beyond the ledger's end")

    def end_believed(self, ledger: int, last_entry: int) -> None:
        """A reader takes this for the end of the ledger."""
        record = self._simulation.register.records.get(ledger)
        promise(record is None or (record.state == CLOSED and record.last_entry == last_entry),
                f"6: a reader takes {last_entry} for the end of ledger {ledger}")  # fmt: skip

    # ------------------------------------------------------------------------------ the end
    def unreadable(self, ledger: int, entry: int, why: str) -> None:
        """A reader was told so, in the end, when all is healed."""
        self.losses_seen += 1
        promise(self._beyond, f"6: entry {entry} of ledger {ledger} cannot be read: {why}")

    def at_rest(self) -> None:
        for ledger, seen in self.ledgers.items():
            record = self._simulation.register.records.get(ledger)
            if record is not None and record.state == CLOSED:
                for entry, why in seen.failed.items():
                    promise(why is not EntryOutcome.NOT_STORED or entry > record.last_entry,
                            f"8: entry {entry} of ledger {ledger} is said to be not stored and is in it")  # fmt: skip
                promise(seen.acked <= record.last_entry + 1, f"4: ledger {ledger} ends before what is confirmed")
