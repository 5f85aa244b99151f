"""The Produce stream: open, then entries in and receipts out, until either side ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from ....proto import wire_pb2 as wire
from ....proto.errors import ConnectionLost, InvalidRequest, MagnetarError, to_wire
from ....proto.model import AccessMode
from ....proto.names import Position
from ....runtime.network import CallContext, EndOfStream, Stream
from ...common.turns import Turns
from ...node.topic_manager import OwnedTopics
from ...session.producer import ProducerOptions, ProducerSession
from .border import check_open

Produces = Stream[wire.ProduceReply, wire.ProduceRequest]


async def serve(broker: OwnedTopics, stream: Produces, context: CallContext) -> None:
    """Errors before the producer is opened fail the call; later ones travel as `closed`."""
    items = await stream.receive()
    if items[0].WhichOneof("kind") != "open":
        raise InvalidRequest("the first item of a Produce stream is `open`")

    def send(reply: wire.ProduceReply) -> None:
        with contextlib.suppress(ConnectionLost):  # the reading side of the handler learns it too, and ends
            stream.send_nowait(reply)

    port = Port(send)
    session = await ProducerSession.open(broker, options_of(items[0].open), port, context.peer)
    try:
        send(opened(session))
        await _publish(session, port, stream, items[1:])
    except EndOfStream:
        await session.close()  # what is on its way gets its receipt before the stream ends
    finally:
        session.leave()


def options_of(asked: wire.OpenProducer) -> ProducerOptions:
    check_open(asked)
    return ProducerOptions(
        asked.topic, asked.producer_name, AccessMode(asked.access_mode), dict(asked.properties), asked.instance,
        asked.connection, asked.initial_subscription, asked.topic_epoch,
    )  # fmt: skip


class Port:
    """Sends as much credit as the client needs to be told nothing of it: the stream is not read meanwhile."""

    def __init__(self, send: Callable[[wire.ProduceReply], None]) -> None:
        self._send = send
        self.room = asyncio.Event()
        self.over = False

    def receipt(self, sequence_id: int, position: Position, index: int) -> None:
        self._send(wire.ProduceReply(receipt=wire.Receipt(
            sequence_id=sequence_id, ledger_id=position[0], entry_id=position[1], index=index)))  # fmt: skip

    def duplicate(self, sequence_id: int) -> None:
        self._send(wire.ProduceReply(receipt=wire.Receipt(
            sequence_id=sequence_id, ledger_id=-1, entry_id=-1, index=-1, duplicate=True)))  # fmt: skip

    def failed(self, sequence_id: int, error: MagnetarError) -> None:
        failed = wire.PublishFailed(sequence_id=sequence_id, error=to_wire(error))
        self._send(wire.ProduceReply(failed=failed))

    def credit(self, size: int) -> None:
        self.room.set()

    def closed(self, error: MagnetarError) -> None:
        self.over = True
        self.room.set()
        self._send(wire.ProduceReply(closed=to_wire(error)))


def opened(session: ProducerSession) -> wire.ProduceReply:
    return wire.ProduceReply(
        opened=wire.ProducerOpened(
            producer_name=session.name, last_sequence_id=session.last_sequence_id,
            max_message_size=session.max_message_bytes, topic_epoch=session.topic_epoch,
        )
    )  # fmt: skip


async def _publish(
    session: ProducerSession, port: Port, stream: Produces, items: Sequence[wire.ProduceRequest]
) -> None:
    """In slices: an envelope may hold ten thousand small entries."""
    while True:
        turns = Turns()
        for item in items:
            if turns.over:
                await turns.next()
            if item.WhichOneof("kind") != "publish":
                raise InvalidRequest("a Produce stream is opened once, and then publishes")
            while session.credit <= 0 and not port.over:
                port.room.clear()
                await port.room.wait()
            session.publish(item.publish)
        items = await stream.receive()
