"""The database transactions of a relay (`RelayStore`). A shard has one holder at a time: the shard's record has an
epoch, which each new holder raises, and every transaction begins by updating that record under the holder's own epoch.
This update is the lease and the lock in one: the transaction of an older holder changes no row and raises RelayFenced.

`run_database_transaction` may be called again if its outcome is unknown: deletes and refusals of rows that are gone
change nothing, and the next sequence id in the record shows whether the claim was committed. SQLite, PostgreSQL, MySQL
8; `SKIP LOCKED` where the database has it, so that an operator who revives a row blocks no relay. Guards:
tests/client/outbox/test_store.py, tests/client/outbox/test_databases.py.

Also in this file, under the heading "units": the claim of whole units of rows (`UnitClaimer`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Connection,
    Engine,
    Table,
    and_,
    bindparam,
    column,
    delete,
    exists,
    func,
    insert,
    or_,
    select,
    update,
)
from sqlalchemy.dialects.postgresql import ARRAY

from .destination_core import ClaimedRow, ClaimedShard, ClaimRequest, RefusedRow, RelayDatabaseTransaction
from .relay_core import make_destination_name
from .rows import RelayFenced, RowState, ShardsDiffer, now_ms
from .tables import SQLAlchemyOutbox, check_outbox_tables, translate_database_errors

# --------------------------------------------------------------------------------------------------------- units
# The claim of whole units: an atomic relay claims the rows that one transaction of the application wrote, or none of
# them.
#
#     rows = UnitClaimer(connection, table, claim, phases).claim_units()    in the order of their ids, unit by unit
#
# A unit is taken when each of its rows may be claimed, and is locked: one that is parked, that waits for another
# attempt or whose destination takes nothing keeps all of it. **Order.** What is passed over keeps its keys: a later
# unit with a row of one of these keys is passed over, too. So the rows of a key leave in the order of their ids.
#
# Units that cannot be claimed are checked in each claim, at most CLAIM_WINDOWS_MAX of `rows_max` rows: units after them
# wait, too. Guards: tests/client/outbox/test_units.py.


CLAIM_WINDOWS_MAX = 10
IDS_PER_STATEMENT = 500
"""Most ids in one SQL statement: SQLite had a limit of 999 parameters."""
WhereClauses = Sequence[ColumnElement[bool]]


class UnitClaimer:
    """Claims whole units of rows within the database transaction of `connection`. `phases`: SQL conditions of rows that
    may be claimed; a later condition is tried only if the earlier ones found no unit."""

    def __init__(
        self, connection: Connection, rows: Table, claim: ClaimRequest, phases: Sequence[WhereClauses]
    ) -> None:
        self._connection, self._rows, self._claim, self._phases = connection, rows, claim, phases
        self._taken: list[Any] = []
        self._size = 0
        self._seen: set[int] = set()
        self._kept: set[tuple[str, str]] = set()  # topic and key of what was passed over

    def claim_units(self) -> list[Any]:
        """Locks and returns the rows of the claimed units, unit by unit, in the order of the units' first ids; an empty
        list if no unit can be claimed. The caller must mark the rows as claimed. Must be called once."""
        for phase in self._phases:
            after = 0
            for _ in range(CLAIM_WINDOWS_MAX):
                heads = self._heads(phase, after)
                if not heads or not self._claim_heads(heads) or self._taken:
                    break
                after = heads[-1].id
            if self._taken:
                break
        return self._taken

    def _heads(self, phase: WhereClauses, after: int) -> Sequence[Any]:
        columns = self._rows.c
        query = select(columns.id, columns.unit).where(*phase, columns.id > after).order_by(columns.id)
        return self._connection.execute(query.limit(self._claim.rows_max)).all()

    def _claim_heads(self, heads: Sequence[Any]) -> bool:
        """Claims those units of the rows `heads` that can be claimed. Returns False if there is no room for more."""
        whole = self._load_units(heads)
        free = self._lock_claimable([row.id for rows in whole.values() for row in rows])
        for head in heads:
            rows = whole.pop((head.unit, None if head.unit is not None else head.id), None)
            if rows is None:
                continue  # it was looked at
            places = {(row.topic, row.key) for row in rows if row.key is not None}
            if not free.issuperset(row.id for row in rows) or places & self._kept:
                self._kept |= places
            elif not self._add_unit(rows):
                return False
        return True

    def _add_unit(self, rows: Sequence[Any]) -> bool:
        claim, size = self._claim, sum(row.size for row in rows)
        is_large = len(self._taken) + len(rows) > claim.rows_max or self._size + size > claim.bytes_max
        if self._taken and is_large:
            return False
        self._taken += rows
        self._size += size
        return True

    def _load_units(self, heads: Sequence[Any]) -> dict[tuple[int | None, int | None], list[Any]]:
        """Returns all rows of the units to which `heads` belong, grouped by unit; a row without a unit by its
        own id."""
        columns = self._rows.c
        units = list(dict.fromkeys(each.unit for each in heads if each.unit not in {None, *self._seen}))
        self._seen.update(units)
        found: dict[tuple[int | None, int | None], list[Any]] = {}
        of = ((columns.unit, units), (columns.id, [each.id for each in heads if each.unit is None]))
        for each_of, values in of:
            for some in split_ids_into_chunks(values):
                query = select(
                    columns.id, columns.unit, columns.topic, columns.key, columns.key_hash, columns.size
                ).where(each_of.in_(some)).order_by(columns.id)  # fmt: skip
                for row in self._connection.execute(query):
                    found.setdefault((row.unit, None if row.unit is not None else row.id), []).append(row)
        return found

    def _lock_claimable(self, ids: Sequence[int]) -> set[int]:
        """Locks those of the rows `ids` that may be claimed, and returns their ids."""
        rows = self._rows
        may_be = or_(*(and_(*phase) for phase in self._phases))
        free: set[int] = set()
        for some in split_ids_into_chunks(ids):
            query = select(rows.c.id).where(rows.c.id.in_(some), may_be).with_for_update(skip_locked=True, of=rows)
            free.update(self._connection.scalars(query))
        return free


def split_ids_into_chunks(ids: Sequence[int]) -> Iterable[Sequence[int]]:
    """Yields the ids in order, in sequences of at most IDS_PER_STATEMENT ids."""
    return (ids[at : at + IDS_PER_STATEMENT] for at in range(0, len(ids), IDS_PER_STATEMENT))


# --------------------------------------------------------------------------------------------------------- store


class Lag(NamedTuple):
    """The lag of an outbox: the number of its rows by state (`waiting`, `claimed`, `held`, `parked`: see RowState), and
    the age of its oldest row that is not parked, in seconds (`oldest_s`; 0 if there is none)."""

    waiting: int
    claimed: int
    held: int
    parked: int
    oldest_s: float


class RelayStore:
    """Runs the database transactions of one relay in the application's database. Each method raises OutboxUnreachable
    if the database does not answer, or another OutboxError if the database refuses the statement. `shard`: the number
    of the relay's shard, from 0; `shards`: the number of shards of the outbox."""

    def __init__(self, engine: Engine, outbox: SQLAlchemyOutbox, shard: int = 0, shards: int = 1) -> None:
        self._engine = engine
        self._outbox = outbox
        self._rows, self._shards, self._positions = outbox.rows, outbox.shards, outbox.positions
        self._shard, self._count = shard, shards
        rows = self._rows
        self._claimed_columns = (
            rows.c.id, rows.c.seq, rows.c.destination, rows.c.size, rows.c.key, rows.c.value, rows.c.properties,
            rows.c.event_time, rows.c.deliver_at, rows.c.attempts, rows.c.unit,
            rows.c.value_schema, rows.c.key_form,
        )  # fmt: skip
        self._mark = (
            update(rows).where(rows.c.id == bindparam("row_id"))
            .values(state=int(RowState.CLAIMED), shard=shard, seq=bindparam("new_seq"), destination=bindparam("to"))
        )  # fmt: skip

    def check(self) -> None:
        """Checks that the tables of the outbox are complete. Raises OutboxTableMissing if one is missing,
        OutboxColumnsMissing if one lacks columns, OutboxUnreachable if the database does not answer."""
        check_outbox_tables(self._engine, self._outbox)

    # ------------------------------------------------------------------------------ the shard
    def read_shard_lease(self) -> tuple[int, int]:
        """Returns two numbers of the shard: its epoch, and the time in ms since the epoch at which the relay that holds
        it was last active; (0, 0) if no relay ever held it. Raises the errors that the class names."""
        shards = self._shards
        with translate_database_errors(), self._engine.connect() as connection:
            found = connection.execute(
                select(shards.c.epoch, shards.c.seen).where(shards.c.shard == self._shard)
            ).one_or_none()
        return (0, 0) if found is None else (found.epoch, found.seen)

    def claim_shard(self, holder: str, *, atomic: bool = False) -> ClaimedShard:
        """Claims the shard for the relay `holder` and fences the relay that held it before. `atomic`: the relay sends
        units in cluster transactions, which is recorded for good. Returns the state of the shard. Raises ShardsDiffer,
        and changes nothing, if the outbox has another number of shards; and the errors that the class names."""
        shards, now = self._shards, now_ms()
        noted = {"atomic": 1} if atomic else {}
        with translate_database_errors(), self._engine.begin() as connection:
            taken = connection.execute(
                update(shards).where(shards.c.shard == self._shard)
                .values(epoch=shards.c.epoch + 1, holder=holder, **noted)
            )  # fmt: skip
            if taken.rowcount == 0:
                connection.execute(
                    insert(shards).values(
                        shard=self._shard, shards=self._count, epoch=1, next_seq=0, holder=holder, seen=0, **noted
                    )
                )
            others = connection.scalars(select(shards.c.shards).distinct().where(shards.c.shards != 0)).all()
            if any(each != self._count for each in others):
                raise ShardsDiffer(
                    f"the outbox has {next(each for each in others if each != self._count)} shards, and this relay was"
                    f" started for {self._count}: start it with that number, or stop all relays and change it:"
                    f" magnetar outbox shards {self._count}"
                )
            found = connection.execute(select(shards).where(shards.c.shard == self._shard)).one()
            connection.execute(update(shards).where(shards.c.shard == self._shard).values(seen=now))
            stored = self._stored(connection)
            claimed = self._claimed(connection, -1)
        absent = max(0, now - found.seen) / 1000 if found.seen else None
        return ClaimedShard(found.epoch, found.next_seq, stored, claimed, absent, was_atomic=bool(found.atomic))

    def _stored(self, connection: Connection) -> dict[str, int]:
        positions = self._positions
        found = connection.execute(
            select(positions.c.destination, positions.c.seq).where(positions.c.shard == self._shard)
        )
        return {each.destination: each.seq for each in found}

    def _claimed(self, connection: Connection, from_seq: int) -> list[ClaimedRow]:
        rows = self._rows
        found = connection.execute(
            select(*self._claimed_columns)
            .where(rows.c.state == RowState.CLAIMED, rows.c.shard == self._shard, rows.c.seq >= from_seq)
            .order_by(rows.c.seq)
        )
        return [ClaimedRow._make(each) for each in found]

    def renumber_rows(self, epoch: int, next_seq: int, stored: dict[str, int]) -> None:
        """Renumbers the sequence ids of the shard: the next claimed row gets `next_seq`. Records the highest stored id
        of each destination (`stored`), and makes claimed rows wait again. Raises RelayFenced, and changes nothing, if
        the epoch of the shard is not `epoch`; and the errors that the class names."""
        shards, rows = self._shards, self._rows
        with translate_database_errors(), self._engine.begin() as connection:
            here = shards.c.shard == self._shard, shards.c.epoch == epoch
            if connection.execute(update(shards).where(*here).values(next_seq=next_seq)).rowcount == 0:
                raise RelayFenced(f"shard {self._shard} has a newer holder: stop its relay first")
            connection.execute(
                update(rows).where(rows.c.state == RowState.CLAIMED, rows.c.shard == self._shard)
                .values(state=int(RowState.WAITING), shard=None, seq=None, destination=None)
            )  # fmt: skip
            for destination, seq in stored.items():
                self._store_position(connection, destination, seq)

    # ------------------------------------------------------------------------------ a turn
    def run_database_transaction(self, turn: RelayDatabaseTransaction) -> tuple[list[ClaimedRow], int]:
        """Runs the turn `turn` in one database transaction: records outcomes and claims rows. Returns the claimed rows,
        in the order of their sequence ids, and the next sequence id. If the turn was committed before, returns what it
        claimed then. Raises RelayFenced, and changes nothing, if the shard has a newer holder; and the errors that the
        class names. After OutboxUnreachable it is unknown whether the turn was committed."""
        shards = self._shards
        with translate_database_errors(), self._engine.begin() as connection:
            ours = connection.execute(
                update(shards).where(shards.c.shard == self._shard, shards.c.epoch == turn.epoch).values(seen=now_ms())
            )
            if ours.rowcount == 0:
                raise RelayFenced(f"shard {self._shard} has a newer holder")
            next_seq = connection.scalar(select(shards.c.next_seq).where(shards.c.shard == self._shard))
            assert next_seq is not None, "the shard has its record"
            self._record(connection, turn)
            if next_seq > turn.next_seq:  # this turn took place before
                return self._claimed(connection, turn.next_seq), next_seq
            if turn.claim is None:
                return [], next_seq
            claimed = self._claim(connection, turn.claim, next_seq)
            if claimed:
                next_seq += len(claimed)
                connection.execute(update(shards).where(shards.c.shard == self._shard).values(next_seq=next_seq))
        return claimed, next_seq

    def _record(self, connection: Connection, turn: RelayDatabaseTransaction) -> None:
        rows = self._rows
        for ids in split_ids_into_chunks(turn.delete):
            connection.execute(delete(rows).where(rows.c.id.in_(ids), rows.c.state == RowState.CLAIMED))
        for destination, seq in turn.stored.items():
            self._store_position(connection, destination, seq)
        for failure in turn.failures:
            self._store_refused(connection, failure)
        for ids in split_ids_into_chunks([each.id for each in turn.release]):
            connection.execute(
                update(rows).where(rows.c.id.in_(ids), rows.c.state == RowState.CLAIMED)
                .values(state=int(RowState.WAITING), shard=None, seq=None, destination=None)
            )  # fmt: skip

    def _store_position(self, connection: Connection, destination: str, seq: int) -> None:
        positions = self._positions
        here = and_(positions.c.shard == self._shard, positions.c.destination == destination)
        if connection.execute(update(positions).where(here).values(seq=seq)).rowcount == 0:
            there = connection.scalar(select(positions.c.seq).where(here))  # MySQL counts only rows that changed
            if there is None:
                connection.execute(insert(positions).values(shard=self._shard, destination=destination, seq=seq))

    def _store_refused(self, connection: Connection, failure: RefusedRow) -> None:
        rows, row = self._rows, failure.row
        state = RowState.PARKED if failure.parked else RowState.HELD
        connection.execute(
            update(rows).where(rows.c.id == row.id, rows.c.state == RowState.CLAIMED, rows.c.seq == row.seq)
            .values(
                state=int(state), attempts=row.attempts + 1, error=failure.error[:2000],
                retry_at=now_ms() + int(failure.retry_after_s * 1000), shard=None, seq=None, destination=None,
            )
        )  # fmt: skip

    # ------------------------------------------------------------------------------ a claim
    def _claim(self, connection: Connection, claim: ClaimRequest, next_seq: int) -> list[ClaimedRow]:
        if claim.units:
            found: Sequence[Any] = UnitClaimer(
                connection, self._rows, claim, self._phases(connection, claim)
            ).claim_units()
        else:
            found = self._candidates(connection, claim)
        if not found:
            return []
        seqs: dict[int, tuple[int, str]] = {}
        size = 0
        for each in found:
            size += each.size
            if seqs and size > claim.bytes_max and not claim.units:
                break
            partitions = claim.topics[each.topic][0]
            destination = make_destination_name(each.topic, each.key_hash % partitions if partitions else 0, partitions)
            seqs[each.id] = (next_seq + len(seqs), destination)
        self._assign(connection, seqs)
        rows = self._rows
        claimed: list[ClaimedRow] = []
        for ids in split_ids_into_chunks(list(seqs)):
            of_them = connection.execute(select(*self._claimed_columns).where(rows.c.id.in_(ids)))
            claimed += [ClaimedRow._make(each) for each in of_them]
        return sorted(claimed, key=lambda row: row.seq)

    def _candidates(self, connection: Connection, claim: ClaimRequest) -> Sequence[Any]:
        """Returns the rows that may be claimed, in the order of the ids: refused rows whose time has come, then waiting
        ones."""
        rows = self._rows
        found: list[Any] = []
        for phase in self._phases(connection, claim):
            if len(found) < claim.rows_max:
                query = select(rows.c.id, rows.c.topic, rows.c.key_hash, rows.c.size).where(*phase).order_by(rows.c.id)
                limited = query.limit(claim.rows_max - len(found)).with_for_update(skip_locked=True, of=rows)
                found += connection.execute(limited).all()
        return found

    def _phases(self, connection: Connection, claim: ClaimRequest) -> list[WhereClauses]:
        rows = self._rows
        stuck = connection.scalar(select(exists().where(rows.c.state >= RowState.HELD)))
        due = and_(rows.c.state == RowState.HELD, rows.c.retry_at <= now_ms())
        waiting = self._where(claim, rows.c.state == RowState.WAITING, older=False if stuck else None)
        return [self._where(claim, due, older=True), waiting] if stuck else [waiting]

    def _where(self, claim: ClaimRequest, state: ColumnElement[bool], *, older: bool | None) -> WhereClauses:
        """Returns the condition of rows in `state` that may be claimed. A refused row of the same key blocks a row:
        with `older` True only if it is older; with False always; with None there are no refused rows to check."""
        rows = self._rows
        wanted = [state, self._places(claim)]
        if older is not None:
            other = rows.alias()
            stuck = and_(other.c.state >= RowState.HELD, other.c.topic == rows.c.topic, other.c.key == rows.c.key)
            if claim.units:  # rows of one unit do not wait for each other
                stuck = and_(stuck, or_(other.c.unit.is_(None), rows.c.unit.is_(None), other.c.unit != rows.c.unit))
            wanted.append(~exists().where(and_(stuck, other.c.id < rows.c.id) if older else stuck))
        return wanted

    def _places(self, claim: ClaimRequest) -> ColumnElement[bool]:
        """Returns the condition of rows whose destinations have room for more claimed rows."""
        rows = self._rows
        whole = [topic for topic, (partitions, free) in claim.topics.items() if len(free) >= max(1, partitions)]
        terms: list[Any] = [rows.c.topic.in_(whole)] if whole else []
        for topic, (partitions, free) in claim.topics.items():
            if len(free) < max(1, partitions):
                terms.append(and_(rows.c.topic == topic, (rows.c.key_hash % partitions).in_(free)))
        return or_(*terms)

    def _assign(self, connection: Connection, seqs: dict[int, tuple[int, str]]) -> None:
        if connection.dialect.name == "postgresql":
            self._assign_at_once(connection, seqs)
            return
        connection.execute(
            self._mark, [{"row_id": id_, "new_seq": seq, "to": to} for id_, (seq, to) in seqs.items()]
        )

    def _assign_at_once(self, connection: Connection, seqs: dict[int, tuple[int, str]]) -> None:
        """Assigns ids with one UPDATE … FROM (unnest) per destination: a statement per row would take most of a claim's
        time."""
        rows = self._rows
        by_destination: dict[str, list[tuple[int, int]]] = {}
        for id_, (seq, to) in seqs.items():
            by_destination.setdefault(to, []).append((id_, seq))
        for to, pairs in by_destination.items():
            ids = bindparam("ids", [id_ for id_, _ in pairs], type_=ARRAY(BigInteger))
            numbers = bindparam("numbers", [seq for _, seq in pairs], type_=ARRAY(BigInteger))
            columns = column("id", BigInteger), column("seq", BigInteger)
            given = func.unnest(ids, numbers).table_valued(*columns).render_derived(name="given")
            connection.execute(
                update(rows).where(rows.c.id == given.c.id)
                .values(state=int(RowState.CLAIMED), shard=self._shard, seq=given.c.seq, destination=to)
            )  # fmt: skip

    # ------------------------------------------------------------------------------ questions
    def list_topics(self) -> list[str]:
        """Returns the full names of the topics for which rows wait or were refused, sorted. Reads one index entry for
        each topic and state. Raises the errors that the class names."""
        rows = self._rows
        found: set[str] = set()
        with translate_database_errors(), self._engine.connect() as connection:
            for state in (RowState.WAITING, RowState.HELD):
                query = of_state = select(func.min(rows.c.topic)).where(rows.c.state == state)
                while (topic := connection.scalar(query)) is not None:
                    found.add(topic)
                    query = of_state.where(rows.c.topic > topic)
        return sorted(found)

    def measure_lag(self) -> Lag:
        """Returns the lag of the whole outbox, not only of this shard. Counts all rows, so call it rarely. Raises the
        errors that the class names."""
        rows = self._rows
        with translate_database_errors(), self._engine.connect() as connection:
            counted = connection.execute(select(rows.c.state, func.count()).group_by(rows.c.state)).all()
            first = [
                select(rows.c.created).where(rows.c.state == state).order_by(rows.c.id).limit(1)
                for state in (RowState.WAITING, RowState.CLAIMED, RowState.HELD)
            ]
            oldest = [found for query in first if (found := connection.scalar(query)) is not None]
        age = max(0, now_ms() - min(oldest)) / 1000 if oldest else 0.0
        counts: dict[int, int] = {each[0]: each[1] for each in counted}
        waiting, claimed, held, parked = (counts.get(int(state), 0) for state in RowState)
        return Lag(waiting, claimed, held, parked, age)
