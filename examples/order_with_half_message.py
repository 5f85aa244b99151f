"""Orders in a database, each announced by a half message: the rows and the topic agree, although the shop dies often.

    python examples/order_with_half_message.py magnetar://localhost:7650
"""

import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import magnetar

ORDERS = 12


class Died(Exception):
    """What `kill -9` would do to the shop."""


def take_order(shop: magnetar.Producer, path: Path, group: str, number: int) -> None:
    """It dies before the row is written, or after it, or not at all."""
    half = shop.prepare(b"order %d" % number, group=group, check_key=str(number), check_after=0.5)
    if number % 3 == 1:
        raise Died
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("INSERT INTO orders VALUES (?)", (number,))
    if number % 3 == 2:
        raise Died
    half.commit()


def main(service_url: str) -> None:
    run = uuid4().hex[:8]
    topic, group = f"orders-{run}", f"shop-{run}"
    with tempfile.TemporaryDirectory() as folder, magnetar.Client(service_url) as client:
        path = Path(folder) / "orders.sqlite"
        with closing(sqlite3.connect(path)) as database, database:
            database.execute("CREATE TABLE orders (number INTEGER PRIMARY KEY)")
        shop = client.create_producer(topic)
        died = 0
        for number in range(ORDERS):
            try:
                take_order(shop, path, group, number)
            except Died:
                died += 1

        asked = []

        @client.on_check(group=group)
        def check(half: magnetar.HalfCheck) -> magnetar.Decision:
            """Of any process that can read the database. The shop that did not write the row by now is dead."""
            asked.append(half.check_key)
            with closing(sqlite3.connect(path)) as database:
                row = database.execute("SELECT 1 FROM orders WHERE number = ?", (int(half.check_key),)).fetchone()
            return magnetar.Decision.COMMIT if row else magnetar.Decision.ROLLBACK

        consumer = client.subscribe(topic, "billing", initial_position=magnetar.InitialPosition.Earliest)
        announced: set[int] = set()
        deadline = time.monotonic() + 60
        while len(asked) < died or len(announced) < ORDERS - ORDERS // 3:
            assert time.monotonic() < deadline
            try:
                message = consumer.receive(timeout_millis=500)
            except magnetar.Timeout:
                continue
            announced.add(int(message.data().split()[1]))
            consumer.acknowledge(message)
        with closing(sqlite3.connect(path)) as database:
            rows = {number for (number,) in database.execute("SELECT number FROM orders")}

    print(len(rows), "orders,", len(announced), "announced; the shop died", died, "times")
    assert announced == rows
    assert len(rows) == ORDERS - ORDERS // 3


if __name__ == "__main__":
    main(sys.argv[1])
