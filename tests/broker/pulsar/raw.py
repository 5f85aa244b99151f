"""A client of Pulsar's binary protocol, command by command, and a simulated broker that serves it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from msgspec.structs import replace

from magnetar.bookie.server import Bookie, BookieConfig
from magnetar.broker.pulsar.frames import PulsarFrameSplitter, encode_frame, parse_frame
from magnetar.broker.pulsar.protocol import PulsarProtocol
from magnetar.broker.server import Broker
from magnetar.metadata import paths
from magnetar.metadata.records import GrantsRecord
from magnetar.metadata.store import put_record
from magnetar.proto import pulsar_pb2 as pulsar
from magnetar.proto.entry import encode_client_part
from magnetar.proto.entry_pb2 import MessageMetadata
from magnetar.runtime.access import Guard, ListenerAccess
from magnetar.runtime.network import ByteStream, Endpoint, RunningServer, World
from magnetar.runtime.sim.world import Simulation
from tests.metadata.stores import SimulatedBackend
from tests.support.cluster import SMALL

ANY = Endpoint("127.0.0.1", 0)
T = "persistent://public/default/t"
TIMEOUT_S = 120.0


class Closed(Exception):
    """The broker ended the connection."""


class Raw:
    """`next` gives the first command that is not passed over, with what follows it in its frame."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._frames = PulsarFrameSplitter(64 << 20)
        self._came: list[tuple[str, Any, bytes]] = []

    @classmethod
    async def connected(cls, world: World, endpoint: Endpoint, **options: Any) -> Raw:
        raw = cls(await world.network.connect_bytes(endpoint))
        raw.send(connect=pulsar.CommandConnect(**{"client_version": "test", "protocol_version": 21, **options}))
        await raw.next("connected")
        return raw

    def send(self, entry: bytes = b"", **command: Any) -> None:
        data = encode_frame(**command)
        if entry:
            data = struct.pack(">I", len(data) - 4 + len(entry)) + data[4:] + entry
        self.stream.write_nowait(data)

    def publish(self, sequence_id: int, payload: bytes = b"x", producer_id: int = 1, **options: Any) -> None:
        metadata = MessageMetadata(producer_name="p", sequence_id=sequence_id, publish_time=1)
        send = pulsar.CommandSend(producer_id=producer_id, sequence_id=sequence_id, **options)
        self.send(encode_client_part(metadata, payload), send=send)

    async def next(self, *kinds: str) -> Any:
        """The next command of one of these kinds; others are passed over. Closed."""
        return (await self.next_with_rest(*kinds))[0]

    async def next_with_rest(self, *kinds: str) -> tuple[Any, bytes]:
        async with asyncio.timeout(TIMEOUT_S):
            while True:
                while self._came:
                    kind, command, rest = self._came.pop(0)
                    if kind in kinds:
                        return command, rest
                size = await self.stream.read_into(self._frames.get_free_buffer)
                if not size:
                    raise Closed
                for each in self._frames.receive_frames(size):
                    command, rest_ = parse_frame(each)
                    kind = pulsar.BaseCommand.Type.Name(command.type).lower()
                    self._came.append((kind, getattr(command, kind), bytes(rest_)))

    async def ended(self) -> None:
        """Returns when the broker has ended the connection."""
        try:
            await self.next("nothing")
        except Closed:
            return

    async def open_producer(self, number: int = 1, topic: str = T, **options: Any) -> Any:
        asked = pulsar.CommandProducer(topic=topic, producer_id=number, request_id=100 + number, **options)
        self.send(producer=asked)
        return await self.next("producer_success", "error")

    async def subscribe(self, number: int = 1, topic: str = T, permits: int = 1000, **options: Any) -> Any:
        given = {"subscription": "s", "subType": pulsar.CommandSubscribe.Shared, "initialPosition": 1, **options}
        asked = pulsar.CommandSubscribe(topic=topic, consumer_id=number, request_id=200 + number, **given)
        self.send(subscribe=asked)
        answer = await self.next("success", "error")
        if permits:
            self.send(flow=pulsar.CommandFlow(consumer_id=number, messagePermits=permits))
        return answer


Scenario = Callable[[World, Endpoint], Awaitable[None]]


def simulate(
    scenario: Scenario, seed: int = 1, guard: Guard | None = None, grants: GrantsRecord | None = None, **config: Any
) -> Broker:  # fmt: skip
    """Runs it as a client of a broker with one bookie; the broker, for what it left. `grants` of public/default."""
    simulation = Simulation(seed)
    brokers: list[Broker] = []

    async def body() -> None:
        backend = SimulatedBackend(simulation)
        bookie_store, broker_store = await backend.store(), await backend.store()
        node, bookie_node = backend.node(broker_store), backend.node(bookie_store)
        starting = Bookie.start(simulation.world(bookie_node), BookieConfig(data="/data"), bookie_store)
        await simulation.spawn(bookie_node, starting)
        if grants is not None:
            await put_record(broker_store, paths.grants("public", "default"), grants)
        world = simulation.world(node)
        settings = replace(SMALL, pulsar_listen=ANY, **config)
        broker = await simulation.spawn(node, Broker.start(world, settings, broker_store))
        brokers.append(broker)
        endpoint = Endpoint.parse(broker.pulsar_urls[""][0].partition("://")[2])
        if guard is not None:
            endpoint = (await simulation.spawn(node, _guarded(world, broker, guard))).endpoint
        await simulation.spawn("client", scenario(simulation.world("client"), endpoint))

    simulation.run(body())
    assert not simulation.complaints, simulation.complaints
    return brokers[0]


async def _guarded(world: World, broker: Broker, guard: Guard) -> RunningServer:
    return await world.network.serve_bytes(ANY, PulsarProtocol(broker.topic_manager).serve, ListenerAccess(guard))
