"""Transactions on real processes, which are killed: transfers between accounts, and `process`; both count once."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import magnetar
from magnetar.cli.common.processes import Cluster, Process, Processes
from magnetar.client.client import Client
from magnetar.client.model.settings import ConsumerType, InitialPosition
from magnetar.client.transactions.process import ProcessStatistics, process

pytestmark = pytest.mark.processes

BANKS = [f"bank-{number}" for number in range(4)]
CUSTOMERS = 8
BETWEEN_KILLS = 60
"""Committed transfers: the next kill comes under load."""


class Transfers:
    """Transfers until `stop`; every eleventh is called off after its first half."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.committed: set[str] = set()
        self.aborted: set[str] = set()
        self.unknown: dict[str, Any] = {}
        self.stop = False
        self.seen: dict[str, Counter[int]] = {}
        self.reasons: Counter[str] = Counter()

    async def customer(self, number: int) -> None:
        banks = [await self.client.create_producer(bank, send_timeout_millis=60_000) for bank in BANKS]
        turn = 0
        while not self.stop:
            turn += 1
            name = f"{number}-{turn}"
            payer, payee = (number + turn) % 4, (number + 2 * turn + 1) % 4
            txn = self.client.transaction(timeout=30)
            try:
                async with txn:
                    await banks[payer].send(b"-%d" % turn, {"transfer": name}, txn=txn)
                    if turn % 11 == 10:
                        raise LookupError
                    await banks[payee].send(b"%d" % turn, {"transfer": name}, txn=txn)
                self.committed.add(name)
            except (LookupError, magnetar.TransactionAborted) as error:
                self.aborted.add(name)
                self.reasons[getattr(error, "reason", "called off")] += 1
            except magnetar.OutcomeUnknown:
                self.unknown[name] = txn
            except magnetar.PulsarException as error:
                self.aborted.add(name)  # it was not begun, or an operation raised in the body
                self.reasons[type(error).__name__] += 1
                await asyncio.sleep(0.1)

    async def resolve(self) -> None:
        for name, txn in self.unknown.items():
            async with asyncio.timeout(120):
                while txn.state.name not in ("COMMITTED", "ABORTED"):
                    with contextlib.suppress(magnetar.OutcomeUnknown, magnetar.TransactionAborted):
                        await txn.commit()
            state = await self.client.transaction_status(txn.id)
            assert state is txn.state, "the coordinator tells everyone the same"
            (self.committed if state.name == "COMMITTED" else self.aborted).add(name)

    async def audit(self) -> None:
        """Reads everything that is committed, at any moment."""
        consumer = await self.client.subscribe(
            BANKS, "audit", ConsumerType.Failover, initial_position=InitialPosition.Earliest
        )
        places: dict[tuple[str, str], str] = {}
        while True:
            message = await consumer.receive()
            amount, name = int(message.data()), message.properties()["transfer"]
            place = str(message.message_id()), message.topic_name()
            if place not in places:  # what is delivered again after a kill counts once
                places[place] = name
                self.seen.setdefault(name, Counter())[amount] += 1
            await consumer.acknowledge(message)
            assert name not in self.aborted, f"{name} was aborted and is shown"
            assert all(times == 1 for times in self.seen[name].values()), f"{name} is shown twice"

    def complete(self) -> bool:
        return all(len(self.seen.get(name, ())) == 2 for name in self.committed)


