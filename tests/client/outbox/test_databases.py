"""What is wrong with a database is a typed error that says what to do; nothing hangs."""

import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import Engine, MetaData, create_engine, text
from sqlalchemy.orm import Session

import magnetar
from magnetar.client.outbox.destination_core import RelaySettings
from magnetar.client.outbox.relay import Relay, producer_name
from magnetar.client.outbox.relay_core import RelayCore
from magnetar.client.outbox.rows import (
    OutboxBehind,
    OutboxColumnsMissing,
    OutboxReadOnly,
    OutboxTableMissing,
    OutboxUnreachable,
    RelayFenced,
    SequencesForgotten,
)
from magnetar.client.outbox.store import RelayStore
from magnetar.client.outbox.tables import SQLAlchemyOutbox
from magnetar.proto.errors import InvalidRequest
from tests.support.postgres import Postgres


def made(engine: Engine) -> SQLAlchemyOutbox:
    metadata = MetaData()
    outbox = SQLAlchemyOutbox(metadata)
    metadata.create_all(engine)
    return outbox


def no_client() -> magnetar.Client:
    return magnetar.Client("magnetar://127.0.0.1:1", operation_timeout_seconds=1)


def test_an_older_relay_that_sees_rows_of_the_newer_one_says_that_it_is_fenced(engine: Engine) -> None:
    """Not that the database is older than the topic, after which a person would number its rows anew."""
    outbox = made(engine)
    store = RelayStore(engine, outbox)
    core = RelayCore(0, 1, RelaySettings())
    with no_client() as client:
        relay = Relay(client, engine, outbox, name="older")
        core.on_shard_claimed(store.claim_shard("older"), 0.0)
        assert type(relay._why(core, OutboxBehind("rows of another"))) is OutboxBehind
        store.claim_shard("newer")
        assert type(relay._why(core, OutboxBehind("rows of another"))) is RelayFenced
        assert type(relay._why(core, SequencesForgotten("rows of another"))) is RelayFenced


def test_a_missing_table_is_told_at_the_start(engine: Engine) -> None:
    outbox = SQLAlchemyOutbox(MetaData())
    with no_client() as client, pytest.raises(OutboxTableMissing, match="'magnetar outbox create'"):
        Relay(client, engine, outbox).start()
    with pytest.raises(OutboxTableMissing, match="a migration makes it"):
        RelayStore(engine, outbox).claim_shard("me")


def test_a_table_without_its_columns_is_told_with_their_names(engine: Engine) -> None:
    outbox = made(engine)
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE magnetar_outbox DROP COLUMN destination"))
        connection.execute(text("ALTER TABLE magnetar_outbox DROP COLUMN attempts"))
    with no_client() as client, pytest.raises(OutboxColumnsMissing, match="no column attempts, destination"):
        Relay(client, engine, outbox).start()
    with pytest.raises(OutboxColumnsMissing, match="--table"):
        RelayStore(engine, outbox).claim_shard("me")


def test_a_database_that_takes_no_writes_is_told(database: str, engine: Engine) -> None:
    outbox = made(engine)
    if engine.dialect.name == "sqlite":
        path = Path(database.removeprefix("sqlite:///"))
        reading = create_engine("sqlite://", creator=lambda: sqlite3.connect(f"file:{path}?mode=ro", uri=True))
    else:
        reading = create_engine(f"{database}?options=-c%20default_transaction_read_only%3Don")
    with pytest.raises(OutboxReadOnly, match="UPDATE and DELETE"):
        RelayStore(reading, outbox).claim_shard("me")
    with no_client() as client:
        relay = Relay(client, reading, outbox, name="shop").start()
        assert relay.wait_ready(30)
        relay.stop()
    assert isinstance(relay.error, OutboxReadOnly)
    reading.dispose()


def test_a_role_that_may_not_write_is_told(postgres: Postgres) -> None:
    url = postgres.database("roles")
    engine = create_engine(url)
    outbox = made(engine)
    with engine.begin() as connection:
        connection.execute(text("CREATE ROLE reader LOGIN"))
        connection.execute(text("GRANT SELECT ON ALL TABLES IN SCHEMA public TO reader"))
    reading = create_engine(url.replace("magnetar@", "reader@"))
    with pytest.raises(OutboxReadOnly, match="permission denied"):
        RelayStore(reading, outbox).claim_shard("me")
    engine.dispose()
    reading.dispose()


def test_a_database_that_is_away_is_waited_for_and_a_relay_can_be_stopped_meanwhile(tmp_path: Path) -> None:
    engine = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/shop", connect_args={"connect_timeout": 2})
    outbox = SQLAlchemyOutbox(MetaData())
    with pytest.raises(OutboxUnreachable, match="is the server there"):
        RelayStore(engine, outbox).claim_shard("me")
    with no_client() as client:
        relay = Relay(client, engine, outbox).start()
        assert not relay.wait_ready(0.5)
        assert relay.statistics()["phase"] == "new"
        relay.stop()
    assert relay.error is None
    assert relay.statistics()["phase"] == "stopped"


def test_a_locked_sqlite_database_is_tried_again(tmp_path: Path) -> None:
    engine = create_engine(f"sqlite:///{tmp_path / 'shop.db'}", connect_args={"timeout": 0.05})
    outbox = made(engine)
    with Session(engine) as writing:
        outbox.send(writing, "orders", b"1")
        with pytest.raises(OutboxUnreachable, match="locked"):
            RelayStore(engine, outbox).claim_shard("me")
    assert OutboxUnreachable.retryable
    assert RelayStore(engine, outbox).claim_shard("me").epoch == 1
    engine.dispose()


def test_a_producers_name_comes_from_the_database_or_is_given(tmp_path: Path) -> None:
    assert producer_name(create_engine("postgresql+psycopg://u@h/shop"), None, 3) == "outbox-shop-3"
    assert producer_name(create_engine(f"sqlite:///{tmp_path / 'shop.db'}"), None, 0) == "outbox-shop-0"
    assert producer_name(create_engine("sqlite://"), "till", 0) == "outbox-till-0"
    with pytest.raises(InvalidRequest, match="--name"):
        producer_name(create_engine("sqlite://"), None, 0)
    with no_client() as client, pytest.raises(InvalidRequest, match="count from 0"):
        Relay(client, create_engine("sqlite://"), SQLAlchemyOutbox(MetaData()), 4, 4, name="x")
