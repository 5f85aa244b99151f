"""A producer's session: entries in a buffer that changes after the call, as a connection reads into it again."""

from __future__ import annotations

import asyncio

from magnetar.broker.session.producer import ProducerOptions, ProducerSession
from magnetar.proto.errors import MagnetarError
from magnetar.proto.names import Position
from magnetar.proto.states import BacklogQuotaState, TxnId
from magnetar.runtime.network import CallContext
from tests.broker.topic.coordination import FakeCoordinator, coordinator, in_txn
from tests.support.cluster import Cluster, client_part, payloads_of

TOPIC = "persistent://public/default/t"
__all__ = ["coordinator"]


class Port:
    """Counts receipts; anything else ends the test."""

    def __init__(self) -> None:
        self.receipts = 0

    def send_receipt(self, sequence_id: int, position: Position, index: int) -> None:
        self.receipts += 1

    def on_duplicate(self, sequence_id: int) -> None:
        raise AssertionError(f"{sequence_id} is no duplicate")

    def on_failed(self, sequence_id: int, error: MagnetarError) -> None:
        raise AssertionError(f"{sequence_id}: {error}")

    def on_closed(self, error: MagnetarError) -> None:
        raise AssertionError(str(error))

    def on_publish_waiting(self, error: MagnetarError) -> None:
        raise AssertionError(str(error))

    def grant_credit(self, size: int) -> None: ...


class Publishing:
    """Publishes each entry from one buffer, which it overwrites at once."""

    def __init__(self, session: ProducerSession, port: Port) -> None:
        self.session, self.port = session, port
        self._buffer = bytearray(1000)

    @classmethod
    async def opened(cls, running: Cluster) -> Publishing:
        port = Port()
        broker = running.brokers[0].topic_manager
        return cls(await ProducerSession.open(broker, ProducerOptions(TOPIC, "p"), port, CallContext("test")), port)

    def publish(self, number: int, txn: TxnId | None = None) -> None:
        payload = b"message %d" % number
        part = client_part("p", number, payload) if txn is None else in_txn("p", number, txn, payload)
        view = memoryview(self._buffer)[: len(part)]
        view[:] = part
        self.session.publish(view)
        view[:] = bytes(len(part))

    async def stored(self, count: int) -> list[bytes]:
        async with asyncio.timeout(10):
            while self.port.receipts < count:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        log = self.session.topic.log
        entries = await log.reader.read(log.shape.position_at_or_after(log.shape.start_position), 1 << 20)
        self.session.leave()
        return [payload for entry in entries for payload in payloads_of(entry.payload)]


async def test_an_entry_may_change_once_publish_has_returned(running: Cluster) -> None:
    publishing = await Publishing.opened(running)
    for number in range(5):
        publishing.publish(number)
    assert await publishing.stored(5) == [b"message %d" % number for number in range(5)]


async def test_so_may_one_that_waits_for_the_gate(running: Cluster) -> None:
    publishing = await Publishing.opened(running)
    topic = publishing.session.topic
    topic.maintenance.quota = BacklogQuotaState.HOLD
    for number in range(5):
        publishing.publish(number)
    topic.maintenance.quota = None
    topic.gate.resume_queued_publishes()
    assert await publishing.stored(5) == [b"message %d" % number for number in range(5)]


async def test_so_may_one_that_waits_for_its_transaction(coordinator: FakeCoordinator, running: Cluster) -> None:
    publishing, txn = await Publishing.opened(running), coordinator.begin()
    for number in range(5):
        publishing.publish(number, txn)
    assert await publishing.stored(5) == [b"message %d" % number for number in range(5)]
    assert coordinator.joins == [txn]
