"""The inbox: work is done once for each message, whatever dies between the work and the acknowledgement."""

import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.postgres import Postgres, why_no_postgres

sqlalchemy = pytest.importorskip("sqlalchemy")
from sqlalchemy.orm import Session  # noqa: E402

from magnetar.client.common.errors import InvalidConfiguration  # noqa: E402
from magnetar.client.inbox import KEY_CHARACTERS_MAX, message_key, once, shorten_inbox_key  # noqa: E402
from magnetar.client.inbox.tables import SQLAlchemyInbox  # noqa: E402

_numbers = count(1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[Postgres]:
    if (reason := why_no_postgres()) is not None:
        pytest.skip(reason)
    with Postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    if request.param == "postgresql":
        url = request.getfixturevalue("postgres").database(f"inbox{next(_numbers)}")
    made = sqlalchemy.create_engine(url)
    yield made
    made.dispose()


@pytest.fixture
def inbox(engine: Any) -> SQLAlchemyInbox:
    metadata = sqlalchemy.MetaData()
    made = SQLAlchemyInbox(metadata)
    metadata.create_all(engine)
    return made


def test_a_message_is_new_once_for_each_subscription(engine: Any, inbox: SQLAlchemyInbox) -> None:
    for subscription in ("billing", "shipping"):
        with Session(engine) as session, session.begin():
            assert inbox.first_time(session, subscription, "17")
        with engine.begin() as connection:
            assert not inbox.first_time(connection, subscription, "17")


def test_work_that_fails_leaves_the_message_new(engine: Any, inbox: SQLAlchemyInbox) -> None:
    with Session(engine) as session:
        assert inbox.first_time(session, "billing", "17")
        session.rollback()
    with Session(engine) as session, session.begin():
        assert inbox.first_time(session, "billing", "17")


def test_of_two_consumers_at_once_one_does_the_work(engine: Any, inbox: SQLAlchemyInbox) -> None:
    """The second insert waits for the first transaction: it finds its row, or does the work after a roll-back."""
    for commits in (True, False):
        key, found = f"at-once-{commits}", []

        def second(key: str = key, found: list[bool] = found) -> None:
            with Session(engine) as session, session.begin():
                found.append(inbox.first_time(session, "billing", key))

        with Session(engine) as first:
            assert inbox.first_time(first, "billing", key)
            other = threading.Thread(target=second)
            other.start()
            first.commit() if commits else first.rollback()
        other.join(30)
        assert found == [not commits]


def test_old_keys_are_purged_and_young_ones_stay(engine: Any, inbox: SQLAlchemyInbox) -> None:
    with engine.begin() as connection:
        for number in range(5):
            inbox.first_time(connection, "billing", str(number))
        assert inbox.purge(connection) == 0
        assert inbox.purge(connection, older_than_s=-10, limit=3) == 3
        assert inbox.purge(connection, older_than_s=-10) == 2
        assert inbox.first_time(connection, "billing", "1")


def test_a_key_of_any_length_fits() -> None:
    assert shorten_inbox_key("17") == "17"
    assert len(shorten_inbox_key("x" * 10_000)) <= KEY_CHARACTERS_MAX
    assert shorten_inbox_key("x" * 10_000) != shorten_inbox_key("x" * 10_001)


class _Message:
    def topic_name(self) -> str:
        return "persistent://public/default/orders"

    def producer_name(self) -> str:
        return "outbox-shop-0"

    def sequence_id(self) -> int:
        return 17


def test_a_messages_key_is_its_topic_producer_and_sequence_id() -> None:
    assert message_key(_Message()) == "persistent://public/default/orders|outbox-shop-0|17"  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------- once
class Received:
    """A message as a handler gets it."""

    def __init__(self, number: int, subscription: str = "billing") -> None:
        self.number = number
        self.entry = SimpleNamespace(consumer=SimpleNamespace(subscription=subscription))

    def topic_name(self) -> str:
        return "t"

    def producer_name(self) -> str:
        return "relay"

    def sequence_id(self) -> int:
        return self.number


def test_a_handler_with_an_inbox_is_called_once_for_each_message_and_subscription(
    engine: Any, inbox: SQLAlchemyInbox
) -> None:
    done: list[tuple[str, int]] = []

    @once(inbox, begin=engine.begin)
    def bill(message: Any, connection: Any) -> str:
        assert connection.in_transaction()
        done.append((message.entry.consumer.subscription, message.number))
        return "billed"

    again = [bill(Received(number)) for number in (1, 1, 2)]  # type: ignore[arg-type]
    assert again == ["billed", None, "billed"]
    bill(Received(1, "shipping"))  # type: ignore[arg-type]
    assert done == [("billing", 1), ("billing", 2), ("shipping", 1)]
    assert bill.__name__ == "bill"


def test_what_a_handler_raises_undoes_its_work_and_its_record(engine: Any, inbox: SQLAlchemyInbox) -> None:
    metadata = sqlalchemy.MetaData()
    invoices = sqlalchemy.Table("invoices", metadata, sqlalchemy.Column("number", sqlalchemy.Integer))
    metadata.create_all(engine)
    fails = True

    @once(inbox, "billing", begin=sqlalchemy.orm.sessionmaker(engine).begin, key=lambda message: str(message.number))  # type: ignore[attr-defined]
    def bill(message: Any, session: Session) -> None:
        session.execute(sqlalchemy.insert(invoices), {"number": message.number})
        if fails:
            raise KeyError("no")

    with pytest.raises(KeyError):
        bill(Received(3))  # type: ignore[arg-type]
    fails = False
    for _ in range(3):
        bill(Received(3))  # type: ignore[arg-type]
    with engine.begin() as connection:
        assert connection.execute(sqlalchemy.select(invoices.c.number)).all() == [(3,)]


def test_once_refuses_what_could_not_work(engine: Any, inbox: SQLAlchemyInbox) -> None:
    async def handle(_: Any) -> None: ...

    with pytest.raises(InvalidConfiguration, match="plain function"):
        once(inbox, begin=engine.begin)(handle)
    with pytest.raises(InvalidConfiguration, match="inbox"):
        once(object())  # type: ignore[arg-type]
    with pytest.raises(InvalidConfiguration, match="begin"):
        once(inbox)(lambda _message, _session: None)(Received(1))  # type: ignore[arg-type]
