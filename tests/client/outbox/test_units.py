"""Units of an outbox on real databases: which rows one transaction wrote, and claims of all of them or none."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sqlalchemy import Engine, MetaData, select, update
from sqlalchemy.orm import Session

from magnetar.client.outbox.destination_core import ClaimedRow, ClaimRequest, RefusedRow, RelayDatabaseTransaction
from magnetar.client.outbox.relay import OutboxAdmin
from magnetar.client.outbox.rows import RowState
from magnetar.client.outbox.store import CLAIM_WINDOWS_MAX, RelayStore
from magnetar.client.outbox.tables import SQLAlchemyOutbox

A, B = (f"persistent://public/default/{name}" for name in "ab")
BOTH = {A: (0, (0,)), B: (0, (0,))}
ALL = ClaimRequest(100, 1 << 20, BOTH, units=True)


class Shop:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        metadata = MetaData()
        self.outbox = SQLAlchemyOutbox(metadata)
        metadata.create_all(engine)
        self.store = RelayStore(engine, self.outbox)
        self.admin = OutboxAdmin(engine, self.outbox)
        self.epoch = self.store.claim_shard("me", atomic=True).epoch
        self.next_seq = 0

    def unit(self, *rows: tuple[str, str | None]) -> list[int]:
        """One transaction with rows of these topics and keys; their ids."""
        with self.engine.begin() as connection:
            for topic, key in rows:
                self.outbox.send(connection, topic, b"", key=key)
        with self.engine.connect() as connection:
            ids = connection.scalars(select(self.outbox.rows.c.id).order_by(self.outbox.rows.c.id)).all()
        return list(ids[-len(rows) :])

    def claim(self, wanted: ClaimRequest = ALL, **outcomes: object) -> list[int]:
        """Ids, in the order of their sequence ids."""
        return [row.id for row in self.rows(wanted, **outcomes)]

    def rows(self, wanted: ClaimRequest = ALL, **outcomes: object) -> list[ClaimedRow]:
        turn = RelayDatabaseTransaction(self.epoch, self.next_seq, claim=wanted, **outcomes)  # type: ignore[arg-type]
        found, self.next_seq = self.store.run_database_transaction(turn)
        assert [row.seq for row in found] == list(range(self.next_seq - len(found), self.next_seq))
        return found


@pytest.fixture
def shop(engine: Engine) -> Shop:
    return Shop(engine)


def units(shop: Shop) -> list[int]:
    with shop.engine.connect() as connection:
        return list(connection.scalars(select(shop.outbox.rows.c.unit).order_by(shop.outbox.rows.c.id)))


def test_a_unit_is_what_one_transaction_wrote_whatever_its_savepoints(shop: Shop) -> None:
    with Session(shop.engine) as session:
        for _ in range(2):
            shop.outbox.send(session, "a", b"1")
            with session.begin_nested():
                shop.outbox.send(session, "b", b"2")
            with session.begin_nested() as savepoint:
                shop.outbox.send(session, "b", b"lost")
                savepoint.rollback()
            shop.outbox.send(session, "b", b"3")
            session.commit()
        shop.outbox.send(session, "a", b"lost")
        session.rollback()
        shop.outbox.send(session, "a", b"4")
        session.commit()
    with shop.engine.connect() as connection:  # commit as you go
        for _ in range(2):
            shop.outbox.send(connection, "a", b"5")
            shop.outbox.send(connection, "a", b"6")
            connection.commit()
    found = units(shop)
    assert [found.count(each) for each in dict.fromkeys(found)] == [3, 3, 1, 2, 2]


def test_two_sessions_of_one_transaction_write_one_unit_and_two_at_once_write_two(shop: Shop) -> None:
    with shop.engine.connect() as connection, connection.begin():
        for _ in range(2):
            with Session(connection, join_transaction_mode="create_savepoint") as session:
                shop.outbox.send(session, "a", b"")
                session.commit()
    if shop.engine.dialect.name != "sqlite":
        with shop.engine.connect() as one, shop.engine.connect() as other, one.begin(), other.begin():
            for _ in range(2):
                shop.outbox.send(one, "a", b"")
                shop.outbox.send(other, "a", b"")
    found = units(shop)
    counts = [found.count(each) for each in dict.fromkeys(found)]
    assert counts == ([2] if shop.engine.dialect.name == "sqlite" else [2, 2, 2])


def test_a_claim_takes_whole_units_in_the_order_of_their_ids(shop: Shop) -> None:
    one, two, three = shop.unit((A, "x"), (B, None)), shop.unit((B, "y")), shop.unit((A, "x"), (B, "y"), (A, None))
    small = replace(ALL, rows_max=4)
    assert shop.claim(small) == [*one, *two]
    found = shop.rows(small)
    assert [row.id for row in found] == three
    assert len({row.unit for row in found}) == 1
    assert [row.destination for row in found] == [A, B, A]
    assert shop.claim(small) == []


def test_a_unit_that_is_larger_than_a_claim_is_claimed_alone(shop: Shop) -> None:
    large, next_ = shop.unit(*[(A, str(number)) for number in range(7)]), shop.unit((A, "x"))
    assert shop.claim(replace(ALL, rows_max=3)) == large
    assert shop.claim(replace(ALL, rows_max=3)) == next_


def test_a_repeated_turn_finds_the_units_that_it_claimed(shop: Shop) -> None:
    ids = [*shop.unit((A, "x"), (B, "y")), *shop.unit((B, None))]
    turn = RelayDatabaseTransaction(shop.epoch, 0, claim=ALL)
    assert shop.store.run_database_transaction(turn) == shop.store.run_database_transaction(turn)
    assert [row.id for row in shop.store.run_database_transaction(turn)[0]] == ids
    taken = shop.store.claim_shard("next")
    assert [row.id for row in taken.claimed] == ids
    assert taken.claimed[0].unit == taken.claimed[1].unit != taken.claimed[2].unit


def test_rows_without_a_unit_are_each_one_of_their_own(shop: Shop) -> None:
    ids = shop.unit((A, "x"), (B, "y"))
    with shop.engine.begin() as connection:
        connection.execute(update(shop.outbox.rows).values(unit=None))
    assert shop.claim(replace(ALL, topics={B: (0, (0,))})) == ids[1:]
    assert shop.claim() == ids[:1]


def test_a_destination_without_room_keeps_its_units_and_what_shares_a_key_with_them(shop: Shop) -> None:
    only_a = replace(ALL, topics={A: (0, (0,))})
    both, same_key, other = shop.unit((A, "x"), (B, None)), shop.unit((A, "x")), shop.unit((A, "y"))
    chained = shop.unit((A, "z"), (A, "x"))
    after = shop.unit((A, "z"))
    none = shop.unit((A, None))
    assert shop.claim(only_a) == [*other, *none]
    assert shop.claim() == [*both, *same_key, *chained, *after]


def test_a_parked_row_keeps_its_unit_and_the_keys_of_all_its_rows(shop: Shop) -> None:
    parked, same_key, free = shop.unit((A, "x"), (B, "y")), shop.unit((B, "y")), shop.unit((B, "x"))
    shop.admin.park_rows(parked[:1])
    assert shop.claim() == free
    shop.admin.revive_rows(parked[:1])
    assert shop.claim() == [*parked, *same_key]


def test_a_refused_unit_comes_again_whole_when_its_time_has_come(shop: Shop) -> None:
    unit, next_ = shop.unit((A, "x"), (A, "x"), (B, "y")), shop.unit((A, "x"))
    assert shop.claim(replace(ALL, rows_max=3)) == unit
    claimed = shop.store.claim_shard("again", atomic=True)
    shop.epoch, failed = claimed.epoch, [RefusedRow(row, "no", False, 3600.0) for row in claimed.claimed]
    assert shop.claim(failures=failed) == [], "its key waits"
    rows = shop.outbox.rows
    with shop.engine.begin() as connection:
        connection.execute(update(rows).where(rows.c.id.in_(unit[1:])).values(retry_at=0))
    assert shop.claim() == [], "one of them waits still"
    with shop.engine.begin() as connection:
        connection.execute(update(rows).where(rows.c.state == RowState.HELD).values(retry_at=0))
    assert shop.claim() == unit
    assert shop.claim() == next_, "what is claimed is sent before it"


def test_rows_that_another_relay_has_claimed_keep_the_rest_of_their_unit(shop: Shop) -> None:
    """One that is not atomic claims rows of a unit one by one."""
    unit = shop.unit((A, "x"), (B, "y"))
    assert shop.claim(replace(ALL, rows_max=1, units=False)) == unit[:1]
    assert shop.claim() == []
    assert shop.claim(delete=unit[:1]) == unit[1:]


def test_units_that_wait_do_not_keep_others_from_being_found(shop: Shop) -> None:
    only_a = replace(ALL, rows_max=3, topics={A: (0, (0,))})
    for number in range(3 * (CLAIM_WINDOWS_MAX - 1)):
        shop.unit((A, f"w{number}"), (B, None))
    free = shop.unit((A, "x"))
    assert shop.claim(only_a) == free


@pytest.mark.parametrize("kinds", [(True, False), (False, True)])
def test_a_shard_that_was_ever_atomic_says_so(engine: Engine, kinds: Sequence[bool]) -> None:
    metadata = MetaData()
    outbox = SQLAlchemyOutbox(metadata)
    metadata.create_all(engine)
    store = RelayStore(engine, outbox)
    assert [store.claim_shard("me", atomic=each).was_atomic for each in kinds] == [kinds[0], True]
    assert store.claim_shard("me").was_atomic
