"""A producer of the broker itself, on a stream of its own. It publishes its entries, and ends when it has all receipts.

    positions = await publish_entries_as_one_producer(world, channel, opening, client_parts)

The function drives a `ProducerCore`, as the SDK does; broker/node/internal_producer.py calls it.
Guarding tests: tests/broker/subscription/test_dead_letters.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from ...client.core.effects import (
    AttachedProducerOptions,
    AttachToBroker,
    DetachFromBroker,
    EndWithError,
    ProducerEffect,
    ReportOutcome,
    SendEntry,
)
from ...client.core.failover import Backoff
from ...client.core.producer import ProducerCore
from ...proto import wire_pb2 as wire
from ...proto.entry import encode_client_part, parse_header
from ...proto.errors import ConnectionLost, from_wire
from ...proto.names import Position
from ...runtime.clock import Clock
from ...runtime.network import Channel, EndOfStream, Stream, World, find_rpc

_ID = 1
"""The id of the only producer on its stream."""


async def publish_entries_as_one_producer(
    world: World, channel: Channel, opening: wire.OpenProducer, client_parts: Sequence[bytes]
) -> list[Position | None]:
    """Publishes the entries `client_parts` over `channel` as one producer, and waits for their receipts. Returns the
    position of each stored entry; None for an entry whose position is not known. `opening`: the request that opens the
    producer; if it contains a schema, the entries get the version of this schema in the topic. Makes one attempt.
    Raises CorruptEntry if an entry cannot be parsed, ConnectionLost, or the error of the broker; then some entries may
    be stored, and the caller must retry all of them."""
    outcomes: list[Position | None] = []
    topic, name = opening.topic, opening.producer_name
    core = ProducerCore(
        name, AttachedProducerOptions(send_timeout_s=0.0), max_pending=len(client_parts), lock=nullcontext(),
        backoff=Backoff(world.rng),
    )  # fmt: skip
    added = False
    stream = channel.stream(find_rpc("Broker", "Connect"))
    try:
        stream.send_nowait(wire.ClientFrame(id=_ID, open_producer=opening))
        while len(outcomes) < len(client_parts):
            try:
                frames = await stream.receive()
            except EndOfStream as error:
                raise ConnectionLost(f"{topic}: the broker ended the stream") from error
            for frame in frames:
                if not added and frame.WhichOneof("kind") == "producer_opened":
                    added = True
                    version = frame.producer_opened.schema_version
                    for part in client_parts:
                        named = replace_schema_version(part, version) if opening.HasField("schema") else part
                        core.add_entry(named, parse_header(part).sequence_id, lambda _, place: outcomes.append(place))
                for effect in _facts(core, frame, world.clock):
                    _do(effect, stream)
    finally:
        stream.cancel()
    return outcomes


def _facts(core: ProducerCore, frame: wire.ServerFrame, clock: Clock) -> list[ProducerEffect]:
    now, wall_ms = clock.monotonic(), clock.wall_ms()
    match frame.WhichOneof("kind"):
        case "producer_opened":
            opened = frame.producer_opened
            return core.on_opened(
                opened.producer_name, opened.last_sequence_id, opened.max_message_size, opened.credit,
                opened.topic_epoch, now, wall_ms,
            )  # fmt: skip
        case "receipt":
            return core.on_entry_receipt(
                frame.receipt.sequence_id, frame.receipt.ledger_id, frame.receipt.entry_id, now
            )
        case "credit":
            return core.on_credit_granted(frame.credit)
        case "failed":
            raise from_wire(frame.failed.error)
        case "closed":
            raise from_wire(frame.closed)
        case kind:
            raise ConnectionLost(f"a producer received {kind}")


def _do(effect: ProducerEffect, stream: Stream[Any, Any]) -> None:
    match effect:
        case SendEntry(entry):
            stream.send_nowait(wire.ClientFrame(id=_ID, publish=entry))
        case ReportOutcome(batch, None, ledger_id, entry_id):
            for callback in batch.callbacks:
                if callback is not None:
                    callback(None, Position(ledger_id, entry_id))
        case ReportOutcome(_, error) | EndWithError(error) if error is not None:
            raise error
        case DetachFromBroker() | AttachToBroker():
            raise ConnectionLost("the producer lost its connection")


def replace_schema_version(client_part_: bytes, version: bytes) -> bytes:
    """Returns the entry `client_part_` (a client-part) with the schema version `version`; without a schema version if
    `version` is empty. Raises CorruptEntry if the entry cannot be parsed."""
    header = parse_header(client_part_)
    if header.metadata.schema_version == version:
        return client_part_
    if version:
        header.metadata.schema_version = version
    else:
        header.metadata.ClearField("schema_version")
    return encode_client_part(header.metadata, client_part_[header.payload_offset :])
