"""Publishes the messages of a half in a transaction of its coordinator, as a client of the topics' owners.

    participants = await publisher.publish(txn, messages)

Messages of one topic are published in their order, by one producer of that transaction alone; topics at the same time.
The names, the sequence ids, the publish time and the transaction are set in each entry; the rest is what the program's
producer made of the message. Who prepared the half was allowed to publish then (broker/protocols/grpc/halves.py); this
publisher is a broker. A schema is told with the version that the entry has.
Guards: tests/client/transactions/test_halves.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...proto.entry import client_part, parse_header
from ...proto.entry_pb2 import MessageMetadata
from ...proto.errors import ConnectionLost
from ...proto.names import TopicName
from ...proto.transactions import TxnId
from ...runtime.clock import Clock
from ...runtime.tasks import together
from .internal_producer import InternalProducer

if TYPE_CHECKING:
    from ..transaction.core.records import HalfMessage, Participant


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
        from ..transaction.core.records import Participant  # a coordinator asks, so it is loaded

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


