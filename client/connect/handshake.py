"""The beginning of a stream: one request that says who we are, and the broker's first answer to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ...proto import wire_pb2 as wire
from ...proto.errors import ConnectionLost, InvalidRequest, MagnetarError, NotAllowed, NotFound, Unauthorized, from_wire
from ...proto.names import TopicName
from ...runtime.network import EndOfStream, Stream
from ..model.message_id import MessageId
from ..model.settings import ConsumerKeySharedPolicy, ConsumerSettings, ProducerSettings
from ..model.start import Start
from .lobby import Place

FINAL = (NotAllowed, NotFound, Unauthorized, InvalidRequest)
"""Errors after which it is pointless to try again."""


def open_request(
    topic: TopicName, name: str, instance: str, settings: ProducerSettings, *, connection: int = 0, epoch: int = 0
) -> wire.ProduceRequest:
    opening = wire.OpenProducer(
        topic=topic.full,
        producer_name=name,
        instance=instance,
        access_mode=int(settings.access_mode),  # type: ignore[arg-type]
        properties=settings.properties,
        connection=connection,
        initial_subscription=settings.initial_subscription_name or "",
        topic_epoch=epoch,
    )
    return wire.ProduceRequest(open=opening)


def subscribe_request(
    topic: TopicName, subscription: str, name: str, instance: str, settings: ConsumerSettings, start: Start | None
) -> wire.ConsumeRequest:
    """With a `start`: a reader's subscription, which does not last; None: a durable one."""
    subscribe = wire.Subscribe(
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
    )
    if settings.key_shared_policy is not None:
        _say_how_keys_are_shared(subscribe.key_shared, settings.key_shared_policy)
    if start is not None:
        first = start.id if start.begun is None else MessageId(start.id.partition(), *start.begun)
        subscribe.start.CopyFrom(first.to_wire())
        # A message inside a batch: the broker sends the entry and we leave out what lies before.
        subscribe.start_inclusive = start.inclusive or first.batch_index() >= 0 or start.begun is not None
    return wire.ConsumeRequest(subscribe=subscribe)


def _say_how_keys_are_shared(shared: wire.KeySharedPolicy, policy: ConsumerKeySharedPolicy) -> None:
    shared.mode = int(policy.key_shared_mode)  # type: ignore[assignment]
    shared.allow_out_of_order_delivery = policy.allow_out_of_order_delivery
    for first, last in policy.sticky_ranges:
        shared.ranges.add(first=first, last=last)


async def introduce(
    stream: Stream[Any, Any] | Place, request: Any, expected: str,
    told: Callable[[MagnetarError], MagnetarError] = lambda error: error, *, behind: Sequence[Any] = (),
) -> list[Any]:  # fmt: skip
    """The replies so far; the first is of the kind `expected`. What is `behind` the request leaves with it.

    Raises the broker's error, which `told` may look at, when it refuses, and ConnectionLost when it says anything else.
    The stream is cancelled then.
    """
    try:
        for each in (request, *behind):
            stream.send_nowait(each)
        try:
            replies: list[Any] = list(await stream.receive())
        except EndOfStream as error:
            raise ConnectionLost(f"the broker ended the stream before it was {expected}") from error
        kind = replies[0].WhichOneof("kind")
        if kind == "closed":
            raise told(from_wire(replies[0].closed))
        if kind != expected:
            raise ConnectionLost(f"the broker said {kind} before the stream was {expected}")
    except BaseException:
        stream.cancel()
        raise
    return replies
