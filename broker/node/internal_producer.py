"""Publishing to a topic of any broker, over the wire that clients use: for messages that a broker itself publishes.

One call is one producer: look-up, open, publish, receipts, end. It returns when everything is stored, and raises when
something may not be; then all of it is to be published again, under the same names and sequence ids. What a copy of a
message says beside the message has room beside `max_message_bytes`. The code of a producer is loaded by the first call.
Guarding tests: tests/broker/subscription/test_dead_letters.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...metadata.store import MetadataStore
from ...proto import wire_pb2 as wire
from ...proto.entry import client_part, parse_header
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import (
    ConnectionLost,
    IncompatibleSchema,
    MagnetarError,
    NotAllowed,
    NotFound,
    SchemaNotFound,
    TimedOut,
    TopicNotFound,
)
from ...proto.names import Position, TopicName
from ...proto.states import TxnId
from ...runtime.clock import Clock
from ...runtime.network import Channel, Endpoint, World, rpc
from ...runtime.tasks import together
from ..common.transactions import Settlement
from ..log.managed_ledger import path_of
from ..transaction.peers import Peers

if TYPE_CHECKING:
    from ..transaction.records_core import HalfMessage, Participant

_LOG = logging.getLogger("magnetar.broker.node.internal_producer")

TIMEOUT_S = 30.0
AT_ONCE = 16
"""Producers at a time: dead letters are rare, and must not take the broker from its clients."""


class InternalProducer:
    """Publishes for a broker. `endpoint`: where this broker listens; it answers look-ups like any other."""

    def __init__(self, world: World, endpoint: Callable[[], str]) -> None:
        self._world = world
        self._endpoint = endpoint
        self._room = asyncio.Semaphore(AT_ONCE)

    async def publish(
        self, topic: TopicName, producer_name: str, client_parts: Sequence[bytes], spread: int,
        *, schema_version: bytes = b"", written_for: tuple[TopicName, int] | None = None,
    ) -> list[Position | None]:  # fmt: skip
        """Publishes entries; returns where each is stored. `spread`: any number; chooses the partition of a partitioned
        topic. `schema_version`: of their schema, which the topic has, or the one that they were `written_for`, made
        then; empty: none."""
        async with self._room:
            try:
                async with asyncio.timeout(TIMEOUT_S):
                    schema = await self._schema(*(written_for or (topic, 0)), schema_version)
                    return await self._publish(topic, producer_name, client_parts, spread, schema)
            except TimeoutError as error:
                raise TimedOut(f"{topic}: not published within {TIMEOUT_S} s") from error

    async def copy(
        self, source: tuple[TopicName, int], topic: TopicName, producer_name: str, client_parts: Sequence[bytes],
        spread: int,
    ) -> list[Position | None]:  # fmt: skip
        """Publishes, like `publish`, copies of messages of the topic `source`, made then, which all name one version of
        its schemas. It is registered for `topic`, and they name its number there; where it is refused, or gone, they
        name none."""
        version = parse_header(client_parts[0]).metadata.schema_version if client_parts else b""
        if version:
            try:
                return await self.publish(
                    topic, producer_name, client_parts, spread, schema_version=version, written_for=source
                )
            except (IncompatibleSchema, SchemaNotFound, TopicNotFound) as error:
                _LOG.warning("%s: copies of messages of %s name no schema: %s", topic, source[0], error)
            from .one_producer import of_schema  # it was loaded by the first try

            client_parts = [of_schema(part, b"") for part in client_parts]
        return await self.publish(topic, producer_name, client_parts, spread)

    async def _schema(self, topic: TopicName, incarnation: int, version: bytes) -> wire.SchemaInfo | None:
        if not version:
            return None
        me = self._world.network.connect(Endpoint.parse(self._endpoint()))
        try:
            wanted = wire.GetSchemaRequest(topic=topic.full, version=version, incarnation=incarnation)
            found: wire.SchemaReply = await me.call(rpc("Broker", "GetSchema"), wanted, timeout_s=TIMEOUT_S)
        finally:
            await me.close()
        return found.schema

    async def _publish(
        self, topic: TopicName, name: str, client_parts: Sequence[bytes], spread: int, schema: wire.SchemaInfo | None
    ) -> list[Position | None]:
        await self._world.workers.load(f"{__package__}.one_producer")
        from .one_producer import send

        me = self._world.network.connect(Endpoint.parse(self._endpoint()))
        owner: Channel | None = None
        try:
            asked = wire.PartitionsRequest(topic=topic.full, create=True)
            found = await me.call(rpc("Broker", "Partitions"), asked, timeout_s=TIMEOUT_S)
            if found.partitions:
                topic = topic.with_partition(spread % found.partitions)
            there = await me.call(rpc("Broker", "Lookup"), wire.LookupRequest(topic=topic.full), timeout_s=TIMEOUT_S)
            if not there.here:
                owner = self._world.network.connect(Endpoint.parse(there.owner))
            opening = wire.OpenProducer(topic=topic.full, producer_name=name, instance=name, copies=True)
            if schema is not None:
                opening.schema.CopyFrom(schema)
            return await send(self._world, owner or me, opening, client_parts)
        finally:
            await me.close()
            if owner is not None:
                await owner.close()


# ------------------------------------------------------------------------------------------------ half_publisher
# Publishes the messages of a half in a transaction of its coordinator, as a client of the topics' owners.
#
#     participants = await publisher.publish(txn, messages)
#
# Messages of one topic are published in their order, by one producer of that transaction alone; topics at the same
# time. The names, the sequence ids, the publish time and the transaction are set in each entry; the rest is what the
# program's producer made of the message. Who prepared the half was allowed to publish then (broker/grpc/halves.py);
# this publisher is a broker. A schema is told with the version that the entry has. Guards:
# tests/client/transactions/test_halves.py.


class HalfPublisher:
    """Publishes the messages of halves."""

    def __init__(self, producer: InternalProducer, clock: Clock) -> None:
        self._producer = producer
        self._clock = clock

    async def publish(self, txn: TxnId, messages: Sequence[HalfMessage]) -> list[Participant]:
        by_topic: dict[str, list[bytes]] = {}
        for topic, entry in messages:
            by_topic.setdefault(topic, []).append(entry)
        found: dict[str, Participant] = {}

        async def publish(topic: str, entries: Sequence[bytes]) -> None:
            found[topic] = await self._publish(txn, topic, entries)

        await together([publish(topic, entries) for topic, entries in by_topic.items()], "publish of a half")
        return list(found.values())

    async def _publish(self, txn: TxnId, topic: str, entries: Sequence[bytes]) -> Participant:
        from ..transaction.records_core import Participant  # a coordinator asks, so it is loaded

        name, wall_ms = f"half-{txn.most}-{txn.least}", self._clock.wall_ms()
        parts, schemas = [], set[bytes]()
        for number, entry in enumerate(entries):
            header = parse_header(entry)
            metadata = header.metadata
            schemas.add(metadata.schema_version)
            parts.append(_entry(metadata, entry[header.payload_offset :], name, number, wall_ms, txn))
        schema = schemas.pop() if len(schemas) == 1 else b""
        places = await self._producer.publish(TopicName.parse(topic), name, parts, 0, schema_version=schema)
        if len(places) != len(parts) or any(place is None or place.entry_id < 0 for place in places):
            raise ConnectionLost(f"{topic}: receipts without a position")
        last = max(place for place in places if place is not None)
        return Participant(topic, len(parts), *last)


def _entry(metadata: MessageMetadata, payload: bytes, name: str, number: int, wall_ms: int, txn: TxnId) -> bytes:
    metadata.producer_name, metadata.sequence_id, metadata.publish_time = name, number, wall_ms
    metadata.ClearField("highest_sequence_id")
    metadata.txnid_most_bits, metadata.txnid_least_bits = txn
    return client_part(metadata, payload)


# -------------------------------------------------------------------------------------------------- participants
# The topics of the cluster, for coordinators that tell them how their transactions ended: here, or at their owner.
#
# A topic that does not exist has nothing to settle. That is so only when the metadata says that it has no record: an
# owner that could not be found, or that refuses, is asked again.
# Guards: tests/broker/grpc/test_transactions.py.


SETTLE_S = 5.0
"""Seconds that one settlement at a topic here may take: a slow topic does not hold up the answers of others for longer.
"""
OWNERS_MAX = 10_000
"""Owners of topics that are remembered."""


@runtime_checkable
class Settles(Protocol):
    """A loaded topic that settles transactions."""

    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Settles; returns an answer for each: None when its outcome is durable at the topic; TimedOut. Idempotent."""


