"""python -m tests.client.outbox.kills --kills 200 --seed 1: a relay is killed again and again while an application
commits rows; then each committed row is in its topic exactly once, in the order of its key.

Kinds of deaths: kill -9 of the relay's process at a random moment; a second relay that fences the first; kill -9 of the
application between its statements and around its commit. With `--atomic` the relays are atomic: after each death every
transaction of the application is in the topics whole or not at all. Without it the run counts after how many deaths
that was not so (`partial`): a control that the question can be answered by no. The last line is JSON.
"""

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
from contextlib import nullcontext
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
SETTLE_S = 30.0
"""A transaction that is committed is shown by every topic within that time."""


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
            rows = rng.randrange(1, 20)
            said = {"unit": f"{seed}-{number}", "rows": str(rows)}
            for _ in range(rows):
                number += 1
                name, key = f"{seed}-{number}", str(rng.randrange(20))
                connection.execute(orders.insert(), {"id": name, "key": key, "n": number})
                topic = rng.choice((PLAIN, PARTED))
                outbox.send(connection, topic, name.encode(), key=f"{seed}-{key}", properties=said)


class Kills:
    def __init__(self, processes: Processes, url: str, database: str, seed: int, *, atomic: bool = False) -> None:
        self._atomic = atomic
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
            "--name", "kills", *(("--atomic",) if self._atomic else ()), *more,
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
        seen, partial = Seen(self._url), 0
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
                partial += bool(seen.partial(0.0 if not self._atomic else SETTLE_S))
                assert not partial or not self._atomic, f"in part, for {SETTLE_S:g} s: {seen.partial(0.0)}"
                if number % 3 == 2:
                    application.send_signal(signal.SIGKILL)
                    application.wait()
                    application = self.application()
                relay = self.relay()
            relay.wait_ready()
        finally:
            application.kill()
            application.wait()
            seen.close()
        relay.stop()
        last = self.relay("--until-empty")
        assert last.wait(10 * DEADLINE_S) == 0, last.output()
        aborted = 0
        with Admin(self._url) as admin:
            for topic in (PLAIN, *(f"{PARTED}-partition-{number}" for number in range(3))):
                found = admin.topic_stats(topic).transactions
                aborted += found.aborted_entries if found is not None else 0
        return {**self.judge(), "partial": partial, "aborted_entries": aborted}

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


class Seen:
    """What readers have seen so far, by the transaction of the application."""

    def __init__(self, url: str) -> None:
        self._client = magnetar.Client(url)
        topics = [PLAIN, *self._client.get_topic_partitions(PARTED)]
        self._readers = [self._client.create_reader(topic, magnetar.MessageId.earliest) for topic in topics]
        self._units: dict[str, int] = {}  # to how many are missing

    def partial(self, within_s: float) -> dict[str, int]:
        """Those of which some rows are there, and others are not after that time."""
        deadline = time.monotonic() + within_s
        while True:
            for reader in self._readers:
                while reader.has_message_available():
                    said = reader.read_next(RECEIVE_MS).properties()
                    left = self._units.setdefault(said["unit"], int(said["rows"]))
                    self._units[said["unit"]] = left - 1
            found = {unit: left for unit, left in self._units.items() if left}
            if not found or time.monotonic() >= deadline:
                return found
            time.sleep(0.05)

    def close(self) -> None:
        self._client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--database", choices=["sqlite", "postgresql"], default="postgresql")
    parser.add_argument("--atomic", action="store_true")
    parser.add_argument("--application", metavar="URL", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.application:
        application(given.application, given.seed)
        return
    with tempfile.TemporaryDirectory() as folder, Processes(Path(folder)) as processes:
        url = processes.start("standalone", "standalone", "--port", "0", "--data", "data").wait_ready()
        with Postgres() if given.database == "postgresql" else nullcontext() as server:
            database = server.database("kills") if server is not None else f"sqlite:///{folder}/kills.db"
            kills = Kills(processes, url, database, given.seed, atomic=given.atomic)
            found = kills.run(given.kills, fenced=5)
    asked = {"kills": given.kills, "seed": given.seed, "database": given.database, "atomic": given.atomic}
    print(json.dumps({**asked, **found}))


if __name__ == "__main__":
    main()
