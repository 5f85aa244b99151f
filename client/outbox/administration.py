"""The work of an operator with an outbox, for `magnetar outbox`: lists rows, parks, revives and deletes them.

All operations may run while relays run: claimed rows are left to their relay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from sqlalchemy import Engine, delete, select, update

from ..blocking.client import Client
from ..blocking.loop_thread import shared_loop_thread
from ..common.errors import InvalidTopicName, TopicNotFound
from .relay_core import destination_name, shard_of
from .rows import OutboxError, RowState, ShardsDiffer, now_ms
from .sender import RelaySender
from .store import RelayStore
from .tables import SQLAlchemyOutbox, translate_errors
from .values_core import RelaySettings

ALIVE_MS = 10_000
"""Milliseconds since a relay was seen within which it runs."""


class OutboxRow(NamedTuple):
    """A row without its value, for the CLI. `created_ms`: ms since the epoch. `unit`: equal for all rows of one
    transaction of the application."""

    id: int
    state: str
    topic: str
    key: str | None
    size: int
    created_ms: int
    attempts: int
    seq: int | None
    shard: int | None
    error: str | None
    unit: int | None


class ShardRecord(NamedTuple):
    """The record of a shard. `holder`: the relay that holds the shard; `seen_s`: seconds since that relay was last
    active."""

    shard: int
    shards: int
    epoch: int
    holder: str
    seen_s: float
    next_seq: int


class OutboxAdmin:
    """The operations of an operator on an outbox."""

    def __init__(self, engine: Engine, outbox: SQLAlchemyOutbox) -> None:
        self._engine, self._outbox = engine, outbox
        self._rows = outbox.rows
        self._store = RelayStore(engine, outbox)

    def create(self) -> None:
        """Creates the tables that are missing. Raises OutboxColumnsMissing if a table of that name lacks columns."""
        with translate_errors():
            for table in (self._outbox.rows, self._outbox.shards, self._outbox.positions):
                table.create(self._engine, checkfirst=True)
        self._store.check()

    def check(self) -> None:
        """Checks the tables. Raises OutboxTableMissing if one is missing, OutboxColumnsMissing if one lacks columns."""
        self._store.check()

    def rows(self, *, state: RowState | None = None, topic: str | None = None, limit: int = 100) -> list[OutboxRow]:
        """Returns up to `limit` rows in the order of their ids, filtered by state and topic."""
        c = self._rows.c
        query = select(
            c.id, c.state, c.topic, c.key, c.size, c.created, c.attempts, c.seq, c.shard, c.error, c.unit
        ).order_by(c.id).limit(limit)  # fmt: skip
        if state is not None:
            query = query.where(c.state == state)
        if topic is not None:
            query = query.where(c.topic == topic)
        with translate_errors(), self._engine.connect() as connection:
            found = connection.execute(query).all()
        return [OutboxRow._make(each)._replace(state=RowState(each[1]).name.lower()) for each in found]

    def read_shards(self) -> list[ShardRecord]:
        table = self._outbox.shards
        with translate_errors(), self._engine.connect() as connection:
            found = connection.execute(select(table).order_by(table.c.shard)).all()
        now = now_ms()
        return [
            ShardRecord(r.shard, r.shards, r.epoch, r.holder, max(0, now - r.seen) / 1000, r.next_seq) for r in found
        ]

    def park_rows(self, ids: Sequence[int]) -> int:
        """Parks waiting and refused rows: no relay sends them, and later rows of their keys wait. Returns the number of
        rows that were parked."""
        return self._change(ids, (RowState.WAITING, RowState.HELD), state=int(RowState.PARKED), error="parked by hand")

    def revive_rows(self, ids: Sequence[int] | None = None) -> int:
        """Makes parked and refused rows wait again, and resets their number of attempts. `ids` None: all such rows.
        Returns the number of revived rows."""
        return self._change(
            ids, (RowState.PARKED, RowState.HELD), state=int(RowState.WAITING), attempts=0, error=None, retry_at=None
        )

    def _change(self, ids: Sequence[int] | None, states: tuple[RowState, ...], **values: Any) -> int:
        wanted = [self._rows.c.state.in_(tuple(int(state) for state in states))]
        if ids is not None:
            wanted.append(self._rows.c.id.in_(ids))
        with translate_errors(), self._engine.begin() as connection:
            return connection.execute(update(self._rows).where(*wanted).values(**values)).rowcount

    def drop(self, ids: Sequence[int]) -> int:
        """Deletes rows that are not claimed: their messages are never sent. Returns the number of deleted rows."""
        with translate_errors(), self._engine.begin() as connection:
            here = self._rows.c.id.in_(ids), self._rows.c.state != int(RowState.CLAIMED)
            return connection.execute(delete(self._rows).where(*here)).rowcount

    def set_shard_count(self, shards: int) -> None:
        """Changes the number of shards of the outbox. Raises ShardsDiffer if a relay runs or rows are claimed."""
        running = [each for each in self.read_shards() if each.seen_s * 1000 < ALIVE_MS]
        if running:
            names = ", ".join(f"{each.shard} ({each.holder})" for each in running)
            raise ShardsDiffer(f"relays of shards {names} run: stop them, and try again 10 s later")
        if self.rows(state=RowState.CLAIMED, limit=1):
            raise ShardsDiffer("rows are claimed: let the relays run as they did until none is, and stop them then")
        table = self._outbox.shards
        with translate_errors(), self._engine.begin() as connection:
            connection.execute(update(table).values(shards=shards))

    def renumber_shard(self, client: Client, name: str, shard: int) -> dict[str, int]:
        """Renumbers a shard after OutboxBehind or SequencesForgotten: sequence ids continue after the highest that its
        topics know, and claimed rows wait again, so that those that were stored already are stored twice. Fences a
        running relay. Returns the highest id of each destination."""
        known = [each for each in self.read_shards() if each.shard == shard]
        if not known:
            raise OutboxError(f"the outbox has no shard {shard} yet: nothing is numbered")
        store = RelayStore(self._engine, self._outbox, shard, known[0].shards)
        taken = store.claim_shard("magnetar outbox renumber")
        destinations = {*taken.stored, *(row.destination for row in taken.claimed)}
        for topic in store.topics():
            try:
                found = client.get_topic_partitions(topic)
            except (InvalidTopicName, TopicNotFound):  # nothing was ever sent there
                continue
            partitions = 0 if found == [topic] else len(found)
            destinations |= {destination_name(topic, number, partitions) for number in range(max(1, partitions))}
        owned = sorted(each for each in destinations if shard_of(each, known[0].shards) == shard)
        last = self._last_ids(client, name, owned)
        store.renumber(taken.epoch, max([taken.next_seq, *(each + 1 for each in last.values())]), last)
        return last

    def _last_ids(self, client: Client, name: str, destinations: Sequence[str]) -> dict[str, int]:
        sender = RelaySender(client, name, RelaySettings(), lambda fact: None)

        async def one(destination: str) -> int:
            producer = await sender.open_producer(destination)
            try:
                return producer.last_sequence_id()
            finally:
                await producer.close()

        return {each: shared_loop_thread().run(one(each)) for each in destinations}
