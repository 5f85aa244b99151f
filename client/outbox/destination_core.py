"""The core of one destination of a relay (`DestinationCore`): its claimed rows in the order of their sequence ids, and
the one group of rows in flight.

**One group at a time.** Rows are sent in groups, each as one entry. The next group is sent when the outcome of the
group before is known; if that was refused, only after the database has recorded the refusal. So of every row up to the
highest sequence id that the topic knows of this relay, one thing is certain: it is stored, or it was refused and has
given its id back. Without this rule a row that was refused before a crash, while later rows were stored, would count as
a duplicate after the crash and be lost.

| state | left by |
|---|---|
| CLOSED | `try_begin_opening_producer` → OPENING |
| OPENING | `on_opened` → READY; refused → WAITS |
| READY | `take_next_group` → SENDING |
| SENDING | stored → READY; a row refused → RECORDS, or READY to send its rows one by one; put off → WAITS |
| RECORDS | the refusal is in the database → READY |
| WAITS | its time has come → CLOSED |

Guard: tests/client/outbox/test_relay_core.py.

Also the core of an atomic relay (`AtomicUnitQueue`): its units of rows, and the one cluster transaction in flight. Both
cores are parts of the core in relay_core.py.

A *unit* is the rows that one transaction of the application wrote, to any destinations. A *flight* is one transaction
of the cluster that publishes whole units, as many as one claim may have. So readers see all of a unit or nothing.

    units.add(rows)                     claimed rows; a unit is never claimed in part
    parts = units.start_transaction()   the next flight: the entries of each destination, in order
    units.take_stored_rows()            how it ended; or `put_back()`, or `take_refused_unit()`
    units.take_unstored_rows()          units that are certainly not stored give their ids back

**One flight at a time**, in the order of the claims: a topic accepts the sequence ids of a producer only in order, and
can judge the ids of a flight only when the flight before has ended at the topic.

**Sure or not.** When a relay crashes, or a commit gets no answer, it is unknown whether its flight is stored. When the
producer of a destination is opened, the topic reports `last`, the highest id in it, even if that belongs to a
transaction that may still be aborted. A unit with a row above `last` is not stored, and never will be: its transaction
lacks that row. A unit whose rows are all at `last` or below may be stored: it is sent again under the same ids, with
one entry per row, and the topics drop the rows that they have. Such a unit keeps its ids until it is known to be
stored. Guard: tests/client/outbox/test_together.py.

Also the values, effects and settings of the relay's core (relay_core.py).

A *destination* is the topic to which one producer publishes: a topic without partitions, or one partition, by its full
name. Positions are sequence ids; -1: none. A row that *gives its id back* is no longer claimed: it waits again, and a
later claim gives it a new sequence id."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ...proto.errors import MagnetarError

NO_SEQUENCE_ID = -1


class ClaimedRow(NamedTuple):
    """A row that a relay has claimed. It keeps its sequence id (`seq`) and its destination until its outcome is
    recorded. `id`: the row's key in the database."""

    id: int
    seq: int
    destination: str
    size: int  # bytes of key, value and properties
    key: str | None
    value: bytes | None
    properties: str | None  # a JSON object
    event_time: int | None  # ms since the epoch, as the next one
    deliver_at: int | None
    attempts: int  # how often it was refused
    unit: int | None = None  # of the application's transaction; None: it is one of its own
    value_schema: str | None = None  # with which the value was encoded (rows.py); None: bytes
    key_form: int | None = None  # RowKeyEncoding; None: the key is text, or there is none


@dataclass(frozen=True, slots=True)
class ClaimedShard:
    """The state of a shard that a relay has just claimed. `epoch`: the number of this claim, higher than that of every
    earlier one. `next_seq`: the sequence id that the next claimed row will get. `stored`: by destination, the highest
    sequence id that is known to be stored. `claimed`: rows without a known outcome, in the order of their sequence ids.
    `absent_s`: seconds since a relay last had the shard; None: no relay ever had it. `was_atomic`: whether an atomic
    relay ever had it."""

    epoch: int
    next_seq: int
    stored: dict[str, int]
    claimed: list[ClaimedRow]
    absent_s: float | None = None
    was_atomic: bool = False


class RowsOutcome(Enum):
    """The possible outcomes of sending a group of rows, or the units of a cluster transaction."""

    STORED = "all of it is in the topic"
    ROW_REFUSED = "nothing of it is stored, because of what a row holds"
    PUT_OFF = "the destination takes nothing now; what was stored is learned when it is opened again"
    UNKNOWN = "of a flight: its commit got no answer"


