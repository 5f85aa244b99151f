"""A world for the relay's core: a database with one outbox, topics that deduplicate, and relays that may die anywhere.

Every effect is two steps: it takes place, and its fact is told. A relay dies between any two of them. What it had sent
and had not arrived then may arrive still (`late`), until a newer relay has opened the destination.

An atomic relay sends units of rows in transactions. What a topic has of a transaction is hidden until the topic learns
of its end. An entry of a producer waits there while another transaction of that producer is open; then it is judged by
what was committed. A commit may land without an answer, or be lost on its way.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from zlib import crc32

from magnetar.client.outbox.destination_core import (
    AskTopicPartitions,
    ClaimedRow,
    ClaimedShard,
    EntriesByDestination,
    FindTopics,
    OpenDestination,
    RelayDatabaseTransaction,
    RelayEffect,
    RelaySettings,
    RowsOutcome,
    RunDatabaseTransaction,
    SendInTransaction,
    SendRows,
    StopRelay,
)
from magnetar.client.outbox.relay_core import RelayCore, make_destination_name
from magnetar.client.outbox.rows import RowState
from magnetar.proto.errors import MagnetarError

SMALL = RelaySettings(rows_per_claim=3, rows_per_entry=2, attempts_max=2, retry_first_s=0.1)
Step = Callable[[], None]


@dataclass
class Row:
    id: int
    topic: str
    key: str | None
    poison: bool = False
    deliver_at: int | None = None
    state: RowState = RowState.WAITING
    attempts: int = 0
    retry_at: float = 0.0
    seq: int = -1
    destination: str = ""
    size: int = 10

    @property
    def place(self) -> tuple[str, str | None]:
        return self.topic, self.key

    def claimed(self) -> ClaimedRow:
        return ClaimedRow(
            self.id, self.seq, self.destination, self.size, self.key, b"", None, None, self.deliver_at, self.attempts
        )


class State(Enum):
    OPEN = 0
    COMMITTED = 1
    ABORTED = 2


@dataclass
class Topic:
    """One destination: what is stored, in its order."""

    ids: list[int] = field(default_factory=list)  # of rows
    last: int = -1
    put_off: int = 0  # so many publishes are refused for now
    epoch: int = 0  # of the producer that has it
    open: dict[int, list[ClaimedRow]] = field(default_factory=dict)  # of transactions that have not ended here

    def publish(self, epoch: int, rows: tuple[ClaimedRow, ...], poison: set[int]) -> RowsOutcome:
        if epoch != self.epoch:
            return RowsOutcome.PUT_OFF  # fenced
        if self.put_off:
            self.put_off -= 1
            return RowsOutcome.PUT_OFF
        if rows[-1].seq <= self.last:
            return RowsOutcome.STORED  # a duplicate, says the broker
        assert rows[0].seq > self.last, "an entry is on both sides of what is stored"
        if any(row.id in poison for row in rows):
            return RowsOutcome.ROW_REFUSED
        self.ids += [row.id for row in rows]
        self.last = rows[-1].seq
        return RowsOutcome.STORED

    def publish_in(
        self, epoch: int, rows: Sequence[ClaimedRow], poison: set[int], txn: int, state: State
    ) -> RowsOutcome | None:
        """None: it waits for the end of another transaction."""
        if epoch != self.epoch:
            return RowsOutcome.PUT_OFF  # fenced
        if self.put_off:
            self.put_off -= 1
            return RowsOutcome.PUT_OFF
        if any(each != txn for each in self.open):
            return None
        if any(row.id in poison for row in rows):
            return RowsOutcome.ROW_REFUSED  # because of what it holds: before anything else
        if rows[-1].seq <= self.last:
            return RowsOutcome.STORED  # a duplicate, says the broker
        assert rows[0].seq > self.last, "an entry is on both sides of what is stored"
        if state is not State.OPEN:
            return RowsOutcome.PUT_OFF
        self.open.setdefault(txn, []).extend(rows)
        return RowsOutcome.STORED

    @property
    def last_open(self) -> int:
        return max([self.last, *(row.seq for rows in self.open.values() for row in rows)])

    def learn(self, txn: int, state: State) -> None:
        rows = self.open.pop(txn, [])
        if state is State.COMMITTED and rows:
            self.ids += [row.id for row in rows]
            assert rows[-1].seq > self.last
            self.last = rows[-1].seq


@dataclass
class World:
    partitions: dict[str, int] = field(default_factory=dict)
    rows: dict[int, Row] = field(default_factory=dict)
    topics: dict[str, Topic] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)
    epoch: int = 0
    next_seq: int = 0
    now: float = 0.0
    producers: int = 0
    units: dict[int, int] = field(default_factory=dict)  # of each row that ever was
    txns: dict[int, State] = field(default_factory=dict)
    holder: object = None  # of the transactions' name
    was_atomic: bool = False

    def commit(self, id_: int, topic: str, key: str | None = None, *, poison: bool = False, late: bool = False) -> None:
        """The application commits a row."""
        self.rows[id_] = Row(id_, topic, key, poison, 1 if late else None)
        self.partitions.setdefault(topic, 0)

    def commit_unit(self, unit: int, *rows: tuple[int, str, str | None], poison: Sequence[int] = ()) -> None:
        for id_, topic, key in rows:
            self.commit(id_, topic, key, poison=id_ in poison)
            self.units[id_] = unit

    def topic(self, name: str) -> Topic:
        return self.topics.setdefault(name, Topic())

    def unit(self, row: Row) -> int:
        return self.units.get(row.id, -row.id)

    @property
    def poison(self) -> set[int]:
        return {row.id for row in self.rows.values() if row.poison}

    def done(self) -> bool:
        """What is left is parked, or of a unit that waits for what is parked."""
        kept = {row.place for row in self.rows.values() if row.state is RowState.PARKED and row.key is not None}
        left = {self.unit(row) for row in self.rows.values() if row.state is not RowState.PARKED}
        while True:
            stuck = {
                unit for unit in left
                if any(row.place in kept for row in self.rows.values() if self.unit(row) == unit)
            }  # fmt: skip
            more = {row.place for row in self.rows.values() if self.unit(row) in stuck and row.key is not None}
            if more <= kept:
                busy = any(row.state is RowState.CLAIMED for row in self.rows.values())
                return left == stuck and not busy
            kept |= more

    # ------------------------------------------------------------------------------ transactions
    def end(self, txn: int, state: State) -> State:
        if self.txns[txn] is State.OPEN:
            self.txns[txn] = state
        return self.txns[txn]

    def learn_one(self) -> bool:
        """A topic learns of an end; or the time-out of a transaction whose relay is gone aborts it."""
        for name in self.topics:
            topic = self.topic(name)
            for txn in topic.open:
                if self.txns[txn] is not State.OPEN:
                    topic.learn(txn, self.txns[txn])
                    return True
        return False

    def learn_all(self) -> None:
        while self.learn_one():
            pass

    def visible(self) -> list[int]:
        """When every topic knows the ends of all transactions."""
        hidden = [
            row.id for name in self.topics for txn, rows in self.topic(name).open.items()
            if self.txns[txn] is State.COMMITTED for row in rows
        ]  # fmt: skip
        return [id_ for topic in self.topics.values() for id_ in topic.ids] + hidden

    def check_units(self) -> None:
        found = self.visible()
        assert len(found) == len(set(found)), f"stored twice: {sorted(found)}"
        for unit in set(self.units.values()):
            rows = {id_ for id_, of in self.units.items() if of == unit}
            assert not rows & set(found) or rows <= set(found), f"unit {unit} is there in part: {rows & set(found)}"

    # ------------------------------------------------------------------------------ the database
    def take(self) -> ClaimedShard:
        self.epoch += 1
        claimed = sorted((r for r in self.rows.values() if r.state is RowState.CLAIMED), key=lambda row: row.id)
        rows = [self._claimed(row) for row in claimed]
        return ClaimedShard(self.epoch, self.next_seq, dict(self.stored), rows, 0.0, self.was_atomic)

    def _claimed(self, row: Row) -> ClaimedRow:
        return row.claimed()._replace(unit=self.units.get(row.id))

    def turn(self, turn: RelayDatabaseTransaction) -> tuple[list[ClaimedRow], int] | None:
        """None: fenced."""
        if turn.epoch != self.epoch:
            return None
        for id_ in turn.delete:
            if id_ in self.rows and self.rows[id_].state is RowState.CLAIMED:
                del self.rows[id_]
        self.stored.update(turn.stored)
        for failure in turn.failures:
            row = self.rows.get(failure.row.id)
            if row is not None and row.state is RowState.CLAIMED and row.seq == failure.row.seq:
                row.state = RowState.PARKED if failure.parked else RowState.HELD
                row.attempts, row.retry_at, row.seq = row.attempts + 1, self.now + failure.retry_after_s, -1
        for released in turn.release:
            row = self.rows[released.id]
            if row.state is RowState.CLAIMED:
                row.state, row.seq = RowState.WAITING, -1
        if self.next_seq > turn.next_seq:
            again = [r for r in self.rows.values() if r.state is RowState.CLAIMED and r.seq >= turn.next_seq]
            return [self._claimed(row) for row in sorted(again, key=lambda row: row.seq)], self.next_seq
        return [self._claimed(row) for row in self._claim(turn)] if turn.claim is not None else [], self.next_seq

    def _claim(self, turn: RelayDatabaseTransaction) -> list[Row]:
        assert turn.claim is not None
        taken = self._units(turn) if turn.claim.units else self._rows(turn)[: turn.claim.rows_max]
        for row in taken:
            row.state, row.seq = RowState.CLAIMED, self.next_seq
            self.next_seq += 1
        return taken

    def _rows(self, turn: RelayDatabaseTransaction) -> list[Row]:
        assert turn.claim is not None
        stuck = [row for row in self.rows.values() if row.state in (RowState.HELD, RowState.PARKED)]
        found = []
        for state in (RowState.HELD, RowState.WAITING):
            for row in sorted(self.rows.values(), key=lambda row: row.id):
                if row.state is not state or row.topic not in turn.claim.topics:
                    continue
                if state is RowState.HELD and row.retry_at > self.now:
                    continue
                others = [each for each in stuck if each is not row and row.key is not None and each.place == row.place]
                if any(each.id < row.id or state is RowState.WAITING for each in others):
                    continue
                partitions, free = turn.claim.topics[row.topic]
                number = crc32((row.key or str(row.id)).encode()) % partitions if partitions else 0
                if number in free:
                    row.destination = make_destination_name(row.topic, number, partitions)
                    found.append(row)
        return found

    def _units(self, turn: RelayDatabaseTransaction) -> list[Row]:
        claim = turn.claim
        assert claim is not None
        taken: list[Row] = []
        kept: set[tuple[str, str | None]] = set()
        of_unit: dict[int, list[Row]] = {}
        for row in sorted(self.rows.values(), key=lambda row: row.id):
            of_unit.setdefault(self.unit(row), []).append(row)
        for rows in of_unit.values():
            if all(self._may(row, turn, rows) for row in rows) and not {row.place for row in rows} & kept:
                if taken and len(taken) + len(rows) > claim.rows_max:
                    break
                taken += rows
            else:
                kept |= {row.place for row in rows if row.key is not None}
        return taken

    def _may(self, row: Row, turn: RelayDatabaseTransaction, unit: list[Row]) -> bool:
        assert turn.claim is not None
        if row.topic not in turn.claim.topics or row.state in (RowState.CLAIMED, RowState.PARKED):
            return False
        if row.state is RowState.HELD and row.retry_at > self.now:
            return False
        stuck = (each for each in self.rows.values() if each.state in (RowState.HELD, RowState.PARKED))
        if any(
            each not in unit and row.key is not None and each.place == row.place
            and (each.id < row.id or row.state is RowState.WAITING)
            for each in stuck
        ):  # fmt: skip
            return False
        partitions, free = turn.claim.topics[row.topic]
        number = crc32((row.key or str(row.id)).encode()) % partitions if partitions else 0
        row.destination = make_destination_name(row.topic, number, partitions)
        return number in free

    def check(self, expected: set[int], *, parked: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Each row is stored once, in the order of its key, or is parked and stored nowhere."""
        found = [id_ for topic in self.topics.values() for id_ in topic.ids]
        assert len(found) == len(set(found)), f"stored twice: {found}"
        assert set(found) == expected, f"stored: {sorted(found)}"
        assert {row.id for row in self.rows.values() if row.state is RowState.PARKED} == set(parked)


