"""The relay against a real broker: it dies at each of its steps, the broker is away, rows are refused, two relays run.

`python -m tests.client.outbox.kills --kills 200` kills its process at random.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, MetaData, create_engine, update

import magnetar
import magnetar.schema
from magnetar.admin import Admin
from magnetar.client.common.errors import AlreadyClosed
from magnetar.client.outbox.destination_core import ClaimedRow, RelayDatabaseTransaction, RelaySettings
from magnetar.client.outbox.relay import OutboxAdmin, Relay
from magnetar.client.outbox.rows import DeduplicationOff, OutboxBehind, RelayFenced, RowKeyEncoding, RowState
from magnetar.client.outbox.sender import RelayFact, RelaySender
from magnetar.client.outbox.store import RelayStore
from magnetar.client.outbox.tables import SQLAlchemyOutbox
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import TopicName
from magnetar.proto.policies import Policies
from tests.support.processes import Process, Processes

pytestmark = pytest.mark.processes

DEADLINE_S = 60.0
DEADLINE_MS = 60_000
QUICK = RelaySettings(
    rows_per_claim=5, rows_per_entry=3, attempts_max=2, retry_first_s=0.05, back_off_last_s=0.5, stop_s=1.0
)


class Broker:
    """A standalone server and what a test asks of it."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.url = process.wait_ready()
        self.client = magnetar.Client(self.url)

    def deduplicate(self, *topics: str, partitions: int = 0, **more: Any) -> None:
        with Admin(self.url) as admin:
            for topic in topics:
                admin.create_topic(topic, partitions=partitions)
                admin.set_topic_policies(topic, Policies(deduplication=True, **more))

    def stored(self, topic: str, at_least: int = 0) -> list[str]:
        """Everything that the topic has, in its order."""
        reader = self.client.create_reader(topic, magnetar.MessageId.earliest)
        found: list[str] = []
        deadline = time.monotonic() + DEADLINE_S
        while reader.has_message_available() or (len(found) < at_least and time.monotonic() < deadline):
            found.append(reader.read_next(timeout_millis=DEADLINE_MS).data().decode())
        reader.close()
        return found


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Processes(tmp_path_factory.mktemp("outbox")) as processes:
        made = Broker(processes.start("standalone", "standalone", "--port", "0", "--data", "data"))
        yield made
        made.client.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.engine.dispose()


class Shop:
    """An application: a SQLite database with an outbox."""

    def __init__(self, folder: Path, name: str = "shop.db") -> None:
        self.engine: Engine = create_engine(f"sqlite:///{folder / name}")
        metadata = MetaData()
        self.outbox = SQLAlchemyOutbox(metadata)
        metadata.create_all(self.engine)
        self.admin = OutboxAdmin(self.engine, self.outbox)

    def send(self, topic: str, *values: str, key: str | None = None, deliver_at: int | None = None) -> None:
        with self.engine.begin() as connection:
            for value in values:
                self.outbox.send(connection, topic, value.encode(), key=key, deliver_at=deliver_at)

    def relay(self, broker: Broker, name: str, **more: object) -> Relay:
        return Relay(broker.client, self.engine, self.outbox, name=name, settings=QUICK, **more)  # type: ignore[arg-type]

    def wait_for(self, what: Callable[[], bool], relay: Relay) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            assert time.monotonic() < deadline, (relay.statistics(), relay.lag())
            assert relay.error is None, relay.error
            relay.wait_ready(0.05)
            time.sleep(0.02)

    def wait_empty(self, relay: Relay, *, but: int = 0) -> None:
        self.wait_for(lambda: len(self.admin.rows()) == but, relay)


class Death(BaseException):
    """kill -9, as far as this process allows: nothing of the relay's runs after it."""


