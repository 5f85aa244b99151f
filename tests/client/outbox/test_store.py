"""The relay's transactions against real databases: SQLite and PostgreSQL."""

from dataclasses import replace

import pytest
from sqlalchemy import Engine, MetaData, func, select, update
from sqlalchemy.orm import Session

from magnetar.client.outbox.destination_core import ClaimedRow, ClaimRequest, RefusedRow, RelayDatabaseTransaction
from magnetar.client.outbox.relay import OutboxAdmin
from magnetar.client.outbox.rows import RelayFenced, RowState, ShardsDiffer
from magnetar.client.outbox.store import RelayStore
from magnetar.client.outbox.tables import SQLAlchemyOutbox
from magnetar.exceptions import InvalidMessage, InvalidTopicName, MessageTooBig

TOPIC = "persistent://public/default/orders"
ALL = ClaimRequest(100, 1 << 20, {TOPIC: (0, (0,))})


@pytest.fixture
def outbox(engine: Engine) -> SQLAlchemyOutbox:
    metadata = MetaData()
    outbox = SQLAlchemyOutbox(metadata)
    metadata.create_all(engine)
    return outbox


def send(
    engine: Engine, outbox: SQLAlchemyOutbox, *values: bytes, key: str | None = None, topic: str = "orders"
) -> None:
    with Session(engine) as session, session.begin():
        for value in values:
            outbox.send(session, topic, value, key=key)


def count(engine: Engine, outbox: SQLAlchemyOutbox) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(outbox.rows)) or 0


def claim(store: RelayStore, epoch: int, next_seq: int, wanted: ClaimRequest = ALL) -> tuple[list[ClaimedRow], int]:
    return store.run_database_transaction(RelayDatabaseTransaction(epoch, next_seq, claim=wanted))


