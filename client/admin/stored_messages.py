"""Messages as they are stored, of the entries that a broker sends for a look, without being delivered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ...proto import wire_pb2 as wire
from ...proto.entry import decode_batch, parse_header, properties_of, split_broker_part
from ...proto.names import TopicName
from ..model.message_id import KnownId, MessageId


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A message as it is stored, without being delivered."""

    topic: str  # of one partition, full name
    message_id: MessageId
    key: str
    properties: Mapping[str, str]
    publish_time_ms: int
    payload: bytes


def stored_messages(entries: Iterable[wire.Delivery], topic: str) -> list[StoredMessage]:
    """Decodes entries as a broker sends them into messages, without those that are acknowledged. An encrypted one is
    one message, of its ciphertext, and a chunk is one, of its part of the payload, which is compressed as a whole.
    CorruptEntry: one is torn."""
    partition = TopicName.parse(topic).partition
    found = []
    for entry in entries:
        client_part = split_broker_part(entry.entry)[2]
        header = parse_header(client_part)
        as_it_is = len(header.metadata.encryption_param) > 0 or header.metadata.num_chunks_from_msg > 1
        whole = [(header.metadata, bytes(client_part[header.payload_offset :]))]
        for at, (about, payload) in enumerate(whole if as_it_is else decode_batch(header, client_part)):
            if at in entry.acked_batch_indexes:
                continue
            place = KnownId(partition, entry.ledger_id, entry.entry_id, at if header.batched and not as_it_is else -1)
            properties = properties_of(about)
            found.append(
                StoredMessage(topic, place, about.partition_key, properties, header.publish_time, payload)
            )
    return found