def test_a_relay_that_dies_at_each_step_leaves_each_row_in_its_topic_once(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each transaction, and before and after each group is sent."""
    turn, send = RelayStore.run_database_transaction, RelaySender.send
    left = [0]

    def dies() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise Death

    def dying_turn(self: RelayStore, given: RelayDatabaseTransaction) -> tuple[list[ClaimedRow], int]:
        dies()
        found = turn(self, given)
        dies()
        return found

    def dying_send(self: RelaySender, destination: str, rows: tuple[ClaimedRow, ...]) -> None:
        dies()
        send(self, destination, rows)
        dies()

    deaths = 0
    for step in range(1, 40):
        topic, shop = f"step-{step}", Shop(tmp_path, f"{step}.db")
        broker.deduplicate(topic)
        shop.send(topic, *(str(number) for number in range(8)), key="a")
        with monkeypatch.context() as patched:
            left[0] = step
            patched.setattr(RelayStore, "run_database_transaction", dying_turn)
            patched.setattr(RelaySender, "send", dying_send)
            relay = shop.relay(broker, topic).start()
            deadline = time.monotonic() + DEADLINE_S
            while left[0] > 0 and shop.admin.rows() and time.monotonic() < deadline:
                time.sleep(0.01)
            died = left[0] <= 0
            left[0] = -1
            relay.stop()
        deaths += died
        with shop.relay(broker, topic) as again:
            shop.wait_empty(again)
        assert broker.stored(topic) == [str(number) for number in range(8)], f"died at step {step}"
        shop.engine.dispose()
        if not died:
            break
    assert deaths >= 8, "the relay has as many steps"


def record(*names: str) -> Any:
    """The class `First` of one version of a program: its integers, in this order."""
    fields: dict[str, Any] = {name: magnetar.schema.Integer() for name in names}
    if "z" in fields:
        fields["z"] = magnetar.schema.Integer(default=7, required_default=True)
    return type("First", (magnetar.schema.Record,), fields)


First, Swapped, Grown = record("x", "y"), record("y", "x"), record("y", "x", "z")


@pytest.mark.parametrize("enforced", [False, True])
@pytest.mark.parametrize("atomic", [False, True])
def test_each_row_names_the_schema_that_it_was_written_with(
    broker: Broker, shop: Shop, enforced: bool, atomic: bool
) -> None:
    """In one topic, by one relay; also where messages without a schema are refused: such a row is parked, alone."""
    topic = f"schemas-{enforced}-{atomic}"
    broker.deduplicate(topic, schema_validation_enforced=enforced)
    if enforced:
        broker.client.create_producer(topic, schema=magnetar.schema.AvroSchema(First)).close()
    consumer = broker.client.subscribe(
        topic, "s", schema=magnetar.schema.AvroSchema(Grown), initial_position=magnetar.InitialPosition.Earliest
    ) if enforced else None  # fmt: skip
    with shop.engine.begin() as connection:
        for number in range(8):
            kind = (First, Swapped, Grown)[number % 3]
            value = kind(x=number, y=100 + number)
            shop.outbox.send(connection, topic, value, schema=magnetar.schema.AvroSchema(kind), key="k")
    if not enforced:
        shop.send(topic, "plain", key="other")
    with shop.relay(broker, topic, atomic=atomic) as relay:
        shop.wait_empty(relay)
        if enforced:
            shop.send(topic, "plain", key="other")
            shop.wait_for(lambda: [each.state for each in shop.admin.rows()] == ["parked"], relay)
            (row,) = shop.admin.rows()
            assert "IncompatibleSchema" in (row.error or "")
    consumer = consumer or broker.client.subscribe(
        topic, "s", schema=magnetar.schema.AvroSchema(Grown), initial_position=magnetar.InitialPosition.Earliest
    )
    found = [consumer.receive(DEADLINE_MS) for _ in range(8)]
    assert [(each.value().x, each.value().y) for each in found] == [(n, 100 + n) for n in range(8)]
    assert len({each.int_schema_version() for each in found}) == 3
    if not enforced:
        last = consumer.receive(DEADLINE_MS)
        assert (last.data(), last.int_schema_version()) == (b"plain", -1)
    consumer.close()


def test_a_pair_in_a_row_keeps_its_key_and_its_nulls(broker: Broker, shop: Shop) -> None:
    broker.deduplicate("row-pairs")
    pairs = magnetar.schema.KeyValueSchema(
        magnetar.schema.StringSchema(), magnetar.schema.StringSchema(), magnetar.schema.KeyValueEncodingType.SEPARATED
    )
    wanted = [(key, value) for key in (None, "", "k") for value in (None, "", "v")]
    with shop.engine.begin() as connection:
        for pair in wanted:
            shop.outbox.send(connection, "row-pairs", pair, schema=pairs)
    consumer = broker.client.subscribe(
        "row-pairs", "s", schema=pairs, initial_position=magnetar.InitialPosition.Earliest
    )
    with shop.relay(broker, "row-pairs") as relay:
        assert [consumer.receive(DEADLINE_MS).value() for _ in wanted] == wanted
        shop.wait_empty(relay)
    consumer.close()


def test_rows_reach_topics_and_partitions_with_all_that_they_say(broker: Broker, shop: Shop) -> None:
    broker.deduplicate("whole-plain")
    broker.deduplicate("whole-parted", partitions=4)
    parted = broker.client.subscribe("whole-parted", "s", initial_position=magnetar.InitialPosition.Earliest)
    with shop.engine.begin() as connection:
        shop.outbox.send(connection, "whole-plain", b"v", key="k", properties={"a": "ü"}, event_time=77)
        shop.outbox.send(connection, "whole-plain", None, key="k")
        for number in range(20):
            shop.outbox.send(connection, "whole-parted", b"%d" % number, key=str(number))
    reader = broker.client.create_reader("whole-plain", magnetar.MessageId.earliest)
    with shop.relay(broker, "whole") as relay:
        first, second = reader.read_next(DEADLINE_MS), reader.read_next(DEADLINE_MS)
        found = {parted.receive(DEADLINE_MS).data() for _ in range(20)}
        shop.wait_empty(relay)
        counted = relay.statistics()
    assert (first.data(), first.partition_key(), first.properties()) == (b"v", "k", {"a": "ü"})
    assert first.event_timestamp() == 77
    assert first.producer_name() == "outbox-whole-0"
    assert second.data() == b""
    assert found == {b"%d" % number for number in range(20)}
    assert (counted["stored_rows"], counted["in_memory_rows"], counted["phase"]) == (22, 0, "running")
    assert relay.statistics()["phase"] == "stopped"


def test_a_relay_stops_in_the_middle_of_a_backlog_and_the_next_one_goes_on(broker: Broker, shop: Shop) -> None:
    broker.deduplicate("backlog")
    rows = [str(number) for number in range(2000)]
    shop.send("backlog", *rows)
    relay = shop.relay(broker, "backlog").start()
    shop.wait_for(lambda: relay.statistics()["stored_rows"] > 0, relay)
    relay.stop()
    assert relay.statistics()["phase"] == "stopped"
    assert shop.admin.rows(limit=1), "it did not go on to the end"
    with Relay(broker.client, shop.engine, shop.outbox, name="backlog") as relay:
        shop.wait_empty(relay)
    assert broker.stored("backlog") == rows


def test_a_commit_wakes_a_relay_of_the_same_process(broker: Broker, shop: Shop) -> None:
    from sqlalchemy.orm import Session

    broker.deduplicate("woken")
    settings = RelaySettings(poll_s=3600.0, find_s=3600.0)
    with Relay(broker.client, shop.engine, shop.outbox, name="woken", settings=settings) as relay:
        assert relay.wait_ready(DEADLINE_S)
        with Session(shop.engine) as session:
            for number in range(3):
                shop.outbox.send(session, "woken", b"%d" % number)
                session.commit()
                shop.wait_empty(relay)
    assert broker.stored("woken") == ["0", "1", "2"]


def test_a_topic_without_deduplication_is_refused_with_the_command(broker: Broker, shop: Shop) -> None:
    shop.send("no-dedup", "1")
    relay = shop.relay(broker, "no-dedup")
    with pytest.raises(DeduplicationOff, match="magnetar namespaces set-deduplication public/default --enable"):
        relay.run()
    assert relay.statistics()["phase"] == "failed"


def test_a_topic_without_deduplication_that_is_new_to_a_running_relay_waits_alone(broker: Broker, shop: Shop) -> None:
    broker.deduplicate("with-dedup")
    shop.send("with-dedup", "1")
    with shop.relay(broker, "mixed") as relay:
        shop.wait_empty(relay)
        shop.send("new-without", "waits")
        shop.wait_for(lambda: bool(relay.statistics()["waits"]), relay)
        assert "set-deduplication" in relay.statistics()["waits"]["persistent://public/default/new-without"]
        shop.send("with-dedup", "2")
        shop.wait_empty(relay, but=1)
        with Admin(broker.url) as admin:
            admin.set_topic_policies("new-without", Policies(deduplication=True))
        shop.wait_empty(relay)
    assert broker.stored("with-dedup") == ["1", "2"]
    assert broker.stored("new-without") == ["waits"]


def test_a_refused_row_is_parked_and_rows_of_other_keys_pass(broker: Broker, shop: Shop) -> None:
    """The topic allows a delay of a second; the row asks for a day."""
    broker.deduplicate("poison", max_delay_ms=1000)
    far = int(time.time() * 1000) + 86_400_000
    shop.send("poison", "bad", key="a", deliver_at=far)
    shop.send("poison", "waits", key="a")
    shop.send("poison", "passes", key="b")
    with shop.relay(broker, "poison") as relay:
        shop.wait_for(lambda: relay.lag().parked == 1 and relay.lag().waiting == 1, relay)
        assert broker.stored("poison", at_least=1) == ["passes"]
        (row,) = shop.admin.rows(state=RowState.PARKED)
        assert "delay" in (row.error or "")
        assert row.attempts == QUICK.attempts_max
        assert relay.statistics()["parked_rows"] == 1
        with Admin(broker.url) as admin:
            admin.remove_topic_policies("poison", "max_delay_ms")
        assert shop.admin.revive_rows([row.id]) == 1
        shop.wait_empty(relay)
    assert sorted(broker.stored("poison")) == ["bad", "passes", "waits"]


SPOILED: dict[str, dict[str, Any]] = {
    "cut": {"properties": '{"a": "b'}, "number": {"properties": "7"}, "nested": {"properties": "[" * 50_000},
    "not text": {"properties": '{"a": 1}'}, "null": {"properties": '{"a": null}'},
    "no base64": {"key": "?", "key_form": RowKeyEncoding.BYTES}, "event": {"event_time": -1},
    "late": {"deliver_at": -1},
    "schema": {"value_schema": "{"}, "deep": {"value_schema": "[" * 50_000},
    "type": {"value_schema": '{"type": "NONE SUCH", "name": "", "data": "", "properties": {}}'},
    "no object": {"properties": "[1]"}, "no name": {"value_schema": ""}, "a list": {"value_schema": "[]"},
    "a number": {"value_schema": '{"type": 7}'}, "nothing": {"value_schema": "null"},
}  # fmt: skip


def test_a_row_that_is_damaged_in_any_column_is_parked_and_says_why_and_the_others_pass(
    broker: Broker, shop: Shop
) -> None:
    broker.deduplicate("damaged")
    shop.send("damaged", "first", *SPOILED, "last")
    rows = shop.outbox.rows
    with shop.engine.begin() as connection:
        for value, columns in SPOILED.items():
            connection.execute(rows.update().where(rows.c.value == value.encode()).values(**columns))
    with shop.relay(broker, "damaged") as relay:
        shop.wait_empty(relay, but=len(SPOILED))
        shop.wait_for(lambda: relay.lag().parked == len(SPOILED), relay)
        assert relay.restarts == 0
    assert all(each.error for each in shop.admin.rows(state=RowState.PARKED))
    assert broker.stored("damaged") == ["first", "last"]


def test_of_two_relays_the_older_is_fenced_and_the_newer_sends(broker: Broker, shop: Shop) -> None:
    broker.deduplicate("two")
    shop.send("two", "1")
    old = shop.relay(broker, "two").start()
    shop.wait_empty(old)
    new = shop.relay(broker, "two").start()
    assert new.wait_ready(DEADLINE_S)
    shop.send("two", "2", "3")
    shop.wait_empty(new)
    deadline = time.monotonic() + DEADLINE_S
    while old.error is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(old.error, RelayFenced)
    new.stop()
    old.stop()
    assert new.error is None
    assert broker.stored("two") == ["1", "2", "3"]


def test_a_relay_in_standby_takes_over_when_the_other_is_gone(
    broker: Broker, shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("magnetar.client.outbox.relay.STANDBY_TAKEOVER_S", 1.0)
    broker.deduplicate("standby")
    first = Relay(
        broker.client, shop.engine, shop.outbox, name="standby", settings=RelaySettings(seen_s=0.1)
    ).start()
    shop.send("standby", "1")
    shop.wait_empty(first)
    rarely = RelaySettings(poll_s=3600.0)
    second = Relay(broker.client, shop.engine, shop.outbox, name="standby", standby=True, settings=rarely).start()
    assert not second.wait_ready(2.0)
    assert second.statistics()["phase"] == "standby"
    for _ in range(1000):
        shop.outbox.wake()
    assert second._facts.qsize() <= 1, "what is not read does not take memory for each commit"
    first.stop()
    assert first.error is None
    shop.send("standby", "2")
    shop.wait_empty(second)
    for value in ("3", "4"):  # what it was told before it had the shard does not keep a wake from it
        shop.send("standby", value)
        shop.outbox.wake()
        shop.wait_empty(second)
    second.stop()
    assert broker.stored("standby") == ["1", "2", "3", "4"]


def test_a_sender_that_is_closed_while_it_asks_for_a_topic_connects_to_nothing_afterwards() -> None:
    asked, answer, told = threading.Event(), threading.Event(), SimpleQueue[RelayFact]()

    class Cluster:
        """A client whose brokers answer when they are told to."""

        def inner(self) -> Any:
            return SimpleNamespace(connections=self)

        async def fetch_partition_count(self, topic: TopicName) -> int:
            asked.set()
            await asyncio.to_thread(answer.wait, DEADLINE_S)
            return 0

        def get_service_info(self) -> Any:
            raise AssertionError("nothing would close the admin client that is made with it")

    cluster: Any = Cluster()
    sending = RelaySender(cluster, "closed", QUICK, told.put)
    sending.start_resolving_topic("t")
    assert asked.wait(DEADLINE_S)
    sending.close()
    answer.set()
    errors: list[MagnetarError] = []
    core: Any = SimpleNamespace(on_topic_resolve_failed=lambda topic, error, now: errors.append(error))
    told.get(timeout=DEADLINE_S)(core, 0.0)
    assert isinstance(errors[0], AlreadyClosed)


def test_a_database_from_a_backup_is_refused_and_goes_on_after_renumber(broker: Broker, tmp_path: Path) -> None:
    shop = Shop(tmp_path, "now.db")
    broker.deduplicate("backup")
    with shop.relay(broker, "backup") as relay:
        shop.send("backup", "1", "2")
        shop.wait_empty(relay)
    backup = tmp_path / "backup.db"
    backup.write_bytes((tmp_path / "now.db").read_bytes())
    with shop.relay(broker, "backup") as relay:
        shop.send("backup", "3", "4")
        shop.wait_empty(relay)
    restored = Shop(tmp_path, "backup.db")
    restored.send("backup", "5")
    relay = restored.relay(broker, "backup")
    with pytest.raises(OutboxBehind, match="renumber"):
        relay.run()
    rows = restored.outbox.rows
    for value, topic in (("no name", ""), ("no topic name", "a/b/c/d"), ("no tenant", "persistent://none/such/t")):
        restored.send("backup", value)
        with restored.engine.begin() as connection:
            connection.execute(update(rows).where(rows.c.value == value.encode()).values(topic=topic))
    assert restored.admin.renumber_shard(broker.client, "outbox-backup-0", 0) == {
        "persistent://public/default/backup": 3
    }
    with restored.relay(broker, "backup") as relay:
        restored.wait_empty(relay, but=3)
    assert broker.stored("backup") == ["1", "2", "3", "4", "5"]


def test_a_broker_that_is_away_for_long_loses_nothing_and_stop_does_not_hang(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        broker = Broker(processes.start("standalone", "standalone", "--port", "0", "--data", "data"))
        broker.deduplicate("away")
        shop = Shop(tmp_path)
        relay = shop.relay(broker, "away").start()
        shop.send("away", "1")
        shop.wait_empty(relay)
        broker.process.kill()
        shop.send("away", *(str(number) for number in range(2, 40)))
        shop.wait_for(lambda: relay.lag().claimed > 0, relay)
        relay.stop()
        relay = shop.relay(broker, "away").start()  # one that starts while the broker is away
        broker.process.start()
        broker.process.wait_ready()
        shop.wait_empty(relay)
        relay.stop()
        assert broker.stored("away") == [str(number) for number in range(1, 40)]
        broker.client.close()


def test_relays_and_applications_that_are_killed_lose_nothing_and_double_nothing(tmp_path: Path) -> None:
    """On SQLite; those of an atomic relay are killed on PostgreSQL."""
    from .kills import Kills

    url = f"sqlite:///{tmp_path}/kills.db"
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data").wait_ready()
        found = Kills(processes, server, url, seed=1).run(2, fenced=2)
    assert found["stored"] > 0
