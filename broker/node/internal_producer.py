"""Publishes messages of the broker itself, such as dead letters, to a topic of any broker, like a client over the
network.

Each call opens a producer, publishes, waits for the receipts, and closes the producer. It returns when all entries are
stored. If it raises, some entries may not be stored: then the caller must publish all of them again, under the same
producer name and sequence ids. The properties that are added to a copy of a message may exceed `max_message_bytes`. The
first call imports the code of a producer.
Guarding tests: tests/broker/subscription/test_dead_letters.py.

Also in this file, each below its heading: publishing the messages of a half message in a transaction of its coordinator
(half_publisher); applying outcomes of transactions to topics, for the coordinators (participants).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ...metadata.store import MetadataStore
from ...proto import wire_pb2 as wire
from ...proto.entry import encode_client_part, parse_header
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
from ...runtime.network import Channel, Endpoint, World, find_rpc
from ...runtime.tasks import run_together
from ..common.transactions import Settlement
from ..log.managed_ledger import topic_path
from ..transaction.peers import TransactionPeerClient

if TYPE_CHECKING:
    from ..transaction.records_core import HalfMessage, Participant

_LOG = logging.getLogger("magnetar.broker.node.internal_producer")

PUBLISH_TIMEOUT_S = 30.0
REQUESTS_AT_ONCE = 16
"""Most producers at a time: dead letters are rare, and must not slow the broker for its clients."""


class InternalProducer:
    """Publishes messages that the broker itself creates, over the network like a client. `endpoint`: a function that
    returns the address of this broker, from which owners of topics are requested."""

    def __init__(self, world: World, endpoint: Callable[[], str]) -> None:
        self._world = world
        self._endpoint = endpoint
        self._room = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def publish_messages(
        self, topic: TopicName, producer_name: str, client_parts: Sequence[bytes], spread: int,
        *, schema_version: bytes = b"", written_for: tuple[TopicName, int] | None = None,
    ) -> list[Position | None]:  # fmt: skip
        """Publishes the entries `client_parts` to a topic, and waits until they are stored. Returns the position of
        each stored entry; None for an entry whose position is not known. `spread`: any number; it determines the
        partition of a partitioned topic. `schema_version`: the version of the entries' schema; empty: the entries have
        no schema. `written_for`: the topic and incarnation in which the schema has this version; None: `topic`. Raises
        TimedOut after PUBLISH_TIMEOUT_S seconds, SchemaNotFound or TopicNotFound if the schema does not exist any more,
        the errors of the look-up of the owner, and the error with which the owner of the topic refuses the publish.
        After any error it is unknown which entries are stored."""
        async with self._room:
            try:
                async with asyncio.timeout(PUBLISH_TIMEOUT_S):
                    schema = await self._schema(*(written_for or (topic, 0)), schema_version)
                    return await self._publish(topic, producer_name, client_parts, spread, schema)
            except TimeoutError as error:
                raise TimedOut(f"{topic}: not published within {PUBLISH_TIMEOUT_S} s") from error

    async def publish_copies(
        self, source: tuple[TopicName, int], topic: TopicName, producer_name: str, client_parts: Sequence[bytes],
        spread: int,
    ) -> list[Position | None]:  # fmt: skip
        """Publishes copies of the messages `client_parts` to another topic, like `publish_messages`. `source`: the
        topic and incarnation of the originals; all of them must have the same schema version. Registers their schema
        for `topic` too, and gives the copies the version that it has there. If the registration is refused, or the
        schema is deleted, the copies have no schema version. Raises CorruptEntry if an original cannot be parsed, and
        the errors of `publish_messages`."""
        version = parse_header(client_parts[0]).metadata.schema_version if client_parts else b""
        if version:
            try:
                return await self.publish_messages(
                    topic, producer_name, client_parts, spread, schema_version=version, written_for=source
                )
            except (IncompatibleSchema, SchemaNotFound, TopicNotFound) as error:
                _LOG.warning("%s: copies of messages of %s name no schema: %s", topic, source[0], error)
            from .one_producer import replace_schema_version  # it was loaded by the first try

            client_parts = [replace_schema_version(part, b"") for part in client_parts]
        return await self.publish_messages(topic, producer_name, client_parts, spread)

    async def _schema(self, topic: TopicName, incarnation: int, version: bytes) -> wire.SchemaInfo | None:
        if not version:
            return None
        me = self._world.network.connect(Endpoint.parse(self._endpoint()))
        try:
            wanted = wire.GetSchemaRequest(topic=topic.full, version=version, incarnation=incarnation)
            found: wire.SchemaReply = await me.call(
                find_rpc("Broker", "GetSchema"), wanted, timeout_s=PUBLISH_TIMEOUT_S
            )
        finally:
            await me.close()
        return found.schema

    async def _publish(
        self, topic: TopicName, name: str, client_parts: Sequence[bytes], spread: int, schema: wire.SchemaInfo | None
    ) -> list[Position | None]:
        await self._world.workers.load(f"{__package__}.one_producer")
        from .one_producer import publish_entries_as_one_producer

        me = self._world.network.connect(Endpoint.parse(self._endpoint()))
        owner: Channel | None = None
        try:
            asked = wire.PartitionsRequest(topic=topic.full, create=True)
            found = await me.call(find_rpc("Broker", "Partitions"), asked, timeout_s=PUBLISH_TIMEOUT_S)
            if found.partitions:
                topic = topic.with_partition(spread % found.partitions)
            there = await me.call(
                find_rpc("Broker", "Lookup"), wire.LookupRequest(topic=topic.full), timeout_s=PUBLISH_TIMEOUT_S
            )
            if not there.here:
                owner = self._world.network.connect(Endpoint.parse(there.owner))
            opening = wire.OpenProducer(topic=topic.full, producer_name=name, instance=name, copies=True)
            if schema is not None:
                opening.schema.CopyFrom(schema)
            return await publish_entries_as_one_producer(self._world, owner or me, opening, client_parts)
        finally:
            await me.close()
            if owner is not None:
                await owner.close()


# ------------------------------------------------------------------------------------------------ half_publisher
# Publishes the messages of a half in a transaction of its coordinator, as a client of the topics' owners.
#
#     participants = await publisher.publish(txn, messages)
#
# Messages of one topic are published in their order, by a producer for this transaction only; different topics at the
# same time. Producer name, sequence ids, publish time and transaction are set in each entry; the rest stays as the
# application's producer encoded it. The right to publish was checked when the half was prepared
# (broker/grpc/transactions.py): here a broker publishes. The schema is that of the version in the entries, if all have
# the same. Guards: tests/client/transactions/test_halves.py.


class CommittedHalfPublisher:
    """Publishes the messages of a half message to their topics after its group decided to commit it, in one
    transaction."""

    def __init__(self, producer: InternalProducer, clock: Clock) -> None:
        self._producer = producer
        self._clock = clock

    async def publish(self, txn: TxnId, messages: Sequence[HalfMessage]) -> list[Participant]:
        """Publishes the messages in the transaction `txn`, and waits until all are stored. Returns their topics, each
        with the number and the last position of its entries. Raises the errors of `InternalProducer.publish_messages`,
        and ConnectionLost if the position of an entry is not known. If this call raises, some messages may be stored,
        and the transaction must not commit."""
        by_topic: dict[str, list[bytes]] = {}
        for topic, entry in messages:
            by_topic.setdefault(topic, []).append(entry)
        found: dict[str, Participant] = {}

        async def publish(topic: str, entries: Sequence[bytes]) -> None:
            found[topic] = await self._publish(txn, topic, entries)

        await run_together([publish(topic, entries) for topic, entries in by_topic.items()], "publish of a half")
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
        places = await self._producer.publish_messages(TopicName.parse(topic), name, parts, 0, schema_version=schema)
        if len(places) != len(parts) or any(place is None or place.entry_id < 0 for place in places):
            raise ConnectionLost(f"{topic}: receipts without a position")
        last = max(place for place in places if place is not None)
        return Participant(topic, len(parts), *last)


def _entry(metadata: MessageMetadata, payload: bytes, name: str, number: int, wall_ms: int, txn: TxnId) -> bytes:
    metadata.producer_name, metadata.sequence_id, metadata.publish_time = name, number, wall_ms
    metadata.ClearField("highest_sequence_id")
    metadata.txnid_most_bits, metadata.txnid_least_bits = txn
    return encode_client_part(metadata, payload)


# -------------------------------------------------------------------------------------------------- participants
# Settles transactions at topics, at this broker or at their owner, for the coordinators.
#
# A topic that does not exist has nothing to settle. This is decided only by the metadata, when the topic has no record:
# an owner that could not be found, or that refuses, is asked again.
# Guards: tests/broker/grpc/test_transactions.py.


SETTLE_TIMEOUT_S = 5.0
"""Seconds that one settlement at a topic of this broker may take: a slow topic delays the answers of others no longer.
"""
CACHED_OWNERS_MAX = 10_000
"""Most owners of topics that are cached."""


@runtime_checkable
class TransactionSettlingTopic(Protocol):
    """The interface of a loaded topic to which the outcomes of transactions are applied. `Topic` implements it;
    TopicTransactionSettler calls it."""

    async def settle(self, settlements: Sequence[Settlement], timeout_s: float) -> list[MagnetarError | None]:
        """Applies the outcomes of transactions (`settlements`) to the topic. Returns, for each transaction, None if its
        outcome is durable at the topic, else the error; the error is TimedOut if that takes longer than `timeout_s`.
        Idempotent."""


class TopicTransactionSettler:
    """Applies the outcomes of transactions to topics of any broker. `load`: a function that returns a topic of this
    broker, after loading it if necessary, or raises NotOwner. `owner`: a function that returns the endpoint of the
    broker that serves the topic; "": this broker."""

    def __init__(
        self, metadata: MetadataStore, load: Callable[[TopicName], Awaitable[object]],
        owner: Callable[[TopicName], Awaitable[str]], peers: Callable[[], TransactionPeerClient],
    ) -> None:  # fmt: skip
        self._metadata = metadata
        self._load = load
        self._owner = owner
        self._peers = peers
        self._owners: dict[str, str] = {}  # as they were last found

    async def settle(self, topic: TopicName, settlements: Sequence[Settlement]) -> list[MagnetarError | None]:
        """Applies the outcomes of transactions (`settlements`) to a topic of any broker (see `SettlementTransport` in
        broker/transaction/peers.py). Returns, for each transaction, None if the topic has stored the outcome or is
        certainly deleted, else the error. Raises no MagnetarError, except those of the metadata when it checks whether
        the topic is deleted."""
        try:
            endpoint = self._owners.get(topic.full)
            if endpoint is None:
                endpoint = await self._owner(topic)
                if len(self._owners) >= CACHED_OWNERS_MAX:
                    self._owners.clear()
                self._owners[topic.full] = endpoint
            if endpoint:
                errors = await self._peers().settle(endpoint, topic, settlements)
            else:
                errors = await self.settle_at_own_topic(topic, settlements)
        except MagnetarError as error:
            errors = [error] * len(settlements)
        if any(errors):
            self._owners.pop(topic.full, None)
        if any(isinstance(error, NotFound) for error in errors) and await self._is_gone(topic):
            return [None if isinstance(error, NotFound) else error for error in errors]
        return errors

    async def _is_gone(self, topic: TopicName) -> bool:
        return await self._metadata.get(topic_path(topic)) is None

    async def settle_at_own_topic(
        self, topic: TopicName, settlements: Sequence[Settlement]
    ) -> list[MagnetarError | None]:
        """Applies the outcomes of transactions (`settlements`) to a topic that this broker owns. Returns, for each
        transaction, None if the topic has stored the outcome, else the error (TimedOut after SETTLE_TIMEOUT_S seconds).
        Raises NotOwner if another broker owns the topic; NotAllowed if the topic does not support transactions; and the
        other errors of `TopicManager.load_topic`."""
        loaded = await self._load(topic)
        if not isinstance(loaded, TransactionSettlingTopic):
            raise NotAllowed(f"topic {topic} takes no transactions")
        return await loaded.settle(settlements, SETTLE_TIMEOUT_S)
