"""The opening of a producer or a consumer: the options of its core, and the first frame, with its identity."""

from __future__ import annotations

from ...proto import wire_pb2 as wire
from ...proto.entry import Encrypt
from ...proto.names import TopicName
from ..core.effects import ProducerOptions
from ..model.message_id import MessageId
from ..model.schema import Schema
from ..model.settings import BatchingType, ConsumerKeySharedPolicy, ConsumerSettings, ProducerSettings
from ..model.start import Start

ISOLATIONS = {
    "read_committed": wire.Subscribe.READ_COMMITTED,
    "read_uncommitted": wire.Subscribe.READ_UNCOMMITTED,
}


def producer_options(settings: ProducerSettings, encrypt: Encrypt | None, *, persistent: bool) -> ProducerOptions:
    """Returns the options of a producer's core. Chunks are for persistent topics, as in Pulsar's clients: another one
    drops some of them, and the rest of the message is useless."""
    return ProducerOptions(
        initial_sequence_id=settings.initial_sequence_id,
        batching=settings.batching_enabled,
        batch_messages_max=settings.batching_max_messages,
        batch_bytes_max=settings.batching_max_allowed_size_in_bytes,
        batch_delay_s=settings.batching_max_publish_delay_ms / 1000,
        key_based=settings.batching_type is BatchingType.KeyBased,
        send_timeout_s=settings.send_timeout_millis / 1000,
        compression=int(settings.compression_type),
        chunking=settings.chunking_enabled and persistent,
        encrypt=encrypt,
    )


def open_producer(
    topic: TopicName, name: str, instance: str, settings: ProducerSettings, *, connection: int, epoch: int
) -> wire.OpenProducer:
    request = wire.OpenProducer(
        topic=topic.full,
        producer_name=name,
        instance=instance,
        access_mode=int(settings.access_mode),  # type: ignore[arg-type]
        properties=settings.properties,
        connection=connection,
        initial_subscription=settings.initial_subscription_name or "",
        topic_epoch=epoch,
        hears_waits=True,
    )
    _tell(request, settings.schema)
    return request


def subscribe(
    topic: TopicName, subscription: str, name: str, instance: str, settings: ConsumerSettings, start: Start | None
) -> wire.Subscribe:
    """Returns the frame. With a `start`: a reader's subscription, which does not last; None: a durable one."""
    request = wire.Subscribe(
        topic=topic.full,
        subscription=subscription,
        type=int(settings.consumer_type),  # type: ignore[arg-type]
        initial_position=int(settings.initial_position),  # type: ignore[arg-type]
        consumer_name=name,
        durable=start is None,
        properties=settings.properties,
        instance=instance,
        priority_level=settings.priority_level,
        many_topics=settings.many_topics,
        read_compacted=settings.is_read_compacted,
        existing_only=settings.existing_only,
        isolation=ISOLATIONS[settings.isolation],
        redelivery_order=wire.Subscribe.KEY if settings.redelivery_order == "key" else wire.Subscribe.ANY,
    )
    _tell(request, settings.schema)
    if settings.key_shared_policy is not None:
        _describe(request.key_shared, settings.key_shared_policy)
    if start is not None:
        first = start.id if start.begun is None else MessageId(start.id.partition(), *start.begun)
        request.start.CopyFrom(first.to_wire())
        # A message inside a batch: the broker sends the entry and we leave out what is before it.
        request.start_inclusive = start.inclusive or first.batch_index() >= 0 or start.begun is not None
    return request


def _tell(request: wire.OpenProducer | wire.Subscribe, schema: Schema) -> None:
    info = schema.info()
    if info is not None:
        told = request.schema
        told.type, told.data, told.name = info.type, info.data, info.name
        told.properties.update(info.properties)


def _describe(shared: wire.KeySharedPolicy, policy: ConsumerKeySharedPolicy) -> None:
    shared.mode = int(policy.key_shared_mode)  # type: ignore[assignment]
    shared.allow_out_of_order_delivery = policy.allow_out_of_order_delivery
    for first, last in policy.sticky_ranges:
        shared.ranges.add(first=first, last=last)