class Participants:
    """The participants of transactions. `load`: the topic, loaded here; NotOwner. `owner`: the endpoint of the broker
    that serves it; empty: this one."""

    def __init__(
        self, metadata: MetadataStore, load: Callable[[TopicName], Awaitable[object]],
        owner: Callable[[TopicName], Awaitable[str]], peers: Callable[[], Peers],
    ) -> None:  # fmt: skip
        self._metadata = metadata
        self._load = load
        self._owner = owner
        self._peers = peers
        self._owners: dict[str, str] = {}  # as they were last found

    async def settle(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Settles transactions at a topic, wherever it is served: `Topics` of broker/transaction/peers.py."""
        try:
            endpoint = self._owners.get(topic.full)
            if endpoint is None:
                endpoint = await self._owner(topic)
                if len(self._owners) >= OWNERS_MAX:
                    self._owners.clear()
                self._owners[topic.full] = endpoint
            if endpoint:
                errors = await self._peers().settle(endpoint, topic, settlements)
            else:
                errors = await self.settle_here(topic, settlements)
        except MagnetarError as error:
            errors = [error] * len(settlements)
        if any(errors):
            self._owners.pop(topic.full, None)
        if any(isinstance(error, NotFound) for error in errors) and await self._is_gone(topic):
            return [None if isinstance(error, NotFound) else error for error in errors]
        return errors

    async def _is_gone(self, topic: TopicName) -> bool:
        return await self._metadata.get(path_of(topic)) is None

    async def settle_here(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Settles transactions at a topic that this broker owns; each settlement has its own answer."""
        loaded = await self._load(topic)
        if not isinstance(loaded, Settles):
            raise NotAllowed(f"topic {topic} takes no transactions")
        return await loaded.settle(settlements, SETTLE_S)
