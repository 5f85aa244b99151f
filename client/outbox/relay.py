"""The relay of one shard of an outbox (`Relay`): runs as a thread of the application, or as a process of its own.

    relay = Relay(client, engine, outbox, shard=0, shards=1)
    relay.start()                    # in a new thread; `relay.run()` does the same in the calling thread
    …
    relay.stop()

A relay owns a core (client/outbox/relay_core.py), which makes the decisions, and carries out the core's effects:
database transactions in its own thread, all else in the client's event loop. A failure that may pass is retried for as
long as it lasts: the database or a broker is not reachable. An error that an operator must resolve ends the relay, and
is in `error`. An unforeseen error is logged, and the relay starts again, as after a crash.

Also the operations of an operator on an outbox (`OutboxAdmin`), for `magnetar outbox`: to list, park, revive and delete
rows. They may be called while relays run, because they do not change rows that a relay has claimed. There are two
exceptions: `set_shard_count` raises ShardsDiffer while a relay runs, and `renumber_shard` fences it."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Sequence
from pathlib import PurePath
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol, Self

from sqlalchemy import Engine, delete, select, update

from ...proto.errors import InvalidRequest, MagnetarError
from ...proto.names import check_producer_name
from ...runtime.clock import SystemClock
from ..blocking.client import Client
from ..blocking.loop_thread import shared_loop_thread
from ..common.errors import InvalidTopicName, TopicNotFound
from .destination_core import (
    AskTopicPartitions,
    FindTopics,
    OpenDestination,
    RelayDatabaseTransaction,
    RelayEffect,
    RelaySettings,
    RunDatabaseTransaction,
    SendInTransaction,
    SendRows,
    StopRelay,
)
from .relay_core import RelayCore, find_shard_of_destination, make_destination_name
from .rows import (
    OutboxBehind,
    OutboxError,
    OutboxUnreachable,
    RelayFenced,
    RowState,
    SequencesForgotten,
    ShardsDiffer,
    now_ms,
)
from .sender import RelayFact, RelaySender
from .store import Lag, RelayStore
from .tables import SQLAlchemyOutbox, translate_database_errors

RELAY_ALIVE_MS = 10_000
"""A relay that was active within this time, in ms, counts as running."""


class OutboxRow(NamedTuple):
    """A row of an outbox without its value, for the CLI. `state`: a name of RowState in small letters. `size`: bytes of
    key, value and properties. `created_ms`: ms since the epoch. `attempts`: how often it was refused. `seq`, `shard`:
    the sequence id and the shard of a claimed row, else None. `error`: why it was refused last; None: it was not.
    `unit`: a number that is equal for all rows of one transaction of the application."""

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
    """The record of a shard in the database. `shards`: the number of shards of the outbox. `epoch`: how often the shard
    was claimed. `holder`: the host and process id of the relay that has the shard. `seen_s`: seconds since that relay
    was last active. `next_seq`: the sequence id that the next claimed row gets."""

    shard: int
    shards: int
    epoch: int
    holder: str
    seen_s: float
    next_seq: int


class OutboxAdmin:
    """The operations of an operator on an outbox: to list its rows and shards, to park, revive and delete rows, and to
    renumber a shard. Each raises OutboxUnreachable if the database does not answer, or another OutboxError if the
    database refuses the statement."""

    def __init__(self, engine: Engine, outbox: SQLAlchemyOutbox) -> None:
        self._engine, self._outbox = engine, outbox
        self._rows = outbox.rows
        self._store = RelayStore(engine, outbox)

    def create(self) -> None:
        """Creates those tables of the outbox that are missing. Raises OutboxColumnsMissing if a table of that name
        exists but lacks columns; OutboxUnreachable or another OutboxError if the database does not answer or refuses
        it."""
        with translate_database_errors():
            for table in (self._outbox.rows, self._outbox.shards, self._outbox.positions):
                table.create(self._engine, checkfirst=True)
        self._store.check()

    def check(self) -> None:
        """Checks that the tables of the outbox are complete. Raises OutboxTableMissing if one is missing,
        OutboxColumnsMissing if one lacks columns, OutboxUnreachable if the database does not answer."""
        self._store.check()

    def rows(self, *, state: RowState | None = None, topic: str | None = None, limit: int = 100) -> list[OutboxRow]:
        """Returns up to `limit` rows in the order of their ids; only rows in the state `state` and of the topic
        `topic` (its full name), if these are given. Raises OutboxUnreachable or another OutboxError if the query
        fails."""
        c = self._rows.c
        query = select(
            c.id, c.state, c.topic, c.key, c.size, c.created, c.attempts, c.seq, c.shard, c.error, c.unit
        ).order_by(c.id).limit(limit)  # fmt: skip
        if state is not None:
            query = query.where(c.state == state)
        if topic is not None:
            query = query.where(c.topic == topic)
        with translate_database_errors(), self._engine.connect() as connection:
            found = connection.execute(query).all()
        return [OutboxRow._make(each)._replace(state=RowState(each[1]).name.lower()) for each in found]

    def read_shards(self) -> list[ShardRecord]:
        """Returns the records of all shards that a relay ever claimed, in the order of their numbers. Raises
        OutboxUnreachable or another OutboxError if the query fails."""
        table = self._outbox.shards
        with translate_database_errors(), self._engine.connect() as connection:
            found = connection.execute(select(table).order_by(table.c.shard)).all()
        now = now_ms()
        return [
            ShardRecord(r.shard, r.shards, r.epoch, r.holder, max(0, now - r.seen) / 1000, r.next_seq) for r in found
        ]

    def park_rows(self, ids: Sequence[int]) -> int:
        """Parks those of the rows `ids` that wait or were refused: no relay sends parked rows, and later rows of the
        same keys wait. Returns the number of rows that were parked. Raises OutboxUnreachable or another OutboxError if
        the database fails."""
        return self._change(ids, (RowState.WAITING, RowState.HELD), state=int(RowState.PARKED), error="parked by hand")

    def revive_rows(self, ids: Sequence[int] | None = None) -> int:
        """Makes those of the rows `ids` that are parked or were refused wait for a relay again, and sets their number
        of attempts to 0. `ids` None: all parked and refused rows. Returns the number of rows that were revived. Raises
        OutboxUnreachable or another OutboxError if the database fails."""
        return self._change(
            ids, (RowState.PARKED, RowState.HELD), state=int(RowState.WAITING), attempts=0, error=None, retry_at=None
        )

    def _change(self, ids: Sequence[int] | None, states: tuple[RowState, ...], **values: Any) -> int:
        wanted = [self._rows.c.state.in_(tuple(int(state) for state in states))]
        if ids is not None:
            wanted.append(self._rows.c.id.in_(ids))
        with translate_database_errors(), self._engine.begin() as connection:
            return connection.execute(update(self._rows).where(*wanted).values(**values)).rowcount

    def drop(self, ids: Sequence[int]) -> int:
        """Deletes those of the rows `ids` that no relay has claimed: their messages are never sent. Returns the number
        of deleted rows. Raises OutboxUnreachable or another OutboxError if the database fails."""
        with translate_database_errors(), self._engine.begin() as connection:
            here = self._rows.c.id.in_(ids), self._rows.c.state != int(RowState.CLAIMED)
            return connection.execute(delete(self._rows).where(*here)).rowcount

    def set_shard_count(self, shards: int) -> None:
        """Changes the number of shards into which the outbox is divided. Raises ShardsDiffer if a relay was active in
        the last 10 s, or rows are claimed; OutboxUnreachable or another OutboxError if the database fails."""
        running = [each for each in self.read_shards() if each.seen_s * 1000 < RELAY_ALIVE_MS]
        if running:
            names = ", ".join(f"{each.shard} ({each.holder})" for each in running)
            raise ShardsDiffer(f"relays of shards {names} run: stop them, and try again 10 s later")
        if self.rows(state=RowState.CLAIMED, limit=1):
            raise ShardsDiffer("rows are claimed: let the relays run as they did until none is, and stop them then")
        table = self._outbox.shards
        with translate_database_errors(), self._engine.begin() as connection:
            connection.execute(update(table).values(shards=shards))

    def renumber_shard(self, client: Client, name: str, shard: int) -> dict[str, int]:
        """Renumbers the sequence ids of a shard after the error OutboxBehind or SequencesForgotten: new ids continue
        after the highest id that the topics know. Claimed rows wait again, so rows that were stored already are stored
        a second time. Fences a running relay. `name`: the name of the relay's producers (`producer_name`). Returns the
        highest id of each destination. Raises OutboxError if no relay ever had the shard, or the database fails;
        RelayFenced if another relay claims the shard meanwhile; and the errors of `Client.create_producer`."""
        known = [each for each in self.read_shards() if each.shard == shard]
        if not known:
            raise OutboxError(f"the outbox has no shard {shard} yet: nothing is numbered")
        store = RelayStore(self._engine, self._outbox, shard, known[0].shards)
        taken = store.claim_shard("magnetar outbox renumber")
        destinations = {*taken.stored, *(row.destination for row in taken.claimed)}
        for topic in store.list_topics():
            try:
                found = client.get_topic_partitions(topic)
            except (InvalidTopicName, TopicNotFound):  # nothing was ever sent there
                continue
            partitions = 0 if found == [topic] else len(found)
            destinations |= {make_destination_name(topic, number, partitions) for number in range(max(1, partitions))}
        owned = sorted(each for each in destinations if find_shard_of_destination(each, known[0].shards) == shard)
        last = self._last_ids(client, name, owned)
        store.renumber_rows(taken.epoch, max([taken.next_seq, *(each + 1 for each in last.values())]), last)
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


_LOG = logging.getLogger("magnetar.outbox")
STANDBY_TAKEOVER_S = 10.0
"""Seconds after which a relay in standby claims the shard, if it did not see the holder of the shard become active
within that time (measured by its own clock)."""
_clock = SystemClock()


class TablesProvider(Protocol):
    """The interface of an outbox for its relays; SQLAlchemyOutbox and DjangoOutbox implement it. `tables` returns the
    tables that a relay reads. `relays`: the set of running relays of this process, which a commit wakes."""

    relays: Any

    def tables(self) -> SQLAlchemyOutbox: ...


class Relay:
    """Sends the rows of one shard of an outbox. A shard has one relay at a time: a newer relay fences the older one,
    which ends with RelayFenced. With `standby` the relay waits until no other relay has the shard, so that every worker
    of an application can run one.

    `engine`: a SQLAlchemy engine for the application's database. `name`: the part NAME of the producers' name
    `outbox-NAME-SHARD`; by default the name of the database. NAME must stay the same, and must differ between databases
    that send to the same topics. `shards`: the number of relays that share the outbox, the same for all of them.
    `atomic`: the rows of one transaction of the application are sent in one transaction of the cluster, so that readers
    see all of these rows or none (docs/outbox.md); `shards` must then be 1. `shard`: its number, from 0. Raises
    InvalidRequest if `shard`, `shards` or `name` is wrong, or the database has no name and none is given."""

    def __init__(
        self, client: Client, engine: Engine, outbox: TablesProvider, shard: int = 0, shards: int = 1, *,
        name: str | None = None, standby: bool = False, settings: RelaySettings | None = None, atomic: bool = False,
    ) -> None:  # fmt: skip
        if not 0 <= shard < shards:
            raise InvalidRequest(f"shard {shard} of {shards}: shards count from 0")
        if atomic and shards > 1:
            raise InvalidRequest("an atomic relay is alone: what one transaction wrote may be for topics of any shard")
        self.name = producer_name(engine, name, shard)
        self.error: MagnetarError | None = None  # why it ended
        self.restarts = 0  # after unforeseen errors
        self._client = client
        self._outbox = outbox
        self._shard, self._shards = shard, shards
        self._settings = settings or RelaySettings()
        self._store = RelayStore(engine, outbox.tables(), shard, shards)
        self._standby = standby
        self._atomic = atomic
        self._facts: SimpleQueue[RelayFact | None] = SimpleQueue()
        self._is_woken = False  # the queue has a wake: a relay that does not read it gets no second one
        self._core: RelayCore | None = None
        self._sender: RelaySender | None = None
        self._phase = "new"
        self._trouble = ""  # what it waits for
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._thread: threading.Thread | None = None
        self._before = {"sent_rows": 0, "stored_rows": 0, "refused_rows": 0, "parked_rows": 0}

    # ------------------------------------------------------------------------------ start and stop
    def start(self) -> Self:
        """Starts the relay in a thread of its own, and returns the relay. Must be called once. Raises
        OutboxTableMissing or OutboxColumnsMissing if the tables of the outbox are missing or lack columns; a later
        error is in `error`. A database that does not answer is tried again."""
        assert self._thread is None, "a relay is started once"
        try:
            self._store.check()
        except OutboxUnreachable as error:
            _LOG.warning("%s: %s", self.name, error)
        self._thread = threading.Thread(target=self._in_thread, name=f"magnetar-{self.name}", daemon=True)
        self._thread.start()
        return self

    def _in_thread(self) -> None:
        try:
            self.run()
        except MagnetarError as error:
            _LOG.error("%s: the relay ended: %s: %s", self.name, type(error).__name__, error)
        except BaseException as error:
            self.error = MagnetarError(f"{type(error).__name__}: {error}")
            _LOG.exception("%s: the relay ended", self.name)

    def run(self) -> None:
        """Runs the relay in the calling thread until `stop` is called in another thread. Raises the error that ended
        the relay, which is also in `error`: RelayFenced, ShardsDiffer, OutboxBehind, SequencesForgotten,
        DeduplicationOff, or that of a table that is missing or read-only. While the database does not answer, and after
        an unforeseen error, which is logged, the relay begins again after a pause."""
        self._outbox.relays.add(self)
        failed = 0
        try:
            while not self._stop.is_set():
                try:
                    self._serve()
                except OutboxUnreachable as error:
                    self._trouble = error.message
                    _LOG.warning("%s: %s", self.name, error)
                except MagnetarError as error:
                    self.error = error
                    raise
                except Exception:
                    self.restarts += 1
                    self._trouble = "an unforeseen error; see the log"
                    _LOG.exception("%s: the relay starts anew", self.name)
                else:
                    failed = 0
                    continue
                self._stop.wait(min(self._settings.back_off_last_s, 0.1 * 2 ** min(failed, 20)))
                failed += 1
        finally:
            self._phase = "failed" if self.error else "stopped"
            self._ready.set()
            self._outbox.relays.discard(self)

    def wake(self) -> None:
        """Makes the relay search for rows at once instead of after its pause. May be called from any thread."""
        if not self._is_woken:
            self._is_woken = True
            self._facts.put(self._on_woken)

    def _on_woken(self, core: RelayCore, now: float) -> list[RelayEffect]:
        self._is_woken = False  # first: rows of a later commit need a search of their own
        return core.on_rows_committed(now)

    def wait_ready(self, timeout_s: float) -> bool:
        """Waits until the relay has claimed its shard, or has ended. Returns False if neither happened within
        `timeout_s` seconds."""
        return self._ready.wait(timeout_s)

    def stop(self) -> None:
        """Stops the relay: it claims no more rows, waits up to `stop_s` seconds for rows in flight, and ends. Returns
        when the thread of `start` has ended, after `stop_s` + 30 seconds at the latest; at once for a relay of `run`.
        The next relay of the shard sends the claimed rows that were not sent. May be called again."""
        self._stop.set()
        self._facts.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(self._settings.stop_s + 30.0)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ------------------------------------------------------------------------------ the loop
    def _serve(self) -> None:
        self._store.check()
        if not self._wait_turn():
            return
        holder = f"{socket.gethostname()}:{os.getpid()}"
        taken = self._store.claim_shard(holder, atomic=self._atomic)
        self._facts = SimpleQueue()  # what concerns an earlier life is not told to this one
        self._is_woken = False  # after that: a wake in between is one too many, and none is missing
        facts = self._facts
        core = RelayCore(self._shard, self._shards, self._settings, name=self.name, atomic=self._atomic)
        sender = RelaySender(self._client, self.name, self._settings, facts.put)
        self._core, self._sender = core, sender
        self._phase, self._trouble = "running", ""
        self._ready.set()
        try:
            self._run_effects(core, sender, core.on_shard_claimed(taken, _clock.monotonic()))
            self._run_steps(core, sender, facts)
        finally:
            self._before = self._counters()
            self._core = self._sender = None
            sender.close()

    def _run_steps(self, core: RelayCore, sender: RelaySender, facts: SimpleQueue[RelayFact | None]) -> None:
        ends_at = float("inf")
        while True:
            now = _clock.monotonic()
            if self._stop.is_set() and not core.stopping:
                ends_at = now + self._settings.stop_s
                self._run_effects(core, sender, core.stop_claiming(now))
            if core.stopping and (core.is_idle or now >= ends_at):
                return
            try:
                fact = facts.get(timeout=max(0.0, min(core.next_timer_at, ends_at) - now))
            except Empty:
                self._run_effects(core, sender, core.run_timers(_clock.monotonic()))
                continue
            if fact is not None:
                self._run_effects(core, sender, fact(core, _clock.monotonic()))

    def _run_effects(self, core: RelayCore, sender: RelaySender, effects: list[RelayEffect]) -> None:
        left = deque(effects)
        while left:
            match left.popleft():
                case SendRows(destination, rows):
                    sender.send(destination, rows)
                case SendInTransaction(parts):
                    sender.send_in_transaction(parts)
                case RunDatabaseTransaction(turn):
                    left.extend(self._transact(core, turn))
                case OpenDestination(destination):
                    sender.open(destination)
                case AskTopicPartitions(topic):
                    sender.start_resolving_topic(topic)
                case FindTopics():
                    left.extend(self._find(core))
                case StopRelay(error):
                    raise self._why(core, error)

    def _why(self, core: RelayCore, error: MagnetarError) -> MagnetarError:
        """Returns the error to end with: RelayFenced if a newer relay has the shard, because its messages look like
        those of another database; else `error`."""
        if isinstance(error, OutboxBehind | SequencesForgotten) and self._store.read_shard_lease()[0] != core.epoch:
            return RelayFenced(f"a newer relay has shard {self._shard} of {self.name}: this one ends")
        return error

    def _transact(self, core: RelayCore, turn: RelayDatabaseTransaction) -> list[RelayEffect]:
        try:
            rows, next_seq = self._store.run_database_transaction(turn)
        except RelayFenced:
            return core.on_fenced()
        except OutboxUnreachable as error:
            self._log_trouble(error)
            return core.on_database_outcome_unknown(_clock.monotonic())
        self._trouble = ""
        return core.on_database_committed(turn, rows, next_seq, _clock.monotonic())

    def _find(self, core: RelayCore) -> list[RelayEffect]:
        try:
            topics = self._store.list_topics()
        except OutboxUnreachable as error:
            self._log_trouble(error)
            return core.on_topic_search_failed(_clock.monotonic())
        return core.on_topics_found(topics, _clock.monotonic())

    def _log_trouble(self, error: OutboxUnreachable) -> None:
        if not self._trouble:
            _LOG.warning("%s: %s", self.name, error)
        self._trouble = error.message

    def _wait_turn(self) -> bool:
        """With `standby`, waits until the shard's holder has not renewed its record for STANDBY_TAKEOVER_S. Returns
        False if the relay was stopped before."""
        if not self._standby:
            return True
        self._phase = "standby"
        before, since = self._store.read_shard_lease(), _clock.monotonic()
        while before != (0, 0) and _clock.monotonic() - since < STANDBY_TAKEOVER_S:
            if self._stop.wait(STANDBY_TAKEOVER_S / 10):
                return False
            found = self._store.read_shard_lease()
            if found != before:
                before, since = found, _clock.monotonic()
        return True

    # ------------------------------------------------------------------------------ what it does
    def _counters(self) -> dict[str, int]:
        core = self._core
        return {
            name: count + (int(getattr(core, name)) if core is not None else 0) for name, count in self._before.items()
        }

    def statistics(self) -> dict[str, Any]:
        """Returns counters since the start, without a query to the database: rows sent, stored, refused and parked;
        claimed rows in memory; destinations and topics that wait, with the reason (`waits`). `trouble`: the reason why
        the relay itself waits; empty if it does not. `phase`: new, standby, running, stopped or failed."""
        core = self._core
        found: dict[str, Any] = {
            "name": self.name, "shard": self._shard, "shards": self._shards, "phase": self._phase, **self._counters(),
            "restarts": self.restarts, "trouble": self._trouble,
            "error": f"{type(self.error).__name__}: {self.error.message}" if self.error else "",
        }  # fmt: skip
        destinations = list(core.destinations.values()) if core is not None else []
        topics = dict(core.topics) if core is not None else {}
        together = core.atomic_units if core is not None else None
        found["in_memory_rows"] = sum(each.row_count for each in destinations) + (together.row_count if together else 0)
        found["destinations"] = len(destinations)
        found["waits"] = {
            **{name: each.error for name, each in topics.items() if each.error},
            **{each.name: each.error for each in destinations if each.error},
        }
        return found

    def lag(self) -> Lag:
        """Returns the number of rows of the whole outbox by state, and the age of the oldest row that is not parked.
        Counts all rows in the database, so call it rarely. Raises an OutboxError if the query fails."""
        return self._store.measure_lag()


def producer_name(engine: Engine, name: str | None, shard: int) -> str:
    """Returns the name of the producers of a relay, `outbox-NAME-SHARD`. NAME is `name`, or by default the name of the
    database. Raises InvalidRequest if the database has no name and none is given, or if the name is not valid."""
    given = name if name is not None else PurePath(engine.url.database or "").stem
    if not given or given == ":memory:":
        raise InvalidRequest(f"the database {engine.url.drivername} has no name: give the outbox one (name=…, --name)")
    try:
        return check_producer_name(f"outbox-{given}-{shard}")
    except MagnetarError as error:
        raise InvalidRequest(f"{error.message}: choose another name (name=…, --name)") from error
