"""The world of model.py for an atomic relay: units of rows, and topics that know transactions.

What a topic has of a transaction is hidden until the topic learns of its end. An entry of a producer waits there while
another transaction of that producer is open; then it is judged by what was committed. A commit may land without an
answer, or be lost on its way. The relay of this world may die between any two steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from zlib import crc32

from magnetar.client.outbox.destination_core import (
    ClaimedRow,
    ClaimedShard,
    DatabaseTurn,
    Effect,
    Parts,
    RelaySettings,
    RowsOutcome,
    SendInTransaction,
)
from magnetar.client.outbox.relay_core import RelayCore, make_destination_name
from magnetar.client.outbox.rows import RowState

from .model import SMALL, Relay, Row, Topic, World


class State(Enum):
    OPEN = 0
    COMMITTED = 1
    ABORTED = 2


@dataclass
class TxnTopic(Topic):
    open: dict[int, list[ClaimedRow]] = field(default_factory=dict)  # of transactions that have not ended here

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
class TxnWorld(World):
    units: dict[int, int] = field(default_factory=dict)  # of each row that ever was
    txns: dict[int, State] = field(default_factory=dict)
    holder: object = None  # of the transactions' name
    was_atomic: bool = False

    def commit_unit(self, unit: int, *rows: tuple[int, str, str | None], poison: Sequence[int] = ()) -> None:
        for id_, topic, key in rows:
            self.commit(id_, topic, key, poison=id_ in poison)
            self.units[id_] = unit

    def topic(self, name: str) -> TxnTopic:
        found = self.topics.setdefault(name, TxnTopic())
        assert isinstance(found, TxnTopic)
        return found

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
        found = super().take()
        claimed = [row._replace(unit=self.units[row.id]) for row in found.claimed]
        return ClaimedShard(found.epoch, found.next_seq, found.stored, claimed, found.absent_s, self.was_atomic)

    def turn(self, turn: DatabaseTurn) -> tuple[list[ClaimedRow], int] | None:
        found = super().turn(turn)
        if found is None:
            return None
        return [row._replace(unit=self.units[row.id]) for row in found[0]], found[1]

    def _claim(self, turn: DatabaseTurn) -> list[ClaimedRow]:
        claim = turn.claim
        assert claim is not None
        if not claim.units:
            return super()._claim(turn)
        taken: list[Row] = []
        kept: set[tuple[str, str | None]] = set()
        of_unit: dict[int, list[Row]] = {}
        for row in sorted(self.rows.values(), key=lambda row: row.id):
            of_unit.setdefault(self.units[row.id], []).append(row)
        for rows in of_unit.values():
            if all(self._may(row, turn, rows) for row in rows) and not {row.place for row in rows} & kept:
                if taken and len(taken) + len(rows) > claim.rows_max:
                    break
                taken += rows
            else:
                kept |= {row.place for row in rows if row.key is not None}
        for row in taken:
            row.state, row.seq = RowState.CLAIMED, self.next_seq
            self.next_seq += 1
        return [row.claimed() for row in taken]

    def _may(self, row: Row, turn: DatabaseTurn, unit: list[Row]) -> bool:
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

    def done(self) -> bool:
        """What is left is parked, or of a unit that waits for what is parked."""
        kept = {row.place for row in self.rows.values() if row.state is RowState.PARKED and row.key is not None}
        left = {self.units[row.id] for row in self.rows.values() if row.state is not RowState.PARKED}
        while True:
            stuck = {
                unit for unit in left
                if any(row.place in kept for row in self.rows.values() if self.units[row.id] == unit)
            }  # fmt: skip
            more = {row.place for row in self.rows.values() if self.units[row.id] in stuck and row.key is not None}
            if more <= kept:
                busy = any(row.state is RowState.CLAIMED for row in self.rows.values())
                return left == stuck and not busy
            kept |= more


class TxnRelay(Relay):
    """`atomic`; `lost`: so many commits get no answer, and every second of them never arrives."""

    def __init__(self, world: TxnWorld, *, settings: RelaySettings = SMALL, atomic: bool = True) -> None:
        self.atomic = atomic
        self.lost = 0
        self.txn = 0
        self._has_name = False
        self.at = world
        super().__init__(world, settings=settings)

    def _do(self, effects: list[Effect]) -> None:
        rest: list[Effect] = []
        for effect in effects:
            if isinstance(effect, SendInTransaction) and not self.dead:
                self.steps.append(lambda parts=effect.parts: self._fly(parts))  # type: ignore[misc]
            else:
                rest.append(effect)
        super()._do(rest)

    def make_core(self, settings: RelaySettings) -> RelayCore:
        self.at.was_atomic = self.at.was_atomic or self.atomic
        return RelayCore(0, 1, settings, atomic=self.atomic)

    def _open(self, name: str) -> None:
        topic = self.at.topic(name)
        self.world.producers += 1
        topic.epoch = self._producers[name] = self.world.producers
        last = topic.last_open
        self.steps.append(lambda: self._do(self.core.on_opened(name, last, self.world.now)))

    def _send(self, name: str, rows: tuple[ClaimedRow, ...]) -> None:
        """Without a transaction: it waits at the topic like any other entry of the producer."""
        epoch = self._producers[name]

        def arrive() -> None:
            if self.at.topic(name).open and epoch == self.at.topic(name).epoch:
                self._wait(arrive)
                return
            self.flying.remove(arrive)
            outcome = self.at.topic(name).publish(epoch, rows, self.at.poison)
            self.steps.append(lambda: self._do(self.core.on_group_done(name, outcome, "refused", self.world.now)))

        self.flying.append(arrive)
        self.steps.append(arrive)

    # ------------------------------------------------------------------------------ flights
    def _fly(self, parts: Parts) -> None:
        world = self.at
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
            outcome = self.at.topic(name).publish_in(epoch, rows, self.at.poison, txn, self.at.txns[txn])
            if outcome is None:
                self._wait(arrive)
                return
            self.flying.remove(arrive)
            self.steps.append(lambda: self._arrived(name, left, txn, outcome))

        self.flying.append(arrive)
        self.steps.append(arrive)

    def _wait(self, arrive: object) -> None:
        """For an end: a topic learns of one, or a time-out makes one."""
        if not self.at.learn_one():
            for txn in self.at.txns:
                if txn != self.txn:
                    self.at.end(txn, State.ABORTED)
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
            self.at.end(txn, State.ABORTED)
            off = tuple(where for each, where in failed if each is RowsOutcome.PUT_OFF)
            self._landed(RowsOutcome.PUT_OFF if off else RowsOutcome.ROW_REFUSED, off)
        else:
            self.steps.append(lambda: self._commit(txn))

    def _commit(self, txn: int) -> None:
        if self.lost:
            self.lost -= 1
            if self.lost % 2:
                self.at.end(txn, State.COMMITTED)
            self._landed(RowsOutcome.UNKNOWN, ())
        elif self.at.end(txn, State.COMMITTED) is State.COMMITTED:
            self._landed(RowsOutcome.STORED, ())
        else:
            self._landed(RowsOutcome.PUT_OFF, ())

    def _landed(self, outcome: RowsOutcome, failed: tuple[str, ...]) -> None:
        self.txn = 0
        self.steps.append(lambda: self._do(self.core.on_transaction_done(outcome, "refused", failed, self.world.now)))

    def die(self, *, late: bool) -> None:
        """`late`: what it had sent arrives, as far as it need not wait."""
        self.dead = True
        self.txn = 0
        for arrive in list(self.flying) if late else ():
            arrive()
