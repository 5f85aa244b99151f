"""A destination of a relay: its claimed rows in the order of their sequence ids, and the one group in flight.

**One group at a time.** Rows leave in groups that are one entry each, and the next group leaves when the outcome of the
one before is known; when it was refused, only after that is recorded in the database. So the highest sequence id that
the topic knows of this relay means: every row up to it is stored, or was refused and has given its id back. Without it
a row that was refused before a crash, while later ones were stored, would count as a duplicate and be lost.

| state | left by |
|---|---|
| CLOSED | `begin_opening` → OPENING |
| OPENING | `on_opened` → READY; refused → WAITS |
| READY | `take_next_group` → SENDING |
| SENDING | stored → READY; a row refused → RECORDS, or READY to send its rows one by one; put off → WAITS |
| RECORDS | the refusal is in the database → READY |
| WAITS | its time has come → CLOSED |

Guard: tests/client/outbox/test_relay_core.py.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from enum import Enum

from .values_core import NONE, ClaimedRow, RelaySettings

ANY = sys.maxsize
"""Value of `last_open` when it is not known what the topic has."""


class DestinationStatus(Enum):
    """The state of a destination."""

    CLOSED = "no producer"
    OPENING = "a producer is being opened"
    READY = "nothing is in flight"
    SENDING = "a group is in flight"
    RECORDS = "a refusal is not in the database yet"
    WAITS = "tried again later"


class Destination:
    """The core of one destination of a relay: a topic without partitions, or one partition."""

    def __init__(self, name: str, settings: RelaySettings, stored: int = NONE) -> None:
        self.name = name
        self.state = DestinationStatus.CLOSED
        self.queue: deque[ClaimedRow] = deque()
        self.in_flight: tuple[ClaimedRow, ...] = ()
        self.stored = stored  # the highest id that is known to be stored
        self.error = ""  # why it waits
        self.due = 0.0  # when it is tried again
        self.last_open = ANY  # the highest id in the topic when it was opened, also of an open transaction
        self._settings = settings
        self._singles_to = NONE  # rows up to this id are sent one by one
        self._failed = 0  # how often in a row it was put off

    @property
    def row_count(self) -> int:
        return len(self.queue) + len(self.in_flight)

    @property
    def last_claimed_id(self) -> int:
        """Returns the highest sequence id that the topic may have stored: of the waiting rows, the rows in flight, and
        the rows known to be stored."""
        last = self.queue[-1] if self.queue else self.in_flight[-1] if self.in_flight else None
        return self.stored if last is None else max(self.stored, last.seq)

    @property
    def may_claim(self) -> bool:
        """Whether more rows may be claimed for the destination: its producer is open, and its queue has room."""
        open_ = self.state in (DestinationStatus.READY, DestinationStatus.SENDING)
        return open_ and len(self.queue) < self._settings.rows_per_claim

    def add(self, row: ClaimedRow) -> None:
        assert row.seq > self.last_claimed_id, "sequence ids of a destination rise"
        self.queue.append(row)

    def take_next_group(self) -> tuple[ClaimedRow, ...]:
        """Moves the next group of rows to `in_flight` and returns it; returns an empty tuple if nothing can be sent
        now.
        """
        if self.state is not DestinationStatus.READY or not self.queue:
            return ()
        group = [self.queue.popleft()]
        size = group[0].size
        alone = group[0].seq <= self._singles_to
        while self.queue and not alone and may_join_entry(group, size, self.queue[0], self._settings):
            size += self.queue[0].size
            group.append(self.queue.popleft())
        self.in_flight = tuple(group)
        self.state = DestinationStatus.SENDING
        return self.in_flight

    def start_sending(self, rows: tuple[ClaimedRow, ...]) -> None:
        """Marks `rows` as in flight: this destination's part of a cluster transaction (together_core.py)."""
        assert self.state is DestinationStatus.READY, "a flight waits until its destinations are ready"
        self.in_flight, self.state = rows, DestinationStatus.SENDING

    def end_sending(self, state: DestinationStatus = DestinationStatus.READY) -> None:
        """Ends this destination's part of a cluster transaction that did not store it. The rows are not put back here:
        they belong to their units (together_core.py)."""
        self.in_flight, self.state = (), state

    # ------------------------------------------------------------------------------ outcomes
    def on_opened(self, last: int, *, sure: bool) -> list[ClaimedRow]:
        """Fact: the producer is open. `last`: the highest sequence id that the topic knows. Returns the rows that are
        stored according to it. If not `sure`, an open transaction may contain them: nothing is returned, the rows up
        to `last` are sent again one by one, and the topic drops those that it has stored."""
        assert self.state is DestinationStatus.OPENING, "it was being opened"
        assert not self.in_flight, "nothing is in flight without a producer"
        self.last_open = last
        if not sure:
            self._singles_to = max(self._singles_to, last)
            self.state, self.error = DestinationStatus.READY, ""
            return []
        found = []
        while self.queue and self.queue[0].seq <= last:
            found.append(self.queue.popleft())
        if found:
            self.stored = found[-1].seq
        self.state, self.error = DestinationStatus.READY, ""
        return found

    def on_group_stored(self) -> tuple[ClaimedRow, ...]:
        done, self.in_flight = self.in_flight, ()
        self.stored = done[-1].seq
        self.state, self._failed = DestinationStatus.READY, 0
        return done

    def on_group_refused(self) -> tuple[ClaimedRow | None, list[ClaimedRow]]:
        """Fact: the group in flight was refused. Returns the refused row, and the waiting rows of its key, which give
        their ids back. If the group had several rows, returns no row: all of them are sent again, one by one, under
        the same ids."""
        group, self.in_flight = self.in_flight, ()
        if len(group) > 1:
            self.queue.extendleft(reversed(group))
            self._singles_to = group[-1].seq
            self.state = DestinationStatus.READY
            return None, []
        row = group[0]
        followers = [each for each in self.queue if row.key is not None and each.key == row.key]
        if followers:
            gone = {each.id for each in followers}
            self.queue = deque(each for each in self.queue if each.id not in gone)
        self.state = DestinationStatus.RECORDS
        return row, followers

    def on_refusal_recorded(self) -> None:
        """Fact: the refusal is in the database; the next group may be sent."""
        if self.state is DestinationStatus.RECORDS:
            self.state = DestinationStatus.READY

    def on_producer_failed(self, error: str, now: float) -> None:
        """Fact: the producer ended, or could not be opened. The rows in flight go back to the front of the queue, and
        the producer is opened again after a pause."""
        assert self.state in (DestinationStatus.OPENING, DestinationStatus.SENDING), (
            "it was being opened, or a group was in flight"
        )
        self.queue.extendleft(reversed(self.in_flight))
        self.in_flight = ()
        self.state, self.error = DestinationStatus.WAITS, error
        self.due = now + min(self._settings.back_off_last_s, 0.1 * 2 ** min(self._failed, 20))
        self._failed += 1

    def on_transaction_failed(self, error: str, now: float, *, sure: bool) -> None:
        """Ends this destination's part of a cluster transaction that failed, and opens the producer again after a
        pause. If not `sure`, the transaction may be committed."""
        self.in_flight = ()
        self.last_open = self.last_open if sure else ANY
        self.on_producer_failed(error, now)

    def begin_opening(self, now: float) -> bool:
        """Returns whether the producer must be opened now; if so, the state changes to OPENING."""
        if self.state is DestinationStatus.WAITS and now >= self.due:
            self.state = DestinationStatus.CLOSED
        if self.state is DestinationStatus.CLOSED:
            self.state = DestinationStatus.OPENING
            return True
        return False

    def check(self) -> None:
        ids = [row.seq for row in (*self.in_flight, *self.queue)]
        assert ids == sorted(set(ids)), "rows are in the order of their sequence ids"
        assert not ids or ids[0] > self.stored, "what is stored is not sent again"
        assert bool(self.in_flight) == (self.state is DestinationStatus.SENDING), (
            "a group is in flight exactly while it is sent"
        )


def may_join_entry(group: Sequence[ClaimedRow], size: int, row: ClaimedRow, settings: RelaySettings) -> bool:
    """Whether `row` may join `group` in one entry. A delayed row has an entry of its own, and an entry has one schema.
    """
    if row.value_schema != group[0].value_schema:
        return False
    if group[0].deliver_at is not None or row.deliver_at is not None:
        return False
    return len(group) < settings.rows_per_entry and size + row.size <= settings.bytes_per_entry
