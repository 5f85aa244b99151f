"""A dead letter's bytes: the messages of an entry that are not acknowledged, one entry each, with their origin.

Each keeps its payload, key, ordering key, event time and properties, and gets REAL_TOPIC, REAL_SUBSCRIPTION,
ORIGIN_MESSAGE_ID, REDELIVERY_COUNT and DEAD_LETTER_REASON. Producer name and sequence id identify the message, so that
a second copy after a crash is dropped where deduplication is on: one name per source entry, the batch index as the
sequence id. An entry that cannot be taken apart is sent unchanged, as the payload of one message. An encrypted one
stays one entry with its ciphertext: a batch goes as a whole, with the messages in it that are acknowledged.

A message in chunks is one message: each of its chunks is copied with its bytes (`chunk_letter`), under one name, the
place of its last chunk as its origin, and a uuid that is the copy's own. A chunk of a message that is not whole is sent
unchanged, as the payload of one message.
Guarding tests: tests/broker/subscription/core/test_dead_letter.py.
"""

from __future__ import annotations

from typing import NamedTuple

from ....proto.entry import (
    Buffer,
    EntryHeader,
    MessageFields,
    client_part,
    decode_batch,
    encode_entry,
    parse_header,
    split_broker_part,
)
from ....proto.entry_pb2 import MessageMetadata
from ....proto.errors import CorruptEntry
from ....proto.names import Position, TopicName

REAL_TOPIC, REAL_SUBSCRIPTION, ORIGIN_MESSAGE_ID = "REAL_TOPIC", "REAL_SUBSCRIPTION", "ORIGIN_MESSAGE_ID"
REDELIVERY_COUNT, REASON = "REDELIVERY_COUNT", "DEAD_LETTER_REASON"

_OF_ITS_TOPIC = ("deliver_at_time", "highest_sequence_id", "txnid_most_bits", "txnid_least_bits")
"""Fields that say nothing in another topic. `schema_version` is made one of that topic by who publishes there."""


class Source(NamedTuple):
    """The origin of a dead letter: topic, subscription, entry, and its redeliveries."""

    topic: TopicName
    subscription: str
    position: Position
    redeliveries: int
    max_redeliver_count: int

    @property
    def producer_name(self) -> str:
        ledger_id, entry_id = self.position
        return f"{self.topic.local}-{self.topic.partition}-{self.subscription}-DLQ-{ledger_id}-{entry_id}"

    @property
    def reason(self) -> str:
        return f"given back {self.redeliveries} times, at most {self.max_redeliver_count} redeliveries are allowed"


def letters_of(source: Source, entry: Buffer, done: frozenset[int], now_ms: int) -> list[bytes]:
    """Returns the client-parts, in order; `done`: batch indexes that are acknowledged."""
    reason = source.reason
    try:
        body = split_broker_part(entry)[2]
        header = parse_header(body)
        if header.metadata.num_chunks_from_msg > 1:
            of, number = header.metadata.num_chunks_from_msg, header.metadata.chunk_id
            why = f"{reason}; it is chunk {number} of {of} of a message of which the rest is missing"
            return [encode_entry(_addressed(source, -1, MessageMetadata(), now_ms, why), bytes(entry))]
        if header.metadata.encryption_keys:
            return [_as_it_is(source, header, bytes(body[header.payload_offset :]), now_ms)]
        messages = decode_batch(header, body)
    except CorruptEntry as error:
        metadata = _addressed(source, -1, MessageMetadata(), now_ms, f"the entry is damaged: {error.message}")
        return [encode_entry(metadata, bytes(entry))]
    letters = []
    for index, (fields, payload) in enumerate(messages):
        if index not in done:
            metadata = _addressed(source, index if header.batched else -1, _copied(header, fields), now_ms, reason)
            letters.append(encode_entry(metadata, payload))
    return letters


def chunk_letter(source: Source, entry: Buffer, now_ms: int) -> bytes:
    """The client-part of one chunk; `source.position` is that of the last one. CorruptEntry."""
    body = split_broker_part(entry)[2]
    header = parse_header(body)
    return _as_it_is(source, header, bytes(body[header.payload_offset :]), now_ms, uuid=f"{source.producer_name}-0")


def _as_it_is(source: Source, header: EntryHeader, payload: bytes, now_ms: int, *, uuid: str = "") -> bytes:
    """A payload that is not taken apart: ciphertext, or a chunk."""
    metadata = MessageMetadata()
    metadata.CopyFrom(header.metadata)
    for name in _OF_ITS_TOPIC:
        metadata.ClearField(name)
    if uuid:
        metadata.uuid = uuid
    return client_part(_addressed(source, -1, metadata, now_ms, source.reason), payload)


def _copied(header: EntryHeader, fields: MessageFields) -> MessageMetadata:
    """The metadata that the message keeps. The version of its schema is a number of its topic: who publishes it makes
    it one of this topic (broker/node/internal_producer.py `InternalProducer.copy`)."""
    metadata = MessageMetadata()
    if isinstance(fields, MessageMetadata):
        metadata.CopyFrom(header.metadata)
        for name in ("compression", "uncompressed_size", *_OF_ITS_TOPIC):
            metadata.ClearField(name)
        return metadata
    for name in (
        "partition_key", "partition_key_b64_encoded", "null_partition_key", "ordering_key", "event_time", "null_value",
    ):  # fmt: skip
        if fields.HasField(name):
            setattr(metadata, name, getattr(fields, name))
    if header.metadata.schema_version:
        metadata.schema_version = header.metadata.schema_version
    metadata.properties.extend(fields.properties)
    return metadata


def _addressed(source: Source, index: int, metadata: MessageMetadata, now_ms: int, reason: str) -> MessageMetadata:
    ledger_id, entry_id = source.position
    metadata.producer_name = source.producer_name
    metadata.sequence_id = max(0, index)
    metadata.publish_time = now_ms
    there = {pair.key for pair in metadata.properties}
    told = {
        REAL_TOPIC: source.topic.full,
        REAL_SUBSCRIPTION: source.subscription,
        ORIGIN_MESSAGE_ID: f"({ledger_id},{entry_id},{source.topic.partition},{index})",
        REDELIVERY_COUNT: str(source.redeliveries),
        REASON: reason,
    }
    for key, value in told.items():
        if key not in there:
            metadata.properties.add(key=key, value=value)
    return metadata
