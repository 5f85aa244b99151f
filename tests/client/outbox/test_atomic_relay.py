"""An atomic relay against a real broker: all or nothing of a transaction's rows, whatever it dies of.

`python -m tests.client.outbox.kills --kills 200 --atomic` kills its process at random.
"""

import asyncio
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from magnetar.admin import Admin
from magnetar.client.outbox.destination_core import ClaimedRow, RelayDatabaseTransaction
from magnetar.client.outbox.relay import Relay
from magnetar.client.outbox.rows import OutboxBehind, RelayFenced, RowState
from magnetar.client.outbox.sender import RelaySender
from magnetar.client.outbox.store import RelayStore
from magnetar.client.transactions.transaction import Transaction
from magnetar.proto.errors import InvalidRequest
from tests.support.postgres import Postgres
from tests.support.processes import Processes

from .test_relay import DEADLINE_S, QUICK, SPOILED, Broker, Shop

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Processes(tmp_path_factory.mktemp("atomic")) as processes:
        made = Broker(processes.start("standalone", "standalone", "--port", "0", "--data", "data"))
        yield made
        made.client.close()


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    made = Shop(tmp_path)
    yield made
    made.engine.dispose()


def unit(shop: Shop, *rows: tuple[str, str], key: str | None = None, **more: Any) -> None:
    """One transaction of the application with a row for each topic and value."""
    with shop.engine.begin() as connection:
        for topic, value in rows:
            shop.outbox.send(connection, topic, value.encode(), key=key, **more)


def wait_whole(broker: Broker, one: str, two: str, why: str) -> None:
    """`one` has two rows of each unit, `two` one. A commit is shown by each topic when it learns of it."""
    deadline = time.monotonic() + DEADLINE_S
    while len(broker.stored(one)) != 2 * len(broker.stored(two)):
        assert time.monotonic() < deadline, why
        time.sleep(0.05)


class Death(BaseException):
    """kill -9, as far as this process allows: nothing of the relay's runs after it."""


class Killer:
    """Ends the relay at the n-th of its steps, in its thread and in the client's loop."""

    def __init__(self, patched: pytest.MonkeyPatch, step: int) -> None:
        self.left = step
        self.dead = threading.Event()
        turn, begin = RelayStore.run_database_transaction, RelaySender._begin
        groups, commit = RelaySender._groups, Transaction.commit

        def dying_turn(store: RelayStore, given: RelayDatabaseTransaction) -> tuple[list[ClaimedRow], int]:
            self.dies()
            found = turn(store, given)
            self.dies()
            return found

        async def dying_begin(sender: RelaySender) -> Transaction:
            self.dies()
            return await begin(sender)

        async def dying_groups(sender: RelaySender, *given: Any) -> Any:
            self.dies()
            found = await groups(sender, *given)
            self.dies()
            return found

        async def dying_commit(txn: Transaction, *given: Any) -> None:
            self.dies()
            await commit(txn, *given)
            self.dies()

        async def abort(txn: Transaction, *given: Any) -> None:
            """A relay that was killed aborts nothing."""

        for owner, name, dying in (
            (RelayStore, "run_database_transaction", dying_turn), (RelaySender, "_begin", dying_begin),
            (RelaySender, "_groups",
            dying_groups),
            (Transaction, "commit", dying_commit), (Transaction, "abort", abort),
        ):  # fmt: skip
            patched.setattr(owner, name, dying)

    def dies(self) -> None:
        self.left -= 1
        if self.left <= 0:
            self.dead.set()
            raise Death