class RefusedRow(NamedTuple):
    """A row that its topic refused, with the reason (`error`). The row gives its sequence id back. It may be claimed
    again after `retry_after_s` seconds; if `parked`, it is claimed only after an operator has revived it."""

    row: ClaimedRow
    error: str
    parked: bool
    retry_after_s: float


@dataclass(frozen=True, slots=True)
class ClaimRequest:
    """A request to claim rows, at most `rows_max` rows and `bytes_max` bytes; one row may be larger than that.
    `topics`: topic → the number of its partitions (0: not partitioned), and the numbers of those that have room.
    `units`: only whole units are claimed; the first unit may exceed the bounds."""

    rows_max: int
    bytes_max: int
    topics: dict[str, tuple[int, tuple[int, ...]]]
    units: bool = False


@dataclass(frozen=True, slots=True)
class RelayDatabaseTransaction:
    """A *turn*: one database transaction of a relay. Its steps, in this order: check that the shard still has the epoch
    `epoch`; record outcomes (`delete`, `stored`, `failures`, `release`); claim rows (`claim`). If it is unknown whether
    a turn committed, it can be run again: its claim was committed if the shard's next sequence id is above `next_seq`.
    `stored`: by destination, the highest sequence id that is known to be stored."""

    epoch: int
    next_seq: int
    delete: list[int] = field(default_factory=list)  # ids of stored rows
    stored: dict[str, int] = field(default_factory=dict)
    failures: list[RefusedRow] = field(default_factory=list)
    release: list[ClaimedRow] = field(default_factory=list)  # not sent; they wait again
    claim: ClaimRequest | None = None


@dataclass(frozen=True, slots=True)
class AskTopicPartitions:
    """Effect: ask the cluster how many partitions the topic has, and whether its deduplication is on. The answer is the
    fact `RelayCore.on_topic_resolved` or `on_topic_resolve_failed`."""

    topic: str


@dataclass(frozen=True, slots=True)
class OpenDestination:
    """Effect: close the present producer of a destination, and open a new one. The result is the fact
    `RelayCore.on_opened` or `on_producer_open_failed`."""

    destination: str


@dataclass(frozen=True, slots=True)
class SendRows:
    """Effect: publish the rows `rows` to `destination` as one entry, under their sequence ids. The result is the fact
    `RelayCore.on_group_outcome`."""

    destination: str
    rows: tuple[ClaimedRow, ...]


@dataclass(frozen=True, slots=True)
class SendInTransaction:
    """Effect: publish the entries of each destination, in order, in one cluster transaction, and commit it. `parts`:
    destination → entries, each a tuple of rows. The result is the fact `RelayCore.on_transaction_outcome`."""

    parts: dict[str, tuple[tuple[ClaimedRow, ...], ...]]


@dataclass(frozen=True, slots=True)
class RunDatabaseTransaction:
    """Effect: run the database transaction `turn`, which records outcomes and claims rows. The result is the fact
    `RelayCore.on_database_committed`, `on_database_outcome_unknown` or `on_fenced`."""

    turn: RelayDatabaseTransaction


@dataclass(frozen=True, slots=True)
class FindTopics:
    """Effect: search the outbox for topics for which rows wait. The result is the fact `RelayCore.on_topics_found` or
    `on_topic_search_failed`."""


@dataclass(frozen=True, slots=True)
class StopRelay:
    """Effect: end the relay with `error` at once, without waiting for rows in flight."""

    error: MagnetarError


RelayEffect = (
    AskTopicPartitions
    | OpenDestination
    | SendRows
    | SendInTransaction
    | RunDatabaseTransaction
    | FindTopics
    | StopRelay
)


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """The settings of a relay."""

    rows_per_claim: int = 1000  # of one transaction; more: fewer transactions, more memory and a longer one
    bytes_per_claim: int = 8 << 20  # of one transaction; one row may be larger
    rows_per_entry: int = 1000  # of one entry in a topic, which is stored or refused as a whole
    bytes_per_entry: int = 1 << 20  # of one entry; a larger row is alone in its own
    poll_s: float = 0.05  # between two looks at an outbox that had nothing; `wake` ends the wait
    find_s: float = 0.25  # between two looks for topics that were not known
    refresh_s: float = 60.0  # between two questions for partitions that were added, and for the policy
    attempts_max: int = 10  # refusals of a row before it is parked
    retry_first_s: float = 1.0  # before a refused row is sent again; each wait is twice as long
    retry_last_s: float = 300.0  # the longest of them
    back_off_last_s: float = 30.0  # the longest wait before a destination or the database is tried again
    remembered_s: float = 5 * 3600.0  # a relay was absent for less: topics know its ids (dedup_inactive_minutes)
    seen_s: float = 2.0  # an idle relay notes so often that it is there
    stop_s: float = 10.0  # how long `stop` waits for what is in flight


