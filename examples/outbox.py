"""An order and its message in one database transaction; the relay; a consumer that does its work once.

    python examples/outbox.py magnetar://localhost:7650

Needs `pip install 'magnetar[outbox]'`. Here the database is SQLite; with PostgreSQL only its URL differs.
"""

import sys
import tempfile
from pathlib import Path
from uuid import uuid4

try:
    from sqlalchemy import Column, Engine, Integer, MetaData, String, Table, create_engine, func, insert, select
    from sqlalchemy.orm import Session
except ModuleNotFoundError:
    sys.exit("SQLAlchemy is missing: pip install 'magnetar[outbox]'")

import magnetar
from magnetar.admin import Admin, Policies
from magnetar.inbox import SQLAlchemyInbox, message_key
from magnetar.outbox import Relay, SQLAlchemyOutbox

metadata = MetaData()
orders = Table("orders", metadata, Column("number", Integer, primary_key=True), Column("item", String(40)))
invoices = Table("invoices", metadata, Column("id", Integer, primary_key=True), Column("number", Integer))
outbox = SQLAlchemyOutbox(metadata)
inbox = SQLAlchemyInbox(metadata)


def place(engine: Engine, topic: str, number: int, item: str, *, fails: bool = False) -> None:
    """The order and its message commit together, or not at all. Nothing is on the network here."""
    with Session(engine) as session, session.begin():
        session.execute(insert(orders).values(number=number, item=item))
        outbox.send(session, topic, item.encode(), key=str(number))
        if fails:
            raise RuntimeError("the payment was refused")


def bill(engine: Engine, message: magnetar.Message) -> bool:
    """The work and the message's key commit together: a message that comes again changes nothing."""
    with Session(engine) as session, session.begin():
        if not inbox.first_time(session, "billing", message_key(message)):
            return False
        session.execute(insert(invoices).values(number=int(message.partition_key())))
        return True


def count(engine: Engine, table: Table) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(table)) or 0


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    topic = f"outbox-{run}"
    with Admin(service_url) as admin:  # what a relay sends again after a crash is dropped by the topic
        admin.create_topic(topic)
        admin.set_topic_policies(topic, Policies(deduplication=True))
    with tempfile.TemporaryDirectory() as folder, magnetar.Client(service_url) as client:
        engine = create_engine(f"sqlite:///{Path(folder) / 'shop.db'}")
        metadata.create_all(engine)
        consumer = client.subscribe(topic, "billing", initial_position=magnetar.InitialPosition.Earliest)

        place(engine, topic, 1, "two cups")
        place(engine, topic, 2, "a spoon")
        try:
            place(engine, topic, 3, "a table", fails=True)
        except RuntimeError as error:
            print("order 3:", error)
        print(count(engine, orders), "orders,", count(engine, outbox.rows), "messages wait in the outbox")
        assert (count(engine, orders), count(engine, outbox.rows)) == (2, 2)

        with Relay(client, engine, outbox, name=f"shop-{run}"):  # or a process: magnetar outbox relay
            for _ in range(2):
                message = consumer.receive(timeout_millis=30_000)
                assert bill(engine, message)
                assert not bill(engine, message), "a second delivery is recognised"
                consumer.acknowledge(message)
                print("billed", message.data(), "of order", message.partition_key())
        print(count(engine, invoices), "invoices,", count(engine, outbox.rows), "messages wait")
        assert count(engine, invoices) == 2
        engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1])
