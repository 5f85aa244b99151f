"""The core of a relay for its shard (`RelayCore`): decides which rows the relay claims and sends, which outcomes it
records, and when it must stop. No I/O; times are seconds of a monotonic clock.

The driver (relay.py) calls a method for each fact (`on_shard_claimed`, `on_topics_found`, `on_topic_resolved`,
`on_opened`, `on_group_outcome`, `on_database_committed`, …). The method returns the effects that the driver must carry
out, in order (destination_core.py). A *turn* is one database transaction, which records outcomes and claims rows.

**Shards.** Each destination belongs to one shard: a hash of its topic's name, plus the number of the partition, modulo
the number of shards. So no two relays ever send to one destination, and the producer of a destination can be exclusive.

**Exactly once.** A row gets its sequence id when it is claimed, in the database, and keeps it until its outcome is in
the database. Sequence ids follow the order of claims, not of row ids, because transactions with row ids commit out of
order: a row that is committed late is claimed late. A starting relay first claims the shard, with a new epoch. It
then opens the destinations, learns from each topic the highest id that the topic has stored, and deletes the rows up to
that id. It sends the other claimed rows again under their ids, before any new row. destination_core.py says what one
destination may have in flight.

**Units.** An atomic relay sends the rows that one transaction of the application wrote in one transaction of the
cluster (destination_core.py). If a shard ever had an atomic relay, its relay does not conclude from the topic's highest
id that rows are stored, because an open transaction may contain them: it sends the rows again, until the topic has
dropped them as duplicates.

**The relay stops** with an error when it cannot know which rows are stored: `OutboxBehind`, `SequencesForgotten`; and
when another relay has the shard: `RelayFenced`.

**Order.** Rows of a destination are sent in the order of their claims. A refused row gives its id back together with
the claimed rows of the same key after it; later rows of that key cannot be claimed until the refused row is stored,
revived or deleted.

Guards: tests/client/outbox/test_relay_core.py, which crashes the relay at every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from zlib import crc32

from ...proto.errors import MagnetarError
from ...proto.names import parse_number
from .destination_core import (
    NO_SEQUENCE_ID,
    AskTopicPartitions,
    AtomicUnitQueue,
    ClaimedRow,
    ClaimedShard,
    ClaimRequest,
    DestinationCore,
    DestinationStatus,
    FindTopics,
    OpenDestination,
    RefusedRow,
    RelayDatabaseTransaction,
    RelayEffect,
    RelaySettings,
    RowsOutcome,
    RunDatabaseTransaction,
    SendInTransaction,
    SendRows,
    StopRelay,
)
from .rows import DeduplicationOff, OutboxBehind, RelayFenced, SequencesForgotten


def find_shard_of_destination(destination: str, shards: int) -> int:
    """Returns the number of the shard to which `destination` belongs; the relay of that shard sends its rows. The
    result depends only on the destination's name and on `shards`, the number of shards."""
    topic, found, digits = destination.rpartition("-partition-")
    number = parse_number(digits) if found else None
    if number is None:
        topic, number = destination, 0
    return (crc32(topic.encode()) + number) % shards


def make_destination_name(topic: str, partition: int, partitions: int) -> str:
    """Returns the name of the destination for rows of `topic`: the full name of the partition number `partition`, or
    the topic's own name if `partitions` is 0."""
    return f"{topic}-partition-{partition}" if partitions else topic


@dataclass(slots=True)
class _Topic:
    partitions: int = NO_SEQUENCE_ID  # not known yet
    asked: bool = False
    due: float = 0.0  # when it is asked again
    failed: int = 0
    error: str = ""
    deduplicates: bool = True  # as far as is known; its rows are claimed only then