class Relay:
    """A relay in this world: its core, and the steps of its effects that did not take place yet. `lost`: so many
    commits get no answer, and every second of them never arrives."""

    def __init__(self, world: World, *, settings: RelaySettings = SMALL, atomic: bool = False) -> None:
        self.world = world
        world.was_atomic = world.was_atomic or atomic
        self.core = RelayCore(0, 1, settings, atomic=atomic)
        self.lost = self.txn = 0
        self._has_name = False
        self.steps: deque[Step] = deque()
        self.error: MagnetarError | None = None
        self.dead = False
        self.lost_turns = 0  # so many transactions take place and seem to fail
        self.flying: list[Step] = []  # sends that did not arrive
        self._producers: dict[str, int] = {}
        self._do(self.core.on_shard_claimed(world.take(), world.now))

    def _do(self, effects: list[RelayEffect]) -> None:
        if self.dead:
            return
        self.core.check()
        for effect in effects:
            match effect:
                case FindTopics():
                    self.steps.append(self._find)
                case AskTopicPartitions(topic):
                    self.steps.append(lambda topic=topic: self._resolved(topic))  # type: ignore[misc]
                case OpenDestination(destination):
                    self.steps.append(lambda name=destination: self._open(name))  # type: ignore[misc]
                case SendRows(destination, rows):
                    self._send(destination, rows)
                case SendInTransaction(parts):
                    self.steps.append(lambda parts=parts: self._fly(parts))  # type: ignore[misc]
                case RunDatabaseTransaction(turn):
                    self.steps.append(lambda turn=turn: self._transact(turn))  # type: ignore[misc]
                case StopRelay(error):
                    self.error, self.dead = error, True

    def _find(self) -> None:
        states = (RowState.WAITING, RowState.HELD)
        topics = sorted({row.topic for row in self.world.rows.values() if row.state in states})
        self.steps.append(lambda: self._do(self.core.on_topics_found(topics, self.world.now)))

    def _resolved(self, topic: str) -> None:
        self._do(self.core.on_topic_resolved(topic, self.world.partitions[topic], self.world.now))

    def _open(self, name: str) -> None:
        topic = self.world.topic(name)
        self.world.producers += 1
        topic.epoch = self._producers[name] = self.world.producers
        last = topic.last_open
        self.steps.append(lambda: self._do(self.core.on_opened(name, last, self.world.now)))

    def _send(self, name: str, rows: tuple[ClaimedRow, ...]) -> None:
        """Without a transaction: it waits at the topic like any other entry of the producer."""
        epoch = self._producers[name]

        def arrive() -> None:
            if self.world.topic(name).open and epoch == self.world.topic(name).epoch:
                self._wait(arrive)
                return
            self.flying.remove(arrive)
            outcome = self.world.topic(name).publish(epoch, rows, self.world.poison)
            self.steps.append(lambda: self._do(self.core.on_group_outcome(name, outcome, "refused", self.world.now)))

        self.flying.append(arrive)
        self.steps.append(arrive)

    def _transact(self, turn: RelayDatabaseTransaction) -> None:
        found = self.world.turn(turn)
        if found is None:
            self.steps.append(lambda: self._do(self.core.on_fenced()))
        elif self.lost_turns:
            self.lost_turns -= 1
            self.steps.append(lambda: self._do(self.core.on_database_outcome_unknown(self.world.now)))
        else:
            self.steps.append(lambda: self._do(self.core.on_database_committed(turn, *found, self.world.now)))

    def _fly(self, parts: EntriesByDestination) -> None:
        world = self.world
        if self._has_name and world.holder is not self:
            self._has_name = False
            self._landed(RowsOutcome.PUT_OFF, ())
            return
        if not self._has_name:
            for txn in world.txns:
                world.end(txn, State.ABORTED)
            world.holder, self._has_name = self, True
        self.txn = len(world.txns) + 1
        world.txns[self.txn] = State.OPEN
        left = {name: list(entries) for name, entries in parts.items()}
        for name in parts:
            self._next(name, left, self.txn)

    def _next(self, name: str, left: dict[str, list[tuple[ClaimedRow, ...]]], txn: int) -> None:
        epoch, rows = self._producers[name], left[name][0]

        def arrive() -> None:
            outcome = self.world.topic(name).publish_in(epoch, rows, self.world.poison, txn, self.world.txns[txn])
            if outcome is None:
                self._wait(arrive)
                return
            self.flying.remove(arrive)
            self.steps.append(lambda: self._arrived(name, left, txn, outcome))

        self.flying.append(arrive)
        self.steps.append(arrive)

    def _wait(self, arrive: object) -> None:
        """For an end: a topic learns of one, or a time-out makes one."""
        if not self.world.learn_one():
            for txn in self.world.txns:
                if txn != self.txn:
                    self.world.end(txn, State.ABORTED)
        self.steps.append(arrive)  # type: ignore[arg-type]

    def _arrived(
        self, name: str, left: dict[str, list[tuple[ClaimedRow, ...]]], txn: int, outcome: RowsOutcome
    ) -> None:
        if outcome is not RowsOutcome.STORED:
            left[name] = []
            left.setdefault("failed", []).append((outcome, name))  # type: ignore[arg-type]
        else:
            left[name].pop(0)
            if left[name]:
                self._next(name, left, txn)
                return
        if any(entries for where, entries in left.items() if where != "failed"):
            return
        failed: list[tuple[RowsOutcome, str]] = left.get("failed", [])  # type: ignore[assignment]
        if failed:
            self.world.end(txn, State.ABORTED)
            off = tuple(where for each, where in failed if each is RowsOutcome.PUT_OFF)
            self._landed(RowsOutcome.PUT_OFF if off else RowsOutcome.ROW_REFUSED, off)
        else:
            self.steps.append(lambda: self._commit(txn))

    def _commit(self, txn: int) -> None:
        if self.lost:
            self.lost -= 1
            if self.lost % 2:
                self.world.end(txn, State.COMMITTED)
            self._landed(RowsOutcome.UNKNOWN, ())
        elif self.world.end(txn, State.COMMITTED) is State.COMMITTED:
            self._landed(RowsOutcome.STORED, ())
        else:
            self._landed(RowsOutcome.PUT_OFF, ())

    def _landed(self, outcome: RowsOutcome, failed: tuple[str, ...]) -> None:
        self.txn = 0
        self.steps.append(
            lambda: self._do(self.core.on_transaction_outcome(outcome, "refused", failed, self.world.now))
        )

    def step(self, rng: random.Random | None = None) -> None:
        """The next step, or one of them by chance; with none, time passes."""
        if not self.steps:
            self.world.now = max(self.world.now, self.core.next_timer_at)
            self._do(self.core.run_timers(self.world.now))
            return
        if rng is not None:
            self.steps.rotate(-rng.randrange(len(self.steps)))
        self.steps.popleft()()

    def die(self, *, late: bool) -> None:
        """kill -9. `late`: what it had sent arrives, as far as it need not wait."""
        self.dead, self.txn = True, 0
        for arrive in list(self.flying) if late else ():
            arrive()

    def finish(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if self.dead or (self.world.done() and not self.steps):
                return
            self.step()
        raise AssertionError(f"rows are left: {self.world.rows}")