LAST_OPEN_UNKNOWN = sys.maxsize
"""Value of `last_open` while it is unknown which rows the topic has."""


class DestinationStatus(Enum):
    """The states of a destination."""

    CLOSED = "no producer"
    OPENING = "a producer is being opened"
    READY = "nothing is in flight"
    SENDING = "a group is in flight"
    RECORDS = "a refusal is not in the database yet"
    WAITS = "tried again later"


class DestinationCore:
    """The core of one destination of a relay: decides which of its rows are sent, and when. A destination is a topic
    without partitions, or one partition. `queue`: the claimed rows that wait; `in_flight`: the rows that are being
    sent. `stored`: the highest sequence id that is known to be stored; NO_SEQUENCE_ID: none. `error`: why it waits, and
    `due`: until when. `last_open`: the highest id that the topic knew when the producer was opened, also that of an
    open transaction; LAST_OPEN_UNKNOWN: not known. `now`: seconds of a monotonic clock."""

    def __init__(self, name: str, settings: RelaySettings, stored: int = NO_SEQUENCE_ID) -> None:
        self.name = name
        self.state = DestinationStatus.CLOSED
        self.queue: deque[ClaimedRow] = deque()
        self.in_flight: tuple[ClaimedRow, ...] = ()
        self.stored = stored  # the highest id that is known to be stored
        self.error = ""  # why it waits
        self.due = 0.0  # when it is tried again
        # the highest id in the topic when it was opened, also of an open transaction
        self.last_open = LAST_OPEN_UNKNOWN
        self._settings = settings
        self._singles_to = NO_SEQUENCE_ID  # rows up to this id are sent one by one
        self._failed = 0  # how often in a row it was put off

    @property
    def row_count(self) -> int:
        """Returns the number of rows that wait or are in flight."""
        return len(self.queue) + len(self.in_flight)

    @property
    def last_claimed_id(self) -> int:
        """Returns the highest sequence id of the rows that wait, are in flight, or are known to be stored;
        NO_SEQUENCE_ID if there are no such rows. The topic cannot have stored a higher one."""
        last = self.queue[-1] if self.queue else self.in_flight[-1] if self.in_flight else None
        return self.stored if last is None else max(self.stored, last.seq)

    @property
    def may_claim(self) -> bool:
        """Returns whether more rows may be claimed for the destination: its producer is open, and its queue has
        room."""
        open_ = self.state in (DestinationStatus.READY, DestinationStatus.SENDING)
        return open_ and len(self.queue) < self._settings.rows_per_claim

    def add(self, row: ClaimedRow) -> None:
        """Adds a claimed row at the end of the queue. Its sequence id must be above `last_claimed_id`."""
        assert row.seq > self.last_claimed_id, "sequence ids of a destination rise"
        self.queue.append(row)

    def take_next_group(self) -> tuple[ClaimedRow, ...]:
        """Moves the next group of rows, which must be sent as one entry, to `in_flight`, and returns the group. Returns
        an empty tuple if the destination is not READY, or no row waits."""
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
        """Records that `rows` are in flight as this destination's part of a cluster transaction."""
        assert self.state is DestinationStatus.READY, "a flight waits until its destinations are ready"
        self.in_flight, self.state = rows, DestinationStatus.SENDING

    def end_sending(self, state: DestinationStatus = DestinationStatus.READY) -> None:
        """Records that this destination's part of a cluster transaction has ended and was not stored; the destination
        gets the state `state`. The rows are not put back into its queue: AtomicUnitQueue has them."""
        self.in_flight, self.state = (), state

    # ------------------------------------------------------------------------------ outcomes
    def on_opened(self, last: int, *, sure: bool) -> list[ClaimedRow]:
        """Fact: the producer is open. `last`: the highest sequence id that the topic knows. Returns the waiting rows up
        to `last`, which the topic has stored. If not `sure`, an open transaction may contain these rows: then returns
        no rows; the rows up to `last` are sent again one by one, and the topic drops those that it has."""
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
        """Fact: the topic stored the rows in flight. Returns these rows."""
        done, self.in_flight = self.in_flight, ()
        self.stored = done[-1].seq
        self.state, self._failed = DestinationStatus.READY, 0
        return done

    def on_group_refused(self) -> tuple[ClaimedRow | None, list[ClaimedRow]]:
        """Fact: the topic refused the group in flight. Returns the refused row, and the waiting rows with the same key,
        all of which give their ids back; no group is sent until `on_refusal_recorded`. If the group had several rows,
        returns (None, []): these rows are sent again one by one, under the same ids."""
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
        """Fact: the refusal of a row is stored in the database. The next group may be sent."""
        if self.state is DestinationStatus.RECORDS:
            self.state = DestinationStatus.READY

    def on_producer_failed(self, error: str, now: float) -> None:
        """Fact: the producer ended, or could not be opened, for the reason `error`. The rows in flight go back to the
        front of the queue. The producer is opened again after a pause, which is longer after each failure."""
        assert self.state in (DestinationStatus.OPENING, DestinationStatus.SENDING), (
            "it was being opened, or a group was in flight"
        )
        self.queue.extendleft(reversed(self.in_flight))
        self.in_flight = ()
        self.state, self.error = DestinationStatus.WAITS, error
        self.due = now + min(self._settings.back_off_last_s, 0.1 * 2 ** min(self._failed, 20))
        self._failed += 1

    def on_transaction_failed(self, error: str, now: float, *, sure: bool) -> None:
        """Fact: the cluster transaction that contains this destination's part failed, for the reason `error`. The
        producer is opened again after a pause. `sure`: whether the transaction certainly did not commit."""
        self.in_flight = ()
        self.last_open = self.last_open if sure else LAST_OPEN_UNKNOWN
        self.on_producer_failed(error, now)

    def try_begin_opening_producer(self, now: float) -> bool:
        """Returns whether the producer must be opened at the time `now`; if so, changes the state to OPENING."""
        if self.state is DestinationStatus.WAITS and now >= self.due:
            self.state = DestinationStatus.CLOSED
        if self.state is DestinationStatus.CLOSED:
            self.state = DestinationStatus.OPENING
            return True
        return False

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ids = [row.seq for row in (*self.in_flight, *self.queue)]
        assert ids == sorted(set(ids)), "rows are in the order of their sequence ids"
        assert not ids or ids[0] > self.stored, "what is stored is not sent again"
        assert bool(self.in_flight) == (self.state is DestinationStatus.SENDING), (
            "a group is in flight exactly while it is sent"
        )