async def until(condition: Any, *works: asyncio.Future[Any]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            for each in works:
                if each.done():
                    each.result()
            await asyncio.sleep(0.05)


async def transfer_under_kills(url: str, victims: list[Process]) -> Transfers:
    async with Client(url, operation_timeout_seconds=20) as client:
        transfers = Transfers(client)
        audit = asyncio.ensure_future(transfers.audit())
        customers = [asyncio.ensure_future(transfers.customer(number)) for number in range(CUSTOMERS)]
        for victim in victims:
            goal = len(transfers.committed) + BETWEEN_KILLS
            await until(lambda goal=goal: len(transfers.committed) >= goal, audit, *customers)
            await asyncio.to_thread(restart, victim)
        goal = len(transfers.committed) + BETWEEN_KILLS
        await until(lambda: len(transfers.committed) >= goal, audit, *customers)
        transfers.stop = True
        await asyncio.wait_for(asyncio.gather(*customers), 240)
        await transfers.resolve()
        await until(transfers.complete, audit)
        audit.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await audit
        return transfers


def restart(victim: Process) -> None:
    victim.kill()
    victim.start()
    victim.wait_ready()


def judge(transfers: Transfers) -> None:
    assert set(transfers.seen) == transfers.committed, "committed transfers, and no others, are shown"
    for name, amounts in transfers.seen.items():
        assert len(amounts) == 2, f"{name} has one half"
        assert sum(amounts) == 0, f"the sum of {name} is {sum(amounts)}"
    assert transfers.reasons["called off"] > 0, "some were called off"


@pytest.mark.parametrize("kind", ["broker", "bookie"])
def test_the_sum_of_all_accounts_never_changes_whatever_is_killed(kind: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, session_timeout_s=2.0) as cluster:
        victims = (cluster.brokers if kind == "broker" else cluster.bookies) * 2
        judge(asyncio.run(transfer_under_kills(cluster.url, victims[:4])))


def test_the_sum_of_all_accounts_never_changes_in_a_killed_standalone(started: Processes, tmp_path: Path) -> None:
    server = started.start("standalone", "standalone", "--port", "0", "--data", str(tmp_path / "data"))
    judge(asyncio.run(transfer_under_kills(server.wait_ready(), [server, server])))


MESSAGES = 20_000


async def process_under_kills(url: str, victims: list[Process]) -> tuple[Counter[bytes], ProcessStatistics]:
    async with Client(url, operation_timeout_seconds=20) as client:
        consumer = await client.subscribe("in", "s", initial_position=InitialPosition.Earliest)
        async with await client.create_producer("in", max_pending_messages=MESSAGES) as source:
            await source.send_many([b"%d" % number for number in range(MESSAGES)])
        producer = await client.create_producer("out", send_timeout_millis=60_000)
        statistics = ProcessStatistics()
        running = asyncio.ensure_future(
            process(
                consumer, producer, lambda message: message.data(), messages_max=100, idle_timeout_ms=8000,
                timeout=20, statistics=statistics,
            )
        )  # fmt: skip
        for turn, victim in enumerate(victims, 1):
            goal = MESSAGES * turn // (len(victims) + 1)
            await until(lambda goal=goal: statistics.sent >= goal or running.done())
            await asyncio.to_thread(restart, victim)
        reader = await client.create_reader("out", magnetar.MessageId.earliest)
        found: Counter[bytes] = Counter()
        deadline = asyncio.get_running_loop().time() + 240
        while len(found) < MESSAGES and asyncio.get_running_loop().time() < deadline:
            # `received` counts again what an abort gave back, and an abort that no broker answered gives back what it
            # holds at the transaction's time-out, after the idle time: only the output tells that all is done.
            with contextlib.suppress(magnetar.OutcomeUnknown):
                await running
            while await reader.has_message_available():
                found[(await reader.read_next(10_000)).data()] += 1
            running = asyncio.ensure_future(
                process(consumer, producer, lambda message: message.data(), idle_timeout_ms=4000)
            )
        running.cancel()
        await asyncio.wait([running])
        while await reader.has_message_available():  # what came twice
            found[(await reader.read_next(10_000)).data()] += 1
        return found, statistics


@pytest.mark.parametrize("kind", ["broker", "bookie"])
def test_process_counts_each_message_once_whatever_is_killed(kind: str, tmp_path: Path) -> None:
    with Cluster(tmp_path, session_timeout_s=2.0) as cluster:
        victims = cluster.brokers if kind == "broker" else cluster.bookies
        found, _ = asyncio.run(process_under_kills(cluster.url, victims[:3]))
    assert len(found) == MESSAGES
    assert set(found.values()) == {1}
