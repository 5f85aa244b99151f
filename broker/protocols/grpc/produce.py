"""The Produce stream: open, then entries in and receipts out, until either side ends it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from ....proto import wire_pb2 as wire
from ....proto.errors import ConnectionLost, InvalidRequest, TopicTerminated
from ....proto.names import TopicName, check_producer_name
from ....runtime.network import CallContext, EndOfStream, Stream
from ...common.turns import Turns
from ...log.topic_log import State
from ...node.topic_manager import OwnedTopics
from ...topic.producer import Producer
from ...topic.topic import Topic
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

    topic, producer = await made(broker, items[0].open, send, context.peer)
    try:
        await topic.producers.join(producer)
        send(opened(topic, producer))
        await _publish(topic, producer, stream, items[1:])
    except EndOfStream:
        await producer.settled()  # what is on its way gets its receipt before the stream ends
    finally:
        topic.producers.leave(producer)


async def made(
    broker: OwnedTopics, asked: wire.OpenProducer, send: Callable[[wire.ProduceReply], None], peer: str
) -> tuple[Topic, Producer]:
    """The producer that is asked for, and the topic that it is to join. TopicTerminated: it takes nothing any more."""
    check_open(asked)
    if asked.producer_name:
        check_producer_name(asked.producer_name)
    topic = await broker.topic(TopicName.parse(asked.topic))
    if topic.log.state is State.TERMINATED:
        raise TopicTerminated(f"topic {topic.name} is terminated: it can be read and not written", topic=topic.name)
    id_ = broker.next_id()
    producer = Producer(
        id_, asked.producer_name or f"{broker.name}-{broker.world.rng.randbytes(4).hex()}-{id_}", asked.access_mode,
        topic, send, address=peer, instance=asked.instance,
        size_max=topic.applied.max_message_bytes, pending_bytes_max=broker.config.pending_bytes,
        connection=asked.connection, epoch=asked.topic_epoch,
    )  # fmt: skip
    if asked.initial_subscription:
        await topic.subscribe(asked.initial_subscription, topic.log.shape.start)
    return topic, producer


def opened(topic: Topic, producer: Producer) -> wire.ProduceReply:
    return wire.ProduceReply(
        opened=wire.ProducerOpened(
            producer_name=producer.name,
            last_sequence_id=producer.last_sequence_id,
            max_message_size=topic.applied.max_message_bytes,
            topic_epoch=producer.epoch,
        )
    )


async def _publish(
    topic: Topic, producer: Producer, stream: Produces, items: Sequence[wire.ProduceRequest]
) -> None:
    """In slices: an envelope may hold ten thousand small entries."""
    while True:
        before, size, turns = topic.log.queued_index, 0, Turns()
        for item in items:
            if turns.over:
                await turns.next()
            if item.WhichOneof("kind") != "publish":
                raise InvalidRequest("a Produce stream is opened once, and then publishes")
            size += len(item.publish)
            why = topic.life.refusal()
            if why is None:
                producer.publish(item.publish)
            else:
                producer.refuse(item.publish, why)
        topic.gate.took(topic.log.queued_index - before, size)
        await producer.room()
        await topic.gate.open()
        items = await stream.receive()