def may_join_entry(group: Sequence[ClaimedRow], size: int, row: ClaimedRow, settings: RelaySettings) -> bool:
    """Returns whether `row` may be sent in the same entry as the rows of `group`, which have `size` bytes together. A
    delayed row has an entry of its own, and an entry has one schema."""
    if row.value_schema != group[0].value_schema:
        return False
    if group[0].deliver_at is not None or row.deliver_at is not None:
        return False
    return len(group) < settings.rows_per_entry and size + row.size <= settings.bytes_per_entry


AtomicUnit = tuple[ClaimedRow, ...]
EntriesByDestination = dict[str, tuple[tuple[ClaimedRow, ...], ...]]
"""Destination → the entries of a flight for this destination; each entry is a group of rows."""


class AtomicUnitQueue:
    """The core of an atomic relay: the units that wait, and the units of the one cluster transaction in flight. A unit
    is the rows that one transaction of the application wrote."""

    def __init__(self, settings: RelaySettings, destinations: Mapping[str, DestinationCore]) -> None:
        self.queue: deque[AtomicUnit] = deque()
        self.in_flight: tuple[AtomicUnit, ...] = ()
        self._settings = settings
        self._at = destinations
        self._alone_to = NO_SEQUENCE_ID  # units up to this id are sent one by one: one of them was refused

    @property
    def row_count(self) -> int:
        """Returns the number of rows of the units that wait. Rows in flight are not included: their destinations count
        them."""
        return sum(map(len, self.queue))

    def count_waiting_rows(self, destination: str) -> int:
        """Returns the number of rows that wait for `destination`; rows in flight are not included."""
        return sum(row.destination == destination for unit in self.queue for row in unit)

    def add(self, rows: Sequence[ClaimedRow]) -> None:
        """Adds claimed rows to the units that wait. The rows must be in the order of their sequence ids, with the rows
        of each unit next to each other."""
        last: list[ClaimedRow] = []
        for row in rows:
            if last and (row.unit is None or row.unit != last[-1].unit):
                self.queue.append(tuple(last))
                last = []
            last.append(row)
        if last:
            self.queue.append(tuple(last))

    @property
    def may_claim(self) -> bool:
        """Returns whether more rows may be claimed: the queue has room for them, and no waiting unit is one that the
        topics may have stored already."""
        return self.row_count < self._settings.rows_per_claim and not any(map(self.may_be_stored, self.queue))

    def may_be_stored(self, unit: AtomicUnit) -> bool:
        """Returns whether the topics may have stored the unit already: each of its rows has a sequence id that its
        destination may know."""
        return all(row.seq <= self._at[row.destination].last_open for row in unit)

    # ------------------------------------------------------------------------------ a flight
    def start_transaction(self) -> EntriesByDestination:
        """Starts the next cluster transaction: moves units to `in_flight` and returns their entries by destination. The
        caller must call `start_sending` of these destinations. Returns an empty dict if a transaction is in flight, no
        unit waits, or a destination of the first unit is not READY."""
        if self.in_flight:
            return {}
        chosen: list[AtomicUnit] = []
        rows = size = 0
        while self.queue and self._joins(chosen, rows, size):
            unit = self.queue.popleft()
            chosen.append(unit)
            rows, size = rows + len(unit), size + _size(unit)
        self.in_flight = tuple(chosen)
        parts: dict[str, list[ClaimedRow]] = {}
        for row in (row for unit in chosen for row in unit):
            parts.setdefault(row.destination, []).append(row)
        alone = {row.seq for unit in chosen if self.may_be_stored(unit) for row in unit}
        return {name: tuple(self._entries(each, alone)) for name, each in parts.items()}

    def _joins(self, chosen: Sequence[AtomicUnit], rows: int, size: int) -> bool:
        unit = self.queue[0]
        if any(self._at[row.destination].state is not DestinationStatus.READY for row in unit):
            return False
        if not chosen:
            return True
        settings = self._settings
        is_small = rows + len(unit) <= settings.rows_per_claim and size + _size(unit) <= settings.bytes_per_claim
        return is_small and unit[0].seq > self._alone_to

    def _entries(self, rows: Sequence[ClaimedRow], alone: set[int]) -> list[tuple[ClaimedRow, ...]]:
        entries: list[tuple[ClaimedRow, ...]] = []
        group: list[ClaimedRow] = []
        size = 0
        for row in rows:
            together = group and group[-1].seq not in alone and row.seq not in alone
            if group and not (together and may_join_entry(group, size, row, self._settings)):
                entries.append(tuple(group))
                group, size = [], 0
            group.append(row)
            size += row.size
        return [*entries, tuple(group)]

    # ------------------------------------------------------------------------------ how it ended
    def take_stored_rows(self) -> list[ClaimedRow]:
        """Removes and returns the rows of the units in flight, because their cluster transaction committed."""
        flight, self.in_flight = self.in_flight, ()
        return [row for unit in flight for row in unit]

    def put_back(self) -> None:
        """Puts the units in flight back to the front of the queue. They are sent again under the same sequence ids."""
        self.queue.extendleft(reversed(self.in_flight))
        self.in_flight = ()

    @property
    def is_outcome_unknown(self) -> bool:
        """Returns whether the cluster transaction in flight has a single unit, and the topics may have stored this unit
        in an earlier transaction. If the unit is refused now, it is then still unknown whether it is stored."""
        return len(self.in_flight) == 1 and self.may_be_stored(self.in_flight[0])

    def take_refused_unit(self) -> AtomicUnit:
        """Removes and returns the unit that was refused. Returns an empty tuple if several units were in flight: these
        units go back to the queue and are sent again one by one."""
        assert not self.is_outcome_unknown, "what may be stored is not given up"
        flight = self.in_flight
        self.put_back()
        if len(flight) > 1:
            self._alone_to = flight[-1][-1].seq
            return ()
        return self.queue.popleft()

    def take_unstored_rows(self) -> list[ClaimedRow]:
        """Removes and returns all waiting rows, if it is certain that the topics have stored none of them. Otherwise
        removes nothing and returns an empty list: the unit that may be stored keeps its ids, so the rows after it must
        keep theirs."""
        if any(map(self.may_be_stored, self.queue)):
            return []
        found = [row for unit in self.queue for row in unit]
        self.queue.clear()
        return found

    def is_blocked(self) -> bool:
        """Returns whether nothing is in flight and the first unit needs a destination whose producer is closed for a
        pause (WAITS)."""
        needed = (self._at[row.destination].state for row in self.queue[0]) if self.queue else ()
        return not self.in_flight and any(each is DestinationStatus.WAITS for each in needed)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ids = [row.seq for unit in (*self.in_flight, *self.queue) for row in unit]
        assert ids == sorted(set(ids)), "units are in the order of their claims"
        flying: dict[str, list[ClaimedRow]] = {}
        for row in (row for unit in self.in_flight for row in unit):
            flying.setdefault(row.destination, []).append(row)
        found = {name: list(each.in_flight) for name, each in self._at.items() if each.in_flight}
        assert flying == found, "a destination has its part of the flight"


def _size(unit: AtomicUnit) -> int:
    return sum(row.size for row in unit)