def test_a_message_is_there_exactly_when_the_transaction_committed(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    with Session(engine) as session:
        outbox.send(session, "orders", b"lost")
        session.rollback()
    assert count(engine, outbox) == 0
    with engine.begin() as connection:
        outbox.send(
            connection, "orders", b"kept", key="17", properties={"a": "ü"}, event_time=5, deliver_at=6
        )
        outbox.send(connection, "orders", None, key="17")
    store = RelayStore(engine, outbox)
    rows, _ = claim(store, store.claim_shard("me").epoch, 0)
    assert [(row.value, row.key, row.properties, row.event_time, row.deliver_at) for row in rows] == [
        (b"kept", "17", '{"a": "ü"}', 5, 6),
        (None, "17", None, None, None),
    ]


def test_a_wrong_message_fails_in_the_applications_transaction(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    with Session(engine) as session, session.begin():
        for wrong, topic, value in (
            (InvalidTopicName, "a/b", b""),
            (InvalidMessage, "orders", 17),
            (MessageTooBig, "orders", bytes(6 << 20)),
        ):
            with pytest.raises(wrong):
                outbox.send(session, topic, value)
    assert count(engine, outbox) == 0


def test_a_claim_gives_consecutive_ids_and_a_row_that_commits_late_gets_a_later_one(
    engine: Engine, outbox: SQLAlchemyOutbox
) -> None:
    """Its row id is lower: with the row id as sequence id deduplication would swallow it."""
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time: row ids commit in order")
    store = RelayStore(engine, outbox)
    epoch = store.claim_shard("me").epoch
    late = engine.connect()
    transaction = late.begin()
    outbox.send(late, "orders", b"late")
    send(engine, outbox, b"early")
    rows, next_seq = claim(store, epoch, 0)
    assert [(row.value, row.seq) for row in rows] == [(b"early", 0)]
    transaction.commit()
    late.close()
    later, next_seq = claim(store, epoch, next_seq)
    assert [(row.value, row.seq) for row in later] == [(b"late", 1)]
    assert later[0].id < rows[0].id
    assert next_seq == 2


def test_an_older_holder_changes_nothing(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    send(engine, outbox, b"1")
    old, new = RelayStore(engine, outbox), RelayStore(engine, outbox)
    epoch = old.claim_shard("old").epoch
    rows, _ = claim(old, epoch, 0)
    taken = new.claim_shard("new")
    assert taken.epoch == epoch + 1
    assert [(row.id, row.seq) for row in taken.claimed] == [(rows[0].id, 0)], "with its claimed rows, under their ids"
    assert taken.next_seq == 1
    with pytest.raises(RelayFenced):
        old.run_database_transaction(RelayDatabaseTransaction(epoch, 1, delete=[rows[0].id]))
    assert count(engine, outbox) == 1


def test_a_turn_that_is_repeated_changes_nothing_more_and_finds_what_it_claimed(
    engine: Engine, outbox: SQLAlchemyOutbox
) -> None:
    send(engine, outbox, b"1", b"2", b"3")
    store = RelayStore(engine, outbox)
    epoch = store.claim_shard("me").epoch
    rows, next_seq = claim(store, epoch, 0, replace(ALL, rows_max=2))
    done, refused = rows
    turn = RelayDatabaseTransaction(
        epoch, next_seq, [done.id], {TOPIC: done.seq}, [RefusedRow(refused, "refused", False, 60.0)], claim=ALL
    )
    first = store.run_database_transaction(turn)
    assert [row.value for row in first[0]] == [b"3"]
    assert store.run_database_transaction(turn) == first
    lag = store.measure_lag()
    assert (lag.waiting, lag.claimed, lag.held) == (0, 1, 1)
    assert store.claim_shard("next").stored == {TOPIC: done.seq}


def test_rows_of_a_refused_rows_key_wait_and_others_pass(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    for number, key in enumerate(["a", "a", "b", None, "a"]):
        send(engine, outbox, b"%d" % number, key=key)
    store = RelayStore(engine, outbox)
    epoch = store.claim_shard("me").epoch
    rows, seq = claim(store, epoch, 0, replace(ALL, rows_max=2))
    turn = RelayDatabaseTransaction(
        epoch, seq, failures=[RefusedRow(rows[0], "no", False, 0.0)], release=rows[1:], claim=None
    )
    _, seq = store.run_database_transaction(turn)
    found, seq = claim(store, epoch, seq)
    assert [row.value for row in found] == [b"0", b"3", b"2"] or [row.value for row in found] == [b"0", b"2", b"3"]
    assert found[0].attempts == 1
    _, seq = store.run_database_transaction(
        RelayDatabaseTransaction(epoch, seq, failures=[RefusedRow(found[0], "no", True, 0.0)])
    )
    assert claim(store, epoch, seq)[0] == [], "its key waits for the parked row"
    admin = OutboxAdmin(engine, outbox)
    assert [row.error for row in admin.rows(state=RowState.PARKED)] == ["no"]
    assert admin.revive_rows() == 1
    assert [row.value for row in claim(store, epoch, seq)[0]] == [b"0", b"1", b"4"], "in the order of their key"


def test_partitions_without_room_are_not_claimed(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    for number in range(40):
        send(engine, outbox, b"x", key=str(number))
    store = RelayStore(engine, outbox)
    epoch = store.claim_shard("me").epoch
    rows, seq = claim(store, epoch, 0, replace(ALL, topics={TOPIC: (4, (1, 3))}))
    assert {row.destination for row in rows} == {f"{TOPIC}-partition-1", f"{TOPIC}-partition-3"}
    more, _ = claim(store, epoch, seq, replace(ALL, topics={TOPIC: (4, (0, 1, 2, 3))}))
    assert len(rows) + len(more) == 40
    from magnetar.proto.names import choose_partition_of_key

    for row in (*rows, *more):
        assert row.key is not None
        assert row.destination == f"{TOPIC}-partition-{choose_partition_of_key(row.key, 4)}", (
            "as any producer routes the key"
        )


def test_a_claim_is_bounded_in_bytes(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    send(engine, outbox, bytes(1000), bytes(1000), bytes(5000))
    store = RelayStore(engine, outbox)
    epoch = store.claim_shard("me").epoch
    sizes, seq = [], 0
    for _ in range(3):
        rows, seq = claim(store, epoch, seq, replace(ALL, bytes_max=2500))
        sizes.append([row.size for row in rows])
    assert sizes == [[1000, 1000], [5000], []]


def test_another_number_of_shards_is_refused_until_it_is_changed(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    store = RelayStore(engine, outbox, 0, 2)
    epoch = store.claim_shard("me").epoch
    with pytest.raises(ShardsDiffer, match="magnetar outbox shards 4"):
        RelayStore(engine, outbox, 1, 4).claim_shard("other")
    admin = OutboxAdmin(engine, outbox)
    with pytest.raises(ShardsDiffer, match="stop them"):
        admin.set_shard_count(4)
    send(engine, outbox, b"1")
    claim(store, epoch, 0)
    with engine.begin() as connection:
        connection.execute(update(outbox.shards).values(seen=1))
    with pytest.raises(ShardsDiffer, match="claimed"):
        admin.set_shard_count(4)
    taken = store.claim_shard("me")
    store.run_database_transaction(RelayDatabaseTransaction(taken.epoch, taken.next_seq, delete=[taken.claimed[0].id]))
    with engine.begin() as connection:
        connection.execute(update(outbox.shards).values(seen=1))
    admin.set_shard_count(4)
    assert RelayStore(engine, outbox, 1, 4).claim_shard("other").next_seq == 0


def test_topics_of_waiting_rows_are_found_whatever_the_backlog(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    for topic in ("b", "a", "b", "c"):
        send(engine, outbox, b"x", topic=topic)
    assert [each.rpartition("/")[2] for each in RelayStore(engine, outbox).list_topics()] == ["a", "b", "c"]


def test_a_topic_without_a_name_is_found_too(engine: Engine, outbox: SQLAlchemyOutbox) -> None:
    """Another program wrote the row: the relay says that it waits for the topic, and why."""
    send(engine, outbox, b"x")
    with engine.begin() as connection:
        connection.execute(update(outbox.rows).values(topic=""))
    send(engine, outbox, b"y")
    assert RelayStore(engine, outbox).list_topics() == ["", TOPIC]


def test_rows_are_parked_revived_and_dropped_but_not_while_they_are_claimed(
    engine: Engine, outbox: SQLAlchemyOutbox
) -> None:
    send(engine, outbox, b"1", b"2")
    admin, store = OutboxAdmin(engine, outbox), RelayStore(engine, outbox)
    first, second = [row.id for row in admin.rows()]
    assert admin.park_rows([first]) == 1
    claim(store, store.claim_shard("me").epoch, 0)
    assert [admin.park_rows([second]), admin.drop([second]), admin.revive_rows([second])] == [0, 0, 0]
    assert admin.drop([first]) == 1
    assert [row.state for row in admin.rows()] == ["claimed"]
