"""A world for the relay's core: a database with one outbox, topics that deduplicate, and relays that may die anywhere.

Every effect is two steps: it takes place, and its fact is told. A relay dies between any two of them. What it had sent
and had not arrived then may arrive still (`late`), until a newer relay has opened the destination.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

from magnetar.client.outbox.destination_core import (
    ClaimedRow,
    ClaimedShard,
    DatabaseTurn,
    Effect,
    FindTopics,
    OpenDestination,
    RelaySettings,
    ResolveTopic,
    RowsOutcome,
    RunDatabaseTurn,
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


@dataclass
class Topic:
    """One destination: what is stored, in its order."""

    ids: list[int] = field(default_factory=list)  # of rows
    last: int = -1
    put_off: int = 0  # so many publishes are refused for now
    epoch: int = 0  # of the producer that has it

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

    def commit(self, id_: int, topic: str, key: str | None = None, *, poison: bool = False, late: bool = False) -> None:
        """The application commits a row."""
        self.rows[id_] = Row(id_, topic, key, poison, 1 if late else None)
        self.partitions.setdefault(topic, 0)

    @property
    def poison(self) -> set[int]:
        return {row.id for row in self.rows.values() if row.poison}

    def done(self) -> bool:
        return all(row.state is RowState.PARKED or self._blocked(row) for row in self.rows.values())

    def _blocked(self, row: Row) -> bool:
        parked = (each for each in self.rows.values() if each.state is RowState.PARKED)
        waits = row.state in (RowState.WAITING, RowState.HELD) and row.key is not None
        return waits and any(each.place == row.place for each in parked)

    # ------------------------------------------------------------------------------ the database
    def take(self) -> ClaimedShard:
        self.epoch += 1
        claimed = sorted((r for r in self.rows.values() if r.state is RowState.CLAIMED), key=lambda row: row.id)
        return ClaimedShard(self.epoch, self.next_seq, dict(self.stored), [row.claimed() for row in claimed], 0.0)

    def turn(self, turn: DatabaseTurn) -> tuple[list[ClaimedRow], int] | None:
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
            return [row.claimed() for row in sorted(again, key=lambda row: row.seq)], self.next_seq
        return self._claim(turn) if turn.claim is not None else [], self.next_seq

    def _claim(self, turn: DatabaseTurn) -> list[ClaimedRow]:
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
        for row in found[: turn.claim.rows_max]:
            row.state, row.seq = RowState.CLAIMED, self.next_seq
            self.next_seq += 1
        return [row.claimed() for row in found[: turn.claim.rows_max]]

    def check(self, expected: set[int], *, parked: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        """Each row is stored once, in the order of its key, or is parked and stored nowhere."""
        found = [id_ for topic in self.topics.values() for id_ in topic.ids]
        assert len(found) == len(set(found)), f"stored twice: {found}"
        assert set(found) == expected, f"stored: {sorted(found)}"
        assert {row.id for row in self.rows.values() if row.state is RowState.PARKED} == set(parked)


class Relay:
    """A relay in this world: its core, and the steps of its effects that did not take place yet."""

    def __init__(self, world: World, *, shard: int = 0, shards: int = 1, settings: RelaySettings = SMALL) -> None:
        self.world = world
        self.shard, self.shards = shard, shards
        self.core = self.make_core(settings)
        self.steps: deque[Step] = deque()
        self.error: MagnetarError | None = None
        self.dead = False
        self.lost_turns = 0  # so many transactions take place and seem to fail
        self.flying: list[Step] = []  # sends that did not arrive
        self._producers: dict[str, int] = {}
        self._do(self.core.on_shard_claimed(world.take(), world.now))

    def make_core(self, settings: RelaySettings) -> RelayCore:
        return RelayCore(self.shard, self.shards, settings)

    def _do(self, effects: list[Effect]) -> None:
        if self.dead:
            return
        self.core.check()
        for effect in effects:
            match effect:
                case FindTopics():
                    self.steps.append(self._find)
                case ResolveTopic(topic):
                    self.steps.append(lambda topic=topic: self._resolved(topic))  # type: ignore[misc]
                case OpenDestination(destination):
                    self.steps.append(lambda name=destination: self._open(name))  # type: ignore[misc]
                case SendRows(destination, rows):
                    self._send(destination, rows)
                case RunDatabaseTurn(turn):
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
        topic = self.world.topics.setdefault(name, Topic())
        self.world.producers += 1
        topic.epoch = self._producers[name] = self.world.producers
        last = topic.last
        self.steps.append(lambda: self._do(self.core.on_opened(name, last, self.world.now)))

    def _send(self, name: str, rows: tuple[ClaimedRow, ...]) -> None:
        epoch = self._producers[name]

        def arrive() -> None:
            self.flying.remove(arrive)
            outcome = self.world.topics[name].publish(epoch, rows, self.world.poison)
            self.steps.append(lambda: self._do(self.core.on_group_done(name, outcome, "refused", self.world.now)))

        self.flying.append(arrive)
        self.steps.append(arrive)

    def _transact(self, turn: DatabaseTurn) -> None:
        found = self.world.turn(turn)
        if found is None:
            self.steps.append(lambda: self._do(self.core.on_fenced()))
        elif self.lost_turns:
            self.lost_turns -= 1
            self.steps.append(lambda: self._do(self.core.on_turn_failed(self.world.now)))
        else:
            self.steps.append(lambda: self._do(self.core.on_turn_committed(turn, *found, self.world.now)))

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
        """kill -9. `late`: what it had sent arrives."""
        self.dead = True
        for arrive in list(self.flying) if late else ():
            arrive()

    def finish(self, steps_max: int = 2000) -> None:
        for _ in range(steps_max):
            if self.dead or (self.world.done() and not self.steps):
                return
            self.step()
        raise AssertionError(f"rows are left: {self.world.rows}")
