"""python -m tests.client.outbox.kills --kills 200 --seed 1: a relay is killed again and again while an application
commits rows; then each committed row is in its topic exactly once, in the order of its key.

Kinds of deaths: kill -9 of the relay's process at a random moment; a second relay that fences the first; kill -9 of the
application between its statements and around its commit. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from sqlalchemy import Column, Integer, MetaData, String, Table, create_engine, select

import magnetar
from magnetar.admin import Admin
from magnetar.client.outbox.tables import SQLAlchemyOutbox
from magnetar.proto.policies import Policies
from tests.support.postgres import Postgres
from tests.support.processes import Processes

PLAIN, PARTED = "kills-plain", "kills-parted"
RECEIVE_MS = 120_000
DEADLINE_S = 120.0


def tables() -> tuple[MetaData, SQLAlchemyOutbox, Table]:
    """The outbox, and the application's own table: an order is there exactly when its message shall be."""
    metadata = MetaData()
    outbox = SQLAlchemyOutbox(metadata)
    orders = Table(
        "orders", metadata, Column("id", String(40), primary_key=True), Column("key", String(8)), Column("n", Integer)
    )
    return metadata, outbox, orders


def application(database: str, seed: int) -> None:
    """Commits orders with their messages until it is killed."""
    engine = create_engine(database)
    _, outbox, orders = tables()
    rng = random.Random(seed)
    print("ready application", flush=True)
    number = 0
    while True:
        with engine.begin() as connection:
            for _ in range(rng.randrange(1, 20)):
                number += 1
                name, key = f"{seed}-{number}", str(rng.randrange(20))
                connection.execute(orders.insert(), {"id": name, "key": key, "n": number})
                outbox.send(connection, rng.choice((PLAIN, PARTED)), name.encode(), key=f"{seed}-{key}")


class Kills:
    def __init__(self, processes: Processes, url: str, database: str, seed: int) -> None:
        self._processes, self._url, self._database = processes, url, database
        self._rng = random.Random(seed)
        self._number = 0
        self.engine = create_engine(database)
        metadata, self._outbox, self._orders = tables()
        metadata.create_all(self.engine)
        with Admin(url) as admin:
            admin.create_topic(PLAIN)
            admin.create_topic(PARTED, partitions=3)
            for topic in (PLAIN, PARTED):
                admin.set_topic_policies(topic, Policies(deduplication=True))

    def relay(self, *more: str) -> Any:
        self._number += 1
        return self._processes.start(
            f"relay-{self._number}", "outbox", "relay", "--database", self._database, "--url", self._url,
            "--name", "kills", *more,
        )  # fmt: skip

    def application(self) -> subprocess.Popen[str]:
        self._number += 1
        command = [sys.executable, "-m", "tests.client.outbox.kills", "--application", self._database]
        started = subprocess.Popen(
            [*command, "--seed", str(self._number)], stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[3], env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        assert started.stdout is not None
        assert started.stdout.readline().startswith("ready")
        return started

    def run(self, kills: int, *, fenced: int) -> dict[str, int]:
        """`kills` relays are killed; each `fenced`th is fenced by the next one instead."""
        application, relay = self.application(), self.relay()
        try:
            for number in range(kills):
                relay.wait_ready()
                time.sleep(self._rng.random() ** 2)
                if fenced and number % fenced == fenced - 1:
                    newer = self.relay()
                    newer.wait_ready()
                    assert relay.wait(DEADLINE_S) == 5, relay.output()
                    relay = newer
                    continue
                relay.kill()
                if number % 3 == 2:
                    application.send_signal(signal.SIGKILL)
                    application.wait()
                    application = self.application()
                relay = self.relay()
            relay.wait_ready()
        finally:
            application.kill()
            application.wait()
        relay.stop()
        last = self.relay("--until-empty")
        assert last.wait(10 * DEADLINE_S) == 0, last.output()
        return self.judge()

    def judge(self) -> dict[str, int]:
        """Reads all topics from their beginning."""
        with self.engine.connect() as connection:
            committed = {row.id: row.n for row in connection.execute(select(self._orders))}
        stored: list[str] = []
        order: dict[tuple[str, str], list[int]] = defaultdict(list)
        with magnetar.Client(self._url) as client:
            for topic in [PLAIN, *client.get_topic_partitions(PARTED)]:
                reader = client.create_reader(topic, magnetar.MessageId.earliest)
                while reader.has_message_available():
                    message = reader.read_next(RECEIVE_MS)
                    stored.append(message.data().decode())
                    order[topic, message.partition_key()].append(committed.get(stored[-1], -1))
                reader.close()
        assert len(stored) == len(set(stored)), f"{len(stored) - len(set(stored))} messages are there twice"
        assert set(stored) == committed.keys(), f"{len(committed)} committed, {len(stored)} stored"
        assert all(each == sorted(each) for each in order.values()), "the order of a key is not kept"
        return {"committed": len(committed), "stored": len(stored), "keys": len(order)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    parser.add_argument("--application", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.application:
        application(given.application, given.seed)
        return
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        url = processes.start("standalone", "standalone", "--port", "0", "--data", "data").wait_ready()
        if given.database == "sqlite":
            found = Kills(processes, url, f"sqlite:///{folder}/kills.db", given.seed).run(given.kills, fenced=5)
        else:
            with Postgres() as server:
                found = Kills(processes, url, server.database("kills"), given.seed).run(given.kills, fenced=5)
    print(json.dumps({"kills": given.kills, "seed": given.seed, "database": given.database, **found}))


if __name__ == "__main__":
    main()