def test_an_atomic_relay_that_dies_at_each_step_leaves_each_unit_whole_and_once(
    broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Around each transaction of the database, each part of a flight, and each commit."""
    for step in range(1, 60):
        one, two, shop = f"died-{step}-a", f"died-{step}-b", Shop(tmp_path, f"{step}.db")
        broker.deduplicate(one, two)
        for number in range(4):
            unit(shop, (one, f"{number}"), (two, f"{number}"), (one, f"{number}'"), key="k")
        with monkeypatch.context() as patched:
            killer = Killer(patched, step)
            relay = Relay(
                broker.client, shop.engine, shop.outbox, name=f"died-{step}", atomic=True,
                settings=replace(QUICK, stop_s=0.05),
            ).start()  # fmt: skip
            deadline = time.monotonic() + DEADLINE_S
            while not killer.dead.is_set() and shop.admin.rows() and time.monotonic() < deadline:
                time.sleep(0.01)
            died = killer.dead.is_set()
            relay.stop()
        wait_whole(broker, one, two, f"in part, died at step {step}")
        with shop.relay(broker, f"died-{step}", atomic=True) as again:
            shop.wait_empty(again)
        assert broker.stored(one, 8) == [f"{number}{mark}" for number in range(4) for mark in ("", "'")], f"at {step}"
        assert broker.stored(two, 4) == [str(number) for number in range(4)], f"at {step}"
        shop.engine.dispose()
        if not died:
            break
    assert step > 12, "a relay has as many steps"


def test_readers_see_all_of_a_unit_or_nothing(broker: Broker, shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the commit is held back everything is stored, and nothing is shown."""
    broker.deduplicate("shown-a", "shown-b")
    broker.deduplicate("shown-parts", partitions=3)
    go, asked, honest = threading.Event(), threading.Event(), Transaction.commit

    async def commit(txn: Transaction, *given: Any) -> None:
        asked.set()
        await asyncio.to_thread(go.wait)
        await honest(txn, *given)

    monkeypatch.setattr(Transaction, "commit", commit)
    rows = [("shown-a", "1"), ("shown-b", "2"), *(("shown-parts", str(number)) for number in range(12))]
    unit(shop, *rows)
    with shop.relay(broker, "shown", atomic=True) as relay:
        assert asked.wait(DEADLINE_S)
        assert [broker.stored(topic) for topic in ("shown-a", "shown-b", "shown-parts")] == [[], [], []]
        assert relay.statistics()["in_memory_rows"] == len(rows)
        go.set()
        shop.wait_empty(relay)
    assert broker.stored("shown-a", 1) == ["1"]
    assert sorted(broker.stored("shown-parts", 12), key=int) == [str(number) for number in range(12)]


def test_a_unit_with_a_row_that_is_refused_is_parked_whole(broker: Broker, shop: Shop) -> None:
    """The topic allows a delay of a second; the row asks for a day."""
    broker.deduplicate("refused-a")
    broker.deduplicate("refused-b", max_delay_ms=1000)
    unit(shop, ("refused-a", "first"))
    with shop.engine.begin() as connection:
        shop.outbox.send(connection, "refused-a", b"with bad", key="k")
        shop.outbox.send(connection, "refused-b", b"bad", deliver_at=int(time.time() * 1000) + 86_400_000)
    unit(shop, ("refused-a", "of its key"), ("refused-b", "with of its key"), key="k")
    unit(shop, ("refused-a", "passes"), ("refused-b", "passes"), key="other")
    with shop.relay(broker, "refused", atomic=True) as relay:
        shop.wait_for(lambda: relay.lag().parked == 2 and relay.lag().waiting == 2, relay)
        assert broker.stored("refused-a", 2) == ["first", "passes"]
        assert broker.stored("refused-b", 1) == ["passes"]
        parked = shop.admin.rows(state=RowState.PARKED)
        assert all("delay" in (each.error or "") for each in parked)
        with Admin(broker.url) as admin:
            admin.remove_topic_policies("refused-b", "max_delay_ms")
        shop.admin.revive_rows([each.id for each in parked])
        shop.wait_empty(relay)
    assert broker.stored("refused-a", 4) == ["first", "passes", "with bad", "of its key"]


def test_a_row_that_another_program_spoiled_is_parked_and_those_beside_it_pass(broker: Broker, shop: Shop) -> None:
    """What makes no message is seen after the rows before it, of the same group, are on their way."""
    rows = shop.outbox.rows
    for name, columns in SPOILED.items():
        broker.deduplicate(topic := f"spoiled-{name.replace(' ', '-')}")
        for value in ("first", name, "last"):
            unit(shop, (topic, value))
        with shop.engine.begin() as connection:
            connection.execute(rows.update().where(rows.c.value == name.encode()).values(**columns))
    with shop.relay(broker, "spoiled", atomic=True) as relay:
        shop.wait_for(lambda: relay.lag().parked == len(SPOILED) and not relay.lag().waiting, relay)
        shop.wait_empty(relay, but=len(SPOILED))
        assert relay.restarts == 0
    assert all(each.error for each in shop.admin.rows(state=RowState.PARKED))
    for name in SPOILED:
        assert broker.stored(f"spoiled-{name.replace(' ', '-')}", 2) == ["first", "last"]


@pytest.mark.parametrize("atomic", [False, True])
def test_a_relay_of_either_kind_goes_on_after_an_atomic_one_that_was_killed(
    broker: Broker, shop: Shop, monkeypatch: pytest.MonkeyPatch, atomic: bool
) -> None:
    """Before its commit: the topics have the ids of an open transaction, which is aborted."""
    name = f"kind-{atomic}"
    broker.deduplicate(f"{name}-a", f"{name}-b")
    rows = [(f"{name}-{topic}", str(number)) for number in range(6) for topic in "ab"]
    for row in rows:
        unit(shop, row)
    dead = threading.Event()

    async def commit(*_: Any) -> None:
        dead.set()
        raise Death

    async def abort(*_: Any) -> None: ...

    with monkeypatch.context() as patched:
        patched.setattr(Transaction, "commit", commit)
        patched.setattr(Transaction, "abort", abort)
        patched.setattr("magnetar.client.outbox.sender.FLIGHT_TIMEOUT_S", 5.0)
        relay = shop.relay(broker, name, atomic=True).start()
        assert dead.wait(DEADLINE_S)
        relay.stop()
    with shop.relay(broker, name, atomic=atomic) as relay:
        shop.wait_empty(relay)
    for topic in "ab":
        assert broker.stored(f"{name}-{topic}", 6) == [str(number) for number in range(6)]


def test_of_two_atomic_relays_the_older_is_fenced(broker: Broker, shop: Shop) -> None:
    broker.deduplicate("older-a", "older-b")
    unit(shop, ("older-a", "1"), ("older-b", "1"))
    old = shop.relay(broker, "older", atomic=True).start()
    shop.wait_empty(old)
    new = shop.relay(broker, "older", atomic=True).start()
    assert new.wait_ready(DEADLINE_S)
    for number in range(2, 20):
        unit(shop, ("older-a", str(number)), ("older-b", str(number)))
    shop.wait_empty(new)
    deadline = time.monotonic() + DEADLINE_S
    while old.error is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert isinstance(old.error, RelayFenced)
    new.stop()
    old.stop()
    assert new.error is None
    for topic in ("older-a", "older-b"):
        assert broker.stored(topic, 19) == [str(number) for number in range(1, 20)]


def test_an_atomic_relay_takes_whole_units_through_a_broker_that_dies(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        broker = Broker(processes.start("standalone", "standalone", "--port", "0", "--data", "data"))
        broker.deduplicate("away-a", "away-b")
        shop = Shop(tmp_path)
        with shop.relay(broker, "away", atomic=True) as relay:
            for number in range(60):
                unit(shop, ("away-a", str(number)), ("away-b", str(number)))
                if number in (20, 40):
                    broker.process.kill()
                    broker.process.start()
                    broker.process.wait_ready()
            shop.wait_empty(relay)
            assert relay.restarts == 0
        for topic in ("away-a", "away-b"):
            assert broker.stored(topic, 60) == [str(number) for number in range(60)]
        broker.client.close()


def test_a_restored_database_stops_an_atomic_relay(broker: Broker, tmp_path: Path) -> None:
    shop = Shop(tmp_path, "now.db")
    broker.deduplicate("restored")
    backup = tmp_path / "backup.db"
    backup.write_bytes((tmp_path / "now.db").read_bytes())
    with shop.relay(broker, "restored", atomic=True) as relay:
        unit(shop, ("restored", "1"), ("restored", "2"))
        shop.wait_empty(relay)
    restored = Shop(tmp_path, "backup.db")
    unit(restored, ("restored", "3"))
    with pytest.raises(OutboxBehind, match="renumber"):
        restored.relay(broker, "restored", atomic=True).run()


def test_an_atomic_relay_has_all_shards(broker: Broker, shop: Shop) -> None:
    with pytest.raises(InvalidRequest, match="alone"):
        Relay(broker.client, shop.engine, shop.outbox, 0, 2, name="shards", atomic=True)


def test_atomic_relays_that_are_killed_leave_nothing_in_part(tmp_path: Path, postgres: Postgres) -> None:
    """On PostgreSQL; those of a relay that is not atomic are killed on SQLite."""
    from .kills import Kills

    url = postgres.database("kills-atomic")
    with Processes(tmp_path) as processes:
        server = processes.start("standalone", "standalone", "--port", "0", "--data", "data").wait_ready()
        found = Kills(processes, server, url, seed=1, atomic=True).run(2, fenced=2)
    assert found["stored"] > 0
    assert found["partial"] == 0


