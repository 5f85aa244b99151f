"""A program that is killed: it takes orders into a database, and announces each by a half message.

    python -m tests.client.transactions.shop take URL DATABASE     prepares, writes some rows, and waits to be killed
    python -m tests.client.transactions.shop check URL DATABASE    answers for its group, by the rows

Of the orders, those of every third number have a row and no decision, the next ones neither, the others both.
"""

import sqlite3
import sys
import threading

import magnetar

ORDERS = 12
GROUP = "shop"


def take(client: magnetar.Client, database: sqlite3.Connection) -> None:
    producer = client.create_producer("orders")
    for number in range(ORDERS):
        half = producer.prepare(b"%d" % number, group=GROUP, check_key=str(number), check_after=1.5)
        if number % 3 != 1:
            with database:
                database.execute("INSERT INTO orders VALUES (?)", (number,))
        if number % 3 == 2:
            half.commit()
    print("ready magnetar://127.0.0.1:1", flush=True)
    threading.Event().wait()


def check(client: magnetar.Client, path: str) -> None:
    @client.on_check(group=GROUP)
    def decide(half: magnetar.HalfCheck) -> magnetar.Decision:
        with sqlite3.connect(path) as database:
            row = database.execute("SELECT 1 FROM orders WHERE number = ?", (int(half.check_key),)).fetchone()
        sys.stdout.write(f"asked {half.check_key}\n")  # in one piece: checks run in threads
        sys.stdout.flush()
        return magnetar.Decision.COMMIT if row else magnetar.Decision.ROLLBACK

    print("ready magnetar://127.0.0.1:1", flush=True)
    threading.Event().wait()


def main(what: str, url: str, path: str) -> None:
    with magnetar.Client(url) as client:
        if what == "check":
            check(client, path)
            return
        database = sqlite3.connect(path)
        with database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (number INTEGER PRIMARY KEY)")
        take(client, database)


if __name__ == "__main__":
    main(*sys.argv[1:])