class RelayCore:
    """The core of the relay of one shard: decides which rows are claimed, sent, retried and parked, and when. Methods
    return the effects that the driver must carry out, in order. `now`: seconds of a monotonic clock."""

    def __init__(
        self, shard: int, shards: int, settings: RelaySettings, *, name: str = "outbox", atomic: bool = False
    ) -> None:
        """Makes the core of the relay of shard number `shard` of `shards`. `name`: the name of the relay's producers,
        for error messages. `atomic`: whether each unit is sent in one cluster transaction; `shards` must then be 1."""
        assert 0 <= shard < shards, "a shard has a number below that of the shards"
        assert not atomic or shards == 1, "a unit may be for any destinations"
        self.shard, self.shards = shard, shards
        self.topics: dict[str, _Topic] = {}
        self.destinations: dict[str, DestinationCore] = {}
        self.sent_rows = self.stored_rows = self.refused_rows = self.parked_rows = 0
        self.atomic_units = AtomicUnitQueue(settings, self.destinations) if atomic else None
        self._sure = not atomic  # an id in a topic is of a row that is stored
        self.turns = self._begun = 0  # transactions that took place, that were begun
        self.stopped: MagnetarError | None = None
        self.stopping = False  # nothing more is claimed or sent
        self._name = name
        self._settings = settings
        self._epoch = self._next_seq = 0
        self._absent_s: float | None = None
        self._known: dict[str, int] = {}  # what each destination had stored when the shard was taken
        self._turning: RelayDatabaseTransaction | None = None
        self._turn_due = 0.0  # after a failure: when the same turn is repeated
        self._turn_failed = 0
        self._claim_due = 0.0
        self._seen_due = 0.0
        self._find_due = 0.0
        self._finding = False
        self._delete: list[int] = []
        self._stored: dict[str, int] = {}
        self._failures: list[RefusedRow] = []
        self._release: list[ClaimedRow] = []
        self._ours_wanted: dict[str, int] = {}
        self._first: frozenset[str] | None = None  # the topics that were found first

    # ------------------------------------------------------------------------------ facts
    def on_shard_claimed(self, found: ClaimedShard, now: float) -> list[RelayEffect]:
        """Fact: this relay has claimed the shard; `found` is the state of the shard in the database. Takes over the
        rows that an earlier relay claimed. Their destinations are opened next, to learn which of these rows are
        stored."""
        self._epoch, self._next_seq, self._absent_s = found.epoch, found.next_seq, found.absent_s
        self._known = dict(found.stored)
        for name in found.stored:
            if find_shard_of_destination(name, self.shards) == self.shard:
                self._destination(name)
        self._sure = self._sure and not found.was_atomic
        self._add_rows(sorted(found.claimed, key=lambda row: row.seq))
        return self.run_timers(now)

    def _add_rows(self, rows: Sequence[ClaimedRow]) -> None:
        for row in rows:
            at = self._destination(row.destination)
            if self.atomic_units is None:
                at.add(row)
        if self.atomic_units is not None:
            self.atomic_units.add(rows)

    def on_topics_found(self, topics: Sequence[str], now: float) -> list[RelayEffect]:
        """Fact: a search of the outbox found that rows wait for the topics `topics`. Adds those topics that the relay
        does not know yet."""
        self._finding = False
        self._find_due = now + self._settings.find_s
        for topic in topics:
            self.topics.setdefault(topic, _Topic())
        if self._first is None:
            self._first = frozenset(topics)  # what is wrong with them is said at once, and not by a growing lag
        return self.run_timers(now)

    def on_topic_search_failed(self, now: float) -> list[RelayEffect]:
        """Fact: the search of the outbox for topics failed. The search is repeated after one second."""
        self._finding = False
        self._find_due = now + 1.0
        return []

    def on_topic_resolved(self, topic: str, partitions: int, now: float) -> list[RelayEffect]:
        """Fact: the cluster answered that `topic` has `partitions` partitions (0: it is not partitioned), and that its
        deduplication is on."""
        known = self.topics[topic]
        known.asked, known.failed, known.error, known.deduplicates = False, 0, "", True
        known.partitions = max(known.partitions, partitions)
        known.due = now + self._settings.refresh_s
        for number in self._owned(topic):
            self._destination(make_destination_name(topic, number, known.partitions))
        self._claim_due = min(self._claim_due, now)
        return self.run_timers(now)

    def on_topic_resolve_failed(self, topic: str, error: MagnetarError, now: float) -> list[RelayEffect]:
        """Fact: the cluster did not answer the question about `topic`, or the topic's deduplication is off (`error` is
        DeduplicationOff). The cluster is asked again later; until then the relay uses what it knows about the topic.
        DeduplicationOff stops the relay if the topic was found by its first search; otherwise no row of that topic is
        claimed until the policy is on again."""
        known = self.topics[topic]
        known.asked, known.error = False, error.message
        if isinstance(error, DeduplicationOff) and topic in (self._first or ()) and known.partitions == NO_SEQUENCE_ID:
            return self._stop(error)
        known.deduplicates = known.deduplicates and not isinstance(error, DeduplicationOff)
        known.due = now + min(self._settings.back_off_last_s, 0.25 * 2 ** min(known.failed, 20))
        known.failed += 1
        return []

    def on_opened(self, destination: str, last: int, now: float) -> list[RelayEffect]:
        """Fact: the producer of `destination` is open. `last`: the highest sequence id that the topic knows of this
        producer name. Stops the relay if `last` shows that the database or the topic has lost sequence ids."""
        at = self.destinations[destination]
        given = at.last_claimed_id if self._sure else self._next_seq - 1  # ids of what was aborted were given back
        if last > given:
            return self._stop(OutboxBehind(
                f"{destination} has sequence id {last} of producer {self._name}, and this outbox has given it"
                f" {given if given >= 0 else 'none'}: the database was restored from a backup, or"
                " made anew, or another database has the same name (name=…). Rows of a backup may be in the topic"
                f" already. To send them all the same: magnetar outbox renumber --shard {self.shard}"
            ))  # fmt: skip
        waiting = len(at.queue) + (
            self.atomic_units.count_waiting_rows(destination) if self.atomic_units is not None else 0
        )
        if last < at.stored and waiting:
            what = f"{destination} has sequence id {last}, and had {at.stored}"
            return self._stop(self._forgotten(what, waiting))
        absent = self._absent_s or 0.0
        if last == at.stored == NO_SEQUENCE_ID and waiting and absent > self._settings.remembered_s:
            return self._stop(self._forgotten(f"{destination} knows nothing after {absent:,.0f} s", waiting))
        for row in at.on_opened(last, sure=self._sure):
            self._on_stored(row, at)
        return self.run_timers(now)

    def _forgotten(self, what: str, rows: int) -> SequencesForgotten:
        return SequencesForgotten(
            f"{what}: it has forgotten producer {self._name} (dedup_inactive_minutes), or was made anew. {rows} claimed"
            " rows may be stored or not. To send them all the same:"
            f" magnetar outbox renumber --shard {self.shard}"
        )

    def on_producer_open_failed(self, destination: str, error: str, now: float) -> list[RelayEffect]:
        """Fact: the producer of `destination` could not be opened, for the reason `error`. The producer is opened again
        after a pause."""
        self._put_off(self.destinations[destination], error, now)
        return []

    def on_group_outcome(self, destination: str, outcome: RowsOutcome, error: str, now: float) -> list[RelayEffect]:
        """Fact: the group of rows in flight to `destination` has the outcome `outcome`. `error`: why the group was not
        stored; empty if it was. A group that was put off, or whose outcome is unknown, is sent again after a pause,
        when the destination was opened again."""
        at = self.destinations[destination]
        match outcome:
            case RowsOutcome.STORED:
                for row in at.on_group_stored():
                    self._on_stored(row, at)
            case RowsOutcome.ROW_REFUSED:
                self._on_refused(at, error, now)
            case RowsOutcome.PUT_OFF | RowsOutcome.UNKNOWN:
                self._put_off(at, error, now)
        return self.run_timers(now)

    def on_transaction_outcome(
        self, outcome: RowsOutcome, error: str, failed: Sequence[str], now: float
    ) -> list[RelayEffect]:
        """Fact: the cluster transaction in flight has the outcome `outcome`. `error`: the reason if it was not stored,
        as text. `failed`: the destinations whose producers ended, if it was put off. If `failed` is empty then, all its
        destinations are opened again after a pause; otherwise only those of `failed`."""
        together = self.atomic_units
        assert together is not None, "an atomic relay has flights"
        flying = {row.destination: self.destinations[row.destination] for unit in together.in_flight for row in unit}
        if outcome is RowsOutcome.STORED:
            for at in flying.values():
                at.on_group_stored()
            for row in together.take_stored_rows():
                self._on_stored(row, flying[row.destination])
        elif outcome is RowsOutcome.ROW_REFUSED and not together.is_outcome_unknown:
            for at in flying.values():
                at.end_sending()
            if unit := together.take_refused_unit():
                self._unit_refused(unit, error)
        else:
            together.put_back()
            sure = outcome is not RowsOutcome.UNKNOWN
            for at in flying.values():
                if sure and failed and at.name not in failed:
                    at.end_sending()
                else:
                    at.on_transaction_failed(error, now, sure=sure)
                    self._ours_wanted[at.name] = self._begun
        return self.run_timers(now)

    def _unit_refused(self, unit: Sequence[ClaimedRow], error: str) -> None:
        """Records that `unit` was refused: the whole unit waits or is parked. The units after it give their sequence
        ids back, because they may contain rows of the same keys."""
        for row in unit:
            self.destinations[row.destination].end_sending(DestinationStatus.RECORDS)
        attempts = max(row.attempts for row in unit)
        for row in unit:
            self._on_row_failed(row._replace(attempts=attempts), error)
        assert self.atomic_units is not None, "a unit is of an atomic relay"
        self._release += self.atomic_units.take_unstored_rows()

    def _put_off(self, at: DestinationCore, error: str, now: float) -> None:
        """Closes a destination for a pause. It is opened again only after a later turn has confirmed that this relay
        still has the shard, because opening a producer would fence that of a newer relay."""
        at.on_producer_failed(error, now)
        self._ours_wanted[at.name] = self._begun

    def _may_open(self, at: DestinationCore) -> bool:
        return self.turns > self._ours_wanted.get(at.name, NO_SEQUENCE_ID)

    def _on_stored(self, row: ClaimedRow, at: DestinationCore) -> None:
        self.stored_rows += 1
        self._delete.append(row.id)
        self._stored[at.name] = at.stored

    def _on_refused(self, at: DestinationCore, error: str, now: float) -> None:
        if not self._sure and len(at.in_flight) == 1 and at.in_flight[0].seq <= at.last_open:
            self._put_off(at, error, now)  # it may be stored, so its id is not given up
            return
        row, followers = at.on_group_refused()
        if row is not None:
            self._on_row_failed(row, error)
            self._release += followers

    def _on_row_failed(self, row: ClaimedRow, error: str) -> None:
        parked = row.attempts + 1 >= self._settings.attempts_max
        wait = min(self._settings.retry_last_s, self._settings.retry_first_s * 2 ** min(row.attempts, 30))
        self.refused_rows += 1
        self.parked_rows += parked
        self._failures.append(RefusedRow(row, error, parked, wait))

    def on_database_committed(
        self, turn: RelayDatabaseTransaction, rows: Sequence[ClaimedRow], next_seq: int, now: float
    ) -> list[RelayEffect]:
        """Fact: the database transaction of the turn `turn` committed. `rows`: the rows that it claimed, in the order
        of their sequence ids. `next_seq`: the sequence id that the next claimed row will get."""
        assert turn is self._turning, "one turn at a time"
        self._turning = None
        self._turn_failed = 0
        self.turns += 1
        self._seen_due = now + self._settings.seen_s
        assert next_seq >= self._next_seq, "sequence ids are not given twice"
        self._next_seq = next_seq
        for failure in turn.failures:
            self.destinations[failure.row.destination].on_refusal_recorded()
        if self.atomic_units is not None and self._failures:
            self._release += rows  # the claim was made before the refusal was known
        else:
            refused = {(each.row.destination, each.row.key) for each in self._failures if each.row.key is not None}
            self._release += [row for row in rows if (row.destination, row.key) in refused]  # likewise
            self._add_rows([row for row in rows if (row.destination, row.key) not in refused])
        if turn.claim is not None and not rows:
            self._claim_due = now + self._settings.poll_s
        return self.run_timers(now)

    def on_database_outcome_unknown(self, now: float) -> list[RelayEffect]:
        """Fact: it is unknown whether the database transaction of the turn in progress committed. The same turn is
        repeated after a pause."""
        assert self._turning is not None, "a turn was begun"
        self._turn_due = now + min(self._settings.back_off_last_s, 0.1 * 2 ** min(self._turn_failed, 20))
        self._turn_failed += 1
        return []

    def on_fenced(self) -> list[RelayEffect]:
        """Fact: the database refused the turn because a newer relay has the shard. Stops this relay with
        RelayFenced."""
        return self._stop(self._fenced())

    def _fenced(self) -> RelayFenced:
        return RelayFenced(
            f"a newer relay has shard {self.shard} of {self._name}: this one ends. Run one relay for each shard;"
            " others may wait for its end with --standby (standby=True)"
        )

    def on_rows_committed(self, now: float) -> list[RelayEffect]:
        """Fact: the application committed rows to the outbox. Searches for these rows at once."""
        self._claim_due = min(self._claim_due, now)
        self._find_due = min(self._find_due, now)
        return self.run_timers(now)

    def stop_claiming(self, now: float) -> list[RelayEffect]:
        """Begins to stop the relay: no more rows are claimed or sent, but the outcomes of the rows in flight are still
        recorded. `is_idle` then says when the driver may end."""
        self.stopping = True
        return self.run_timers(now)

    @property
    def epoch(self) -> int:
        """Returns the epoch of the shard's record when this relay claimed the shard. Each claim raises the epoch, so it
        identifies the claim."""
        return self._epoch

    @property
    def is_idle(self) -> bool:
        """Returns whether no rows are in flight and every outcome is recorded in the database."""
        flying = any(each.in_flight for each in self.destinations.values())
        return not (flying or self._turning or self._delete or self._failures or self._release)

    # ------------------------------------------------------------------------------ effects
    def run_timers(self, now: float) -> list[RelayEffect]:
        """Returns the effects that are due at `now`; none after the relay was stopped by an error. The driver must call
        this again when `next_timer_at` is reached."""
        if self.stopped is not None:
            return []
        effects: list[RelayEffect] = []
        if not self.stopping:
            self._open_and_send(effects, now)
        if self._turning is not None and self._turn_failed and now >= self._turn_due:
            self._turn_due = inf
            effects.append(RunDatabaseTransaction(self._turning))
        elif self._turning is None:
            turn = self._next_turn(now)
            if turn is not None:
                self._turning = turn
                self._turn_due = inf
                effects.append(RunDatabaseTransaction(turn))
        return effects

    def _open_and_send(self, effects: list[RelayEffect], now: float) -> None:
        if not self._finding and now >= self._find_due:
            self._finding = True
            effects.append(FindTopics())
        for topic, known in self.topics.items():
            if not known.asked and now >= known.due:
                known.asked = True
                effects.append(AskTopicPartitions(topic))
        for each in self.destinations.values():
            if self._may_open(each) and each.try_begin_opening_producer(now):
                effects.append(OpenDestination(each.name))
            if group := each.take_next_group():
                self.sent_rows += len(group)
                effects.append(SendRows(each.name, group))
        if self.atomic_units is not None:
            self._start_transaction(self.atomic_units, effects)

    def _start_transaction(self, together: AtomicUnitQueue, effects: list[RelayEffect]) -> None:
        if together.is_blocked():
            self._release += together.take_unstored_rows()
        if parts := together.start_transaction():
            for name, entries in parts.items():
                rows = tuple(row for entry in entries for row in entry)
                self.destinations[name].start_sending(rows)
                self.sent_rows += len(rows)
            effects.append(SendInTransaction(parts))

    def _next_turn(self, now: float) -> RelayDatabaseTransaction | None:
        claim = self._claim() if not self.stopping and now >= self._claim_due else None
        outcomes = bool(self._delete or self._failures or self._release)
        if claim is None and not outcomes and now < min(self._seen_due, self._ours_due()):
            return None
        turn = RelayDatabaseTransaction(
            self._epoch, self._next_seq, self._delete, self._stored, self._failures, self._release, claim
        )
        self._delete, self._stored, self._failures, self._release = [], {}, [], []
        self._begun += 1
        return turn

    def _ours_due(self) -> float:
        """Returns the earliest time at which a destination is to be opened that needs a turn first (`_may_open`);
        infinity if there is none."""
        waiting = (each for each in self.destinations.values() if each.state is DestinationStatus.WAITS)
        return inf if self.stopping else min((each.due for each in waiting if not self._may_open(each)), default=inf)

    def _claim(self) -> ClaimRequest | None:
        if self.atomic_units is not None and not self.atomic_units.may_claim:
            return None
        topics = {}
        for topic, known in self.topics.items():
            if not known.deduplicates:
                continue
            free = tuple(
                number
                for number in self._owned(topic)
                if self.destinations[make_destination_name(topic, number, known.partitions)].may_claim
            )
            if free:
                topics[topic] = (known.partitions, free)
        settings = self._settings
        units = self.atomic_units is not None
        return ClaimRequest(settings.rows_per_claim, settings.bytes_per_claim, topics, units) if topics else None

    def _owned(self, topic: str) -> list[int]:
        """Returns the numbers of the partitions of a topic that belong to this shard; [0] stands for a topic without
        partitions."""
        partitions = self.topics[topic].partitions
        if partitions == NO_SEQUENCE_ID:
            return []
        numbers = range(max(1, partitions))
        return [
            n for n in numbers
            if find_shard_of_destination(make_destination_name(topic, n, partitions), self.shards) == self.shard]

    def _destination(self, name: str) -> DestinationCore:
        if name not in self.destinations:
            self.destinations[name] = DestinationCore(name, self._settings, self._known.get(name, NO_SEQUENCE_ID))
        return self.destinations[name]

    def _stop(self, error: MagnetarError) -> list[RelayEffect]:
        self.stopped = error
        return [StopRelay(error)]

    @property
    def next_timer_at(self) -> float:
        """Returns the time at which the driver must call `run_timers` if no fact comes before; infinity if there is no
        such time."""
        times = [self._turn_due] if self._turning is not None else [self._seen_due, self._ours_due()]
        if self._turning is None and not self.stopping and self._claim() is not None:
            times.append(self._claim_due)
        if not self.stopping:
            times += [] if self._finding else [self._find_due]
            times += [known.due for known in self.topics.values() if not known.asked]
            waiting = (each for each in self.destinations.values() if each.state is DestinationStatus.WAITS)
            times += [each.due for each in waiting if self._may_open(each)]
        return min(times)

    def check(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for each in self.destinations.values():
            each.check()
            assert self.atomic_units is None or not each.queue, "rows of an atomic relay are in units"
            assert each.last_claimed_id < max(1, self._next_seq) or self._next_seq == 0, "every id was given by a claim"
        if self._turning is None:
            waits = {each.row.destination for each in self._failures}
        else:
            waits = {each.row.destination for each in (*self._failures, *self._turning.failures)}
        records = {each.name for each in self.destinations.values() if each.state is DestinationStatus.RECORDS}
        assert records == waits, "a destination waits exactly while its refusal is not recorded"
        gone = set(self._delete) | {each.row.id for each in self._failures} | {each.id for each in self._release}
        held = {row.id for each in self.destinations.values() for row in (*each.in_flight, *each.queue)}
        if self.atomic_units is not None:
            self.atomic_units.check()
            held |= {row.id for unit in self.atomic_units.queue for row in unit}
        assert not gone & held, "a row with an outcome is not sent"
