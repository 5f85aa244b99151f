"""A cluster in one process on real sockets and files, and a client that speaks raw streams."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.broker.common.config import BrokerConfig
from magnetar.broker.server import Broker
from magnetar.metadata.sqlite import SqliteStore
from magnetar.proto import wire_pb2 as wire
from magnetar.proto.entry import (
    decode_batch,
    encode_batch,
    encode_entry,
    encode_plain_items,
    parse_header,
    split_broker_part,
)
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.proto.errors import MagnetarError, from_wire
from magnetar.runtime.network import Endpoint, World, find_rpc
from magnetar.runtime.process import make_system_world

TIMEOUT_S = 20.0
SMALL = BrokerConfig(
    listen=Endpoint("127.0.0.1", 0), ensemble_size=1, write_quorum=1, ack_quorum=1, cursor_flush_s=0.05,
    trim_interval_s=3600.0, close_grace_s=0.05,
)  # fmt: skip


def client_part(
    producer: str, sequence_id: int, *payloads: bytes, time_ms: int = 1000, deliver_at_ms: int = 0,
    key: str | None = None,
) -> bytes:  # fmt: skip
    metadata = MessageMetadata(
        producer_name=producer, sequence_id=sequence_id, publish_time=time_ms, partition_key=key
    )  # fmt: skip
    if deliver_at_ms:
        metadata.deliver_at_time = deliver_at_ms
    if len(payloads) == 1:
        return encode_entry(metadata, payloads[0])
    return encode_batch(metadata, encode_plain_items(payloads), len(payloads))


def payloads_of(entry: bytes) -> list[bytes]:
    part = split_broker_part(entry)[2]
    return [payload for _, payload in decode_batch(parse_header(part), part)]


class Cluster:
    """`store` outlives brokers and bookies; each of them has a session of its own."""

    def __init__(self, world: World, folder: Path, store: SqliteStore) -> None:
        self.world = world
        self.folder = folder
        self.store = store
        self.bookies: list[Bookie] = []
        self.brokers: list[Broker] = []
        self.sessions: list[Any] = []

    async def add_bookie(self, group: str = "") -> Bookie:
        data = self.folder / f"bookie-{len(self.bookies)}"
        bookie = await Bookie.start(self.world, BookieConfig(data=str(data), group=group), self.store.new_session())
        self.bookies.append(bookie)
        return bookie

    async def add_broker(self, config: BrokerConfig = SMALL, **changes: object) -> Broker:
        session = self.store.new_session(timeout_s=0.3)  # counts from `abandon`: how long nobody knows of a crash
        broker = await Broker.start(self.world, replace(config, **changes), session)  # type: ignore[arg-type]
        self.brokers.append(broker)
        self.sessions.append(session)
        return broker

    async def close(self) -> None:
        for broker in self.brokers:
            await broker.close()
            memory = broker.topic_manager.memory
            assert (memory.requests.held, memory.answers.held) == (0, 0), "bytes are counted that nothing holds"
        for bookie in self.bookies:
            await bookie.close()


@asynccontextmanager
async def cluster(
    folder: Path, *, bookies: int = 1, brokers: int = 1, limit_s: float | None = 120, **changes: object
) -> AsyncIterator[Cluster]:
    """`limit_s`: whoever uses it has to be done then."""
    world = make_system_world(1)
    store = await SqliteStore.open(world, str(folder / "metadata.sqlite"))
    running = Cluster(world, folder, store)
    try:
        async with asyncio.timeout(limit_s):
            for _ in range(bookies):
                await running.add_bookie()
            for _ in range(brokers):
                await running.add_broker(**changes)
            yield running
    finally:
        await running.close()
        await store.close()


def one_by_one(items: Sequence[Any]) -> Iterator[Any]:
    """Deliveries that came together, each for itself."""
    for item in items:
        if item.WhichOneof("kind") == "deliveries":
            several = item.deliveries
            for entry_id, entry in zip(several.entry_ids, several.entries, strict=True):
                one = wire.Delivery(ledger_id=several.ledger_id, entry_id=entry_id, entry=entry)
                yield wire.ServerFrame(id=item.id, delivery=one)
        elif item.WhichOneof("kind") != "credit":
            yield item


class Wire:
    """A stream, of Connect with one producer or consumer of id 1: `next(kind)` gives the next item of that kind."""

    def __init__(self, world: World, broker: Broker | Endpoint, method: str = "Connect") -> None:
        endpoint = broker if isinstance(broker, Endpoint) else broker.endpoint
        self.channel = world.network.connect(endpoint)
        self.stream = self.channel.stream(find_rpc("Broker", method))
        self.items: deque[Any] = deque()

    def frame(self, **kind: Any) -> None:
        self.stream.send_nowait(wire.ClientFrame(id=1, **kind))

    async def next(self, kind: str) -> Any:
        """The next item of that kind; others keep waiting. Raises what `closed` says."""
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                for item in self.items:
                    found = item.WhichOneof("kind")
                    if found == kind:
                        self.items.remove(item)
                        return getattr(item, kind)
                    if found == "closed":
                        raise from_wire(item.closed)
                self.items.extend(one_by_one(await self.stream.receive()))

    async def quiet(self, seconds: float = 0.2) -> bool:
        """Nothing came for so long."""
        try:
            async with asyncio.timeout(seconds):
                self.items.extend(one_by_one(await self.stream.receive()))
        except TimeoutError:
            return not self.items
        return False

    async def close(self) -> None:
        self.stream.cancel()
        await self.channel.close()


class TestProducer(Wire):
    __test__ = False

    def __init__(self, world: World, broker: Broker | Endpoint, topic: str, name: str = "p", **options: Any) -> None:
        super().__init__(world, broker)
        self.name = name
        self.sequence_id = 0
        opening = wire.OpenProducer(topic=topic, producer_name=name, **options)
        self.frame(open_producer=opening)

    async def opened(self) -> TestProducer:
        self.answer = await self.next("producer_opened")
        return self

    def publish(self, *payloads: bytes, deliver_at_ms: int = 0, key: str | None = None) -> None:
        part = client_part(self.name, self.sequence_id, *payloads, deliver_at_ms=deliver_at_ms, key=key)
        self.frame(publish=part)
        self.sequence_id += len(payloads)

    async def send(self, *payloads: bytes, deliver_at_ms: int = 0, key: str | None = None) -> Any:
        self.publish(*payloads, deliver_at_ms=deliver_at_ms, key=key)
        return await self.next("receipt")


class TestConsumer(Wire):
    __test__ = False

    def __init__(
        self, world: World, broker: Broker | Endpoint, topic: str, subscription: str = "s", *, permits: int = 1000,
        durable: bool = True, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(world, broker)
        subscribe = wire.Subscribe(topic=topic, subscription=subscription, durable=durable, **options)
        self.frame(subscribe=subscribe)
        if permits:
            self.permits(permits)
        self.requests = 0

    async def ready(self) -> TestConsumer:
        await self.next("subscribed")
        return self

    def permits(self, count: int) -> None:
        self.frame(permits=count)

    async def receive(self) -> wire.Delivery:
        delivery: wire.Delivery = await self.next("delivery")
        return delivery

    async def receive_payloads(self, count: int) -> list[bytes]:
        found: list[bytes] = []
        while len(found) < count:
            found += payloads_of((await self.receive()).entry)
        return found

    async def ack(self, *deliveries: wire.Delivery, cumulative: bool = False, indexes: Sequence[int] = ()) -> None:
        """With a receipt: durable when it returns."""
        self.requests += 1
        entries = [
            wire.AckedEntry(ledger_id=each.ledger_id, entry_id=each.entry_id, batch_indexes=indexes)
            for each in deliveries
        ]
        kind = wire.Ack.CUMULATIVE if cumulative else wire.Ack.INDIVIDUAL
        self.frame(ack=wire.Ack(kind=kind, entries=entries, request_id=self.requests))
        await self.done()

    async def done(self) -> None:
        answer = await self.next("done")
        assert answer.request_id == self.requests
        if answer.HasField("error"):
            raise from_wire(answer.error)

    async def ask(self, **request: Any) -> None:
        self.frame(**request)
        await self.done()

    async def leave(self) -> None:
        """As `close`; the broker has closed the consumer when this returns."""
        self.requests += 1
        await self.ask(close=self.requests)
        await self.close()


__all__ = ["Cluster", "MagnetarError", "TestConsumer", "TestProducer", "client_part", "cluster", "payloads_of"]
